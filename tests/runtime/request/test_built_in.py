"""Tests of functions that are recognised as features of `attention`: decisions, results and lists."""

import math
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flex

import flashtune
from flashtune.request.functions import block_lists, built_in
from flashtune.request.functions.block_lists import unwritten_lists
from flashtune.request.functions.call import flex_call
from tests.support.fuzzing import fuzz_count

BATCH, HEADS, LENGTH = 2, 4, 160
SIZE, CAP = 50, 20
# Products with distances are exact in float32.
SLOPES, WIDE = (torch.arange(1, heads + 1) / 64 for heads in (HEADS, 2 * HEADS))
OF_SEQUENCES = WIDE.view(BATCH, HEADS)
INFINITY = math.inf
CAUSAL, WINDOW = {"causal": "bottom_right"}, {"causal": "bottom_right", "window_left": SIZE - 1}
Function = Callable[..., Any]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


MASKS: dict[str, tuple[Function, dict[str, Any] | None]] = {
    "causal": (causal, CAUSAL),
    "causal by a difference": (lambda b, h, q, k: ~(q - k < 0), CAUSAL),
    "causal by a sum": (lambda b, h, q, k: k < q + 1, CAUSAL),
    "window": (lambda b, h, q, k: (q >= k) & (q - k < SIZE), WINDOW),
    "window by a bound": (lambda b, h, q, k: torch.logical_and(k > q - SIZE, k <= q), WINDOW),
    "window and its end": (lambda b, h, q, k: (q >= k) & (q - k <= SIZE), WINDOW | {"window_left": SIZE}),
    "long window": (lambda b, h, q, k: (q >= k) & (q - k < LENGTH), CAUSAL),
    "one key": (lambda b, h, q, k: (q >= k) & (q - k < 1), WINDOW | {"window_left": 0}),
    "two sides": (lambda b, h, q, k: abs(q - k) <= SIZE, {"window_left": SIZE, "window_right": SIZE}),
    "uneven sides": (lambda b, h, q, k: (q - k <= 9) & (k - q < 5), {"window_left": 9, "window_right": 4}),
    "keys after": (lambda b, h, q, k: k - q <= 7, {"window_right": 7}),
    "strictly causal": (lambda b, h, q, k: q > k, None),
    "causal from the next": (lambda b, h, q, k: q >= k + 1, None),
    "some keys after": (lambda b, h, q, k: q >= k - 1, {"window_right": 1}),
    "empty window": (lambda b, h, q, k: (q >= k) & (q - k < 0), None),
    "empty sides": (lambda b, h, q, k: abs(q - k) <= -1, None),
    "window before": (lambda b, h, q, k: (q - k > 3) & (q - k < SIZE), None),
    "another factor": (lambda b, h, q, k: 2 * q >= k, None),
    "of heads": (lambda b, h, q, k: q >= k + h, None),
    "either": (lambda b, h, q, k: (q >= k) | (q - k < -SIZE), None),
    "other term": (lambda b, h, q, k: (q >= k) & (k != 5), None),
}
SCORES: dict[str, tuple[Function, bool]] = {
    "softcap": (lambda s, b, h, q, k: CAP * torch.tanh(s / CAP), True),
    "softcap of literals": (lambda s, b, h, q, k: torch.tanh(s / 2.5) * 2.5, True),
    "softcap of 1": (lambda s, b, h, q, k: torch.tanh(s), True),
    "alibi": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(), True),
    "alibi of differences": (lambda s, b, h, q, k: SLOPES[h] * (k - q) + s, True),
    "negated alibi": (lambda s, b, h, q, k: s + -SLOPES[h] * abs(k - q), True),
    "alibi of sequences": (lambda s, b, h, q, k: s - OF_SEQUENCES[b, h] * abs(q - k), True),
    "softcap without its factor": (lambda s, b, h, q, k: torch.tanh(s / 2.5), False),
    "two caps": (lambda s, b, h, q, k: torch.tanh(s / 2.5) * 2.25, False),
    "softcap of a product": (lambda s, b, h, q, k: torch.tanh(s * CAP) * CAP, False),
    "cap of 0": (lambda s, b, h, q, k: torch.where(q > 3, s, 0.0 * torch.tanh(s * 0.0)), False),
    "alibi that grows": (lambda s, b, h, q, k: s + SLOPES[h] * abs(q - k), False),
    "alibi of later keys": (lambda s, b, h, q, k: s + SLOPES[h] * (q - k), False),
    "another head": (lambda s, b, h, q, k: s - SLOPES[(h + 1) % HEADS] * abs(q - k), False),
    "slopes of sequences": (lambda s, b, h, q, k: s - SLOPES[b] * abs(q - k), False),
    "more slopes": (lambda s, b, h, q, k: s - WIDE[h] * abs(q - k), False),
    "half slopes": (lambda s, b, h, q, k: s - SLOPES.half()[h] * abs(q - k), False),
    "shifted alibi": (lambda s, b, h, q, k: s - SLOPES[h] * abs(q - k + 1), False),
    "alibi of products": (lambda s, b, h, q, k: s * 2.0 - SLOPES[h] * abs(q - k), False),
    "negated score": (lambda s, b, h, q, k: SLOPES[h] * (k - q) - s, False),
    "two features": (lambda s, b, h, q, k: torch.tanh(s) - SLOPES[h] * abs(q - k), False),
}


