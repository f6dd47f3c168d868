"""Uniform registers that nothing can have written before they are read."""

import msgspec
import pytest
import triton

from flashtune import testing
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Causal, Dtype
from flashtune.core.record import Outcome
from flashtune.core.target import find_target
from flashtune.templates.family import Family
from flashtune.templates.forward_q_outer.space import QOuterConfig
from flashtune.templates.registry import families
from flashtune.tuner.binary.disassembly import unwritten
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution.compile_pool import compile_candidate
from tests.tuner.binary.listings import listed

H200 = find_target("h200")
PLAIN = testing.problem("heads=8,seqlen=1024,head_dim=128,dtype=bf16,batch=4")
READ_4, READ_5, READ_7 = (f"UIADD3 UR20, UP0, UR{number}, 0x2, URZ" for number in (4, 5, 7))


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("UMOV UR4, URZ", READ_4, "EXIT"),
        ("ULDC.64 UR4, c[0x0][0x218]", READ_5, "EXIT"),
        ("UIMAD.WIDE.U32 UR4, URZ, 0x2, URZ", READ_5, "EXIT"),
        ("ULDC.128 UR4, c[0x0][0x218]", READ_7, "EXIT"),
        ("R2UR UR4, R2", READ_4, "EXIT"),
        # Behind a predicate comes what is written.
        ("ULOP3.LUT UP1, UR4, URZ, 0x4, URZ, 0xc0, !UPT", READ_4, "EXIT"),
        ("@UP0 UMOV UR4, URZ", READ_4, "EXIT"),
        # One of two ways is enough.
        ("@P0 BRA 0x20", "UMOV UR4, URZ", READ_4, "EXIT"),
        # Written at the end of a loop, read at its start.
        ("NOP", READ_4, "UMOV UR4, URZ", "@P0 BRA 0x10", "EXIT"),
        # Nothing comes here.
        ("EXIT", READ_4, "EXIT"),
        # A table leads anywhere, also past what is in between.
        ("UMOV UR4, URZ", "@P0 BRX R2", "EXIT", READ_4, "EXIT"),
        # A subroutine's registers are written where it is called from, or by another.
        ("BRA 0x20", "RET.REL.NODEC R2 0x0", "UMOV UR4, URZ", "CALL.REL.NOINC 0x40", READ_4, "RET R2"),
        # Half of the four count for nothing where the first factor is in registers, so also in copies.
        ("HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24", "EXIT"),
        ("UMOV UR4, UR8", "EXIT"),
        # Bits that are cleared before they are set, and a half of a register.
        ("ULOP3.LUT UR4, UR4, 0xdfffffff, URZ, 0xc0, !UPT", "EXIT"),
        ("UPRMT UR4, UR4, 0x7610, UR6", "EXIT"),
    ],
)
def test_registers_that_may_be_written_are_accepted(lines: tuple[str, ...]) -> None:
    assert unwritten(listed(*lines)) == ""


@pytest.mark.parametrize(
    ("lines", "address"),
    [
        (("UIADD3 UR4, UP0, UR4, 0x2, URZ", "EXIT"), 0),
        (("UMOV UR4, URZ", READ_5, "EXIT"), 0x10),
        (("ULDC.64 UR4, c[0x0][0x218]", READ_7, "EXIT"), 0x10),
        # A comparison writes a predicate.
        (("UISETP.LT.AND UP0, UPT, UR4, 0x2, UPT", READ_4, "EXIT"), 0x10),
        # Written on the way that does not come here.
        (("@P0 BRA 0x30", "UMOV UR4, URZ", "EXIT", READ_4, "EXIT"), 0x30),
        # Written later.
        ((READ_4, "UMOV UR4, URZ", "EXIT"), 0),
    ],
)
def test_registers_that_are_never_written_are_reported(lines: tuple[str, ...], address: int) -> None:
    assert unwritten(listed(*lines)) == f"{lines[address // 16]} at {address:#x}"


@pytest.mark.slow
@pytest.mark.skipif(
    not triton.__version__.startswith(("3.6.", "3.7.")),
    reason="its ptxas is not the one that loses an address",
)
def test_kernel_miscompiled_by_ptxas_is_not_launched() -> None:
    problem = msgspec.structs.replace(
        PLAIN, dtype=Dtype.FP16, head_dim=80, value_head_dim=80, causal=Causal.TOP_LEFT, seqlen_q=1
    )
    config = QOuterConfig(
        num_warps=4,
        num_stages=2,
        block_m=64,
        block_n=128,
        split_head_dim=True,
        split_masked_loop=False,
        lpt=False,
    )
    compilation = compile_candidate(
        problem, Candidate("forward_q_outer", config), Specialization(alignment=Alignment.ANY), H200
    )
    assert compilation.outcome is Outcome.INFEASIBLE
    assert compilation.message.startswith(
        "ptxas made code that reads a register which nothing wrote (UIADD3 UR"
    )


@pytest.mark.slow
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("family", [family for family in families() if family.supports(PLAIN, H200) is None])
def test_correct_binary_is_accepted(family: Family) -> None:
    candidate = Candidate(family.name, family.default(PLAIN, H200))
    compilation = compile_candidate(PLAIN, candidate, Specialization(), H200)
    assert (compilation.outcome, compilation.message) == (Outcome.OK, "")
