"""The sample of records for `flashtune verify --sample`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from flashtune.core.record import Record


def sample(records: Iterable[Record]) -> tuple[Record, ...]:
    """Returns one record of each class of generated kernels, and every record without a config.

    Records of one class have the same target, family, dtype, head dims, mask and other features. The record
    with the first problem key represents its class, so that equal tables give equal samples.
    """
    listed = list(records)
    chosen: dict[Hashable, Record] = {}
    for record in sorted(listed, key=lambda record: record.problem.key):
        if record.config is not None:
            chosen.setdefault(_class(record), record)
    kept = {id(record) for record in chosen.values()}
    return tuple(record for record in listed if record.config is None or id(record) in kept)


def _class(record: Record) -> Hashable:
    problem = record.problem
    return (
        record.target,
        record.family,
        problem.dtype,
        problem.head_dim,
        problem.value_head_dim,
        problem.causal,
        problem.features,
    )
