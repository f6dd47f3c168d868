"""The tables of docs/proof.md about mutants and correct kernels, from saved runs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from flashtune.verification.check import INTERPRETER
from tests.mutants.catalogue import gpu_mutants, interpreted_mutants
from tests.mutants.core import Mutant, broken
from tests.mutants.emulated import emulated_mutants
from tests.mutants.results import CAUGHT, Fate, Found, Run, load

SAVED = Path(__file__).parents[1] / "data" / "mutants"
SCRIPT = "python -m tests.mutants table"
# Fates of mutants that were run and not detected, at least without delays.
NOT_DETECTED = {
    Fate.SURVIVED: "survived",
    Fate.EQUIVALENT: "equivalent",
    Fate.DELAYED: "detected with delays only",
}


def pages_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs at these paths, by default the saved ones."""
    return [load(path) for path in paths or sorted(SAVED.glob("*.json*"))]


def texts(runs: Sequence[Run]) -> dict[str, str]:
    """The text of each table by name."""
    lines = {"mutants": _mutants(runs), "right": _right(runs)}
    return {name: "\n".join(several) for name, several in lines.items()}


def _mutants(runs: Sequence[Run]) -> Iterator[str]:
    """The mutants of each family and how many each machine detects, and the others by name."""
    devices = list(dict.fromkeys(run.device for run in runs if run.found))
    rows = {device: [row for run in runs if run.device == device for row in run.found] for device in devices}
    mutants, emulated = _by_family(gpu_mutants()), _by_family(emulated_mutants())
    yield _row("family", "mutants", *devices, "emulator")
    yield f"|---|{'---:|' * (len(devices) + 2)}"
    for family, number in mutants.items():
        cells = (_detected(row for row in rows[device] if row.family == family) for device in devices)
        yield _row(f"`{family}`", number, *cells, emulated[family] or "")
    detected = (_detected(rows[device]) for device in devices)
    yield _row("all", mutants.total(), *detected, emulated.total())
    yield from _not_detected(rows)
    for device in devices:
        yield ""
        yield from _machine([run for run in runs if run.device == device])


def _not_detected(rows: Mapping[str, Sequence[Found]]) -> Iterator[str]:
    """A table of the mutants that some machine ran and did not detect, with their fates."""
    fates = {device: {(row.family, row.name): row for row in several} for device, several in rows.items()}
    missed = {
        key: row.racy for device in rows for key, row in fates[device].items() if row.fate in NOT_DETECTED
    }
    devices = [device for device in rows if any(row.fate in NOT_DETECTED for row in rows[device])]
    if not missed:
        return
    yield ""
    yield _row("family", "mutant", *devices)
    yield f"|---|---|{'---|' * len(devices)}"
    for key, racy in missed.items():
        cells = (_outcome(fates[device].get(key)) for device in devices)
        yield _row(f"`{key[0]}`", f"{key[1]} (race)" if racy else key[1], *cells)


def _outcome(row: Found | None) -> str:
    if row is None:
        return ""
    return "detected" if row.fate in CAUGHT else NOT_DETECTED.get(row.fate, row.fate.value.replace("_", " "))


def _by_family(mutants: Iterable[Mutant]) -> Counter[str]:
    return Counter(mutant.subject.family for mutant in mutants)


def _detected(rows: Iterable[Found]) -> str:
    """How many of the mutants that were run were detected."""
    fates = [row.fate for row in rows if row.fate not in {Fate.NOT_COMPILED, Fate.NOT_RUN}]
    return f"{sum(fate in CAUGHT for fate in fates)} of {len(fates)}" if fates else ""


def _machine(runs: Sequence[Run]) -> Iterator[str]:
    """A machine's versions and counts."""
    first = runs[0]
    rows = [row for run in runs for row in run.found]
    fates = Counter(row.fate for row in rows)
    where = "Triton's interpreter" if first.device == INTERPRETER else first.device
    yield f"{where}, level `{first.level}` (torch {first.torch}, Triton {first.triton}):"
    yield ""
    ended = fates[Fate.HUNG] + fates[Fate.DIED]
    yield f"- Refused: {fates[Fate.REFUSED]}. Hung or died: {ended}."
    if fates[Fate.NOT_COMPILED] + fates[Fate.NOT_RUN]:
        yield f"- Not compiled: {fates[Fate.NOT_COMPILED]}. Not run: {fates[Fate.NOT_RUN]}."
    controls = [control for run in runs if run.found for control in run.controls]
    if controls:
        accepted = sum(control.passed for control in controls)
        yield f"- Unmodified kernels that were accepted: {accepted} of {len(controls)}."
    present = {broken(mutant).digest for mutant in _catalogue(first.device)}
    is_rendered = [row.kernel in present for row in rows if row.kernel]
    yield f"- Mutants that still render to the source that was run: {sum(is_rendered)} of {len(is_rendered)}."


def _catalogue(device: str) -> tuple[Mutant, ...]:
    return interpreted_mutants() if device == INTERPRETER else gpu_mutants()


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


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
