"""Tests of the code of random masks in int32 that wraps around, against int64."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flashtune.core.expressions.derivative import derivatives
from flashtune.core.expressions.evaluation import Values, node_values
from flashtune.core.expressions.nodes import INT32, Kind, Op
from flashtune.core.expressions.text import functions_text
from flashtune.core.features.functions import integers_of
from flashtune.core.features.records import TABLES
from flashtune.request.functions.tracing import trace
from flashtune.templates.common.args.gluon_functions import GluonWriter
from flashtune.templates.common.args.gluon_gradients import GradientWriter
from tests.emulator.hardware import Array, Pointer, Tensor, plain
from tests.emulator.program import identity
from tests.problems.random_conditions import BATCH, HEADS, mask_case
from tests.support.fuzzing import fuzz_count


class Int32(Tensor):
    """A tensor of int32, of bools, or of float64 in place of float32."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)
        if self.values.dtype == np.int64:
            # Of Python's ints, or of sums of bools.
            whole, self.values = self.values, self.values.astype(np.int32)
            assert np.array_equal(whole, self.values)
        assert self.values.dtype in (np.int32, np.bool_, np.float64)

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        return Int32(self.values.astype(dtype))

    def __index__(self) -> int:
        return int(self.values)

    def __bool__(self) -> bool:
        return bool(self.values)


def of_tensors(function: Callable[..., Any]) -> Callable[..., Int32]:
    return lambda *operands: Int32(function(*map(plain, operands)))


def load(pointer: Pointer) -> Int32:
    assert np.all(np.asarray(pointer.offset) >= 0)
    return Int32(pointer.memory[pointer.offset])


