"""Problems from the text of a shape, and their inputs: generated ones, or those of a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from flashtune.core.errors import ProblemError, UsageError, quoted
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.kernel import Alignment
from flashtune.core.layouts import DENSE_LAYOUTS, Layout
from flashtune.core.problem import Direction, Problem
from flashtune.request.arguments import read_option
from flashtune.request.call import Call, dense_call, seeded, varlen_call
from flashtune.request.functions.call import paged_flex_call
from flashtune.request.read_call import read_call
from flashtune.request.side_inputs import side_views
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.verification.cases import Case
from flashtune.verification.gradients.inputs import make_dlse, make_dout
from flashtune.verification.inputs.memory import MemoryFrame, placed
from flashtune.verification.inputs.placement import aside, query_places
from flashtune.verification.inputs.prepared import dense_values
from flashtune.verification.lengths import Lengths, equal_lengths, is_ragged, usual_lengths
from flashtune.verification.probes import Probe

# Keys of the blocks that the values of probes are made for.
BLOCK = 64


def problem(shape: str, **changes: Any) -> Problem:
    """Returns the problem of a shape (docs/shapes.md), with some fields of `Problem` replaced.

    `seqlen` in `changes` sets both lengths. A new `head_dim` is also that of the values if both were equal.

        problem("heads=8,kv_heads=2,seqlen=512,head_dim=128,dtype=bf16,causal,batch=2", seqlen_q=1)

    Raises:
        UsageError: The shape is invalid, or it is more than one problem.
        ProblemError: A change has an invalid value, or they contradict one another.
    """
    problems = parse_shape(shape)
    if len(problems) > 1:
        raise UsageError(f"{quoted(shape)} is {len(problems)} problems: give each key one value")
    (parsed,) = problems
    if "seqlen" in changes:
        length = changes.pop("seqlen")
        changes = {"seqlen_q": length, "seqlen_kv": length} | changes
    if "head_dim" in changes and parsed.head_dim == parsed.value_head_dim:
        changes = {"value_head_dim": changes["head_dim"]} | changes
    fields = msgspec.structs.asdict(parsed)
    if unknown := changes.keys() - fields.keys():
        raise UsageError(f"a problem has no field {quoted(min(unknown))}: see flashtune.core.problem.Problem")
    try:
        return msgspec.convert(fields | changes, Problem)
    except msgspec.ValidationError as error:
        # msgspec wraps the errors of the problem itself.
        raise ProblemError(str(error.__cause__ or error)) from error


class Inputs(NamedTuple):
    """All inputs of one computation, as flashtune's kernels take them.

    Attributes:
        problem: The problem.
        q: Queries, [batch, heads, seqlen_q, head_dim], or [1, heads, tokens, head_dim] of a varlen batch.
        k: Keys, [batch, kv_heads, seqlen_kv, head_dim], [1, kv_heads, tokens, head_dim] of a varlen batch, or
            [pages, kv_heads, page_size, head_dim].
        v: Values of the same form, with `value_head_dim`.
        scale: Softmax scale.
        extra: Lengths, block tables, biases and all other inputs of features.
        dout: The gradient of the output, of the output's shape. None in a forward pass.
        dlse: The gradient of the log-sum-exp, or None for zeros.
        layout: The order of the dimensions of the reference's output and of dq.
        kv_layout: The order of the dimensions of the reference's dk and dv.
    """

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    extra: ExtraInputs = NO_EXTRA_INPUTS
    dout: Tensor | None = None
    dlse: Tensor | None = None
    layout: Layout = Layout.BHSD
    kv_layout: Layout = Layout.BHSD

    @property
    def lengths(self) -> Lengths:
        """Queries and keys of each sequence."""
        queries, keys = equal_lengths(self.problem)
        if self.extra.cu_seqlens_q is not None:
            queries = tuple(self.extra.cu_seqlens_q.diff().tolist())
        if self.extra.seqlens_kv is not None:
            keys = tuple(self.extra.seqlens_kv.tolist())
        elif self.extra.cu_seqlens_kv is not None:
            keys = tuple(self.extra.cu_seqlens_kv.diff().tolist())
        return Lengths(queries, keys)

    def backward(self, dout: Tensor) -> Inputs:
        """Returns the inputs of the backward pass, with a gradient in the layout of the call's output."""
        problem = msgspec.structs.replace(self.problem, direction=Direction.BACKWARD)
        return self._replace(problem=problem, dout=self.layout.heads_first(dout))


