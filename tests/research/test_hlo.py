"""What a compiled program's text tells: launches, how often, and what they move and multiply."""

from __future__ import annotations

import pytest

from research import hlo

# A window: a loop over tokens whose trip count is given, a loop over experts whose is not, a conditional, a product
# whose weight is an argument, and a pool that a fusion changes in place and a kernel of ours reads.
TEXT = """HloModule jit_window, is_scheduled=true, input_output_alias={ {1}: (1, {}, may-alias) }

%updated (param_0: bf16[640,2,8], param_1: bf16[4,2,8], param_2: s32[]) -> bf16[640,2,8] {
  %param_0 = bf16[640,2,8]{2,1,0} parameter(0)
  %param_1 = bf16[4,2,8]{2,1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %dus = bf16[640,2,8]{2,1,0} dynamic-update-slice(%param_0, %param_1, %param_2, %zero, /*index=4*/%zero)
}

%product (param_0.1: bf16[4,16], param_1.1: bf16[16,32]) -> bf16[4,32] {
  %param_0.1 = bf16[4,16]{1,0} parameter(0)
  %param_1.1 = bf16[16,32]{1,0} parameter(1)
  ROOT %dot.1 = bf16[4,32]{1,0} dot(%param_0.1, %param_1.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%sliced (param_0.2: bf16[8,16,32], param_1.2: s32[]) -> bf16[16,32] {
  %param_0.2 = bf16[8,16,32]{2,1,0} parameter(0)
  %param_1.2 = s32[] parameter(1)
  %zero.2 = s32[] constant(0)
  %slice = bf16[1,16,32]{2,1,0} dynamic-slice(%param_0.2, %param_1.2, %zero.2, %zero.2), dynamic_slice_sizes={1,16,32}
  ROOT %bitcast = bf16[16,32]{1,0} bitcast(%slice)
}

%one_expert (arg: (s32[], bf16[8,16,32])) -> (s32[], bf16[8,16,32]) {
  %arg = (s32[], bf16[8,16,32]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %stack = bf16[8,16,32]{2,1,0} get-tuple-element(%arg), index=1
  %matrix = bf16[16,32]{1,0} fusion(%stack, %i), kind=kLoop, calls=%sliced
  ROOT %next = (s32[], bf16[8,16,32]{2,1,0}) tuple(%i, %stack)
}

%some_left (arg.1: (s32[], bf16[8,16,32])) -> pred[] {
  %arg.1 = (s32[], bf16[8,16,32]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  ROOT %less = pred[] fusion(%i.1), kind=kLoop, calls=%compared
}

%compared (param_0.3: s32[]) -> pred[] {
  %param_0.3 = s32[] parameter(0)
  ROOT %compare = pred[] compare(%param_0.3, %param_0.3), direction=LT
}

%sampled (arg.2: bf16[4,32]) -> bf16[4,32] {
  %arg.2 = bf16[4,32]{1,0} parameter(0)
  %copied = bf16[4,32]{1,0} copy(%arg.2)
  ROOT %sorted = bf16[4,32]{1,0} sort(%copied), dimensions={1}, to_apply=%compared
}

%greedy (arg.3: bf16[4,32]) -> bf16[4,32] {
  %arg.3 = bf16[4,32]{1,0} parameter(0)
  ROOT %copied.1 = bf16[4,32]{1,0} copy(%arg.3)
}

%token (arg.4: (s32[], bf16[640,2,8], bf16[16,32], bf16[8,16,32], bf16[4,16], /*index=5*/pred[])) -> (s32[], bf16[640,2,8], bf16[16,32], bf16[8,16,32], bf16[4,16], /*index=5*/pred[]) {
  %arg.4 = (s32[], bf16[640,2,8]{2,1,0}, bf16[16,32]{1,0}, bf16[8,16,32]{2,1,0}, bf16[4,16]{1,0}, /*index=5*/pred[]) parameter(0)
  %step = s32[] get-tuple-element(%arg.4), index=0
  %pool = bf16[640,2,8]{2,1,0} get-tuple-element(%arg.4), index=1
  %weight = bf16[16,32]{1,0} get-tuple-element(%arg.4), index=2
  %stack.1 = bf16[8,16,32]{2,1,0} get-tuple-element(%arg.4), index=3
  %x = bf16[4,16]{1,0} get-tuple-element(%arg.4), index=4
  %asked = pred[] get-tuple-element(%arg.4), index=5
  %made = bf16[4,32]{1,0} fusion(%x, %weight), kind=kCustom, calls=%product, metadata={op_name="jit(window)/while/body/dot(a)"}
  %turned = bf16[4,2,8]{2,1,0} bitcast(%x)
  %written = bf16[640,2,8]{2,1,0} fusion(%pool, %turned, %step), kind=kLoop, calls=%updated
  %attended = (bf16[4,2,8]{2,1,0}, f32[4]{0}) custom-call(%turned, %written), custom_call_target="mosaic_gpu_v2"
  %linked = bf16[640,2,8]{2,1,0} custom-call(%made, %written), custom_call_target="mosaic_gpu_v2", output_to_operand_aliasing={{}: (1, {})}
  %begin = (s32[], bf16[8,16,32]{2,1,0}) tuple(%step, %stack.1)
  %experts = (s32[], bf16[8,16,32]{2,1,0}) while(%begin), condition=%some_left, body=%one_expert
  %chosen = bf16[4,32]{1,0} conditional(%asked, %made, %made), true_computation=%sampled, false_computation=%greedy
  ROOT %all = (s32[], bf16[640,2,8]{2,1,0}, bf16[16,32]{1,0}, bf16[8,16,32]{2,1,0}, bf16[4,16]{1,0}, /*index=5*/pred[]) tuple(%step, %linked, %weight, %stack.1, %x, /*index=5*/%asked)
}

%always (arg.5: (s32[])) -> pred[] {
  %arg.5 = (s32[]) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main.1 (tokens: s32[], pool.1: bf16[640,2,8]) -> s32[] {
  %tokens = s32[] parameter(0)
  %pool.1 = bf16[640,2,8]{2,1,0} parameter(1)
  %began = (s32[], bf16[640,2,8]{2,1,0}) tuple(%tokens, %pool.1)
  %window = (s32[], bf16[640,2,8]{2,1,0}) while(%began), condition=%always, body=%token, backend_config={"known_trip_count":{"n":"8"},"known_init_step":{"init":"0"}}
  ROOT %last = s32[] get-tuple-element(%window), index=0
}
"""  # noqa: E501
POOL = 640 * 2 * 8 * 2


