"""Rules for records that may be selected, shared by the store, merges and tables."""

from collections.abc import Iterable

import msgspec

from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.record import Outcome, Provenance, Record
from flashtune.templates.registry import find_family

# A kernel for such tensors may assume nothing about them.
ANY_TENSORS = Specialization(Alignment.ANY, index_bits=64)


def why_not_selectable(record: Record) -> str | None:
    """Returns the reason why a record may not be a selection, or None if it may."""
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
    """Returns whether another database's selection of the same (problem, target) replaces ours.

    Times are comparable only under the same versions. A measured time always beats a predicted one.
    """
    if theirs.provenance is not Provenance.MEASURED or theirs.ms is None:
        return False
    if ours.provenance is not Provenance.MEASURED or ours.ms is None:
        return True
    # Families have different templates, so only the other versions are compared across families.
    template = ours.versions.template if theirs.family != ours.family else theirs.versions.template
    alike = msgspec.structs.replace(theirs.versions, template=template) == ours.versions
    return alike and theirs.ms < ours.ms


def serves_any_tensors(record: Record) -> bool:
    """Returns whether a record serves its problem for tensors of any strides and addresses.

    If a selection does not, a second record of the problem may be its fallback.
    """
    return record.config is None or find_family(record.family).can_address(record.problem.dtype, ANY_TENSORS)


def by_problem(records: Iterable[Record]) -> dict[str, tuple[Record, ...]]:
    """Returns records by the key of their problem, each selection before its fallback."""
    grouped: dict[str, tuple[Record, ...]] = {}
    for record in records:
        key = record.problem.key
        grouped[key] = tuple(sorted((*grouped.get(key, ()), record), key=serves_any_tensors))
    return grouped
