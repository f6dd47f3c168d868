"""Tests of traced score and mask functions: canonical forms, captured values, refusals, and block masks."""

import functools
import gc
import math
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex

import flashtune
from flashtune.core.errors import ProblemError
from flashtune.core.expressions.nodes import MAX_TABLES, Functions
from flashtune.request.functions import block_lists as block_lists_module
from flashtune.request.functions import tracing, warm_calls
from flashtune.request.functions.block_lists import block_lists, unwritten_lists
from flashtune.request.functions.operands import MAX_ROW
from flashtune.request.functions.tracing import trace
from flashtune.request.functions.warm_calls import warm_flex_call
from flashtune.runtime.call_key import short_key
from flashtune.runtime.session import SESSION

Function = Callable[..., Any]
SIZE, FACTOR, TABLE = 7, 1.75, torch.rand(4)


def of_mask(mask: Function) -> Functions:
    return trace(None, mask).functions


def global_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx < SIZE


def window_of(size: int) -> Function:
    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < size

    return window


def steps(count: int) -> Function:
    return lambda s, b, h, q, k: functools.reduce(lambda total, step: total + step * s, range(count), s)


EQUAL: dict[str, tuple[Function, Function]] = {
    "order": (lambda b, h, q, k: q >= k, lambda b, h, q, k: k <= q),
    "opposite": (lambda b, h, q, k: q >= k, lambda b, h, q, k: ~(q < k)),
    "difference": (lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k >= 0),
    "sum": (lambda b, h, q, k: q + k + 3 < 9, lambda b, h, q, k: 1 + (k + (2 + q)) <= 8),
    "and": (
        lambda b, h, q, k: (q >= k) & (b > 1) & (h > 0),
        lambda b, h, q, k: (h > 0) & ((b > 1) & (q >= k)),
    ),
    "functions": (lambda b, h, q, k: q >= k, lambda b, h, q, k: torch.logical_not(torch.gt(k, q))),
    "global and cell": (global_window, window_of(3)),
    "wrappers": (flex.and_masks(window_of(3), global_window), flex.and_masks(global_window, window_of(9))),
    "partial": (functools.partial(lambda n, b, h, q, k: q - k < n, 5), window_of(6)),
    "constant": (
        lambda b, h, q, k: torch.ones_like(q, dtype=torch.bool) & (q >= k),
        lambda b, h, q, k: q >= k,
    ),
    "zeros of a shape": (lambda b, h, q, k: q >= k + q.new_zeros(q.shape), lambda b, h, q, k: q >= k),
    "devices": (
        lambda b, h, q, k: (q >= k).to(q.device) & (k > 3).to("cpu"),
        lambda b, h, q, k: (q >= k) & (k > 3),
    ),
    "module": (lambda b, h, q, k: TABLE[h] > 0.5, lambda b, h, q, k: TABLE[h] > 0.5),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_functions_share_a_form(name: str) -> None:
    first, other = map(of_mask, EQUAL[name])
    assert first == other
    assert first.digest == other.digest


def test_hidden_scores_are_a_mask() -> None:
    score = trace(lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf), None)
    assert score.functions == of_mask(lambda b, h, q, k: q >= k)
    assert score.hides_scores
    added = trace(lambda s, b, h, q, k: s + torch.where(q >= k, 0.0, -math.inf), None)
    assert added.functions == score.functions
    assert trace(lambda s, b, h, q, k: s, flex.noop_mask).functions == Functions()


def test_captured_numbers_are_arguments() -> None:
    first, other = (trace(None, window_of(size)) for size in (3, 4))
    assert first.functions == other.functions
    assert (first.ints, other.ints) == ((3,), (4,))
    capped = trace(lambda s, b, h, q, k: torch.tanh(s / 2.5) * 2.5, None)
    assert capped.floats == ()


def test_numbers_that_decide_control_flow_are_constants() -> None:
    assert trace(steps(2), None).functions != trace(steps(3), None).functions
    assert trace(steps(3), None).ints == ()


def test_changed_captured_values_are_seen() -> None:
    size, table = 3, torch.rand(4)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k < size) & (table[h] > 0)

    before = trace(None, mask)
    assert trace(None, mask).functions is before.functions
    table.add_(1)
    assert trace(None, mask).functions is before.functions
    size = 5
    assert trace(None, mask).ints == (5,)
    table = torch.rand(9)
    assert trace(None, mask).tables[0] is table


