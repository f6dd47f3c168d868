"""Selection of the backends of both passes of a differentiable call. One decision keeps them consistent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec
import torch

from flashtune.core.errors import ProblemError
from flashtune.core.features.records import NO_EXTRA_INPUTS, TENSORS, ExtraInputs
from flashtune.core.features.table import TENSOR_INPUTS
from flashtune.core.kernel import Specialization, specialization_of
from flashtune.core.problem import Causal
from flashtune.core.target import find_target
from flashtune.dispatch.decision import (
    DOUBLE,
    INTERPRETED_TARGET,
    Backend,
    Decision,
    as_read,
    baseline,
    check_device,
    copied,
    copy_words,
    has_hidden_keys,
    peer_backend,
    peer_reason,
    request_target,
    required_specialization,
    selection_source,
    without_values,
)
from flashtune.dispatch.faster_peers import faster_peer_of_pair, is_untrusted, untimed_peer
from flashtune.dispatch.lookup import default_selection, select
from flashtune.dispatch.masked_sdpa import is_masked
from flashtune.dispatch.sdpa import copies_ms, default_backend
from flashtune.dispatch.sdpa_times import EFFICIENT
from flashtune.dispatch.tables import tuned_records
from flashtune.launch.compilation import interpreting
from flashtune.launch.tensors import BackwardTensors
from flashtune.request.request import Prefer, Request
from flashtune.request.side_inputs import side_views

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.problem import Problem
    from flashtune.core.record import Selection
    from flashtune.core.target import Target

# Side inputs whose gradients are computed from the kernels' results, in addition to those of q, k and v.
DIFFERENTIABLE_SIDE = tuple(name for name in TENSORS if TENSOR_INPUTS[name].has_gradient)

# With at most this many queries, default kernels of both passes took 1.2 to 3.8 times as long as SDPA, at
# three shapes on an H200.
FEW_ROWS = 32

# The decisions for the forward and the backward pass, with the same backend.
BothPasses: TypeAlias = tuple[Decision, Decision]


class Assumptions(NamedTuple):
    """Properties of a call's tensors in addition to their shapes.

    Attributes:
        forward: Properties that a forward kernel may assume.
        backward: Properties that a backward kernel may assume.
        gradients: Names of the side inputs that require grad.
        usual: Returns the backend that SDPA selects, or None if it is not known or has no name.
        sdpa_copies_ms: Returns the time of the copies that SDPA needs.
        copies: The start of the reason: the tensors that are copied first, if any.
    """

    forward: Specialization
    backward: Specialization
    gradients: tuple[str, ...] = ()
    usual: Callable[[], str | None] = lambda: None
    copies: str = ""
    sdpa_copies_ms: Callable[[Target], float] = lambda _: 0.0


def decide_pair(
    request: Request, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs = NO_EXTRA_INPUTS
) -> BothPasses:
    """Returns the decisions for both passes of a request and its tensors.

    Raises:
        ProblemError: No backend supports the call, or `prefer` is "generated" and no family computes it.
    """
    ungenerated = _ungenerated(request)
    if ungenerated is not None:
        return ungenerated
    forward = request.forward
    assumed = Assumptions(
        required_specialization(forward, q, k, v, side),
        backward_specialization(request, q, k, v, side),
        side_gradients(side),
        lambda: default_backend(*request.views(q, k, v), request.problem, side.bias),
        copy_words(copied(request, q, k, v)),
        lambda target: copies_ms(request.views(q, k, v), target),
    )
    return decide_assumed(request, assumed)


def decide_assumed(request: Request, assumed: Assumptions) -> BothPasses:
    """Returns the decisions for both passes from known properties of the tensors, without the tensors.

    Raises:
        ProblemError: As `decide_pair`.
    """
    ungenerated = _ungenerated(request)
    if ungenerated is not None:
        return ungenerated
    try:
        return _generated(request, assumed)
    except ProblemError as error:
        if request.prefer is Prefer.GENERATED:
            raise
        return _both(Decision(baseline(request), str(error)))


def check_differentiable(request: Request) -> None:
    """Checks that a call is differentiable.

    Raises:
        ProblemError: The inputs are 8-bit or paged, or no backend supports the device of the tensors.
    """
    check_device(request)
    problem = request.problem
    if problem.dtype.is_quantized:
        raise ProblemError(
            f"attention of {problem.dtype} inputs has no backward pass and an input or a scale "
            "requires grad: call under torch.no_grad(), or pass 16-bit inputs"
        )
    if problem.page_size:
        raise ProblemError(
            "attention of sequences in pages has no backward pass and an input requires grad: call under "
            "torch.no_grad(), or pass dense tensors to flashtune.attention"
        )


def side_gradients(side: ExtraInputs) -> tuple[str, ...]:
    """Returns the names of the side inputs that require grad."""
    if side is NO_EXTRA_INPUTS:
        return ()
    named = zip(TENSORS, side.optional_tensors, strict=True)
    return tuple(name for name, tensor in named if tensor is not None and tensor.requires_grad)


def backward_specialization(
    request: Request, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs = NO_EXTRA_INPUTS
) -> Specialization:
    """Returns the properties that a backward kernel may assume if dout has the strides of the output."""
    out = torch.empty(request.out_shape, dtype=request.out_dtype, device="meta")
    return specialization_of_pass(request, backward_tensors(request, q, k, v, out, out, out), side)


def specialization_of_pass(
    request: Request, tensors: BackwardTensors, side: ExtraInputs = NO_EXTRA_INPUTS
) -> Specialization:
    """Returns the properties that a backward kernel may assume of tensors in the kernels' layout."""
    bias = None
    if side.bias is not None:
        bias = side_views(request.problem, side, tensors.k.shape[0]).bias
    found = specialization_of(tensors.planned, request.return_lse, bias)
    return msgspec.structs.replace(found, constant_bias=True) if request.constant_bias else found


