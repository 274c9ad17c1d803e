"""What users of other engines type: names of arguments, and what they do with outputs."""

import dataclasses
import itertools
import json
import warnings

import numpy as np
import pytest
from PIL import Image

from vlcache_jax import LLM, Ladder, SamplingParams
from vlcache_jax.engine import memory_plan
from vlcache_jax.engine.memory_plan import slot_bytes
from vlcache_jax.foreign import ours

SETTINGS = {
    "ladder": Ladder(rows=(64,), patches=(64,), sequences=(1, 4), window=4),
    "max_model_len": 512,
    "kv_cache_bytes": "8MiB",
    "dtype": "float",
    "use_tqdm": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoints):
    with LLM(model=str(checkpoints("qwen3_vl-tied")), **SETTINGS, limit_mm_per_prompt={"image": 1}) as llm:
        llm._ahead.stop()
        yield llm


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mm_processor_cache_type": "lru"}, "LLM has no argument mm_processor_cache_type, as vLLM has: write cache="),
        (
            {"hf_token": "x"},
            "LLM has no argument hf_token, as vLLM has: write nothing, and log in with `hf auth login`$",
        ),
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size must be None or 1, as nothing else is supported here, got 2$",
        ),
        ({"quantization": "awq"}, "quantization must be None, as nothing else is supported here, got 'awq'$"),
        ({"max_modellen": 5}, "LLM has no argument max_modellen; is it max_model_len[?]$"),
        ({"xyzzy": 5}, "LLM has no argument xyzzy$"),
    ],
)
def test_other_engines_arguments_are_told_apart(llm, given, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        LLM("nowhere", **given)


def test_what_asks_for_nothing_is_ignored():
    given = {"tensor_parallel_size": 1, "trust_remote_code": True, "enforce_eager": False, "download_dir": None}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert ours("LLM", given, []) == {}
    [one] = told
    assert str(one.message) == "trust_remote_code has no meaning here and is ignored"
    assert one.filename == __file__


def test_what_has_another_name_here(checkpoints):
    assert ours("LLM", {"max_num_batched_tokens": 64}, ["max_rows"]) == {"max_rows": 64}
    settings = {name: value for name, value in SETTINGS.items() if name not in ("ladder", "kv_cache_bytes")}
    model = checkpoints("qwen3_vl-tied")
    with LLM(model, **settings, max_num_batched_tokens=64, kv_cache_memory_bytes="4MiB", tensor_parallel_size=1) as llm:
        assert llm._runner.ladder.max_rows == 64
        assert repr(llm).startswith(f"LLM('{model}', dtype='float32'")
    with pytest.raises(TypeError, match="chat has no argument tool"):
        ours("chat", {"tool": 1}, ["chat_template"])


def test_sizes_in_other_words(llm, checkpoints, monkeypatch):
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 24 * 2**30)  # whatever else runs on the machine
    pages = memory_plan.round_pages(8 * 2**20 // (128 * slot_bytes(llm._runner.config, np.dtype(np.float32))))
    assert (llm._runner.num_slots, llm._runner.dtype) == (128 * (pages + 1), np.float32)
    settings = SETTINGS | {"kv_cache_bytes": None, "gpu_memory_utilization": 0.001, "max_num_seqs": 2, "dtype": "half"}
    with LLM(checkpoints("qwen3_vl-tied"), **settings) as small:
        assert small._runner.ladder.sequences == (1, 2)
        assert small._runner.dtype == np.float16
    with pytest.raises(MemoryError, match="model and KV pool must fit"):
        LLM(checkpoints("qwen3_vl-tied"), **settings | {"gpu_memory_utilization": 1e-9})


def test_the_engine_shows_what_it_has(llm):
    assert llm.get_tokenizer().decode([97, 98]) == "ab"
    params = llm.get_default_sampling_params()
    assert isinstance(params, SamplingParams)
    assert params.temperature is not None


def test_calls_as_others_write_them(llm, textured_image):
    picture = Image.fromarray(textured_image(64, 64))
    asked = [{"role": "user", "content": [{"type": "image_pil", "image_pil": picture, "uuid": "mine"}]}]
    [output] = llm.chat(asked, GREEDY, False)
    [again] = llm.chat(messages_with(picture, "mine"), GREEDY, False)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    other = Image.fromarray(textured_image(64, 64, seed=3))
    with pytest.raises(ValueError, match="mine"):
        llm.chat(messages_with(other, "mine"), GREEDY, False)  # the id is another picture's
    ids = llm.get_tokenizer()("Hello")["input_ids"]
    found = llm.generate([{"prompt_token_ids": ids}, "Hello", ids], GREEDY, False, lora_request=None)
    assert found[0].outputs == found[1].outputs == found[2].outputs
    assert [output.request_id for output in found] == ["0", "1", "2"]
    continued = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer"}]
    [output] = llm.chat(continued, GREEDY, False, continue_final_message=True)
    assert output.prompt.endswith("The answer")
    [output] = llm.chat(continued, GREEDY, False, chat_template="{{ word }}", chat_template_kwargs={"word": "ab"})
    assert output.prompt == "ab"
    [same] = llm.chat(messages=continued, sampling_params=GREEDY, use_tqdm=False, tools=None, lora_request=None)
    assert same.outputs == llm.chat(continued, GREEDY, False)[0].outputs
    for wrong in ({"tools": [1]}, {"template": "x"}):
        with pytest.raises(TypeError, match=r"^(tools must be None|chat has no argument template)"):
            llm.chat(continued, GREEDY, False, **wrong)
    with pytest.raises(TypeError, match=r"^generate has no argument sampling_param; is it sampling_params"):
        llm.generate("Hello", use_tqdm=False, sampling_param=GREEDY)
    with pytest.raises(ValueError, match=r"^conversations must be left out beside messages, got both$"):
        llm.chat(continued, messages=continued)
    [score] = llm.score(continued, ["a"], use_tqdm=False, continue_final_message=True)
    assert len(score.token_ids) == 1
    with pytest.raises(ValueError, match="must hold at most 1 images, got 2"):
        llm.chat(
            [{"role": "user", "content": [*asked[0]["content"], {"type": "text", "text": "x"}] * 2}], GREEDY, False
        )


def messages_with(picture, uuid):
    return [{"role": "user", "content": [{"type": "image", "image": picture, "uuid": uuid}]}]


def test_each_row_of_a_job_has_its_own_parameters(llm):
    rows = [[{"role": "user", "content": f"{i}"}] for i in range(11)]
    lengths = [1 + i % 5 for i in range(11)]
    params = [dataclasses.replace(GREEDY, max_tokens=length) for length in lengths]
    found = dict(llm.chat_iter(iter(rows), iter(params), False))
    assert [len(found[i].outputs[0].token_ids) for i in range(11)] == lengths
    assert [found[i].request_id for i in range(11)] == list(map(str, range(11)))
    assert len(list(llm.chat_iter(iter(rows), itertools.cycle(params), False))) == 11  # more than are needed
    before = []
    with pytest.raises(ValueError, match=r"^sampling_params must give one for each conversation, got fewer of them$"):
        before.extend(index for index, _ in llm.chat_iter(iter(rows), params[:9], False))
    assert sorted(before) == list(range(9))  # what came before the fault is answered
    mixed = [*params[:4], {"max_tokens": 3}, *params[5:]]
    found = dict(llm.chat_iter(rows, mixed, False, on_error="return"))
    assert found[4].error == "sampling_params[4] must be SamplingParams, got dict"
    assert sum(output.error is None for output in found.values()) == 10


def test_outputs_are_json(llm, textured_image):
    llm.reset_mm_cache()
    told = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, n=2, ignore_eos=True)
    asked = messages_with(textured_image(64, 64), None)
    [output] = llm.chat(asked, told, False, verify=True)
    found = json.loads(json.dumps(output.to_dict()))
    assert found["prompt_token_ids"] == output.prompt_token_ids.tolist()
    assert found["outputs"][1]["token_ids"] == list(output.outputs[1].token_ids)
    assert found["outputs"][0]["logprobs"][0]["texts"]
    assert found["cache"]["images"][0]["why"] == "unknown_image"
    assert found["verification"]["tokens_agree"] == 3
    assert set(found) == {field.name for field in dataclasses.fields(output)}
    [wrong] = llm.chat([[{"role": "user"}]], told, False, on_error="return")
    assert json.loads(json.dumps(wrong.to_dict()))["error"] == wrong.error
    [score] = llm.score(asked, ["ab"], keep_logits=True, use_tqdm=False)
    assert np.shape(json.loads(json.dumps(score.to_dict()))["logits"]) == (2, llm._runner.config.text.vocab_size)
