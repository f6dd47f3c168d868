import pytest

from benchmarks.exhaustive.inner_loop import find_loop, loops
from benchmarks.exhaustive.jobs import describe_candidate
from flashtune.core.kernel import Specialization
from flashtune.core.target import find_target
from flashtune.tuner.candidates import Candidate
from tests.tuner.binary.listings import listed
from tests.tuner.search.fakes import FAMILY, a_config, a_problem


def test_inner_loop_has_instruction_counts_and_cycles() -> None:
    loop = find_loop(
        listed(
            "MOV R1, c[0x0][0x28] | 5",
            "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8] | 3",
            "@P0 MUFU.EX2 R3, R4 | 7",
            "FMUL.FTZ R3, R3, R4 | 2",
            "@!P0 BRA 0x10 | 4",
            "EXIT | 1",
        )
    )
    assert loop is not None
    assert loop.instructions == {"BRA": 1, "FMUL": 1, "HGMMA": 1, "MUFU": 1}
    assert loop.cycles == 3 + 7 + 2 + 4


def test_innermost_loop_is_found() -> None:
    loop = find_loop(
        listed("NOP", "MOV R1, R2", "HMMA.16816.F32 R4, R5, R6, R7", "@P0 BRA 0x20", "@P1 BRA 0x10", "EXIT")
    )
    assert loop is not None
    assert loop.instructions == {"BRA": 1, "HMMA": 1}


def test_retry_after_the_code_is_not_a_loop() -> None:
    # A wait that fails goes to a block at the end, which tries again and comes back.
    loop = find_loop(
        listed(
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2",
            "@!P0 BRA 0x60",
            "HGMMA.64x64x16.F32 R24, gdesc[UR8]",
            "FADD R1, R2, R3",
            "@P1 BRA 0x20",
            "EXIT",
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2",
            "@!P0 BRA 0x60",
            "BRA 0x20",
        )
    )
    assert loop is not None
    assert loop.instructions == {"BRA": 1, "FADD": 1, "HGMMA": 1}


def test_code_without_mma_loop_has_no_inner_loop() -> None:
    assert find_loop(listed("HMMA.16816.F32 R4, R5, R6, R7", "EXIT")) is None
    assert find_loop(listed("FADD R1, R2, R3", "@P0 BRA 0x0", "EXIT")) is None
    assert find_loop("") is None


@pytest.mark.parametrize(
    ("successors", "expected"),
    [
        ([[1], [2], [1, 3], []], [{1, 2}]),
        ([[1], [2, 4], [3], [1, 2], []], [{1, 2, 3}, {2, 3}]),
        # Entered in two places, so no block is its head.
        ([[1, 2], [2], [1, 3], []], []),
        ([[0]], [{0}]),
    ],
)
def test_natural_loops(successors: list[list[int]], expected: list[set[int]]) -> None:
    bodies = [set(body) for body in loops(successors)]
    assert sorted(bodies, key=sorted) == sorted(expected, key=sorted)


@pytest.mark.slow
def test_a_compiled_kernel_has_an_exponential_for_each_score() -> None:
    candidate = Candidate(FAMILY, a_config(block_m=64, block_n=64, num_warps=4))
    described = describe_candidate(a_problem(), candidate, Specialization(), find_target("h100"))
    assert described.loop is not None
    # 64 × 64 scores on 128 threads, and the rescaling of the two rows of each.
    assert described.loop.instructions["MUFU"] == 34
    assert described.loop.cycles > sum(described.loop.instructions.values())
