"""Estimates from tuned shapes of another head dim or 16-bit type.

They are used for problems without a tuned shape of the same head dims and type. A head dim without tuned
shapes is computed in tiles of the next wider one, and both 16-bit types are equally fast. The ranking of
configs, and their comparison with SDPA, are therefore assumed to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from flashtune.core.config import Config
from flashtune.core.problem import Dtype, Problem
from flashtune.core.record import Record, TransferEstimate
from flashtune.core.target import Target
from flashtune.dispatch.forecast import forecast, untimed
from flashtune.dispatch.nearest import tuned_alike
from flashtune.templates.common.model.sram import power_of_two
from flashtune.templates.registry import find_family

SIXTEEN_BITS = (Dtype.BF16, Dtype.FP16)
# Axes that the head dims determine: whether heads are several tiles, and outputs two halves.
OF_WIDTH = ("decomposed", "halved")
# Shapes whose heads are wider than this multiple of the problem's tile have another bottleneck.
WIDEST = 2


def forecast_related(
    problem: Problem,
    records: Iterable[Record],
    target: Target,
    serves: Callable[[Record], bool],
    usual: str,
) -> tuple[Record, TransferEstimate] | None:
    """Returns the result of `forecast` for shapes of the other 16-bit type or of the next wider head dims.

    The record has the problem's own type and head dims, and no verdict.

    Args:
        problem: A shape without a tuned shape of the same type, head dims and features.
        records: Selected records of the GPU, each with a config.
        target: The GPU.
        serves: Whether a record's family can serve the call.
        usual: The family whose default config is used otherwise. Types and head dims without a tuned shape of
            this family are skipped.
    """
    known = tuple(records)
    for other in _related(problem, known):
        if not any(record.family == usual for record in tuned_alike(other, known)):
            continue
        found = forecast(
            other,
            known,
            target,
            lambda record: serves(record) and _carried_over(record, problem, target) is not None,
        )
        config = None if found is None else _carried_over(found[0], problem, target)
        if found is not None and config is not None:
            record, why = found
            own = msgspec.structs.replace(
                record.problem,
                dtype=problem.dtype,
                head_dim=problem.head_dim,
                value_head_dim=problem.value_head_dim,
            )
            return msgspec.structs.replace(untimed(record, config), problem=own), why
    return None


def _related(problem: Problem, records: Sequence[Record]) -> Iterator[Problem]:
    """Yields the problem with the types and head dims of tuned shapes, the nearest first."""
    if problem.dtype.is_quantized:
        return
    dtypes = (problem.dtype, *(dtype for dtype in SIXTEEN_BITS if dtype is not problem.dtype))
    if problem.dtype not in SIXTEEN_BITS:
        dtypes = (problem.dtype,)
    found = {
        (record.problem.head_dim, record.problem.value_head_dim, record.problem.dtype)
        for record in records
        if record.problem.dtype in dtypes and _is_wider(record.problem, problem)
    }
    for head_dim, value_head_dim, dtype in sorted(found, key=lambda one: (one[:2], dtypes.index(one[2]))):
        other = msgspec.structs.replace(
            problem, dtype=dtype, head_dim=head_dim, value_head_dim=value_head_dim
        )
        if other != problem:
            yield other


def _is_wider(tuned: Problem, problem: Problem) -> bool:
    """Whether the heads of a tuned shape are at least as wide as the problem's, up to a limit."""
    return all(
        own <= other <= WIDEST * power_of_two(own)
        for own, other in (
            (problem.head_dim, tuned.head_dim),
            (problem.value_head_dim, tuned.value_head_dim),
        )
    )


def _carried_over(record: Record, problem: Problem, target: Target) -> Config | None:
    """Returns a record's config for the problem's head dims, or None if it is not in their search space."""
    family = find_family(record.family)
    if record.config is None:
        return None
    usual = dict(family.default(problem, target).items())
    of_width = {name: usual[name] for name in OF_WIDTH if name in usual}
    config = msgspec.structs.replace(record.config, **of_width)
    return config if family.space(problem, target).contains(config) else None
