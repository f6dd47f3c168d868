"""Selects the record for a problem on a GPU, with its verification status there.

The order is: the user's database, the shipped table, the tuned config with the lowest estimated time at such
shapes, and a family's default config.
"""

import itertools
import math
from collections.abc import Callable, Iterator

import msgspec

from flashtune.core.canonical import without
from flashtune.core.errors import ProblemError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import (
    Outcome,
    Provenance,
    Record,
    Selection,
    TransferEstimate,
    VerificationStatus,
)
from flashtune.core.target import Target
from flashtune.dispatch.forecast import BUNDLED_MARGIN, forecast, forecast_related, untimed
from flashtune.dispatch.nearest import (
    DECODING_FAMILY,
    FEW_QUERIES,
    SPLIT_GAIN,
    WHOLE_FAMILY,
    is_far,
    may_split,
    splits_keys,
    tuned_alike,
    without_hidden_keys,
)
from flashtune.dispatch.tables import Tables
from flashtune.dispatch.versions import current_versions
from flashtune.launch.bundles import Bundles
from flashtune.launch.compilation import interpreting
from flashtune.templates.family import Family, unsupported_reason
from flashtune.templates.registry import families, find_family

# The order in which default configs are tried for problems without a tuned shape. Other families come last.
DEFAULT_FAMILIES = (
    "forward_hopper",
    "forward_q_outer",
    "forward_masked",
    "backward_hopper",
    "backward_split",
)
# The first family for latent keys, if queries fill its tiles of 64 rows or its tiles occupy a quarter of the
# SMs. One sequence of 128 heads and 4k keys took 18 us on an NVIDIA H200, and 24 us with DECODING_FAMILY.
LATENT_FAMILY = "decode_latent_hopper"
LATENT_ROWS = 64
# The first family for gradients in float32: 0.5 to 0.7 of the time of `backward_split` on an H200.
FLOAT32_BACKWARD = "backward_fused"
# With block masks of 128, tuned kernels of `forward_masked` took 1.3 to 1.4 times as long as estimated,
# relative to those of `forward_hopper`. Measured at three shapes on an H100 and an H200. Gradients by
# `backward_split` took longer than estimated at all blocks.
PORTABLE_BLOCKS, PORTABLE_FACTOR = 128, 1.3
# Splits of tiles of these families are preferred to those of DECODING_FAMILY if their modelled time is less
# than this multiple. At the shapes of benchmarks/results/nvidia-h200-splits.json.gz and
# nvidia-h200-masked-splits.json.gz, they lose least: 0.8% and 0.4% in the mean.
SPLIT_TILES_LEADS = {"forward_hopper": 1.75, "forward_masked": 1.1}
# The shape of prompts with features in bundles.
BUNDLED_EXTENTS = {"heads": 32, "kv_heads": 8, "batch": 2, "seqlen_q": 2048, "seqlen_kv": 2048}


def select(
    problem: Problem,
    target: Target,
    tables: Tables,
    specialization: Specialization,
    *,
    generated: bool,
    bundles: Bundles | None = None,
) -> Selection:
    """Returns the selection for a problem on a GPU.

    A family that requires more than the specialization is not selected. With `generated`, no baseline is.
    At untuned shapes, kernels of `bundles` are preferred to kernels that are about as fast.
    """

    def serves(record: Record) -> bool:
        if record.config is None:
            return not generated
        family = find_family(record.family)
        return unsupported_reason(family, problem, target, specialization, record.config) is None

    def is_bundled(record: Record) -> bool:
        return bundles is not None and bundles.find(record, specialization, target) is not None

    entry = tables.find(problem, serves)
    if entry is not None:
        source, record = entry
        return _selected(record, source, VerificationStatus.TIMED)
    tuned = tuple(record for record in tables.effective() if record.config)
    # Kernels skip hidden keys, so times are those of the problem without them.
    seen = without_hidden_keys(problem)
    expected = forecast(seen, tuned, target, serves, is_bundled)
    if expected is None:
        default = default_selection(problem, target, specialization)
        expected = forecast_related(seen, tuned, target, serves, default.record.family, is_bundled)
    if expected is not None and not _is_new_phase(seen, *expected):
        record, why = expected
        if seen != problem:
            assert record.config is not None
            record = untimed(msgspec.structs.replace(record, problem=problem), record.config)
        return _selected(record, "estimated", VerificationStatus.VERIFIED, why)
    default = default_selection(problem, target, specialization)
    return default if bundles is None else _bundled_default(default, target, is_bundled)


