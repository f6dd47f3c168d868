"""The tables of docs/proof.md and benchmarks/results/mutants.md, from saved runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from flashtune.verification.check import INTERPRETER
from tests.mutants.catalogue import gpu_mutants, interpreted_mutants
from tests.mutants.core import broken
from tests.mutants.results import CAUGHT, Fate, Found, Run, counts, load

SAVED = Path(__file__).parents[1] / "data" / "mutants"
SCRIPT = "python -m tests.mutants table"


def pages_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs at these paths; those that are kept where none is given."""
    return [load(path) for path in paths or sorted(SAVED.glob("*.json*"))]


def texts(runs: Sequence[Run]) -> dict[str, str]:
    """The text of each table by name: two summaries for docs/proof.md, and `each` for mutants.md."""
    lines = {"mutants": _mutants(runs), "right": _right(runs), "each": _each(runs)}
    return {name: "\n".join(several) for name, several in lines.items()}


def _mutants(runs: Sequence[Run]) -> Iterator[str]:
    """The fates of the mutants by family and kind: a table for each machine and its versions."""
    tables: dict[str, list[Run]] = {}
    for run in runs:
        if run.found:
            where = "Under Triton's interpreter" if run.device == INTERPRETER else f"On an {run.device}"
            title = f"{where}, level `{run.level}` (torch {run.torch}, Triton {run.triton}):"
            tables.setdefault(title, []).append(run)
    for title, several in tables.items():
        yield title
        yield ""
        yield from _fates([found for run in several for found in run.found])
        yield ""
        controls = [control for run in several for control in run.controls]
        if controls:
            accepted = sum(control.passed for control in controls)
            number_of = "All" if accepted == len(controls) else f"{accepted} of"
            yield f"{number_of} {len(controls)} unmodified kernels were accepted."
            yield ""
        yield from _still_rendered(several)


def _still_rendered(runs: Sequence[Run]) -> Iterator[str]:
    """How many of a machine's mutants render to the same source as in the saved run."""
    known = [one for run in runs for one in run.found if one.kernel]
    if not known:
        return
    mutants = interpreted_mutants() if runs[0].device == INTERPRETER else gpu_mutants()
    present = {broken(mutant).digest for mutant in mutants}
    same = sum(one.kernel in present for one in known)
    yield f"{same} of the {len(known)} mutants still render to the source that was run."
    yield ""


def _fates(found: Sequence[Found]) -> Iterator[str]:
    """A table of families and kinds. Rare fates have a column where a mutant has them."""
    late = {"with delays": Fate.DELAYED} if counts(found)[Fate.DELAYED] else {}
    unfit = {"not compiled": Fate.NOT_COMPILED} if counts(found)[Fate.NOT_COMPILED] else {}
    others = {
        **late,
        "equivalent": Fate.EQUIVALENT,
        "**survived**": Fate.SURVIVED,
        **unfit,
        "not run": Fate.NOT_RUN,
    }
    rows: list[tuple[object, ...]] = []
    kinds = (
        (family, kind, [one for one in mutants if one.racy == racy])
        for family, mutants in _by_family(found).items()
        for racy, kind in ((False, "wrong result"), (True, "race"))
    )
    for family, kind, mutants in kinds:
        if not mutants:
            continue
        number = counts(mutants)
        ended = number[Fate.HUNG] + number[Fate.DIED]
        rest = (number[fate] for fate in others.values())
        rows.append((f"`{family}`", kind, number.total(), number[Fate.REFUSED], ended, *rest))
    yield from _table(("family", "kind", "mutants", "refused", "hung or died", *others), rows)


def _by_family(found: Iterable[Found]) -> dict[str, list[Found]]:
    families: dict[str, list[Found]] = {}
    for one in found:
        families.setdefault(one.family, []).append(one)
    return families


def _right(runs: Sequence[Run]) -> Iterator[str]:
    """How many correct kernels were refused."""
    drawn = [run for run in runs if run.controls and not run.found]
    for run in drawn:
        refused = [control for control in run.controls if not control.passed]
        wrongly = sum(control.wrongly_refused for control in refused)
        worst = max((control.worst_ratio for control in run.controls if control.passed), default=0.0)
        yield f"On an {run.device} (torch {run.torch}, Triton {run.triton}), {len(run.controls)} sampled"
        yield f"configs were verified: {len(refused)} were refused, {wrongly} of them wrongly. The largest"
        yield f"error of an accepted kernel is {worst:.2f} of the bound."
        if refused:
            yield ""
            yield from (
                f"- Refused, {control.standing}: {control.label}. {control.failed}" for control in refused
            )
    if not drawn:
        yield "No run over sampled configs is saved yet."


def _each(runs: Sequence[Run]) -> Iterator[str]:
    """Every mutant and its first failed check, from the largest run of each family."""
    largest: dict[str, list[Found]] = {}
    for run in runs:
        for family, mutants in _by_family(run.found).items():
            if len(mutants) >= len(largest.get(family, ())):
                largest[family] = mutants
    for family, mutants in largest.items():
        yield f"## `{family}`"
        yield ""
        rows = ((_name(one), one.breaks, _end(one)) for one in mutants)
        yield from _table(("mutant", "effect", "first failed check"), rows)
        yield ""


def _name(one: Found) -> str:
    return f"{one.name} (a race)" if one.racy else one.name


def _end(one: Found) -> str:
    if one.fate not in CAUGHT:
        return f"**{one.fate.value.replace('_', ' ')}**"
    # A probe and its lengths come before the colon.
    case = one.caught_by.partition(" heads=")[0]
    return case if one.fate is Fate.REFUSED else one.fate.value


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"
