"""Tests of emulated Hopper kernels with functions of keys in pages and of split keys."""

from typing import Any

import msgspec
import pytest

from flashtune.core.problem import Causal
from tests.problems.function_cases import FUNCTIONS
from tests.templates.hopper.emulated import test_hopper_pages_emulated as pages
from tests.templates.hopper.emulated.test_hopper_emulated import ALONE, SMALL, a_small, kernel_of, worst_error

SPLIT: dict[str, Any] = {**ALONE, "pack_gqa": 1, "num_splits": 3}


@pytest.mark.slow
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("config", [{**SMALL, "pack_gqa": 1}, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_pages(name: str, packed: bool, config: dict[str, Any]) -> None:
    lengths = pages.MIXED if packed else pages.EQUAL
    for page, causal in ((1, Causal.NONE), (16, Causal.BOTTOM_RIGHT), (128, Causal.NONE)):
        problem = pages.a_paged(page, packed=packed, causal=causal, functions=FUNCTIONS[name])
        assert pages.worst_error(kernel_of(problem, **config), problem, lengths) < 1e-12, page


@pytest.mark.slow
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_split_keys(name: str) -> None:
    for queries, keys in ((70, 500), (3, 150)):
        problem = a_small(heads=4, kv_heads=2, seqlen_q=queries, seqlen_kv=keys, functions=FUNCTIONS[name])
        assert worst_error(kernel_of(problem, **SPLIT), problem, 5) < 1e-12, (queries, keys)


# Texts of kernels of packed pages, and others in their place, by the name of the functions.
POSITION = "positions + this.seqlen_kv - this.seqlen_q"
MISTAKES = (
    ("window", POSITION, "positions"),
    ("window", POSITION, f"{POSITION} - 1"),
    ("alibi", "start = (n_block * BLOCK_N - origin", "start = (n_block * BLOCK_N + 1 - origin"),
    ("sequences", "= this.batch", "= 0 * this.batch"),
    ("sequences", "= this.head", "= this.kv_head * scheduler.group_size + this.head"),
    ("documents", "gl.where(index < 0, index + size, index)", "index"),
    ("relative bias", "row_max * LOG2_E + gl.log2", "row_max + gl.log2"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text", "wrong"), MISTAKES)
def test_wrong_kernels_have_other_results(name: str, text: str, wrong: str) -> None:
    problem = pages.a_paged(16, packed=True, causal=Causal.NONE, functions=FUNCTIONS[name])
    kernel = kernel_of(problem, **SPLIT)
    assert text in kernel.source
    mistaken = msgspec.structs.replace(kernel, source=kernel.source.replace(text, wrong))
    # More queries than keys have negative positions.
    assert not pages.worst_error(mistaken, problem, [*pages.MIXED, (70, 30)]) < 1e-3
