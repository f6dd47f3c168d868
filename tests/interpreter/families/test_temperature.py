"""Tests of the temperature by query position, which the unfused computation serves in every entry point."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.canonical import shape_text
from flashtune.core.errors import ProblemError
from flashtune.core.extra_inputs import ExtraInputs
from flashtune.core.problem import Feature
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.verification.gradients.head_sampling import sample_pairs
from flashtune.verification.gradients.reference import Chosen, expect_gradients
from flashtune.verification.gradients.scores import BackwardCase
from flashtune.verification.inputs.side_inputs import make_side
from flashtune.verification.lengths import equal_lengths, usual_lengths
from flashtune.verification.probes import Probe
from flashtune.verification.reference.forward import expect, sample

OPTIONS: dict[str, Any] = {"temperature_scale": 0.7, "temperature_floor": 3.0}
SHAPE = "heads=4,kv_heads=2,seqlen_q=9,seqlen_kv=17,head_dim=16,batch=2,dtype=fp32,causal"


def plain(q: Tensor, k: Tensor, v: Tensor, softcap: float | None = None) -> Tensor:
    """Causal attention of [batch, heads, seqlen, width] in float64, by a loop over rows."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    rows = []
    for row in range(q.shape[2]):
        position = row + k.shape[2] - q.shape[2]
        factor = 1 + 0.7 * torch.log(torch.tensor((position + 1) // 3 + 1.0, dtype=torch.float64))
        scores = factor * (q[:, :, row : row + 1] @ k[:, :, : position + 1].mT) / 4
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        rows.append(scores.softmax(-1) @ v[:, :, : position + 1])
    return torch.cat(rows, 2)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(4)
    q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 17, 16), torch.randn(2, 2, 17, 16)
    return q, k, v


def near(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_and_its_plan(softcap: float | None) -> None:
    q, k, v = tensors()
    options = OPTIONS | {"softcap": softcap}
    near(flashtune.attention(q, k, v, causal=True, **options), plain(q, k, v, softcap))
    planned = flashtune.plan(q, k, v, causal=True, **options)
    near(planned(q, k, v), plain(q, k, v, softcap))
    assert "temperature" in repr(planned)


def test_varlen() -> None:
    q, k, v = tensors()
    packed = [
        torch.cat([one[0, :, :rows], one[1]], 1).transpose(0, 1) for one, rows in ((q, 4), (k, 6), (v, 6))
    ]
    starts = [torch.tensor(offsets, dtype=torch.int32) for offsets in ([0, 4, 13], [0, 6, 23])]
    attend: Any = flashtune.attention_varlen
    out = attend(*packed, *starts, 9, 17, causal=True, **OPTIONS).transpose(0, 1)
    near(out[None, :, :4], plain(q[:1, :, :4], k[:1, :, :6], v[:1, :, :6]))
    near(out[None, :, 4:], plain(q[1:], k[1:], v[1:]))


def test_paged() -> None:
    q, k, v = tensors()
    pages = [torch.nn.functional.pad(one, (0, 0, 0, 15)).unflatten(2, (2, 16)) for one in (k, v)]
    caches = [one.transpose(1, 2).flatten(0, 1).transpose(1, 2) for one in pages]
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    lengths = torch.tensor([17, 17], dtype=torch.int32)
    attend: Any = flashtune.attention_paged
    out = attend(q.transpose(1, 2), *caches, table, lengths, **OPTIONS)
    near(out.transpose(1, 2), plain(q, k, v))
    with pytest.raises(ProblemError, match="shared_prefix does not go with temperature_scale"):
        attend(q.transpose(1, 2), *caches, table, lengths, shared_prefix=16, **OPTIONS)


def test_shapes_and_keys() -> None:
    (problem,) = parse_shape(f"{SHAPE},temperature")
    assert problem.features == {Feature.TEMPERATURE}
    assert problem.key.endswith("_bottom_right_temperature")
    assert parse_shape(shape_text(problem)) == (problem,)
    assert flashtune.explain(*tensors(), causal=True, **OPTIONS).backend == "unfused"


def test_wrong_numbers_are_refused() -> None:
    options: list[dict[str, Any]] = [{"temperature_scale": -1.0}, {"temperature_floor": 0.5}]
    for wrong in options:
        with pytest.raises(ProblemError, match=f"{next(iter(wrong))} cannot be"):
            flashtune.attention(*tensors(), **wrong)


def test_gradients_are_those_of_float64_and_of_the_reference() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in tensors())
    out = flashtune.attention(q, k, v, causal=True, softcap=2.0, **OPTIONS)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)
    expected = torch.autograd.grad(plain(q, k, v, 2.0), (q, k, v), dout.double())
    (problem,) = parse_shape(f"{SHAPE},temperature,softcap,backward")
    side = ExtraInputs(softcap=2.0, **OPTIONS)
    lengths = equal_lengths(problem)
    given = BackwardCase(q.detach(), k.detach(), v.detach(), dout, None, side, 0.25, lengths)
    generator = torch.Generator().manual_seed(1)
    chosen = Chosen(sample_pairs(problem, generator), torch.arange(9))
    reference = expect_gradients(problem, given, chosen).gradients
    for name, one, other in zip(("dq", "dk", "dv"), found, expected, strict=True):
        near(one, other.double())
        near(reference[name].exact.reshape(one.shape), other.double())


def test_reference_and_its_inputs() -> None:
    (problem,) = parse_shape(f"{SHAPE},temperature")
    q, k, v = tensors()
    generator = torch.Generator().manual_seed(1)
    reference = expect(problem, q, k, v, 0.25, sample(problem, generator), ExtraInputs(**OPTIONS))
    near(reference.out.view(2, 4, 9, 16), plain(q, k, v))
    made = make_side(Probe.RANDOM, problem, usual_lengths(problem), 16, generator)
    assert made == ExtraInputs(temperature_scale=0.1, temperature_floor=17 / 4)
