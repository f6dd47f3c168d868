"""The float64 reference of inputs, with the tolerance of each row, and the comparison of results with it."""

import math
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad

from flashtune.core.layouts import Layout
from flashtune.testing.inputs import Inputs, packed
from flashtune.verification.gradients.head_sampling import Pairs
from flashtune.verification.gradients.reference import Chosen, expect_gradients
from flashtune.verification.gradients.scores import BackwardCase
from flashtune.verification.gradients.tolerance import Gradient
from flashtune.verification.inputs.placement import SequenceLayout, key_places, query_places
from flashtune.verification.reference.forward import Sample, expect
from flashtune.verification.tolerance import worst_ratio

# Rows that are computed at a time, which bounds the memory.
ROWS = 1024


class Expected(NamedTuple):
    """One result of the reference.

    Attributes:
        name: Its name in `Reference`.
        exact: The result in float64, in the layout of a kernel's result.
        allowed: The tolerance of each row, of the same shape without the last dimension. Results without
            columns, such as the log-sum-exp, have the same shape.
    """

    name: str
    exact: Tensor
    allowed: Tensor


class Reference(NamedTuple):
    """The results of the reference. Those of the other pass, and of absent features, are None.

    The output and the log-sum-exp are also present in a backward pass, because a kernel reads them.
    """

    out: Expected
    lse: Expected
    dq: Expected | None = None
    dk: Expected | None = None
    dv: Expected | None = None
    dbias: Expected | None = None
    dslopes: Expected | None = None
    dsinks: Expected | None = None