def _bundled_default(default: Selection, target: Target, is_bundled: Callable[[Record], bool]) -> Selection:
    """Returns a default selection with the config of the bundles' shape if that is about as fast.

    The default configs of a family differ between shapes. Bundles have that of one shape.
    """
    record = default.record
    if is_bundled(record):
        return default
    family = find_family(record.family)
    config = family.default(msgspec.structs.replace(record.problem, **BUNDLED_EXTENTS), target)
    other = msgspec.structs.replace(record, config=config)
    if not is_bundled(other):
        return default
    own_ms, other_ms = (family.makespan_ms(record.problem, each.config, target) for each in (record, other))
    is_near = other_ms <= (1 + BUNDLED_MARGIN) * own_ms
    return msgspec.structs.replace(default, record=other) if is_near else default


def _selected(
    record: Record, source: str, best: VerificationStatus, why: TransferEstimate | None = None
) -> Selection:
    """Returns the selection of a record. Without a valid receipt, a kernel is unproven here."""
    proven = record.config is None or record.is_proven(current_versions(record.family))
    standing = best if proven else VerificationStatus.UNPROVEN
    return Selection(record=record, standing=standing, source=source, forecast=why)


def _is_new_phase(problem: Problem, record: Record, why: TransferEstimate) -> bool:
    """Whether the nearest tuned shape is far, and only one of both has few queries, as in decoding.

    Splits of keys make times of more queries similar.
    """
    nearest = why.nearest.problem
    if problem.seqlen_q > FEW_QUERIES and splits_keys(record):
        return False
    few = [shape.seqlen_q <= FEW_QUERIES for shape in (problem, nearest)]
    return few[0] != few[1] and is_far(nearest, problem)


def default_selection(problem: Problem, target: Target, specialization: Specialization) -> Selection:
    """Returns a default config that fits the GPU, for a problem without a tuned shape."""
    selection = next(default_selections(problem, target, specialization), None)
    if selection is not None:
        return selection
    candidates = [family for family in families() if family.direction is problem.direction]
    reasons = [_why_not(family, problem, target, specialization) for family in candidates]
    if problem.features:
        # Only list the reasons of families with all features. The error names the features to leave out.
        able = [problem.features <= family.features for family in candidates]
        known_reasons = "; ".join(
            reason for reason, knows in zip(reasons, able, strict=True) if reason and knows
        )
        advice = _advice(problem, target, specialization)
        words = ", ".join(sorted(problem.features))
        raise ProblemError(
            f"no kernel family computes {problem.key} ({words}) on {target.name}"
            f"{f' ({known_reasons})' if known_reasons else ''}: {advice}"
        )
    raise ProblemError(
        f"no kernel family computes {problem.key} on {target.name}: {'; '.join(filter(None, reasons))}"
    )


def default_selections(
    problem: Problem, target: Target, specialization: Specialization
) -> Iterator[Selection]:
    """Yields the default configs of families that compute a problem for such tensors, the preferred first."""
    able = [family for family in families() if _why_not(family, problem, target, specialization) is None]
    names = {family.name for family in able}
    splitting = next((name for name in SPLIT_TILES_LEADS if name in names), "")
    for family in sorted(able, key=lambda family: _default_rank(family, problem, target, splitting)):
        config = family.default(problem, target)
        if unsupported_reason(family, problem, target, specialization, config) is not None:
            continue
        record = Record(
            problem=problem,
            target=target.name,
            family=family.name,
            config=config,
            specialization=Specialization(),
            kernel=None,
            outcome=Outcome.OK,
            provenance=Provenance.PREDICTED,
            versions=current_versions(family.name),
        )
        yield Selection(record=record, standing=VerificationStatus.UNPROVEN, source="default")