def mask_of(mask: Function | None, queries: int = LENGTH, keys: int = LENGTH, size: int = 64) -> Any:
    if mask is None:
        return None
    return flex.create_block_mask(mask, None, HEADS, queries, keys, device="cpu", BLOCK_SIZE=size)


def inputs(queries: int = LENGTH, keys: int = LENGTH, **options: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, HEADS, length, 16) for length in (queries, keys, keys))
    drawn = [4 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.requires_grad_(**options) for tensor in drawn]


def call_of(
    score: Function | None, blocks: Any, queries: int = LENGTH, keys: int = LENGTH, **options: Any
) -> Any:
    q, k, v = inputs(queries, keys, **{"requires_grad": False, **options})
    # Only explanations pass the function itself.
    return flex_call(q, k, v, score, blocks, None, False, False, partial(unwritten_lists))


def reference(q: Any, k: Any, v: Any, score: Function | None, mask: Function | None) -> Any:
    """Returns the output and the log-sum-exp in float64, by the functions themselves."""
    places = (torch.arange(size) for size in (BATCH, HEADS, q.shape[2], k.shape[2]))
    indices = [place.view(-1, *[1] * (3 - axis)) for axis, place in enumerate(places)]
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores if score is None else score(scores, *indices)
    visible = torch.tensor(True) if mask is None else mask(*indices)
    scores = scores.masked_fill(~visible, -1e9)
    is_empty = ~visible.expand(scores.shape).any(-1)
    out = (torch.softmax(scores, -1) @ v).masked_fill(is_empty[..., None], 0.0)
    return out, scores.logsumexp(-1).masked_fill(is_empty, -math.inf)


def check(score: Function | None, mask: Function | None, queries: int, keys: int) -> None:
    """Compares results with and without gradients, and gradients, with the reference."""
    blocks = mask_of(mask, queries, keys)
    attend: Any = flashtune.flex_attention
    own, exact = (inputs(queries, keys, requires_grad=True) for _ in range(2))
    results = [
        attend(*own, score, blocks, return_lse=True),
        reference(exact[0], exact[1], exact[2], score, mask),
    ]
    for out, lse in results:
        (out.square().sum() + lse.clamp(min=-99).sum()).backward()
    with torch.no_grad():
        alone = attend(*own, score, blocks)
    found = [(*results[0], alone), (*results[1], results[1][0])]
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)
    gradients = ([tensor.grad for tensor in tensors] for tensors in (own, exact))
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_recognised(name: str) -> None:
    mask, expected = MASKS[name]
    options = call_of(None, mask_of(mask)).options
    assert bool(options.functions) is (expected is None)
    for option in ("causal", "window_left", "window_right"):
        assert getattr(options, option) == (expected or {}).get(
            option, "none" if option == "causal" else None
        )
    hidden = call_of(lambda s, b, h, q, k: torch.where(mask(b, h, q, k), s, -INFINITY), None).options
    assert hidden.causal == options.causal


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_recognised(name: str) -> None:
    score, expected = SCORES[name]
    call = call_of(score, mask_of(causal))
    assert bool(call.options.functions) is not expected
    assert ((call.side.softcap, call.side.slopes) != (None, None)) is expected
    if "differences" in name:
        assert call_of(score, None).options.functions, "without a causal mask, the distance has a sign"
    if "alibi" in name:
        assert call_of(score, mask_of(causal), requires_grad=True).options.functions


