"""Loops and their turns, read from machine code."""

from __future__ import annotations

import pathlib

from research import sass

# Two warpgroups part; the first multiplies, with a mask that is branched over and a wait whose turn is out of line, the
# second loads. A loop around the first one's does the next item.
CODE = """
.text.kernel:
   -:-:-:Y:01        /*0000*/                   S2R R0, SR_TID.X
   -:-:-:Y:05        /*0010*/               @P0 BRA `(.L_x_4)
.L_x_0:
   -:-:-:Y:01        /*0020*/                   MOV R1, RZ
.L_x_1:
   -:-:-:Y:02        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5], R8
   -:-:-:Y:05        /*0040*/              @!P1 BRA `(.L_x_5)
.L_x_2:
   -:-:-:Y:03        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT
   1:-:-:Y:05        /*0060*/              @!P2 BRA `(.L_x_3)
   -:-:-:Y:01        /*0070*/                   ISETP.GE.AND P3, PT, R4, R5, PT
   -:-:-:Y:01        /*0080*/                   FSEL R24, R24, -INF , P3
.L_x_3:
   -:-:-:Y:01        /*0090*/               @P4 FADD R2, R2, 1
   -:-:-:Y:05        /*00a0*/               @P1 BRA `(.L_x_1)
   -:-:-:Y:05        /*00b0*/               @P5 BRA `(.L_x_0)
   -:-:-:Y:05        /*00c0*/                   EXIT
.L_x_4:
   -:-:-:Y:02        /*00d0*/                   UTMALDG.3D [UR8], [UR4]
   -:-:-:Y:05        /*00e0*/              @!P1 BRA P3, `(.L_x_4)
   -:-:-:Y:05        /*00f0*/                   EXIT
.L_x_5:
   -:-:-:Y:01        /*0100*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5], R8
   -:-:-:Y:05        /*0110*/              @!P1 BRA `(.L_x_5)
   -:-:-:Y:05        /*0120*/                   BRA `(.L_x_2)
"""


def test_loops_are_found():
    code = sass.parse(CODE)
    assert len(code) == 19
    assert {first: len(body) for first, body in sass.loops(code).items()} == {2: 13, 3: 11, 13: 2, 16: 2}
    assert list(sass.innermost(code, ["HGMMA"])) == [3]
    assert list(sass.innermost(code, ["UTMALDG"])) == [13]


def test_a_turn_is_masked_or_not():
    code = sass.parse(CODE)
    plain, masked = sass.turns(code, 3, ["FSEL"]).values()
    assert (plain.instructions, plain.stall) == (6, 21)
    assert (masked.instructions, masked.stall) == (8, 23)
    assert plain.names["HGMMA"] == masked.names["HGMMA"] == 1
    assert list(sass.turns(code, 3, ["FSEL"])) == [0, 1]
    assert sass.turns(code, 13, sass.SHARED_MEMORY)[0].instructions == 2


def test_kernels_are_in_the_order_of_their_calls():
    """A process counts its kernels: the tenth stands behind the ninth, of whatever name."""
    names = ["experts_kernel_10", "experts_kernel_9", "attention_kernel_11"]
    found = sorted((pathlib.Path(f"{name}.sass_ctrl") for name in names), key=sass.by_number)
    assert [path.stem for path in found] == ["attention_kernel_11", "experts_kernel_9", "experts_kernel_10"]