def test_functions_that_are_defined_again_are_not_traced_again() -> None:
    table = torch.rand(4)

    def mask_of(size: int, table: torch.Tensor) -> Any:
        return lambda b, h, q, k: (q - k < size) & (table[h] > 0)

    first, other = trace(None, mask_of(3, table)), trace(None, mask_of(5, table))
    assert trace(None, mask_of(3, table)).functions is first.functions
    assert trace(None, mask_of(5, table)).functions is other.functions
    assert (first.ints, other.ints) == ((3,), (5,))
    assert trace(None, mask_of(3, torch.rand(4))).tables[0] is not table
    # A tensor may have the identity of one that no longer lives.
    for number in range(20):
        assert trace(None, mask_of(3, torch.full((4,), number))).tables[0][0] == number


def test_repeated_calls_see_changes() -> None:
    q, k, v = (torch.rand(1, 4, 64, 16) for _ in range(3))
    size, table, shift = 3, torch.rand(4), [0.0]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < size

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[h] * 2.0

    def in_list(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + shift[0]

    blocks = flex.create_block_mask(mask, None, None, 64, 64, device="cpu", BLOCK_SIZE=64)

    def record(score: Any = score, blocks: Any = blocks, q: torch.Tensor = q) -> Any:
        return warm_flex_call(
            q, k, v, score, blocks, None, enable_gqa=False, return_lse=False, list_blocks=unwritten_lists
        )

    first = record()
    assert record().side is first.side
    assert record(q=q[:, :, :32].repeat(1, 1, 2, 1)).side is first.side
    size = 5
    changed = record()
    assert int(changed.side.function_ints[0]) == 5
    assert record().side is changed.side
    table = torch.rand(4)
    assert record().side.table_0 is table
    blocks.kv_num_blocks.zero_()
    counts = record().side.block_counts
    assert counts is not None
    assert int(counts.sum()) == int(torch.as_tensor(blocks.full_kv_num_blocks).sum())
    other = flex.create_block_mask(mask, None, None, 64, 64, device="cpu", BLOCK_SIZE=64)
    assert record(blocks=other).side.block_counts is not record().side.block_counts
    before = record(in_list, None).side
    shift[0] = 2.5
    assert float(record(in_list, None).side.function_floats[0]) == 2.5 != float(before.function_floats[0])
    assert record(q=q.clone().requires_grad_()).q.requires_grad
    size = 1234
    other.kv_num_blocks.zero_()
    with torch.inference_mode():
        record(blocks=other)
    # A backward pass cannot save tensors of inference mode.
    assert not any(tensor.is_inference() for tensor in record(blocks=other).side.tensors)


def test_tensors_computed_by_functions_are_computed_again() -> None:
    table = torch.zeros(4)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table.exp()[h] + table.view(2, 2)[h // 2][h % 2]

    assert trace(score, None).tables[0].tolist() == [1.0] * 4
    table.fill_(1.0)
    assert trace(score, None).tables[0].tolist() == pytest.approx([math.e] * 4)


def test_parameters_of_modules_are_captured() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = nn.Parameter(torch.rand(3))

        def forward(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + self.slopes[h]

    module = Scores()
    assert trace(module, None).tables[0] is module.slopes


ROWS, SHORT, LONG = torch.rand(2, 5), torch.rand(2, 3), torch.rand(2, MAX_ROW + 1)
REFUSED: dict[str, tuple[Function, str]] = {
    "lgamma": (lambda s, b, h, q, k: torch.lgamma(s), r"score_mod .* lgamma at test_functions.py:\d+: "),
    "branch": (lambda s, b, h, q, k: s if q >= k else -s, r"as a Python bool .* at test_functions.py:\d+: "),
    "in place": (lambda s, b, h, q, k: s.add_(1), r"add_ at test_functions"),
    "float64": (lambda s, b, h, q, k: s.to(torch.float64), r"to at .* types are"),
    "remainder": (lambda s, b, h, q, k: s % 2, "of integers alone"),
    "power": (lambda s, b, h, q, k: s**1.5, "exponents"),
    "square root": (lambda s, b, h, q, k: s + math.sqrt(q), "cannot be traced at test_functions"),
    "index": (lambda s, b, h, q, k: s + TABLE[s], "indices are integers"),
    "slice": (lambda s, b, h, q, k: s + TABLE[h:], "slice indices"),
    "too many indices": (lambda s, b, h, q, k: s + TABLE[h, q], "1 dimensions has 2 indices"),
    "missing index": (lambda s, b, h, q, k: s + TABLE, "a row of 4 elements"),
    "shape": (lambda s, b, h, q, k: s.shape[0], "only captured tensors have indices"),
    "complex": (lambda s, b, h, q, k: s + TABLE.to(torch.complex64)[h], "captured tensor is torch.complex64"),
    "bitwise": (lambda s, b, h, q, k: s + ((q * 0.5) & 3), "of integers alone"),
    "row": (lambda s, b, h, q, k: s + ROWS[h], "a row of 5 elements"),
    "long row": (lambda s, b, h, q, k: s + LONG[h].sum(), "lacks 1 of its indices"),
    "rows": (lambda s, b, h, q, k: s + (ROWS[h] * SHORT[h]).sum(), "rows of 3 and 5 elements"),
    "index of a row": (lambda s, b, h, q, k: (2 * ROWS[h])[q], "literal integers"),
    "other operators": (lambda s, b, h, q, k: torch.ops.prims.tanh(s), "prims::tanh at"),
    "depth": (lambda s, b, h, q, k: functools.reduce(lambda x, _: s + x * s, range(99), s), "in a chain"),
    "tables": (
        lambda s, b, h, q, k: sum((torch.rand(9)[h] for _ in range(MAX_TABLES + 1)), s),
        "captured tensors: kernels take",
    ),
}  # fmt: skip


def without_numbers(text: str) -> str:
    return re.sub(r"\d+", "0", text)


PAGE = (Path(__file__).parents[3] / "docs/flex-attention.md").read_text()
REFUSALS = PAGE.partition("## Refusals")[2].partition("\n## ")[0]
LISTED = [text for text in re.findall("`([^`]+)`", without_numbers(REFUSALS)) if len(text) > 11]


@pytest.mark.parametrize("name", REFUSED)
def test_other_operations_are_refused_in_a_sentence(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(ProblemError, match=message) as caught:
        trace(function, None)
    assert "\n" not in str(caught.value)
    assert not re.search(r"Traceback|<.* object at", str(caught.value))
    assert any(sentence in without_numbers(str(caught.value)) for sentence in LISTED)


def test_elements_of_tables_are_indices_and_literals_are_too() -> None:
    table, order = torch.rand(4, 2), torch.arange(4)
    traced = trace(lambda s, b, h, q, k: s + table[order[h]][1], None)
    assert traced.text == "score.head.load/1.int@1.load@1/2/3.add/0/4:5:-1:int64x1.fp32x2"


def test_masks_are_bools() -> None:
    with pytest.raises(ProblemError, match="int32 instead of bool"):
        trace(None, lambda b, h, q, k: q - k)


def test_lists_of_blocks() -> None:
    """Full blocks are first, and the last block, which is not whole, is none of them."""
    mask = flex.create_block_mask(
        lambda b, h, q, k: k <= q + 72, None, None, 200, 200, device="cpu", BLOCK_SIZE=64
    )
    lists = block_lists(mask, 200, 200, full_first=True)
    visible = [
        row[:count]
        for row, count in zip(
            lists.mask.indices[0, 0].tolist(), lists.mask.counts[0, 0].tolist(), strict=True
        )
    ]
    assert visible == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert lists.full_counts.tolist() == [[[1, 2, 3, 0]]]
    assert block_lists(mask, 200, 200, full_first=True) is lists
    assert block_lists(mask, 200, 200, full_first=False).full_counts.sum() == 0


def test_state_of_inner_functions_and_objects() -> None:
    """Numbers of nested code are seen; objects with attributes are traced at each call."""
    module = nn.Embedding(4, 1)

    def outer(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        def inner() -> Any:
            scaled = [s * FACTOR for _ in range(1)]
            return scaled[0]

        return inner()

    def with_object(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + module.weight[h, 0]

    first = trace(outer, None)
    assert first.floats == (FACTOR,)
    assert trace(outer, None).functions is first.functions
    assert trace(with_object, None).functions is not trace(with_object, None).functions
    module.weight = nn.Parameter(torch.rand(4, 1))
    assert trace(with_object, None).tables[0] is module.weight


def call(**changes: Any) -> Any:
    tensors = {
        "query": torch.rand(1, 4, 64, 16),
        "key": torch.rand(1, 4, 64, 16),
        "value": torch.rand(1, 4, 64, 16),
    }
    return flashtune.flex_attention(**{**tensors, **changes})


def tiles(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q // 8 >= k // 8


def mask_of(size: int = 128, length: int = 64, function: Function = global_window) -> Any:
    return flex.create_block_mask(function, None, None, length, length, device="cpu", BLOCK_SIZE=size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": torch.rand(1, 2, 64, 16), "value": torch.rand(1, 2, 64, 16)}, "enable_gqa"),
        ({"block_mask": mask_of(length=65)}, "for 65 and 65 queries and keys"),
        ({"block_mask": mask_of(32, function=tiles)}, "multiples of 64"),
        ({"block_mask": mask_of()[:, :, 0]}, "was sliced"),
        ({"block_mask": torch.rand(3)}, "flashtune.BlockMask"),
        ({"score_mod": 3}, "score_mod is int"),
        ({"score_mod": lambda s, b, h, q, k: s + torch.rand(3)[h]}, "by each head: pass at least 4"),
        ({"query": torch.rand(4, 64, 16)}, "3 dimensions"),
    ],
)
def test_calls_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        call(**changes)


class Settings:
    """A class of a program. Its attributes may change."""

    weight = 2.0


def scaled(factor: Any, operation: Any) -> Any:
    return lambda s, b, h, i, j: operation(s * (3.0 if factor is None else 5.0))


def by_parts(parts: Any) -> Any:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for part in parts:
            s = torch.tanh(s * sum(part))
        return s

    return score


def in_order(*operations: Any) -> Any:
    return lambda s, b, h, i, j: operations[0](s) + operations[1](s) * 0.5


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (scaled(None, torch.tanh), scaled("five", torch.tanh)),
        (scaled(None, torch.tanh), scaled(None, torch.sin)),
        (scaled(None, torch.abs), scaled(None, torch.exp)),
        (by_parts([[1.0, 2.0], [3.0]]), by_parts([[1.0], [2.0, 3.0]])),
        (in_order(torch.tanh, torch.sin), in_order(torch.sin, torch.tanh)),
        (
            functools.partial(lambda s, b, h, i, j, x, y: s * x + (i - j) * y, x=2.0, y=0.5),
            functools.partial(lambda s, b, h, i, j, x, y: s * x + (i - j) * y, y=2.0, x=0.5),
        ),
        (scaled(0.0, lambda s: s * Settings.weight), scaled(0.0, lambda s: s * Settings().weight)),
    ],
)
def test_functions_of_equal_code_are_told_apart(first: Any, other: Any) -> None:
    for _ in range(2):
        for function in (first, other):
            traced = trace(function, None)
            alone = tracing._traced(function, "score_mod", capture := tracing._Capture())
            functions, order = capture.builder.finish(alone, -1)
            assert traced.functions == functions
            assert traced.floats == tuple(capture.floats[place] for place in order.floats)


def test_changes_of_attributes_and_data_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.nn.Parameter(torch.zeros(16), requires_grad=False)
    found = {"weight": 2.0}
    get = found.get

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * Settings.weight + get("weight") + table[j]

    q = torch.zeros(1, 1, 16, 16)

    def record() -> Any:
        return warm_flex_call(
            q, q, q, score, None, None, enable_gqa=False, return_lse=False, list_blocks=unwritten_lists
        )

    text = record().options.functions
    monkeypatch.setattr(Settings, "weight", 3.0)
    changed = record().options.functions
    found["weight"] = 4.0
    assert len({text, changed, record().options.functions}) == 3
    sizes = record().side.function_ints.tolist()
    table.data = torch.zeros(16, 2)[:, 0]
    assert record().side.function_ints.tolist() != sizes
    table.data = torch.zeros(16, dtype=torch.float16)
    assert "fp16" in record().options.functions


def test_values_that_cannot_be_traced_are_one_sentence() -> None:
    def reads_a_tensor(s: Any, *_: Any) -> Any:
        assert isinstance(s, torch.Tensor)
        return s

    failing: tuple[Function, ...] = (
        *(lambda s, *_: s * len(s), lambda s, *_: s * np.float32(2.0), lambda s, *_: s * (1.0,)[len(_)]),
        reads_a_tensor,
    )
    for function in failing:
        with pytest.raises(ProblemError, match=r"score_mod cannot be traced at .*test_functions\.py"):
            trace(function, None)


def test_integers_beyond_32_bits_are_refused() -> None:
    with pytest.raises(ProblemError, match="no integer of 32 bits"):
        trace(lambda s, b, h, i, j: torch.where(i - 2**31 == j - 2**31, s, 0.0), None)


def test_a_record_with_a_dead_mask_is_of_no_other_call() -> None:
    q = torch.zeros(1, 1, 256, 16)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * 2.0

    def record(mask: Any) -> Any:
        return warm_flex_call(
            q, q, q, score, mask, None, enable_gqa=False, return_lse=False, list_blocks=unwritten_lists
        )

    mask = mask_of(length=256)
    assert record(mask).side.block_counts is not None
    del mask
    gc.collect()
    assert record(None).side.block_counts is None


@pytest.mark.parametrize("stream", [8, None], ids=["another stream", "a capture"])
def test_lists_of_another_stream_are_not_used(stream: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, mask = torch.randn(1, 1, 256, 16), mask_of(length=256)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(q // 8 >= k // 8, s, -math.inf)

    def lists_at(stream: int | None) -> tuple[Any, Any]:
        for module in (block_lists_module, warm_calls):
            monkeypatch.setattr(module, "stream_of", lambda device: stream)
        call = warm_flex_call(
            q, q, q, score, None, None, enable_gqa=False, return_lse=False, list_blocks=unwritten_lists
        )
        return call.side.block_indices, block_lists(mask, 256, 256, full_first=True)

    (listed, given), again, other = lists_at(7), lists_at(7), lists_at(stream)
    assert again[0] is listed
    assert again[1] is given
    assert other[0] is not listed
    assert other[1] is not given


def test_repeated_calls_share_a_kind_and_lists_without_gradients() -> None:
    q, table, seen = torch.randn(1, 1, 256, 16), torch.zeros(256), []

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where((table[q] == table[k]) & (q >= k), s, -math.inf)

    def lists(*arguments: Any) -> Any:
        seen.append(arguments[2].block_counts)
        return unwritten_lists(*arguments)

    def record(q: torch.Tensor) -> Any:
        return warm_flex_call(q, q, q, score, None, None, False, False, lists)

    first, again, other = record(q), record(q), record(q)
    assert seen == [None, first.side.block_counts, first.side.block_counts]
    assert first.kind is None
    assert again.kind is other.kind is not None
    assert short_key(again) == short_key(other) != short_key(again._replace(q=q.half()))
    assert short_key(first) is short_key(again._replace(scale=-1.0)) is None
    trained = q.clone().requires_grad_()
    one, two = record(trained), record(trained)
    assert one.side.block_counts is not two.side.block_counts
    assert two.side.block_counts is not first.side.block_counts
    table.requires_grad_()
    record(q)
    assert record(q).kind is None


def test_executors_of_repeated_calls_are_forgotten() -> None:
    q = torch.randn(1, 1, 16, 16, dtype=torch.float64)
    results = [flashtune.flex_attention(q, q, q, doubled) for _ in range(3)]
    assert torch.equal(results[0], results[2])
    assert SESSION.repeated
    SESSION.forget()
    assert not SESSION.repeated
    assert torch.equal(flashtune.flex_attention(q, q, q, doubled), results[0])


def doubled(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * 2.0


@torch.inference_mode()
def test_masks_made_in_inference_mode() -> None:
    q, mask = torch.zeros(1, 1, 256, 16), mask_of(length=256)

    def record() -> Any:
        return warm_flex_call(
            q, q, q, None, mask, None, enable_gqa=False, return_lse=False, list_blocks=unwritten_lists
        )

    assert int(record().side.block_counts.sum())
    mask.kv_num_blocks.zero_()
    mask.full_kv_num_blocks.zero_()
    assert not int(record().side.block_counts.sum())


def test_sizes_of_captured_tensors_are_read_again() -> None:
    q, sized = torch.zeros(1, 1, 16, 16), torch.zeros(3)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * sized.shape[0]

    before = warm_flex_call(q, q, q, score, None, None, False, False, unwritten_lists).options
    sized.resize_(5)
    assert warm_flex_call(q, q, q, score, None, None, False, False, unwritten_lists).options != before


def test_records_keep_no_dead_masks_and_no_namespaces_alive() -> None:
    q = torch.zeros(1, 1, 256, 16)
    names: dict[str, Any] = {"table": torch.zeros(16)}
    exec("def score(s, b, h, i, j): return s + table[b]", names)
    kept = weakref.ref(names["table"])
    masks = [mask_of(length=256) for _ in range(3)]
    tensors = [weakref.ref(mask.kv_indices) for mask in masks]
    for length, mask in zip((256, 256, 256), masks, strict=True):
        warm_flex_call(
            q[:, :, :length],
            q,
            q,
            names["score"],
            mask,
            None,
            enable_gqa=False,
            return_lse=False,
            list_blocks=unwritten_lists,
        )
    del masks, mask
    warm_flex_call(q, q[:, :, :128], q[:, :, :128], names["score"], None, None, False, False, unwritten_lists)
    gc.collect()
    assert all(tensor() is None for tensor in tensors)
    del names
    gc.collect()
    assert kept() is None