@pytest.mark.parametrize("shape", [(LENGTH, LENGTH), (100, 160), (160, 100)])
@pytest.mark.parametrize("name", [*MASKS, *SCORES])
def test_results_are_those_of_the_functions(name: str, shape: tuple[int, int]) -> None:
    if name in MASKS:
        check(None, MASKS[name][0], *shape)
    else:
        check(SCORES[name][0], causal if len(name) % 2 else None, *shape)


def drawn(seed: int) -> tuple[Function | None, Function]:
    """Returns random functions, many of which are almost features."""
    draw = random.Random(seed)
    pick = draw.choice
    first, other, shift = pick([-1, 0, 0, 0, 1]), draw.randint(-3, 170), pick([0, 0, 1])
    flips, sign, cap = (draw.random() < 0.5, draw.random() < 0.3), pick([-1.0, 1.0]), pick([1.5, 2.5])

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        causal = q - k >= first if flips[0] else k + first <= q
        return causal & (abs(q - k + shift) <= other) if flips[1] else causal | (q - k == other)

    def capped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.tanh(s / 1.5) * cap

    def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = abs(q - k + shift) if flips[1] else k - q
        return s + sign * SLOPES[h] * distance if flips[0] else s - SLOPES[h] * distance

    return pick([None, capped, alibi]), mask


@pytest.mark.parametrize("seed", range(fuzz_count(20, 400)))
def test_random_functions_have_their_results(seed: int) -> None:
    check(*drawn(seed), *[(LENGTH, LENGTH), (100, 160), (160, 100)][seed % 3])


def test_lengths_align_the_mask_with_the_first_query() -> None:
    options = call_of(SCORES["alibi"][0], mask_of(causal, 100, 160), 100, 160).options
    assert (options.causal, options.functions) == ("top_left", "")
    assert call_of(None, mask_of(MASKS["two sides"][0], 100, 160), 100, 160).options.functions
    assert call_of(SCORES["alibi"][0], None, 100, 160).options.functions


def test_other_lists_are_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_lists, "_refused", Counter())

    def is_recognised(blocks: Any) -> bool:
        return not call_of(None, blocks).options.functions

    fewer, more = mask_of(causal), mask_of(causal)
    assert is_recognised(fewer)
    fewer.kv_num_blocks[..., 1] -= 1
    more.full_kv_num_blocks[..., 0] += 1
    assert not is_recognised(fewer)
    assert not is_recognised(more)
    # Queries without a list of their own would see nothing.
    none = flex.BlockMask.from_kv_blocks(
        fewer.kv_num_blocks, fewer.kv_indices, BLOCK_SIZE=64, mask_mod=causal
    )
    none.seq_lengths = (LENGTH, LENGTH)
    assert not is_recognised(none)
    for _ in range(block_lists.MAX_REFUSED):
        wrong = mask_of(causal)
        wrong.kv_num_blocks.zero_()
        assert not is_recognised(wrong)
    assert not is_recognised(mask_of(causal)), "no more masks are compared"
    monkeypatch.setattr(block_lists, "_refused", Counter())
    known, new = mask_of(causal), mask_of(causal)
    assert is_recognised(known)
    monkeypatch.setattr(block_lists, "stream_of", lambda device: None)
    assert is_recognised(known)
    assert not is_recognised(new), "a graph is captured"
    own = flashtune.BlockMask.from_blocks(torch.ones(3, 3, dtype=torch.bool), 64)
    assert call_of(SCORES["softcap"][0], own).options.functions


def test_the_first_window_of_a_function_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_in, "_windows", {})

    def window_of(size: int) -> Function:
        return lambda b, h, q, k: (q >= k) & (q - k < size)

    q, k, v = inputs()
    explained = flashtune.explain_flex(q, k, v, None, mask_of(window_of(9)))
    assert explained.recognised, "later calls do not depend on it"
    found = [not call_of(None, mask_of(window_of(size))).options.functions for size in (10, 11, 10)]
    assert found == [True, False, True]
    literal = mask_of(lambda b, h, q, k: (q >= k) & (q - k < 33))
    assert not call_of(None, literal).options.functions


def test_explanations_name_the_features() -> None:
    q, k, v = inputs()
    explained = flashtune.explain_flex(q, k, v, SCORES["softcap"][0], mask_of(causal))
    assert "recognised as features: causal,softcap" in str(explained)
    assert not flashtune.explain_flex(q, k, v, SCORES["two caps"][0]).recognised
    assert not flashtune.explain_flex(q, k, v).recognised