def backward_tensors(
    request: Request,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    device: torch.device | str = "meta",
) -> BackwardTensors:
    """Returns the tensors of a call in the kernels' layout. The gradients are meta tensors.

    New tensors on a device replace those that are copied first.
    """
    gradients = [torch.empty_like(tensor, device="meta") for tensor in (q, k, v)]
    views, heads_first = request.views, request.layout.heads_first
    read = as_read(request, q, k, v, device)
    return BackwardTensors(*views(*read), heads_first(out), lse, heads_first(dout), *views(*gradients))


def _generated(request: Request, assumed: Assumptions) -> BothPasses:
    """Returns the result of `decide_assumed` for calls that generated kernels may serve."""
    blocked = [TENSOR_INPUTS[name].option for name in assumed.gradients if name not in DIFFERENTIABLE_SIDE]
    if blocked:
        raise ProblemError(
            f"no kernel family computes the gradient of {' and '.join(blocked)}, which requires grad: "
            "detach it, or pass prefer='fastest' to use the unfused computation"
        )
    if interpreting():
        target = find_target(INTERPRETED_TARGET)
        reason = "TRITON_INTERPRET=1 runs kernels on the CPU"
        forward = default_selection(request.problem, target, assumed.forward)
        backward = default_selection(request.backward, target, assumed.backward)
        return (
            Decision(Backend.INTERPRETER, reason, target, forward),
            Decision(Backend.INTERPRETER, reason, target, backward),
        )
    target = request_target(request)
    tables = tuned_records(target.name)
    forward = select(request.problem, target, tables, assumed.forward, generated=True)
    backward = select(request.backward, target, tables, assumed.backward, generated=True)
    peer = _faster_peer(request, forward, backward, target, assumed)
    if peer is not None:
        backend, reason = peer_backend(peer), peer_reason(peer, forward, backward)
        return Decision(backend, reason, target, forward), Decision(backend, reason, target, backward)
    return (
        Decision(Backend.GENERATED, assumed.copies + selection_source(forward), target, forward),
        Decision(Backend.GENERATED, assumed.copies + selection_source(backward), target, backward),
    )


def _faster_peer(
    request: Request,
    forward: Selection,
    backward: Selection,
    target: Target,
    assumed: Assumptions,
) -> str | None:
    """Returns the baseline that is faster over both passes and may replace both kernels, or None."""
    problem = request.problem
    ragged = problem.packed or problem.kv_lengths
    if request.prefer is Prefer.GENERATED or request.return_lse or request.deterministic or ragged:
        return None
    passes = forward, backward
    if any(is_untrusted(selection, problem) for selection in passes):
        backend = assumed.usual() if is_masked(problem) or not problem.features else None
        if backend == EFFICIENT or not problem.features:
            return untimed_peer(passes, problem, backend, target)
    # With a mask, gradients of SDPA's cuDNN backend may be NaN.
    backend = None if problem.features else assumed.usual()
    more_ms = 0.0 if backend is None else assumed.sdpa_copies_ms(target)
    untimed = all(selection.measured.measurement is None for selection in passes)
    few = untimed and problem.seqlen_q <= FEW_ROWS
    if few and not more_ms and not problem.features and _is_maskless(problem):
        return untimed_peer(passes, problem, backend, target)
    return faster_peer_of_pair(*passes, problem, backend, more_ms)


def _is_maskless(problem: Problem) -> bool:
    """Whether SDPA needs no mask for a problem without features, because it can leave out later keys."""
    is_square = problem.seqlen_q == problem.seqlen_kv
    return problem.causal is Causal.NONE or is_square or has_hidden_keys(problem)


def _ungenerated(request: Request) -> BothPasses | None:
    """Returns the decisions for empty and float64 calls, which need no generated kernel, else None."""
    check_differentiable(request)
    valueless = without_values(request)
    if valueless is not None:
        return _both(valueless)
    return _both(Decision(baseline(request), DOUBLE)) if request.is_double else None


def _both(decision: Decision) -> BothPasses:
    return decision, decision
