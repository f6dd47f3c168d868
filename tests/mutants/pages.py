"""The tables of docs/proof.md about mutants and correct kernels, from saved runs."""

from __future__ import annotations

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
    found = {device: [one for run in runs if run.device == device for one in run.found] for device in devices}
    mutants, emulated = _by_family(gpu_mutants()), _by_family(emulated_mutants())
    yield _row("family", "mutants", *devices, "emulator")
    yield f"|---|{'---:|' * (len(devices) + 2)}"
    for family, number in mutants.items():
        cells = (_detected(one for one in found[device] if one.family == family) for device in devices)
        yield _row(f"`{family}`", number, *cells, emulated[family] or "")
    detected = (_detected(found[device]) for device in devices)
    yield _row("all", mutants.total(), *detected, emulated.total())
    yield from _not_detected(found)
    for device in devices:
        yield ""
        yield from _machine([run for run in runs if run.device == device])


def _not_detected(found: Mapping[str, Sequence[Found]]) -> Iterator[str]:
    """A table of the mutants that some machine ran and did not detect, with their fates."""
    fates = {device: {(one.family, one.name): one for one in several} for device, several in found.items()}
    missed = {
        key: one.racy for device in found for key, one in fates[device].items() if one.fate in NOT_DETECTED
    }
    devices = [device for device in found if any(one.fate in NOT_DETECTED for one in found[device])]
    if not missed:
        return
    yield ""
    yield _row("family", "mutant", *devices)
    yield f"|---|---|{'---|' * len(devices)}"
    for key, racy in missed.items():
        cells = (_outcome(fates[device].get(key)) for device in devices)
        yield _row(f"`{key[0]}`", f"{key[1]} (race)" if racy else key[1], *cells)


def _outcome(found: Found | None) -> str:
    if found is None:
        return ""
    return (
        "detected"
        if found.fate in CAUGHT
        else NOT_DETECTED.get(found.fate, found.fate.value.replace("_", " "))
    )


def _by_family(mutants: Iterable[Mutant]) -> Counter[str]:
    return Counter(mutant.subject.family for mutant in mutants)


def _detected(found: Iterable[Found]) -> str:
    """How many of the mutants that were run were detected."""
    fates = [one.fate for one in found if one.fate not in {Fate.NOT_COMPILED, Fate.NOT_RUN}]
    return f"{sum(fate in CAUGHT for fate in fates)} of {len(fates)}" if fates else ""


def _machine(runs: Sequence[Run]) -> Iterator[str]:
    """A machine's versions and counts."""
    first = runs[0]
    found = [one for run in runs for one in run.found]
    fates = Counter(one.fate for one in found)
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
    known = [one.kernel in present for one in found if one.kernel]
    yield f"- Mutants that still render to the source that was run: {sum(known)} of {len(known)}."


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