def select_pairs(s: Int32, words: Int32) -> Int32:
    """Hides the pairs without a bit. Words are of the pairs of columns that a thread holds in every eight."""
    columns = np.arange(s.values.shape[1])
    words_of_columns = np.broadcast_to(words.values, (len(s.values), 4))[:, columns % 8 // 2]
    seen = words_of_columns >> (columns // 8 * 2 + columns % 2) & 1
    return Int32(np.where(seen, s.values, -np.inf))


LANGUAGE = SimpleNamespace(
    int32=np.int32,
    float32=np.float64,
    constexpr=int,
    to_tensor=Int32,
    load=load,
    fma=lambda first, other, added: first * other + added,
    **{name: of_tensors(getattr(np, name)) for name in ("where", "minimum", "maximum", "zeros_like", "abs")},
)
NAMES = {
    "gl": LANGUAGE,
    "gluon": SimpleNamespace(jit=identity),
    "select_pairs": select_pairs,
    "of_words": lambda rows, s: rows[:, None],
    "places_of_thread": lambda s: Int32([[0, 2, 4, 6]]),
}


class Block:
    """A block of pairs, and the code that is written for a random mask of it."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        lengths = [chance.randint(1, 700) for _ in range(2)]
        self.case = case = mask_case(chance, *lengths)
        nodes = case.functions.nodes
        indices = {nodes[place].op for node in nodes if node.op is Op.LOAD for place in node.operands}
        if chance.random() < 0.3 and not indices & {Op.QUERY, Op.KEY}:
            lengths = [chance.randint(2**20, 2**29) for _ in range(2)]
        self.seqlen_q, self.seqlen_kv = lengths
        rows, width = chance.choice((64, 128)), chance.choice((32, 64, 128))
        self.is_backward = chance.random() < 1 / 3
        self.by_position = not self.is_backward and chance.random() < 0.3
        self.batch, self.head = chance.randrange(BATCH), chance.randrange(HEADS)
        sizes = (width, rows) if self.is_backward else (rows, width)
        starts = [
            chance.randrange(-(-length // size)) * size for length, size in zip(lengths, sizes, strict=True)
        ]
        self.queries, self.keys = (
            np.arange(start, min(start + size, length))
            for start, size, length in zip(starts, sizes, lengths, strict=True)
        )
        if self.is_backward:
            self.writer: GluonWriter = GradientWriter(derivatives(case.functions))
        else:
            is_packed = chance.random() < 0.2
            self.writer = GluonWriter(case.functions, by_position=self.by_position, packed=is_packed)
        parts = ("functions", "constants", *(("keys", "heads") if self.is_backward else ("rows",)))
        arguments = ", ".join(["tile", *self.writer.arguments, self.writer.parts["mask"]])
        self.code = "\n".join(
            [*map(self.writer.parts.__getitem__, parts), f"tile = hide_by_function({arguments})"]
        )
        ints, q_start, kv_start = integers_of(case.ints, case.tables), *starts
        scalars = {
            "batch": self.batch, "head": self.head, "seqlen_q": self.seqlen_q, "seqlen_kv": self.seqlen_kv,
            "kv_head": 0, "m_start": q_start, "n_start": kv_start, "n_block": kv_start // width,
        }  # fmt: skip
        self.names: dict[str, Any] = {name: Int32(number) for name, number in scalars.items()}
        self.names |= {
            **NAMES,
            "this": SimpleNamespace(**self.names),
            "scheduler": SimpleNamespace(group_size=HEADS),
            "origin": self.names["n_start" if self.is_backward else "m_start"],
            "positions": Int32(q_start + np.arange(rows)),
            "function_keys": Int32(np.arange(rows)),
            **dict.fromkeys(("queries", "n_offsets"), Int32(np.arange(width))),
            **dict.fromkeys(("BLOCK_M", "BLOCK_N"), width),
            "tile": Int32(np.ones((rows, width))),
            "function_ints": Pointer(np.array([*ints, 0], np.int32)),
            **{
                name: Pointer(table.numpy().reshape(-1))
                for name, table in zip(TABLES, case.tables, strict=False)
            },
        }

    def visible(self, text: str = "", mutant: str = "") -> Array:
        """Returns the pairs that the code leaves visible, with a text of it replaced."""
        names = {**self.names}
        with np.errstate(all="ignore"):
            exec(self.code.replace(text, mutant), names)
        seen: Array = names["tile"].values == 1.0
        return (seen.T if self.is_backward else seen)[: len(self.queries), : len(self.keys)]

    def expected(self) -> Array | None:
        """Returns the visible pairs in int64, or None if a value is no int32."""
        functions, *_ = self.case
        offset = self.seqlen_kv - self.seqlen_q if self.by_position else 0
        batch, head = torch.tensor(self.batch), torch.tensor(self.head)
        query, key = torch.from_numpy(self.queries[:, None] + offset), torch.from_numpy(self.keys)
        ints, tables = torch.tensor(self.case.ints), tuple(self.case.tables)
        values = Values(batch, head, query, key, ints, torch.zeros(0), tables)
        results = node_values(functions, values, functions.mask)
        whole = [result for place, result in results.items() if functions.kinds[place] is Kind.INT]
        if any(result.min() < INT32[0] or result.max() > INT32[-1] for result in whole):
            return None
        return np.broadcast_to(results[functions.mask].numpy(), (len(self.queries), len(self.keys)))


# Parts of the code, and other texts for them.
MUTANTS = [
    ("last + 1)", "last)"),
    ("places_from(end + 1)", "places_from(end)"),
    ("(size - near), 0)", "0, 0)"),
    (" <= ", " < "),
]


@functools.lru_cache(maxsize=300)
def drawn(seed: int) -> tuple[Block, Array | None]:
    block = Block(seed)
    return block, block.expected()


def test_masks_in_int32_are_those_in_int64() -> None:
    seeds, compared = fuzz_count(300, 10000), Counter[str]()
    for seed in range(seeds):
        block, expected = drawn(seed)
        if expected is not None:
            assert np.array_equal(block.visible(), expected), (seed, functions_text(block.case.functions))
            compared["backward" if block.is_backward else "forward"] += 1
            compared["words"] += bool(block.writer.parts["words"])
            compared["some visible"] += bool(expected.any() and not expected.all())
    assert compared["forward"] + compared["backward"] > 0.8 * seeds
    assert compared["backward"] > 0.2 * seeds
    assert compared["words"] > 0.1 * seeds
    assert compared["some visible"] > 0.2 * seeds


@pytest.mark.parametrize(("text", "mutant"), MUTANTS)
def test_mutants_of_the_code_hide_other_pairs(text: str, mutant: str) -> None:
    blocks = (block for block, expected in map(drawn, range(300)) if expected is not None)
    assert any(not np.array_equal(block.visible(text, mutant), block.visible()) for block in blocks)


@pytest.mark.parametrize("is_backward", [False, True])
def test_compared_floats_are_rounded_after_each_operation(is_backward: bool) -> None:
    functions = trace(None, lambda b, h, q, k: (q * 0.1 == k * 0.1) & (q / 7 <= k / 7)).functions
    writer = GradientWriter(derivatives(functions)) if is_backward else GluonWriter(functions)
    code = writer.parts["functions"] + writer.parts["rows"]
    assert code.count("gl.fma(") == code.count("gl.div_rn(") == 2, code
    assert "steps" not in code, code
    assert "1.0 / " not in code, code
