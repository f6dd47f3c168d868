"""Tests of the counters by Nsight Compute."""

import csv
import io
from collections.abc import Sequence

import pytest

from benchmarks.kernels import limits
from flashtune.core.errors import KernelError

COUNTERS = (limits.CYCLES, limits.L2_BYTES, *limits.SHARES.values())
SHAPES = limits.SHAPES[:2]


def lines(kernels: Sequence[tuple[str, float]], counters: Sequence[str] = COUNTERS) -> list[str]:
    """Returns the lines that `ncu` writes for kernels with these names and values of the first counter.

    `prepare` does not use the matrix units.
    """
    text = io.StringIO()
    rows = csv.writer(text, quoting=csv.QUOTE_ALL)
    rows.writerow(("ID", "Kernel Name", *counters))
    rows.writerow(("", "", *("unit" for _ in counters)))
    for number, (name, cycles) in enumerate(kernels):
        values = [f"{cycles:,}", *(f"{index + 1}.25" for index in range(len(counters) - 1))]
        if name == "prepare":
            values[2] = "0"
        rows.writerow((number, name, *values))
    return ["==PROF== Connected", *text.getvalue().splitlines()]


def test_the_kernel_with_most_matrix_products_of_each_shape_counts() -> None:
    rows = limits.rows_of(
        lines(
            [
                ("prepare", 3000.0),
                ("epilogue", 10.0),
                ("main(a)", 2000.0),
                ("spin_kernel", 5000.0),
                ("only", 7.0),
                ("spin_kernel", 1.0),
            ]
        ),
        SHAPES,
    )
    assert [(row.shape, row.kernel, row.cycles) for row in rows] == [
        (SHAPES[0], "main", 2000.0),
        (SHAPES[1], "only", 7.0),
    ]
    assert rows[0].l2_bytes == 1.25
    assert list(rows[0].shares.values()) == [number + 2.25 for number in range(len(limits.SHARES))]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "0 of 2"),
        (["main", "spin_kernel"], "1 of 2"),
        (["main", "spin_kernel", "main", "spin_kernel", "more"], "2 of 2"),
        (["main", "spin_kernel", "spin_kernel"], "no kernel of"),
    ],
)
def test_missing_kernels_are_an_error(names: list[str], said: str) -> None:
    with pytest.raises(KernelError, match=said):
        limits.rows_of(lines([(name, 1.0) for name in names]), SHAPES)


def test_a_missing_counter_is_an_error() -> None:
    kernels = [("main", 1.0), ("spin_kernel", 1.0)]
    with pytest.raises(KernelError, match="has no counter sm__pipe_tensor"):
        limits.rows_of(lines(kernels, COUNTERS[:2]), SHAPES[:1])
