"""Compares the times of selections, measured or estimated, with those of the baselines."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flashtune.core.mask_sharing import MaskSharing, nearest_way
from flashtune.core.problem import Bias, Problem, score_bytes
from flashtune.core.record import Record, Selection, SharedTime
from flashtune.core.target import Target
from flashtune.dispatch.nearest import DECODING_FAMILY, FEW_QUERIES, WHOLE_FAMILY, is_far
from flashtune.dispatch.sdpa_times import MATH, MAX_SCORES, float32_ms, is_padded
from flashtune.templates.registry import find_family

# The fraction by which two measurements of one kernel may differ. SDPA is used unless the kernel is faster by
# more than this, so that a call is not slower than SDPA. The unfused computation stores all scores in memory.
# It is used only if it is faster than the kernel by more than this.
NOISE = 0.01
# With an estimated time, SDPA must be faster by more than this fraction. Estimates of short times are less
# precise than differences of launches: below this time in ms of one or two passes, SDPA may also be slower by
# another fraction.
FORECAST_NOISE = 0.05
SHORT_MS, SHORT_NOISE = (0.015, 0.06), 0.15
# SDPA also serves if its estimate is up to these fractions above that of kernels: gradients whose heads are
# padded to more columns than SDPA's, and an additive bias with more than one block of keys. The latter took
# 1.4 to 2.3 times the estimate, relative to SDPA, at five shapes of an H200 and an H100.
PADDED_NOISE, BIAS_NOISE, BLOCK = 0.1, 0.7, 64
UNFUSED = "unfused"
# Largest time of the launches of a pass of the unfused computation, in ms.
UNFUSED_LAUNCHES_MS = 0.15
# SDPA by a backend without measured times.
ANY_SDPA = "SDPA"
# A decoding kernel in float32 of up to FEW_QUERIES queries may take this multiple of the modelled time.
SLOW_PRODUCTS = 4.0
# In float32, SDPA must be expected to take this multiple of a kernel's estimated time, and of one from a far
# shape. Below this time in ms, such estimates are not used.
LEAD, FAR_LEAD, UNCERTAIN_MS = 1.1, 2.0, 0.1
# Masked kernels of more queries than FEW_QUERIES take up to these multiples of the modelled time: those that
# split keys, those for heads narrower than NARROW, and kernels without splits for heads wider than WIDE.
# Measured on an H200 at 12 shapes that are not tuned.
SLOW_SPLITS, SLOW_NARROW_SPLITS, SLOW_WIDE = 5.0, 20.0, 3.0
NARROW, WIDE = 64, 128


def faster_peer(
    passes: Sequence[Selection],
    problem: Problem,
    usual_sdpa: str | None,
    sharing: MaskSharing | None = None,
    more_ms: float = 0.0,
) -> str | None:
    """Returns the name of a baseline that replaces the selections of all passes of a call, or None.

    At a tuned shape both were measured in one run for each pass. SDPA is used unless the selections were
    faster beyond noise. At other shapes all times are estimates. The unfused computation is considered only
    if the problem has no more scores than the measured shape, because it stores scores in memory.

    Args:
        passes: The selections.
        problem: The forward problem.
        usual_sdpa: The baseline that torch's SDPA selects for the problem, such as `sdpa-cudnn`. None if the
            backend or the way in which SDPA uses it was not measured.
        sharing: How the call's mask is shared.
        more_ms: Time of the copies that SDPA needs, less the time that only kernels need.
    """
    if passes[0].record.config is None:
        return passes[0].record.family
    of_passes = [_times(selection, sharing) for selection in passes]
    present = [times for times in of_passes if times is not None]
    if len(present) < len(passes):
        return None
    ms = sum(times.ms for times in present)
    is_forecast = any(times.is_forecast for times in present)
    margin = _forecast_margin(present, problem, ms) if is_forecast else NOISE
    limits = {usual_sdpa or "": ms * (1 + margin)}
    if score_bytes(problem) <= min(times.scores for times in present):
        limits[UNFUSED] = ms * (1 - (FORECAST_NOISE if is_forecast else NOISE))
    taken = {name: sum(times.peers.get(name, math.inf) for times in present) for name in limits}
    taken[usual_sdpa or ""] += more_ms
    if UNFUSED in limits and len(present) > 1 and problem.bias is Bias.ADDITIVE:
        # Kernels for gradients with a bias may take longer than the launches of the unfused computation.
        share = [times.unfused_ms * score_bytes(problem) / times.scores for times in present]
        taken[UNFUSED] = min(taken[UNFUSED], sum(UNFUSED_LAUNCHES_MS + ms for ms in share))
    return min(
        (name for name in limits if taken[name] < limits[name]), key=lambda name: taken[name], default=None
    )


def is_untrusted(selection: Selection, problem: Problem) -> bool:
    """Whether nothing like the problem was timed and its kernels may be far slower than estimated.

    That holds for float32: its products take several products of Tensor Cores, or none. Estimates of short
    times, and those from far shapes, are up to three times too high, so a larger lead is required.
    """
    if not problem.dtype.is_float32:
        return False
    why = selection.forecast
    if selection.measured.measurement is None or why is None:
        return selection.measured.measurement is None
    lead = FAR_LEAD if is_far(why.nearest.problem, problem) else LEAD
    fused = min((peer.ms for peer in why.peers), default=0.0)
    return why.ms < UNCERTAIN_MS or fused < lead * why.ms


def is_slow_default(
    selection: Selection, problem: Problem, peers: Mapping[str, float], usual_sdpa: str, target: Target
) -> bool:
    """Whether SDPA is expected to be faster than a masked kernel of which no shape alike was timed.

    `selection` is the default config of a family; the problem has a bias or a mask. `peers` are expected
    times of SDPA's backends in ms, by name. `usual_sdpa` is the backend that SDPA selects.
    """
    config, family = selection.record.config, find_family(selection.record.family)
    if config is None or problem.seqlen_q <= FEW_QUERIES:
        return False
    factors = {
        DECODING_FAMILY: _slow_splits(problem),
        WHOLE_FAMILY: SLOW_WIDE if problem.head_dim > WIDE else 0.0,
    }
    ms = factors.get(family.name, 0.0) * family.makespan_ms(problem, config, target)
    return ms >= UNCERTAIN_MS and peers.get(usual_sdpa, math.inf) < ms


def _slow_splits(problem: Problem) -> float:
    """Returns the multiple of the modelled time that a kernel may take if it splits keys of many queries."""
    return SLOW_NARROW_SPLITS if problem.head_dim < NARROW else SLOW_SPLITS


def untimed_peer(
    passes: Sequence[Selection], problem: Problem, usual_sdpa: str | None, target: Target
) -> str | None:
    """Returns the name of a baseline that replaces untrusted selections for all passes, or None.

    SDPA does, unless keys are split and its backends would not split them. If it selects its unfused path,
    scores must not take too much memory. The other arguments are those of `faster_peer`.
    """
    if usual_sdpa in (None, MATH) and score_bytes(problem) > MAX_SCORES:
        return None
    record = passes[0].record
    if len(passes) == 1 and record.family == DECODING_FAMILY:
        ms = find_family(record.family).makespan_ms(problem, record.config, target)
        slow = SLOW_PRODUCTS if problem.seqlen_q <= FEW_QUERIES else _slow_splits(problem)
        if slow * ms < float32_ms(problem, target):
            return None
    return usual_sdpa or ANY_SDPA


def beats(passes: Sequence[Selection], baseline: str, sharing: MaskSharing | None = None) -> bool:
    """Whether selections for all passes of a call are faster than a baseline, as measured or as estimated.

    False if a time is not known. `sharing` is how the call's mask is shared.
    """
    all_times = [_times(selection, sharing) for selection in passes]
    return all(times is not None and baseline in times.peers for times in all_times) and sum(
        times.peers[baseline] for times in all_times if times is not None
    ) >= (1 + NOISE) * sum(times.ms for times in all_times if times is not None)


def shared_time(record: Record, sharing: MaskSharing | None) -> SharedTime | None:
    """Returns a record's times with a mask shared in this way, or in the nearest timed way, or None."""
    if sharing is None or record.measurement is None:
        return None
    way = nearest_way(record.problem, sharing.dimensions)
    return next((time for time in record.measurement.shared or () if time.sharing is way), None)


