"""Selection of the backend of a request, without compiling or launching anything."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

import msgspec
import torch
from torch import Tensor

from flashtune.core.errors import ProblemError
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.kernel import POINTER_ALIGNMENT, Alignment, Specialization, specialization_of
from flashtune.core.mask_sharing import MaskSharing
from flashtune.core.problem import Causal, Problem
from flashtune.core.record import Selection
from flashtune.core.target import Target, device_target, find_target
from flashtune.dispatch.faster_peers import (
    UNFUSED,
    faster_peer,
    is_slow_default,
    is_untrusted,
    shared_time,
    untimed_peer,
)
from flashtune.dispatch.lookup import default_selection, select, without_kernels
from flashtune.dispatch.masked_sdpa import known_refusal, sdpa_allowed, sharing_of
from flashtune.dispatch.sdpa import copies_ms, copy_ms, default_backend
from flashtune.dispatch.sdpa_times import related_peers
from flashtune.dispatch.tables import tuned_records
from flashtune.launch.compilation import interpreting
from flashtune.request.request import Prefer, Request
from flashtune.request.side_inputs import side_views
from flashtune.templates.common.model.sram import power_of_two
from flashtune.templates.common.model.tile_schedule import RESIDENT
from flashtune.templates.common.model.traffic import unpacked

# The target for which the interpreter's default configs are made: small tiles and no TMA.
INTERPRETED_TARGET = "nvidia-l4"
# The reason for the unfused computation of float64 tensors.
DOUBLE = "no kernel takes float64"
# All families can address tensors with these properties.
BEST_TENSORS = Specialization()
# Additional time of a program with unaligned tensors for a block of 64 queries and 64 keys, per column of a
# head, in ms. Measured at 20 shapes on an H200. It is a half or a quarter of this if strides are multiples of
# two or four elements.
UNALIGNED_TILE, UNALIGNED_MS = 64, 3e-5
# Queries, keys and values.
Tensors = tuple[Tensor, Tensor, Tensor]


class Backend(enum.StrEnum):
    """The backend that computes a call."""

    GENERATED = "generated"
    INTERPRETER = "interpreter"
    SDPA = "sdpa"
    UNFUSED = "unfused"
    NONE = "none"


class Decision(msgspec.Struct, frozen=True):
    """The backend of a request and the reason.

    Attributes:
        backend: The backend.
        reason: The reason as one clause.
        target: The GPU, or None if it does not matter.
        selection: The record that was found for the request, or None if none was looked up.
    """

    backend: Backend
    reason: str
    target: Target | None = None
    selection: Selection | None = None

    @property
    def generated(self) -> bool:
        """Whether a generated kernel serves, on a GPU or under the interpreter."""
        return self.backend in (Backend.GENERATED, Backend.INTERPRETER)


def decide(
    request: Request, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs = NO_EXTRA_INPUTS
) -> Decision:
    """Returns the decision for a request without gradients and its tensors.

    Raises:
        ProblemError: No backend supports the call: the tensors are on the CPU and there is no interpreter,
            or no family computes the problem. The latter is an error only if `prefer` is "generated" or
            families compute each of its features, but not their combination.
    """
    check_device(request)
    valueless = without_values(request)
    if valueless is not None:
        return valueless
    if request.is_double:
        return Decision(Backend.UNFUSED, DOUBLE)
    unknown = without_kernels(request.problem)
    if unknown and request.prefer is not Prefer.GENERATED:
        return Decision(Backend.UNFUSED, f"no kernel family computes {' and '.join(unknown)}")
    if interpreting():
        target = find_target(INTERPRETED_TARGET)
        needed = required_specialization(request, q, k, v, side)
        selection = default_selection(request.problem, target, needed)
        return Decision(Backend.INTERPRETER, "TRITON_INTERPRET=1 runs kernels on the CPU", target, selection)
    target = request_target(request)
    # A baseline may not be selected if the call returns a log-sum-exp or has features.
    features = bool(request.problem.features)
    generated = request.prefer is Prefer.GENERATED or request.return_lse or features
    tables, needed = tuned_records(target.name), required_specialization(request, q, k, v, side)
    try:
        selection = select(request.problem, target, tables, needed, generated=generated)
    except ProblemError as error:
        if request.prefer is Prefer.GENERATED or features:
            raise
        return Decision(baseline(request), str(error), target)
    passed_over = ""
    if msgspec.structs.replace(needed, lse=BEST_TENSORS.lse) != BEST_TENSORS:
        usual = select(request.problem, target, tables, BEST_TENSORS, generated=generated)
        passed_over = _passed_over(usual, selection)
    passed_over += copy_words(copied(request, q, k, v))
    return _of_selection(request, selection, target, (q, k, v, side), passed_over)


def without_values(request: Request) -> Decision | None:
    """Returns the decision for a request without queries or keys, or on the meta device."""
    if request.is_empty:
        return Decision(Backend.NONE, "there is nothing to attend to")
    return Decision(Backend.NONE, "meta tensors have no values") if request.device.type == "meta" else None


def request_target(request: Request) -> Target:
    """Returns the GPU of a request."""
    index = request.device.index
    return device_target(torch.cuda.current_device() if index is None else index)


def peer_backend(peer: str) -> Backend:
    """Returns the backend of a timed baseline."""
    return Backend.UNFUSED if peer == UNFUSED else Backend.SDPA


def baseline(request: Request) -> Backend:
    """Returns the baseline of a request: SDPA, or unfused if the call needs a log-sum-exp or has features."""
    same_bits = request.needs_grad and request.deterministic
    plain = not (request.return_lse or request.problem.features or request.is_double or same_bits)
    return Backend.SDPA if plain else Backend.UNFUSED


def required_specialization(
    request: Request, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs = NO_EXTRA_INPUTS
) -> Specialization:
    """Returns the properties that a kernel may assume of these tensors and of the output."""
    tensors = *request.views(*as_read(request, q, k, v)), output_like(request)
    bias = None
    if side.bias is not None:
        bias = side_views(request.problem, side, tensors[1].shape[0]).bias
    return specialization_of(tensors, request.return_lse, bias)


def as_read(
    request: Request, q: Tensor, k: Tensor, v: Tensor, device: torch.device | str = "meta"
) -> Tensors:
    """Returns the tensors that kernels read, with new tensors on a device for those that are copied first."""
    flags = copied(request, q, k, v)
    return _with_copies((q, k, v), flags, device) if any(flags) else (q, k, v)


def copied(request: Request, q: Tensor, k: Tensor, v: Tensor) -> tuple[bool, bool, bool]:
    """Returns which of q, k and v are copied before a pass, because kernels are faster with aligned tensors.

    Only the flag for all three addresses is part of a call's key. So all three are copied if one of the
    addresses is unaligned.
    """
    none = (False, False, False)
    problem, views = request.problem, request.views(q, k, v)
    found = [specialization_of((view,), False) for view in views]
    of_q, of_k, of_v = (not one.takes_descriptors(problem.dtype) for one in found)
    odd = of_q, of_k, of_v
    if not any(odd) or interpreting() or problem.page_size or problem.mla:
        return none
    if problem.dtype.is_quantized or problem.kv_dtype is not None:
        return none
    if any(view.data_ptr() % POINTER_ALIGNMENT for view in views):
        odd = (True, True, True)
    read = _with_copies((q, k, v), odd, "meta")
    aligned = specialization_of((*request.views(*read), output_like(request)), False)
    if not aligned.takes_descriptors(problem.dtype):
        return none
    target = request_target(request)
    ms = copy_ms([tensor for tensor in read if tensor.is_meta], target)
    worst = min(one.alignment for one in found)
    return odd if ms < _saved_ms(problem, target, worst) else none


def _with_copies(tensors: Tensors, flags: tuple[bool, bool, bool], device: torch.device | str) -> Tensors:
    q, k, v = (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if flag else tensor
        for tensor, flag in zip(tensors, flags, strict=True)
    )
    return q, k, v


def _saved_ms(problem: Problem, target: Target, alignment: Alignment) -> float:
    """Returns the time by which a pass with unaligned tensors is longer, roughly, in ms."""
    problem = unpacked(problem)
    tiles = problem.batch * problem.heads * math.ceil(problem.seqlen_q / UNALIGNED_TILE)
    blocks = math.ceil(problem.visible_pairs() / max(1, problem.seqlen_q) / UNALIGNED_TILE)
    width = power_of_two(max(problem.head_dim, problem.value_head_dim))
    rounds = math.ceil(tiles / (RESIDENT * target.sm_count))
    return rounds * blocks * width * UNALIGNED_MS / alignment


def copy_words(flags: Iterable[bool]) -> str:
    """Returns the reason for copies of q, k and v as the start of a clause. Empty without copies."""
    names = [name for name, flag in zip("qkv", flags, strict=True) if flag]
    if not names:
        return ""
    return f"{', '.join(names)} are copied first to align strides and addresses to 16 bytes, and "


def output_like(request: Request) -> Tensor:
    """Returns a meta tensor with the output's strides, as [batch, heads, seqlen_q, value_head_dim]."""
    out = torch.empty(request.out_shape, dtype=request.out_dtype, device="meta")
    return request.layout.heads_first(out)


