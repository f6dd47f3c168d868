"""Selection of the backend of each pass of a request, without compiling or launching anything.

One decision for both passes of a differentiable request keeps them consistent: all passes have one backend.
"""

import enum
from collections.abc import Iterable, Sequence

import msgspec

from flashtune.core.errors import ProblemError
from flashtune.core.features.records import TENSORS
from flashtune.core.features.table import TENSOR_INPUTS
from flashtune.core.kernel import Specialization
from flashtune.core.mask_sharing import MaskSharing
from flashtune.core.problem import Causal, Feature, Problem
from flashtune.core.record import Selection
from flashtune.core.target import Target, find_target
from flashtune.dispatch.bound_request import BoundRequest, KernelKey
from flashtune.dispatch.faster_peers import (
    UNFUSED,
    beats,
    faster_peer,
    is_slow_default,
    is_untrusted,
    shared_time,
    untimed_peer,
)
from flashtune.dispatch.lookup import default_selection, select
from flashtune.dispatch.masked_sdpa import is_masked, sdpa_allowed
from flashtune.dispatch.nearest import without_hidden_keys
from flashtune.dispatch.sdpa_times import EFFICIENT, MATH, related_peers
from flashtune.dispatch.tables import Tables
from flashtune.launch.bundles import Bundles
from flashtune.launch.compilation import interpreting
from flashtune.request.request import Prefer, Request
from flashtune.templates.registry import families, find_family

# The target for which the interpreter's default configs are made: small tiles and no TMA.
INTERPRETED_TARGET = "nvidia-l4"
# The reason for the unfused computation of float64 tensors.
DOUBLE = "no kernel takes float64"
# All families can address tensors with these properties.
BEST_TENSORS = Specialization()
# Side inputs whose gradients are computed from the kernels' results, in addition to those of q, k and v.
DIFFERENTIABLE_SIDE = tuple(name for name in TENSORS if TENSOR_INPUTS[name].has_gradient)
# One block of so many keys is read faster than it is copied.
FEW_KEYS = 64
# With at most this many queries, default kernels of both passes took 1.2 to 3.8 times as long as SDPA.
# Measured at three shapes on an H200.
FEW_ROWS = 32
# Bytes of gradients of hidden keys, which are zeros, for which kernels take 1 ms more than SDPA. Derived from
# the times of whole calls at two shapes on an H200.
HIDDEN_RATE = 1e9


class Backend(enum.StrEnum):
    """The backend that computes a call."""

    GENERATED = "generated"
    INTERPRETER = "interpreter"
    SDPA = "sdpa"
    UNFUSED = "unfused"
    NONE = "none"


class Decision(msgspec.Struct, frozen=True):
    """The backend of a request and the reason."""

    backend: Backend
    reason: str  # The reason as one clause.
    target: Target | None = None  # The GPU, or None if it does not matter.
    selection: Selection | None = None  # The record of the request, or None if none was looked up.

    @property
    def generated(self) -> bool:
        """Whether a generated kernel serves, on a GPU or under the interpreter."""
        return self.backend in (Backend.GENERATED, Backend.INTERPRETER)


def choose(bound: BoundRequest) -> tuple[Decision, ...]:
    """Returns the decision for each pass of a request: forward and, if it needs gradients, backward."""
    request = bound.request
    simple = _without_lookup(request)
    if simple is not None:
        return _for_all_passes(request, simple)
    try:
        return _of_kernels(bound)
    except ProblemError as error:
        is_served_unfused = request.needs_grad or not request.problem.features
        if request.prefer is Prefer.GENERATED or not is_served_unfused:
            raise
        target = None if interpreting() else bound.target
        return _for_all_passes(request, Decision(baseline(request), str(error), target))


def _without_lookup(request: Request) -> Decision | None:
    """Returns the decision for a request that no record can serve, else None."""
    if not request.has_values:
        reason = "there is nothing to attend to" if request.is_empty else "meta tensors have no values"
        return Decision(Backend.NONE, reason)
    if request.is_double:
        return Decision(Backend.UNFUSED, DOUBLE)
    if request.needs_grad or request.prefer is Prefer.GENERATED:
        return None
    computed = frozenset[Feature]().union(*(family.features for family in families()))
    unknown = sorted(request.problem.features - computed)
    if not unknown:
        return None
    return Decision(Backend.UNFUSED, f"no kernel family computes {' and '.join(unknown)}")


def _for_all_passes(request: Request, decision: Decision) -> tuple[Decision, ...]:
    return (decision, decision) if request.needs_grad else (decision,)