@torch.no_grad()
def reference(inputs: Inputs) -> Reference:
    """Returns the reference of inputs, computed on their device.

    Rows that no sequence has are not read, so they may be NaN.
    """
    if not inputs.q.numel():
        return _empty(inputs)
    problem, scale, lengths = inputs.problem, inputs.scale, inputs.lengths
    if not problem.seqlen_kv:
        # The reference takes no empty rows of scores. Lengths hide the added key.
        problem = msgspec.structs.replace(problem, seqlen_kv=1, kv_lengths=not problem.page_size)
    table, first = (
        None if tensor is None else tensor.cpu()
        for tensor in (inputs.extra.block_table, inputs.extra.cu_seqlens_kv)
    )
    queries_at = query_places(problem, lengths) if problem.packed else None
    layout = SequenceLayout(problem, lengths, queries_at, key_places(problem, lengths, table, first))
    q, k, v, extra = layout.inputs(inputs.q, inputs.k, inputs.v, inputs.extra)
    heads = torch.arange(problem.batch * problem.heads)
    parts = [
        expect(problem, q, k, v, scale, Sample(heads, rows), extra, lengths)
        for rows in torch.arange(problem.seqlen_q).split(ROWS)
    ]
    out, allowed, lse, lse_allowed = (
        torch.cat(tensors, 1).unflatten(0, (problem.batch, problem.heads))
        for tensors in zip(*parts, strict=True)
    )
    expected_out = Expected("out", _of_queries(inputs, out), _of_queries(inputs, allowed))
    expected_lse = Expected(
        "lse", *(_as_lse(inputs, packed(problem, lengths, tensor)) for tensor in (lse, lse_allowed))
    )
    if inputs.dout is None:
        return Reference(expected_out, expected_lse)
    numbers = torch.arange(problem.batch * problem.kv_heads)
    pairs = Pairs(numbers // problem.kv_heads, numbers % problem.kv_heads)
    dout = layout.queries(inputs.dout)
    dlse = None if inputs.dlse is None else layout.queries(inputs.dlse[..., None])[..., 0]
    case = BackwardCase(q, k, v, dout, dlse, extra, scale, lengths)
    gradients = expect_gradients(problem, case, Chosen(pairs, torch.arange(problem.seqlen_q))).gradients
    expected = {name: _gradient(inputs, name, gradient) for name, gradient in gradients.items()}
    return Reference(expected_out, expected_lse, **expected)


def close(result: Tensor, expected: Expected) -> float:
    """Checks that a result is as close to the reference as verification demands of kernels.

    Returns the largest error over its tolerance, which is at most 1.

    Raises:
        AssertionError: A row's error exceeds its tolerance, an element is not finite, or the shape is wrong.
    """
    name, exact, allowed = expected
    assert result.shape == exact.shape, (
        f"{name} has shape {list(result.shape)} and the reference {list(exact.shape)}: "
        "pass a tensor of the same layout"
    )
    if not exact.numel():
        return 0.0
    rows = (result, exact) if allowed.dim() < exact.dim() else (result[..., None], exact[..., None])
    ratio = float(worst_ratio(*rows, allowed).item())
    if ratio <= 1.0:
        return ratio
    # Equal infinities have no difference.
    error = (rows[0].double() - rows[1]).masked_fill(rows[0] == rows[1], 0.0).abs()
    share = (error / (allowed[..., None] + 1e-300)).nan_to_num(nan=math.inf, posinf=math.inf)
    position = tuple(int(coordinate) for coordinate in torch.unravel_index(share.argmax(), share.shape))
    index = position[: exact.dim()]
    raise AssertionError(
        f"{name}{list(index)} is {result[index].item():.6g} and the reference {exact[index].item():.6g}, "
        f"{ratio:.3g} times the tolerance of {allowed[position[:-1]].item():.3g}"
    )


def _empty(inputs: Inputs) -> Reference:
    """Returns the forward pass of no queries."""
    shape = (*inputs.q.shape[:3], inputs.problem.value_head_dim)
    out = inputs.layout.as_given(inputs.q.new_zeros(shape, dtype=torch.float64))
    lse = _as_lse(inputs, inputs.q.new_zeros(shape[:3], dtype=torch.float64))
    return Reference(Expected("out", out, out[..., 0]), Expected("lse", lse, lse))


def _of_queries(inputs: Inputs, rows: Tensor) -> Tensor:
    """Returns rows of queries, [batch, heads, rows] or [..., rows, width], in the layout of the output."""
    if rows.dim() == 3:
        return _of_queries(inputs, rows[..., None])[..., 0]
    return inputs.layout.as_given(packed(inputs.problem, inputs.lengths, rows))


def _as_lse(inputs: Inputs, rows: Tensor) -> Tensor:
    """Returns a number of each query, [batch or 1, heads, rows], in the layout of the log-sum-exp."""
    if inputs.layout is Layout.THD:
        return rows[0]
    return rows[..., 0] if inputs.layout is Layout.BHD else rows


def _of_keys(inputs: Inputs, rows: Tensor) -> Tensor:
    """Returns rows of keys, [batch, kv_heads, rows] or [..., rows, width], in the layout of the keys."""
    if rows.dim() == 3:
        return _of_keys(inputs, rows[..., None])[..., 0]
    if inputs.extra.cu_seqlens_kv is not None:
        sizes = inputs.extra.cu_seqlens_kv.diff().tolist()
        # A sequence may have more rows than the longest uses.
        wide = pad(rows, (0, 0, 0, max(sizes, default=0)))
        rows = torch.cat([tensor[:, :size] for tensor, size in zip(wide, sizes, strict=True)], 1)[None]
    return inputs.kv_layout.as_given(rows)


def _gradient(inputs: Inputs, name: str, gradient: Gradient) -> Expected:
    """Returns a gradient of pairs, [pairs, ...] or [pairs, group, ...], as kernels write it."""
    exact, allowed = (
        tensor.unflatten(0, (inputs.problem.batch, inputs.problem.kv_heads)) for tensor in gradient
    )
    if name in ("dk", "dv"):
        return Expected(name, _of_keys(inputs, exact), _of_keys(inputs, allowed))
    exact, allowed = exact.flatten(1, 2), allowed.flatten(1, 2)
    if name == "dq":
        return Expected(name, _of_queries(inputs, exact), _of_queries(inputs, allowed))
    # Each element is a row of its own.
    return Expected(name, exact[..., 0], allowed)