def _passed_over(usual: Selection, selection: Selection) -> str:
    """Returns the reason for not using the selection for tensors that all families can address."""
    if usual.record == selection.record:
        return ""
    return (
        f"{usual.record.family} would serve but cannot address tensors with such strides or addresses, and "
    )


def _of_selection(
    request: Request,
    selection: Selection,
    target: Target,
    given: tuple[Tensor, Tensor, Tensor, ExtraInputs],
    passed_over: str,
) -> Decision:
    if request.prefer is Prefer.FASTEST and not request.return_lse:
        bias = given[-1].bias
        sharing = None if bias is None else sharing_of(request.problem, bias)
        peer = _faster_peer(request, selection, target, sharing, *given)
        if peer is not None:
            backend = peer_backend(peer)
            timed = backend is Backend.SDPA and shared_time(selection.measured, sharing) is not None
            reason = peer_reason(peer, selection, sharing=sharing if timed else None)
            return Decision(backend, reason, target, selection)
    return Decision(Backend.GENERATED, passed_over + selection_source(selection), target, selection)


def selection_source(selection: Selection) -> str:
    """Returns the reason for a generated kernel as one clause."""
    where = {
        "database": "it is selected in the user's database",
        "shipped": "it is selected in the table that ships for this GPU",
        "estimated": _forecast_in_words(selection),
        "default": "nothing alike is tuned for this GPU, so its family's default config serves",
    }
    return where[selection.source]