def _of_kernels(bound: BoundRequest) -> tuple[Decision, ...]:
    """Returns the result of `choose` for a request that kernels may serve."""
    request = bound.request
    blocked = _without_gradient(bound.gradients) if request.needs_grad else ()
    if blocked:
        raise ProblemError(
            f"no kernel family computes the gradient of {' and '.join(blocked)}, which requires grad: "
            "detach it, or pass prefer='fastest' to use the unfused computation"
        )
    if interpreting():
        return _interpreted(bound.passes)
    target = bound.target
    # A baseline may not be selected if the call returns a log-sum-exp or has features.
    generated = request.prefer is Prefer.GENERATED or request.return_lse or request.needs_grad
    generated = generated or bool(request.problem.features)
    selections = tuple(_selected(bound, key.problem, key.specialization, generated) for key in bound.passes)
    peer = None
    if not (request.prefer is Prefer.GENERATED or request.return_lse):
        peer = (_faster_peer_of_pair if request.needs_grad else _faster_peer)(bound, *selections)
    if peer is not None:
        backend, reason = peer_backend(peer), _peer_reason(bound, peer, selections)
        return tuple(Decision(backend, reason, target, selection) for selection in selections)
    start = copy_words(bound.copied)
    if not (request.needs_grad or bound.forward_properties.is_best):
        start = _passed_over(bound, selections[0], generated) + start
    return tuple(
        Decision(Backend.GENERATED, start + selection_source(selection), target, selection)
        for selection in selections
    )


def _selected(
    bound: BoundRequest, problem: Problem, specialization: Specialization, generated: bool
) -> Selection:
    bundles = bound.platform.bundles
    return select(problem, bound.target, bound.records, specialization, generated=generated, bundles=bundles)


