"""Tests of MLA pages smaller than a key block: their copies and layout."""

import re

import pytest

from flashtune.launch.compilation import compile_kernel, load_module
from tests.problems.decode import meta
from tests.problems.latent import H200, a_problem, kernel_of


def test_small_pages_are_copied_one_by_one() -> None:
    kernel = kernel_of(a_problem(page_size=16))
    q, out, cache = meta(64, 128, 1, 576), meta(64, 128, 1, 512), meta(70, 1, 16, 576)
    made = load_module(kernel).descriptors(q, cache, cache[..., :512], out)[1]
    boxes = [[1, 1, 1, 16, 256], [1, 1, 1, 16, 64]]
    assert [descriptor.block_shape for descriptor in made] == boxes
    assert [argument.type.split("[", 1)[1].split("]")[0] for argument in kernel.arguments[2:4]] == [
        str(box).strip("[]") for box in boxes
    ]


def shared_addresses(ptx: str) -> list[tuple[str, int, int]]:
    """Of each copy of keys: the register its address counts from, bytes from there, and the first column."""
    values: dict[str, tuple[str, int]] = {}

    def value_of(operand: str) -> tuple[str, int]:
        return values.get(operand, (operand, 0)) if operand.startswith("%") else ("", int(operand))

    copies = []
    for line in ptx.splitlines():
        if match := re.match(r"\s*add\.s32\s+(%\w+), (%\w+), (-?\d+);", line):
            root, offset = value_of(match[2])
            values[match[1]] = root, offset + int(match[3])
        elif match := re.match(r"\s*mov\.b32\s+(%\w+), (%\w+|-?\d+);", line):
            values[match[1]] = value_of(match[2])
        elif match := re.search(r"bulk\.tensor\.5d.*bytes \[(%\w+)\], \[%\w+, \{(%\w+),", line):
            copies.append((*value_of(match[1]), value_of(match[2])[1]))
    return copies


@pytest.mark.slow
@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("rest", [64, 16])
def test_small_pages_have_the_layout_of_the_products(page: int, rest: int) -> None:
    """As the rows of a tile of which 128 bytes of all rows lie side by side, and then the next 128 bytes."""
    problem = a_problem(page_size=page, head_dim=512 + rest)
    copies = shared_addresses(compile_kernel(kernel_of(problem, overlap_pv=True), H200).asm["ptx"])
    pieces = 64 // page
    assert len(copies) == pieces * (4 + 1 + 4)
    for start, width in ((0, 256), (512, rest), (256, 256)):
        chunk = min(width, 64)
        columns = range(start, start + width, chunk)
        mine, copies = copies[: pieces * len(columns)], copies[pieces * len(columns) :]
        assert len({root for root, _, _ in mine}) == 1
        first = mine[0][1]
        assert [(offset - first, column) for _, offset, column in mine] == [
            ((piece * page + 64 * number) * chunk * 2, column)
            for piece in range(pieces)
            for number, column in enumerate(columns)
        ]
