import pytest

from benchmarks.exhaustive.inner_loop import find_loop, loops
from tests.tuner.binary.listings import listed


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