def tensors(
    problem: Problem,
    device: torch.device | str = "cpu",
    seed: int = 0,
    *,
    probe: str = Probe.RANDOM,
    scale: float | None = None,
    layout: str = "bhsd",
    alignment: int = 16,
    lengths: Lengths | None = None,
    dlse: bool = False,
) -> Inputs:
    """Returns new inputs of a problem, in memory that is NaN between and around their elements.

    A problem of the backward pass also gets a gradient of the output.

    Args:
        problem: The problem.
        device: The device of the tensors.
        seed: The problem, the seed and the options below determine all values.
        probe: The kind of error that the values expose (`flashtune.verification.probes.Probe`).
        scale: Softmax scale. Default: 1 / sqrt(head_dim).
        layout: The order of heads and positions in memory: `bhsd` or `bshd`.
        alignment: 16, 8 or 1: strides are multiples of this number, and of no larger one of these.
        lengths: Queries and keys of each sequence, if they may differ. Default: typical lengths.
        dlse: Whether the log-sum-exp has a gradient too.
    """
    if is_ragged(problem):
        lengths = lengths or usual_lengths(problem)
        total_q = lengths.total_q if problem.packed else 0
        problem = msgspec.structs.replace(problem, packed=total_q, batch=len(lengths.queries))
    lengths = lengths or equal_lengths(problem)
    scale = problem.head_dim**-0.5 if scale is None else scale
    memory_order = read_option("layout", layout, DENSE_LAYOUTS)
    case = Case(problem=problem, probe=Probe(probe), block=BLOCK, scale=scale, layout=memory_order)
    generator = torch.Generator(device).manual_seed(seed)
    dense = dense_values(case, lengths, generator)
    frame = MemoryFrame(Alignment(alignment), memory_order)
    memory = placed(problem, dense, lengths, frame, aside(generator))
    inputs = Inputs(problem, memory.q.view, memory.k.view, memory.v.view, scale, memory.side)
    if not problem.is_backward:
        return inputs
    dout = make_dout(case.probe, problem, BLOCK, generator).to(dense.q.dtype)
    gradient = make_dlse(problem, generator) if dlse else None
    return inputs._replace(
        dout=packed(problem, lengths, dout),
        dlse=None if gradient is None else packed(problem, lengths, gradient).contiguous(),
    )


def packed(problem: Problem, lengths: Lengths, padded: Tensor) -> Tensor:
    """Returns rows of queries, [batch, heads, seqlen_q] or [..., width], as kernels take them."""
    if not problem.packed:
        return padded
    places = query_places(problem, lengths).to(padded.device)
    return padded.transpose(1, 2)[places.sequence, places.row].transpose(0, 1)[None]


def attention_inputs(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Inputs:
    """Returns the inputs of `flashtune.attention(q, k, v, **options)`."""
    return inputs_of(dense_call(q, k, v, **options))


def varlen_inputs(*arguments: Any, **options: Any) -> Inputs:
    """Returns the inputs of `flashtune.attention_varlen(*arguments, **options)`."""
    return inputs_of(varlen_call(*arguments, **options))


def paged_inputs(*arguments: Any, **options: Any) -> Inputs:
    """Returns the inputs of `flashtune.attention_paged(*arguments, **options)`."""
    return inputs_of(paged_flex_call(*arguments, **options))


def inputs_of(call: Call) -> Inputs:
    """Returns the inputs of a call.

    Raises:
        ProblemError: The arguments do not match one another.
    """
    call = seeded(call)
    request = read_call(call)
    q, k, v = request.views(call.q, call.k, call.v)
    extra = side_views(request.problem, call.side, k.shape[0])
    scale = request.default_scale if call.scale is None else call.scale
    kv_layout = request.kv_layout or request.layout
    inputs = Inputs(request.problem, q, k, v, scale, extra, layout=request.layout, kv_layout=kv_layout)
    if not (request.problem.packed or request.problem.page_size):
        return inputs
    # Requests round the numbers of tokens and pages up.
    queries, keys = inputs.lengths
    fields = {"seqlen_q": max(queries, default=0), "seqlen_kv": max(keys, default=0)}
    fields["packed"] = request.tokens
    return inputs._replace(problem=msgspec.structs.replace(request.problem, **fields))
