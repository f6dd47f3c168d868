"""The kernel that a command uses: the one that the user names, or the one that dispatch would use."""

import msgspec

from flashtune.core.config import Config
from flashtune.core.errors import ProblemError, UsageError, nearest, quoted
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.core.target import Target
from flashtune.dispatch.lookup import select
from flashtune.dispatch.tables import same_computation
from flashtune.templates.family import Family, unsupported_reason
from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import contiguous_specialization
from flashtune.tuner.tables.lookup import best_generated, records_of, tables_of


class Chosen(msgspec.Struct, frozen=True):
    """A family's config for a problem on a target."""

    problem: Problem  # The problem, in the form that was tuned.
    target: Target
    family: Family
    config: Config  # A point of the family's space.
    specialization: Specialization
    record: Record | None  # The stored record of this problem and config, if any.
    source: str  # `command line`, `database`, `shipped`, `estimated` or `default`.
    # The problem that the config was selected for: this one, a similar tuned one, or None.
    tuned_for: Problem | None


def choose(
    problem: Problem,
    target: Target,
    db: str | None,
    family_name: str | None = None,
    config: str | None = None,
) -> Chosen:
    """Returns the kernel for a problem: that of dispatch, unless the user names a family or a config.

    Predicted selections are included, unlike in dispatch. `config` has only the fields to change.
    """
    chosen = (
        _of_family(problem, target, db, family_name) if family_name else _as_dispatch(problem, target, db)
    )
    if config is None:
        return chosen
    changed = change_config(chosen.config, config)
    return msgspec.structs.replace(chosen, config=changed, record=None, source="command line", tuned_for=None)


def _as_dispatch(problem: Problem, target: Target, db: str | None) -> Chosen:
    # Only generated kernels, because a baseline has no kernel.
    specialization = contiguous_specialization(problem)
    selection = select(problem, target, tables_of(target.name, db), specialization, generated=True)
    return _from_record(problem, target, selection.record, selection.source)


def _of_family(problem: Problem, target: Target, db: str | None, family_name: str) -> Chosen:
    """Returns the family's selection, else its best record, else its default."""
    family = find_family(family_name)
    specialization = contiguous_specialization(problem)
    reason = unsupported_reason(family, problem, target, specialization)
    if reason:
        raise ProblemError(f"{family_name} does not compute {problem.key} on {target.name}: {reason}")
    selection = tables_of(target.name, db).find(
        problem, lambda record: record.family == family_name and record.problem == problem
    )
    if selection:
        return _from_record(problem, target, selection[1], selection[0])
    rivals = (rival.record for rival in records_of(problem, target.name, db))
    best = best_generated(rival for rival in rivals if rival.family == family_name)
    if best:
        return _from_record(problem, target, best, "database")
    config = family.default(problem, target)
    return Chosen(problem, target, family, config, specialization, None, "default", None)


def _from_record(problem: Problem, target: Target, record: Record, source: str) -> Chosen:
    """Returns the kernel of a record. Its specialization and results apply only to its own problem."""
    assert record.config is not None
    tuned_for = None if source == "default" else record.problem
    # The same computation may be tuned with an equivalent mask.
    same = tuned_for in same_computation(problem)
    return Chosen(
        record.problem if same else problem,
        target,
        find_family(record.family),
        record.config,
        record.specialization if same else contiguous_specialization(problem),
        record if same else None,
        source,
        tuned_for,
    )


def change_config(base: Config, text: str) -> Config:
    """Returns the base config with the fields that a user named changed."""
    changes: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = (piece.strip() for piece in part.partition("="))
        if name not in base.__struct_fields__:
            raise UsageError(f"a config has no {quoted(name)}: {nearest(name, base.__struct_fields__)}")
        if name in changes:
            raise UsageError(f"{name} is given twice in the config: keep one")
        changes[name] = value if separator else "true"
    raw = {name: msgspec.to_builtins(value) for name, value in base.items()} | changes
    try:
        # Not strict: digits become numbers, `true` and `false` become bools, words become enums.
        return msgspec.convert(raw, type(base), strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"the config {quoted(text)} cannot be used: {error}") from error