def _default_rank(
    family: Family, problem: Problem, target: Target, splitting: str
) -> tuple[bool, float, str]:
    """Returns the key by which families are tried for a problem without a tuned shape, the least first.

    `splitting` is the family of SPLIT_TILES_LEADS that is preferred for such tensors.
    """
    if problem.block_mask:
        # No order is the fastest for all: it depends on the size of blocks and on whether heads share lists.
        ms = family.makespan_ms(problem, family.default(problem, target), target)
        is_slower = family.interpreted and (problem.is_backward or problem.block_mask == PORTABLE_BLOCKS)
        return False, PORTABLE_FACTOR * ms if is_slower else ms, family.name
    if family.name == LATENT_FAMILY:
        rows = problem.group_size * problem.seqlen_q
        tiles = problem.batch * math.ceil(rows / LATENT_ROWS)
        return False, -2 if rows >= LATENT_ROWS or 4 * tiles >= target.sm_count else 0, family.name
    if family.name == splitting and _splits_tiles(family, problem, target):
        return False, -2, family.name
    if family.name == DECODING_FAMILY and (problem.seqlen_q <= FEW_QUERIES or _splits_pay(problem, target)):
        return False, -1, family.name
    if family.name == FLOAT32_BACKWARD and problem.dtype.is_float32:
        return False, -1, family.name
    listed = family.name in DEFAULT_FAMILIES
    return not listed, DEFAULT_FAMILIES.index(family.name) if listed else 0, family.name


def _splits_pay(problem: Problem, target: Target) -> bool:
    """Whether split keys take much less time than one program for each tile of queries. Both are modelled."""
    split, whole = (find_family(name) for name in (DECODING_FAMILY, WHOLE_FAMILY))
    if not may_split(problem) or split.supports(problem, target) is not None:
        return False
    split_ms = split.makespan_ms(problem, split.default(problem, target), target)
    unsplit = msgspec.structs.replace(whole.default(problem, target), num_splits=1)
    whole_ms = whole.makespan_ms(problem, unsplit, target)
    return split_ms < SPLIT_GAIN * whole_ms


def _splits_tiles(family: Family, problem: Problem, target: Target) -> bool:
    """Whether a family that serves a call splits keys by default, in less time than DECODING_FAMILY does."""
    if not may_split(problem):
        return False
    config = family.default(problem, target)
    if getattr(config, "num_splits", 1) == 1:
        return False
    other = find_family(DECODING_FAMILY)
    if other.supports(problem, target) is not None:
        return True
    other_ms = other.makespan_ms(problem, other.default(problem, target), target)
    return family.makespan_ms(problem, config, target) < SPLIT_TILES_LEADS[family.name] * other_ms


def _why_not(family: Family, problem: Problem, target: Target, specialization: Specialization) -> str | None:
    if interpreting() and not family.interpreted:
        return f"{family.name} does not run under Triton's interpreter"
    return unsupported_reason(family, problem, target, specialization)


def _advice(problem: Problem, target: Target, specialization: Specialization) -> str:
    """Returns advice that names the fewest features to leave out so that some family computes the rest."""
    features = sorted(problem.features)
    for count in range(1, len(features) + 1):
        for left_out in itertools.combinations(features, count):
            rest = without(problem, left_out)
            if any(_why_not(family, rest, target, specialization) is None for family in families()):
                return f"leave out {' and '.join(left_out)}"
    return "no part of it is computed here either"


def nearest_selection(selection: Selection) -> Selection | None:
    """Returns the selection of the nearest tuned shape if another config has a lower estimate, or None."""
    why = selection.forecast
    if why is None or why.nearest == selection.record:
        return None
    if not tuned_alike(selection.record.problem, (why.nearest,)):
        # The kernel of that shape is for another type or head dim.
        return None
    return _selected(why.nearest, "estimated", VerificationStatus.VERIFIED)
