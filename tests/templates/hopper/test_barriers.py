"""`forward_kv_outer` re-reads what it wrote: barriers part its stores from its loads, compiled too.

Neither the interpreter nor a lucky run shows a race, so the compiler's own output is read.
"""

import re
from typing import NamedTuple

import pytest

from flashtune import testing
from flashtune.core.kernel import Alignment, Kernel, Specialization
from flashtune.core.problem import Causal
from flashtune.core.target import find_target
from flashtune.launch.compilation import compile_kernel
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render

FAMILY = find_family("forward_kv_outer")
BARRIER = "tl.debug_barrier()"
# Of q, k, v and out the elements are bf16: float32 in global memory is the rows' state alone.
TTGIR_EVENTS = {
    r"\bscf\.for\b": "{",
    r"^\s*\} (loc|\{)": "}",
    r"\b(gpu|ttg)\.barrier\b": "B",
    r"\btt\.load\b.*!tt\.ptr<f32>": "L",
    r"\btt\.store\b.*!tt\.ptr<f32>": "S",
}
PTX_EVENTS = {r"\bbar(rier)?\.sync\b": "B", r"\bld\.global\b": "L", r"\bst\.global\b": "S"}


def kernel_of(causal: Causal, head_dim: int, num_warps: int, specialization: Specialization) -> Kernel:
    problem = testing.problem("heads=4,seqlen=512,head_dim=64,dtype=bf16", head_dim=head_dim, causal=causal)
    config = FAMILY.config_type(block_m=32, block_n=32, num_warps=num_warps, num_stages=1)  # type: ignore[call-arg]
    return render(FAMILY, problem, config, specialization)


def events(text: str, kinds: dict[str, str]) -> str:
    """The events of a program in the order of its text, repetitions of one kind left out."""
    kinds_in_order = "".join(
        kind for line in text.splitlines() for pattern, kind in kinds.items() if re.search(pattern, line)
    )
    return re.sub(r"([BLS])\1+", r"\1", kinds_in_order)


class Block(NamedTuple):
    """The events of one basic block, in order, and its successors."""

    events: str
    successors: frozenset[str]


def basic_blocks(ptx: str) -> dict[str, Block]:
    """The blocks of the first function, by label."""
    body = ptx[ptx.index("{") :]
    parts = re.split(r"^(\$L__BB\w+):", body, flags=re.MULTILINE)
    labels, texts = ["entry", *parts[1::2]], parts[::2]
    blocks = {}
    for label, text, following in zip(labels, texts, [*labels[1:], ""], strict=True):
        leaves = re.search(r"^\s*(bra(\.uni)?\s|ret;)", text, flags=re.MULTILINE)
        targets = set(re.findall(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);", text))
        falls_through = set() if leaves or not following else {following}
        blocks[label] = Block(events(text, PTX_EVENTS), frozenset(targets | falls_through))
    return blocks


def loads_before_barrier(blocks: dict[str, Block], start: str, seen: frozenset[str]) -> bool:
    """Whether some way from a block's last store meets a load before it meets a barrier."""
    after = blocks[start].events.rpartition("S")[2][:1]
    if after:
        return after == "L"
    return any(_meets_load(blocks, label, seen) for label in blocks[start].successors - seen)


def _meets_load(blocks: dict[str, Block], label: str, seen: frozenset[str]) -> bool:
    first = blocks[label].events[:1]
    if first in ("B", "L"):
        return first == "L"
    return any(
        _meets_load(blocks, after, seen | {label}) for after in blocks[label].successors - seen - {label}
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", ["a100", "h100", "b200", "mi300x"])
@pytest.mark.parametrize(
    ("causal", "head_dim", "num_warps", "alignment"),
    [(Causal.NONE, 16, 8, Alignment.SIXTEEN), (Causal.BOTTOM_RIGHT, 96, 4, Alignment.ANY)],
)
def test_barriers_separate_stores_from_loads_of_the_same_rows(
    target: str, causal: Causal, head_dim: int, num_warps: int, alignment: Alignment
) -> None:
    kernel = kernel_of(causal, head_dim, num_warps, Specialization(alignment))
    ttgir = compile_kernel(kernel, find_target(target)).asm["ttgir"]
    # Initial state; for each block of keys, for each tile of queries: read, wait, write; at last, division.
    assert events(ttgir[ttgir.index("tt.func") :], TTGIR_EVENTS).startswith("{S}B{{LBS}B}{L}")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["a100", "h100", "b200"])
@pytest.mark.parametrize("num_warps", [2, 8])
def test_barriers_are_in_the_machine_code(target: str, num_warps: int) -> None:
    kernel = kernel_of(Causal.NONE, 64, num_warps, Specialization())
    blocks = basic_blocks(str(compile_kernel(kernel, find_target(target)).asm["ptx"]))
    storing = [label for label, block in blocks.items() if "S" in block.events]
    # Initial state, the rows' update, the output.
    assert len(storing) == 3
    for label in storing:
        # Turns of the same loop over queries have no row in common, so its way back to itself is free.
        assert not loads_before_barrier(blocks, label, frozenset({label}))


def test_each_barrier_has_a_comment() -> None:
    source = kernel_of(Causal.TOP_LEFT, 64, 4, Specialization()).source
    lines = [line.strip() for line in source.splitlines()]
    assert lines.count(BARRIER) == 3
    assert all(lines[at - 1].startswith("# ") for at, line in enumerate(lines) if line == BARRIER)