class _Times(NamedTuple):
    """Times of one pass, in ms."""

    ms: float  # Time of the selection.
    is_forecast: bool  # Whether the times are estimates.
    peers: dict[str, float]  # Times of the baselines by name.
    scores: int  # Size of all scores of the measured shape, in bytes.
    unfused_ms: float  # Time of the unfused computation at the measured shape.


def _times(selection: Selection, sharing: MaskSharing | None = None) -> _Times | None:
    """Returns the times of a selection and its baselines, or None without a measurement."""
    why, measurement = selection.forecast, selection.measured.measurement
    if measurement is None:
        return None
    peers = {peer.name: peer.ms for peer in measurement.peers}
    scores = score_bytes(selection.measured.problem)
    shared = shared_time(selection.measured, sharing)
    # The unfused computation is not timed with shared masks. It is not slower with them.
    standard = {name: ms for name, ms in peers.items() if name == UNFUSED}
    if why is None:
        ms = measurement.ms
        if shared is not None:
            ms, peers = shared.ms, standard | {peer.name: peer.ms for peer in shared.peers}
        return _Times(ms, False, peers, scores, math.inf)
    # The ratio of the unfused computation's time to that of the nearest shape's config is assumed constant.
    expected = {name: ms * why.nearest_ms / measurement.ms for name, ms in standard.items()}
    expected |= {peer.name: peer.ms for peer in why.peers}
    ms = why.ms
    if shared is not None:
        # Estimates are for unshared masks. Sharing is assumed to change times by the same ratio here.
        ms *= shared.ms / measurement.ms
        gains = {peer.name: peer.ms / peers[peer.name] for peer in shared.peers if peer.name in peers}
        gains[UNFUSED] = 1.0
        expected = {name: peer * gains[name] for name, peer in expected.items() if name in gains}
    return _Times(ms, True, expected, scores, standard.get(UNFUSED, math.inf))


def _forecast_margin(passes: Sequence[_Times], problem: Problem, ms: float) -> float:
    """Returns the fraction by which SDPA's estimate may be above that of the kernels, negative if below."""
    margins = [-FORECAST_NOISE]
    if ms < SHORT_MS[len(passes) - 1]:
        margins.append(SHORT_NOISE)
    if len(passes) > 1 and is_padded(problem):
        margins.append(PADDED_NOISE)
    if problem.bias is Bias.ADDITIVE and problem.seqlen_kv > BLOCK:
        margins.append(BIAS_NOISE)
    return max(margins)
