"""Tests of the verification of the backward pass: correct results pass, and errors do not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.core.problem import Causal, Dtype
from flashtune.launch.tensors import BackwardTensors
from flashtune.verification.cases import Level
from tests.verification.gradients.checking import a_problem, of_gradient, of_problem, refused
from tests.verification.gradients.plain_kernel import BLOCK, Hooks, Scores, TwoTiles

LN_2 = math.log(2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "causal"),
    [(Dtype.BF16, Causal.NONE), (Dtype.FP16, Causal.TOP_LEFT), (Dtype.FP32, Causal.BOTTOM_RIGHT)],
)
def test_correct_gradients_pass(monkeypatch: pytest.MonkeyPatch, dtype: Dtype, causal: Causal) -> None:
    problem, config = a_problem(dtype=dtype, causal=causal), TwoTiles(block_n=32, dq_block_m=32)
    for dlse in (False, True):
        assert refused(monkeypatch, problem, level=Level.FULL, config=config, dlse=dlse) == []


def pairs_left_out(name: str, where: Callable[[Tensor, Tensor], Tensor]) -> Hooks:
    """Pairs of a query and a key that one gradient misses."""

    def scores(gradient: str, right: Scores) -> Scores:
        query, key = (torch.arange(size) for size in right.weights.shape[1:])
        left_out = where(query[:, None], key[None, :]).expand(right.weights.shape[1:])
        return Scores(*(tensor.masked_fill(left_out, 0.0) for tensor in right)) if gradient == name else right

    return Hooks(scores=scores)


def of_scores(change: Callable[[str, Scores], Scores]) -> Hooks:
    return Hooks(scores=change)


def of_read(change: Callable[[BackwardTensors], dict[str, Any]]) -> Hooks:
    return Hooks(read=lambda tensors: tensors._replace(**change(tensors)))


def rows_one_on(tensor: Tensor) -> Tensor:
    return tensor.roll(-1, 2)


def one_head_left_out(name: str) -> Hooks:
    """The last head of each group of two does not count."""

    def scores(gradient: str, right: Scores) -> Scores:
        if gradient != name or len(right.weights) < 4:
            return right
        heads = (torch.arange(len(right.weights)) % 2 == 0)[:, None, None]
        return Scores(*(tensor * heads for tensor in right))

    return Hooks(scores=scores)


def not_written(name: str) -> Hooks:
    """The last tile is not written."""

    def last_tile(right: Tensor) -> Tensor:
        right[:, (right.shape[1] - 1) // BLOCK * BLOCK :] = float("nan")
        return right

    return of_gradient(name, last_tile)


def transposed_heads(head: Tensor) -> Tensor:
    return head.max() - head


def weights_of_bf16(_: str, right: Scores) -> Scores:
    return Scores(*(tensor.bfloat16().float() for tensor in right))


MISTAKES: dict[str, Hooks] = {
    "dq: first block of keys skipped": pairs_left_out("dq", lambda query, key: key < BLOCK),
    "dq: last block of keys skipped": pairs_left_out("dq", lambda query, key: key >= 2 * BLOCK),
    "dq: a key in some rows": pairs_left_out("dq", lambda query, key: (key == 5) & (query % 8 == 3)),
    "dk: first block of queries skipped": pairs_left_out("dk", lambda query, key: query < BLOCK),
    "dk: last block of queries skipped": pairs_left_out("dk", lambda query, key: query >= 2 * BLOCK),
    "dk: a query at some keys": pairs_left_out("dk", lambda query, key: (query == 5) & (key % 8 == 3)),
    "dv: first block of queries skipped": pairs_left_out("dv", lambda query, key: query < BLOCK),
    "dv: tail of queries skipped": pairs_left_out("dv", lambda query, key: query >= BLOCK),
    "diagonal one key too far": Hooks(hidden=lambda hidden: hidden.roll(1, -1)),
    "diagonal one key too short": Hooks(hidden=lambda hidden: hidden | hidden.roll(-1, -1)),
    "diagonal aligned to the other corner": of_problem(causal=Causal.TOP_LEFT),
    "delta left out": Hooks(delta=torch.zeros_like),
    "delta of another row": Hooks(delta=lambda delta: delta.roll(1, -1)),
    "delta doubled": Hooks(delta=lambda delta: 2.0 * delta),
    "dq: scale missing": Hooks(scale=lambda name, scale: 1.0 if name == "dq" else scale),
    "dk: scale missing": Hooks(scale=lambda name, scale: 1.0 if name == "dk" else scale),
    "dq: scale twice": Hooks(scale=lambda name, scale: scale**2 if name == "dq" else scale),
    "dk: scale twice": Hooks(scale=lambda name, scale: scale**2 if name == "dk" else scale),
    "dq: scale in powers of two": Hooks(scale=lambda name, scale: scale / LN_2 if name == "dq" else scale),
    "keys of another KV head": Hooks(head=transposed_heads),
    "dk: of another KV head": of_gradient("dk", lambda dk: dk.flip(0)),
    "dv: of another KV head": of_gradient("dv", lambda dv: dv.flip(0)),
    "dk: one head of a group left out": one_head_left_out("dk"),
    "dv: one head of a group left out": one_head_left_out("dv"),
    "lse in base 2": Hooks(log=lambda lse: lse / LN_2),
    "lse of another row": Hooks(log=lambda lse: lse.roll(1, -1)),
    "dout of the next row": of_read(lambda tensors: {"dout": rows_one_on(tensors.dout)}),
    "out of the next row": of_read(lambda tensors: {"out": rows_one_on(tensors.out)}),
    "dq: last tile not written": not_written("dq"),
    "dk: last tile not written": not_written("dk"),
    "dv: last tile not written": not_written("dv"),
    "dq: not cleared": of_gradient("dq", lambda dq: dq + torch.empty_like(dq).fill_(float("nan"))),
    "dq: added twice in some rows": of_gradient("dq", lambda dq: torch.cat([dq[:, :-1], 2 * dq[:, -1:]], 1)),
    "dq: rows shifted": of_gradient("dq", lambda dq: dq.roll(1, 1)),
    "dk for dv": of_scores(
        lambda name, right: right._replace(weights=right.slopes) if name == "dv" else right
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_single_error_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert refused(monkeypatch, a_problem(), MISTAKES[name])


def test_8_bit_probabilities_are_refused_for_wider_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (Dtype.FP16, Dtype.FP32):
        assert refused(monkeypatch, a_problem(dtype=dtype), of_scores(weights_of_bf16))


def test_missing_gradient_of_lse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = of_read(lambda tensors: {"dlse": None})
    assert refused(monkeypatch, a_problem(), forgotten) == []
    assert refused(monkeypatch, a_problem(), forgotten, dlse=True)