@pytest.fixture(scope="module")
def module():
    return hlo.Module(TEXT)


def launches(module):
    return {launch.instruction.name: launch for launch in module.launches(lambda loops: 3.0 * loops)}


def test_loops_turn_as_often_as_they_say_or_one_is_told(module):
    found = launches(module)
    assert {name: launch.times for name, launch in found.items()} == {
        "made": 8, "written": 8, "attended": 8, "linked": 8, "experts": 24, "less": 24, "matrix": 24, "chosen": 8,
        "copied.1": 8,  # the branch with fewer launches
    }  # fmt: skip
    assert {name for name, launch in found.items() if launch.is_predicate} == {"experts", "chosen"}
    assert hlo.trip_count(module.computations[module.entry]["window"]) == 8
    assert hlo.trip_count(found["experts"].instruction) is None


def test_a_loop_whose_turns_nobody_knows_is_an_error(module):
    def unknown(loops):
        raise ValueError(loops)

    with pytest.raises(ValueError, match="1"):
        module.launches(unknown)


def test_kernels_move_what_they_read_and_write(module):
    found = launches(module)

    def traffic(name):
        moved = module.traffic(found[name], {POOL: 0.0})
        return moved.arguments, moved.temporaries

    assert traffic("made") == (2 * (4 * 16 + 16 * 32), 2 * 4 * 32)  # x and the weight; the product
    # The pool is changed in place: what is written there is read, and written.
    assert traffic("written") == (2 * 4 * 16 + 4, 2 * 4 * 16)
    assert traffic("matrix") == (2 * 16 * 32 + 4, 2 * 16 * 32)  # one expert's of the stack
    assert traffic("attended") == (2 * 4 * 16, 2 * 4 * 16 + 4 * 4)  # but for the pool
    assert traffic("linked") == (0, 2 * 4 * 32)
    whole = module.traffic(found["attended"], {})
    assert whole.temporaries == 2 * 4 * 16 + 4 * 4 + POOL
    assert whole.bytes == whole.arguments + whole.temporaries


def test_kernels_multiply(module):
    found = launches(module)
    assert module.operations(found["made"]) == 2 * 4 * 16 * 32
    assert module.operations(found["written"]) == 0


def test_libraries_multiply():
    text = """HloModule gemm

ENTRY %main (a: bf16[4,16], b: bf16[16,32]) -> (bf16[4,32], s8[64]) {
  %a = bf16[4,16]{1,0} parameter(0)
  %b = bf16[16,32]{1,0} parameter(1)
  ROOT %gemm = (bf16[4,32]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}
"""  # noqa: E501
    module = hlo.Module(text)
    [gemm] = module.launches(lambda loops: 1)
    assert module.operations(gemm) == 2 * 4 * 16 * 32


def test_kernels_of_ours_stand_in_fusions_too():
    text = """HloModule rotated

%inside (param_0: bf16[4,16], param_1: bf16[640,2,8]) -> bf16[4,16] {
  %param_0 = bf16[4,16]{1,0} parameter(0)
  %param_1 = bf16[640,2,8]{2,1,0} parameter(1)
  ROOT %ours = bf16[4,16]{1,0} custom-call(%param_0, %param_1), custom_call_target="mosaic_gpu_v2"
}

ENTRY %main (a: bf16[4,16], pool: bf16[640,2,8]) -> bf16[4,16] {
  %a = bf16[4,16]{1,0} parameter(0)
  %pool = bf16[640,2,8]{2,1,0} parameter(1)
  ROOT %fusion = bf16[4,16]{1,0} fusion(%a, %pool), kind=kCustom, calls=%inside
}
"""
    module = hlo.Module(text)
    [fusion] = module.launches(lambda loops: 1)
    assert module.traffic(fusion, {POOL: 0.0}).arguments == 2 * 4 * 16
    assert module.traffic(fusion, {}).arguments == 2 * 4 * 16 + POOL


def test_what_is_no_program_is_an_error():
    with pytest.raises(ValueError, match="compiled program"):
        hlo.Module("nothing")
