"""Tests of the comparison of rows between calls, with launches in plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal
from flashtune.templates.rendering import render
from flashtune.verification import invariance
from tests.problems.hopper import FAMILY, H200, a_config, a_problem

CPU = torch.device("cpu")


def launched(wrong: Callable[[ExtraInputs, Tensor], float]) -> Callable[..., Any]:
    """Returns a replacement of `bind` that computes row by row. `wrong` returns an addition to the scale.

    If there is a log-sum-exp, it alone is wrong.
    """

    def bind(*_: object, **__: object) -> Callable[..., None]:
        def launch(tensors: tuple[Any, ...], scale: float, side: ExtraInputs) -> None:
            q, k, v, out, lse = tensors
            error = wrong(side, q)
            assert side.seqlens_kv is not None or side.cu_seqlens_kv is not None
            starts = None if side.cu_seqlens_q is None else side.cu_seqlens_q.tolist()
            count = q.shape[0] if starts is None else len(starts) - 1
            for sequence in range(count):
                if starts is None:
                    queries, written = q[sequence], out[sequence]
                else:
                    rows = slice(starts[sequence], starts[sequence + 1])
                    queries, written = q[0, :, rows], out[0, :, rows]
                keys, values = (_keys(tensor, sequence, side).double() for tensor in (k, v))
                for head, row in [(0, row) for row in range(queries.shape[1])]:
                    end = keys.shape[1] - queries.shape[1] + row + 1
                    products = keys[0, :end] @ queries[head, row].double()
                    weights = ((scale + error * (lse is None)) * products).softmax(0)
                    written[head, row] = (weights @ values[0, :end]).to(written.dtype)
                    if lse is not None:
                        logs = lse[sequence] if starts is None else lse[0, :, rows]
                        logs[head, row] = ((scale + error) * products).logsumexp(0)

        return launch

    return bind


def _keys(tensor: Tensor, sequence: int, side: ExtraInputs) -> Tensor:
    """Returns the keys or values of a sequence, [heads, keys, width]."""
    if side.block_table is not None:
        assert side.seqlens_kv is not None
        pages = tensor[side.block_table[sequence].clamp(0, tensor.shape[0] - 1).long()]
        return pages.transpose(0, 1).flatten(1, 2)[:, : int(side.seqlens_kv[sequence])]
    if side.cu_seqlens_kv is not None:
        first, end = side.cu_seqlens_kv[sequence : sequence + 2].tolist()
        return tensor[0, :, first:end]
    assert side.seqlens_kv is not None
    return tensor[sequence, :, : int(side.seqlens_kv[sequence])]


def by_batch(side: ExtraInputs, q: Tensor) -> float:
    lengths = side.seqlens_kv if side.cu_seqlens_q is None else side.cu_seqlens_q
    assert lengths is not None
    return 0.05 * (lengths.numel() > 2)


@pytest.mark.parametrize(
    "features",
    [{"kv_lengths": True}, {"packed": 1}, {"page_size": 16}, {"packed": 1, "page_size": 64}],
    ids=["lengths", "packed", "pages", "packed pages"],
)
@pytest.mark.parametrize("lse", [False, True], ids=["outputs", "log-sum-exp"])
@pytest.mark.parametrize(
    ("wrong", "is_right"),
    [
        (lambda *_: 0.0, True),
        (by_batch, False),
        (lambda side, q: 0.05 * (q.shape[2] == 1), False),
    ],
    ids=["right", "by the batch", "in decoding"],
)
def test_rows_are_compared(
    wrong: Callable[[ExtraInputs, Tensor], float],
    is_right: bool,
    features: dict[str, Any],
    lse: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(invariance, "bind", launched(wrong))
    monkeypatch.setattr(invariance, "HEADS", 1)
    monkeypatch.setattr(invariance, "KV_HEADS", 1)
    problem = a_problem(16, causal=Causal.BOTTOM_RIGHT, batch_invariant=True, **features)
    kernel = render(FAMILY, problem, a_config(problem), Specialization(lse=lse))
    findings = list(invariance.invariance_findings(kernel, {}, problem, H200, CPU, 1, others=False))
    assert len(findings) == 7
    assert all(finding.holds() for finding in findings) is is_right
