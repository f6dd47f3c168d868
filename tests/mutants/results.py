"""Saved results of mutants and of correct kernels."""

import enum
import gzip
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from flashtune.core.errors import FlashtuneError
from tests.mutants.core import Mutant, broken


class Fate(enum.StrEnum):
    """The outcome of verifying a mutant.

    refused       A probe found it wrong, or it could not be launched.
    hung          It did not end within its time, or its process had to be ended.
    died          It took its process or the GPU's context down.
    equivalent    It was accepted, and gave the same bits as the unbroken kernel on every probe and on random
                  problems; of sums without an order what another order may give.
    delayed       It was equivalent, and one of the first three as soon as its warps fell behind at random.
    survived      It was accepted, and gave something else somewhere.
    not_compiled  It is no kernel, and so no mutant.
    not_run       Time was up, or the check itself failed.
    """

    REFUSED = "refused"
    HUNG = "hung"
    DIED = "died"
    EQUIVALENT = "equivalent"
    DELAYED = "delayed"
    SURVIVED = "survived"
    NOT_COMPILED = "not_compiled"
    NOT_RUN = "not_run"


CAUGHT = frozenset((Fate.REFUSED, Fate.HUNG, Fate.DIED))


class Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fate of one mutant."""

    family: str
    name: str
    fate: Fate  # The outcome of verifying it.
    caught_by: str = ""  # The first thing that was found wrong, or where it differed.
    seconds: float = 0.0  # Time of its verification.
    racy: bool = False  # Whether it is wrong by a race alone.
    kernel: str = ""  # Digest of the kernel that ran; empty if none did.

    @property
    def probe(self) -> str:
        """The probe that caught it, in a word, or how else it was caught."""
        return self.caught_by.split(" ", 1)[0] if self.fate is Fate.REFUSED else self.fate.value


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An unbroken kernel, verified in the same way."""

    label: str  # Family, problem and config.
    passed: bool  # Whether it was accepted.
    failed: str = ""  # The error if it was not accepted.
    worst_ratio: float = 0.0  # The largest error over what is allowed.
    checks: int = 0  # Figures that were compared.
    seconds: float = 0.0  # Time of its verification.
    # Whether the strict level accepts it, where the full level did not.
    confirmed: bool | None = None
    kernel: str = ""  # Digest of the kernel that ran; empty if none did.
    delayed: bool = False  # Whether it was accepted unless some warps are delayed.

    @property
    def wrongly_refused(self) -> bool:
        """Whether it was refused and the strict level did not refuse it as well."""
        return not self.passed and self.confirmed is not False

    @property
    def standing(self) -> str:
        """Words on how a refusal was confirmed."""
        if self.delayed:
            return "with delays alone"
        if self.confirmed is None:
            return "and not judged again"
        return "and the strict level accepts it" if self.confirmed else "by the strict level too"


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run over mutants, or over right kernels."""

    device: str  # Name of the GPU, or `interpreter`.
    torch: str
    triton: str
    level: str  # How much was checked.
    seed: int  # Of the inputs.
    seconds: float  # Of the whole run.
    controls: tuple[Control, ...] = ()  # Right kernels.
    found: tuple[Found, ...] = ()  # Mutants.


def found_of(mutant: Mutant, fate: Fate, caught_by: str = "", seconds: float = 0.0) -> Found:
    """Returns the record of a mutant with this fate."""
    family = mutant.subject.family
    kernel = "" if fate in {Fate.NOT_COMPILED, Fate.NOT_RUN} else broken(mutant).digest
    return Found(family, mutant.name, fate, caught_by, round(seconds, 2), mutant.racy, kernel)


def save(run: Run, path: Path) -> None:
    """Writes a run as JSON, compressed where the name ends in `.gz`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(run), indent=1)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def load(path: Path) -> Run:
    """A run that was saved.

    Raises:
        FlashtuneError: It is none.
    """
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        return msgspec.json.decode(text, type=Run)
    except (msgspec.MsgspecError, OSError, EOFError, zlib.error) as error:
        raise FlashtuneError(f"{path} holds no run over mutants: {error}") from error


def counts(results: Iterable[Found]) -> Counter[Fate]:
    """How many met which fate."""
    return Counter(result.fate for result in results)


def tally(results: Sequence[Found]) -> str:
    """Lines of a table: how many of each family met which fate, and which probes caught how many first."""
    fates = [fate for fate in Fate if counts(results)[fate]]
    lines = ["".join((f"{'':18}", *(f"{fate.value:>14}" for fate in fates)))]
    for family in dict.fromkeys(result.family for result in results):
        number = counts(result for result in results if result.family == family)
        lines.append("".join((f"{family:18}", *(f"{number[fate]:14}" for fate in fates))))
    probes = Counter(result.probe for result in results if result.fate is Fate.REFUSED).most_common()
    lines.append("refused first by: " + ", ".join(f"{probe} {number}" for probe, number in probes))
    return "\n".join(lines)


def summary(run: Run) -> str:
    """The run in a sentence or two."""
    number = counts(run.found)
    fates = ", ".join(f"{number[fate]} {fate.value.replace('_', ' ')}" for fate in Fate if number[fate])
    refused = [control for control in run.controls if not control.passed]
    wrongly = sum(control.wrongly_refused for control in refused)
    lines = []
    if run.found:
        lines.append(f"{len(run.found)} mutants: {fates}.")
    if run.controls:
        lines.append(f"{len(run.controls)} right kernels: {len(refused)} refused, {wrongly} of them wrongly.")
    return " ".join((*lines, f"{run.seconds:.0f} s on {run.device}."))