def peer_reason(peer: str, *passes: Selection, sharing: MaskSharing | None = None) -> str:
    """Returns the reason for a baseline in one pass or both, as one clause.

    `sharing` is the way in which the mask is shared, if times with such a mask were compared.
    """
    condition = ", both passes together" if len(passes) > 1 else ""
    if sharing is not None:
        condition = f" with a mask shared over {sharing}"
    if all(selection.forecast is None and selection.source != "default" for selection in passes):
        return f"{peer} was measured as fast or faster{condition}"
    return f"{peer} is expected to be faster{condition}"


def _faster_peer(
    request: Request,
    selection: Selection,
    target: Target,
    sharing: MaskSharing | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: ExtraInputs,
) -> str | None:
    """Returns the baseline that is faster than the generated kernel and may replace it, or None."""
    problem = request.problem
    if problem.packed or problem.page_size or problem.kv_lengths:
        # The unfused computation would read lengths from the device, which synchronizes.
        return None
    usual, views = None, request.views(q, k, v)
    if not problem.features:
        if has_hidden_keys(problem):
            # SDPA does not get them.
            problem = msgspec.structs.replace(problem, seqlen_kv=problem.seqlen_q)
            of_q, of_k, of_v = views
            views = of_q, of_k[:, :, : problem.seqlen_q], of_v[:, :, : problem.seqlen_q]
            selection = select(problem, target, tuned_records(target.name), BEST_TENSORS, generated=True)
        usual = default_backend(*views, problem)
    elif sdpa_allowed(request) and side.bias is not None:
        usual = default_backend(*views, problem, side.bias)
        if known_refusal(request, usual, *views, side.bias) is not None:
            usual = None
    if is_untrusted(selection, problem) and (usual is not None or not problem.features):
        return untimed_peer((selection,), problem, usual, target)
    more_ms = copies_ms(views, target) if usual is not None else 0.0
    if more_ms and problem.seqlen_kv <= UNALIGNED_TILE:
        # One block of keys is read faster than it is copied.
        usual = None
    if usual is not None and selection.measured.measurement is None and problem.features:
        expected = related_peers(problem, tuned_records(target.name).effective(), target)
        if is_slow_default(
            selection, problem, {one.name: one.ms + more_ms for one in expected}, usual, target
        ):
            return usual
    return faster_peer(selection, problem, usual, sharing, more_ms)


def has_hidden_keys(problem: Problem) -> bool:
    """Whether no query of a problem without features sees the last keys."""
    return problem.causal is Causal.TOP_LEFT and problem.seqlen_q < problem.seqlen_kv


def _forecast_in_words(selection: Selection) -> str:
    why = selection.forecast
    if why is None:
        return f"the nearest tuned shape is {selection.record.problem.key}"
    same = why.nearest.family == selection.record.family and why.nearest.config == selection.record.config
    if same:
        return f"the nearest tuned shape is {why.nearest.problem.key}"
    return (
        f"{why.ms:.4g} ms are expected of its config, and {why.nearest_ms:.4g} ms of that of the nearest "
        f"tuned shape, {why.nearest.problem.key}"
    )


def check_device(request: Request) -> None:
    """Checks that some backend supports the device of the tensors.

    Raises:
        ProblemError: They are on the CPU, and there is no interpreter or it does not support their type.
    """
    if request.device.type in ("cuda", "meta") or request.is_double:
        return
    if request.problem.dtype.is_quantized:
        raise ProblemError(
            f"the tensors are on {request.device} and {request.problem.dtype} is computed on a GPU alone: "
            "move them to one, or pass 16-bit inputs"
        )
    if interpreting():
        return
    raise ProblemError(
        f"the tensors are on {request.device}: move them to a GPU, or set TRITON_INTERPRET=1 before the "
        "program starts to run kernels on the CPU, slowly"
    )