def _without_gradient(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the arguments of those of some side inputs whose gradients no family computes."""
    return tuple(TENSOR_INPUTS[name].option for name in names if name not in DIFFERENTIABLE_SIDE)


def _interpreted(passes: Iterable[KernelKey]) -> tuple[Decision, ...]:
    target, reason = find_target(INTERPRETED_TARGET), "TRITON_INTERPRET=1 runs kernels on the CPU"
    selections = (default_selection(key.problem, target, key.specialization) for key in passes)
    return tuple(Decision(Backend.INTERPRETER, reason, target, selection) for selection in selections)


def _faster_peer(bound: BoundRequest, selection: Selection) -> str | None:
    """Returns the baseline that is faster than the generated kernel and may replace it, or None."""
    request, problem, target = bound.request, bound.request.problem, bound.target
    if problem.packed or problem.page_size or problem.kv_lengths:
        # The unfused computation would read lengths from the device, which synchronizes.
        return None
    backend = None
    if not problem.features:
        # SDPA does not get hidden keys.
        problem = without_hidden_keys(problem)
        backend = bound.sdpa_backend
    elif sdpa_allowed(request) and bound.side.bias is not None:
        backend = bound.sdpa_backend
        trials = bound.platform.mask_trials
        if trials.known_refusal(request, backend, *bound.views, bound.side.bias) is not None:
            backend = None
    if is_untrusted(selection, problem) and (backend is not None or not problem.features):
        return untimed_peer((selection,), problem, backend, target)
    more_ms = bound.sdpa_copies_ms if backend is not None else 0.0
    if more_ms and problem.seqlen_kv <= FEW_KEYS:
        backend = None
    if backend is not None and selection.measured.measurement is None and problem.features:
        expected = related_peers(problem, bound.records.effective(), target)
        times = {peer.name: peer.ms + more_ms for peer in expected}
        if is_slow_default(selection, problem, times, backend, target):
            return backend
    return faster_peer((selection,), problem, backend, bound.sharing, more_ms)


def _faster_peer_of_pair(bound: BoundRequest, forward: Selection, backward: Selection) -> str | None:
    """Returns the baseline that is faster over both passes and may replace both kernels, or None."""
    problem, target = bound.request.problem, bound.target
    if bound.request.deterministic or problem.packed or problem.kv_lengths:
        return None
    passes = forward, backward
    is_untimed = any(selection.measured.measurement is None for selection in passes)
    hidden_ms = 0.0
    if not problem.features:
        # SDPA does not get hidden keys.
        seen = without_hidden_keys(problem)
        columns = (problem.seqlen_kv - seen.seqlen_kv) * (problem.head_dim + problem.value_head_dim)
        hidden_ms = problem.batch * problem.kv_heads * columns * problem.dtype.itemsize / HIDDEN_RATE
        problem = seen
    if any(is_untrusted(selection, problem) for selection in passes):
        backend = bound.sdpa_backend if is_masked(problem) or not problem.features else None
        if backend in (EFFICIENT, MATH) or not problem.features:
            return untimed_peer(passes, problem, backend, target)
    # With a mask, gradients of SDPA's cuDNN backend may be NaN.
    backend = None if problem.features else bound.sdpa_backend
    more_ms = 0.0 if backend is None else bound.sdpa_copies_ms
    has_few_rows = problem.seqlen_q <= FEW_ROWS and not more_ms
    # Forward passes alike were tuned, but faster families for gradients cannot address these tensors.
    is_slow = (forward.source, backward.source) == ("estimated", "default")
    is_slow = is_slow and find_family(backward.record.family).interpreted
    leads = has_few_rows or (is_slow and backend not in (None, MATH))
    needs_mask = problem.causal is not Causal.NONE and problem.seqlen_q != problem.seqlen_kv
    if is_untimed and leads and not problem.features and not needs_mask:
        return untimed_peer(passes, problem, backend, target)
    return faster_peer(passes, problem, backend, more_ms=more_ms - hidden_ms)


def peer_backend(peer: str) -> Backend:
    """Returns the backend of a timed baseline."""
    return Backend.UNFUSED if peer == UNFUSED else Backend.SDPA


def _peer_reason(bound: BoundRequest, peer: str, passes: Sequence[Selection]) -> str:
    """Returns the reason for a baseline in one pass or both, as one clause."""
    condition, sharing = "", bound.sharing
    if len(passes) > 1:
        condition = ", both passes together"
    elif peer_backend(peer) is Backend.SDPA and shared_time(passes[0].measured, sharing) is not None:
        condition = f" with a mask shared over {sharing}"
    if all(selection.forecast is None and selection.source != "default" for selection in passes):
        return f"{peer} was measured as fast or faster{condition}"
    return f"{peer} is expected to be faster{condition}"


def _passed_over(bound: BoundRequest, selection: Selection, generated: bool) -> str:
    """Returns the reason for not using the selection for tensors that all families can address."""
    best = _selected(bound, bound.request.problem, BEST_TENSORS, generated)
    if best.record == selection.record:
        return ""
    return f"{best.record.family} would serve but cannot address tensors with such strides or addresses, and "


def copy_words(flags: Iterable[bool]) -> str:
    """Returns the reason for copies of q, k and v as the start of a clause. Empty without copies."""
    names = [name for name, flag in zip("qkv", flags, strict=True) if flag]
    if not names:
        return ""
    return f"{', '.join(names)} are copied first to align strides and addresses to 16 bytes, and "


def selection_source(selection: Selection) -> str:
    """Returns the reason for a generated kernel as one clause."""
    if selection.source == "estimated":
        return _forecast_in_words(selection)
    where = {
        "database": "it is selected in the user's database",
        "shipped": "it is selected in the table that ships for this GPU",
        "default": "nothing alike is tuned for this GPU, so its family's default config serves",
    }
    return where[selection.source]


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


def baseline(request: Request) -> Backend:
    """Returns the baseline of a request: SDPA, or unfused if the call needs a log-sum-exp or has features."""
    same_bits = request.needs_grad and request.deterministic
    plain = not (request.return_lse or request.problem.features or request.is_double or same_bits)
    return Backend.SDPA if plain else Backend.UNFUSED


def choose_over(
    usual: str | None,
    passes: Sequence[KernelKey],
    gradients: Sequence[str],
    sharing: MaskSharing | None,
    known: tuple[Target, Tables] | None,
    bundles: Bundles | None = None,
) -> tuple[Decision, ...] | None:
    """Returns the decisions for kernels that replace another library's operator, or None if that is faster.

    Args:
        usual: Name of the replaced operator in records, or None if it has no measurements.
        passes: The passes of the call.
        gradients: Names of the side inputs that require grad.
        sharing: How the call's mask is shared.
        known: The GPU and its tuned records, or None under the interpreter.
        bundles: Bundles whose kernels are preferred at untuned shapes.
    """
    if _without_gradient(gradients):
        return None
    if known is None:
        return _interpreted(passes)
    target, tables = known
    selections = tuple(
        select(key.problem, target, tables, key.specialization, generated=True, bundles=bundles)
        for key in passes
    )
    if usual is not None and not beats(selections, usual, sharing):
        return None
    if any(is_untrusted(selection, passes[0].problem) for selection in selections):
        return None
    return tuple(
        Decision(Backend.GENERATED, selection_source(selection), target, selection)
        for selection in selections
    )
