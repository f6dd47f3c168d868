"""Which records may serve: the one rule that pins, merges and tables share."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.record import Outcome, Provenance, Record
from flashtune.templates.registry import find_family

# Of such tensors nothing may be assumed.
ANY_TENSORS = Specialization(Alignment.ANY, index_bits=64)


def why_not_selectable(record: Record) -> str | None:
    """None where a record may be a selection, else the reason why it may not."""
    if record.outcome is not Outcome.OK:
        return f"its outcome is {record.outcome.value}"
    if record.verdict is not None and not record.verdict.passed:
        return "its results are wrong"
    if record.config is None:
        return None
    if record.kernel is None:
        return "it names no kernel"
    if record.provenance is Provenance.MEASURED and record.verdict is None:
        return "it was measured without being verified"
    return None


def is_better_selection(theirs: Record, ours: Record) -> bool:
    """Whether another database's selection of the same (problem, target) takes the place of ours.

    Times compare only where the same versions made them; a measured time always beats a predicted one.
    """
    if theirs.provenance is not Provenance.MEASURED or theirs.ms is None:
        return False
    if ours.provenance is not Provenance.MEASURED or ours.ms is None:
        return True
    # A template is its family's own; all else must be the same for any two families to compare.
    template = ours.versions.template if theirs.family != ours.family else theirs.versions.template
    alike = msgspec.structs.replace(theirs.versions, template=template) == ours.versions
    return alike and theirs.ms < ours.ms


def serves_any_tensors(record: Record) -> bool:
    """Whether a record serves its problem whatever the strides and addresses of the tensors.

    Where a selection does not, a second record of the problem may stand in for it that does.
    """
    return record.config is None or find_family(record.family).takes(record.problem.dtype, ANY_TENSORS)


def by_problem(records: Iterable[Record]) -> dict[str, tuple[Record, ...]]:
    """Records by their problem's key, each selection before what stands in for it."""
    grouped: dict[str, tuple[Record, ...]] = {}
    for record in records:
        key = record.problem.key
        grouped[key] = tuple(sorted((*grouped.get(key, ()), record), key=serves_any_tensors))
    return grouped
