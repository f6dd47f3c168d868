"""Mutants: a correct rendered kernel, and a patch of its text with an error."""

import functools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import msgspec

from flashtune.core.config import Config
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Problem
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render


class PatchError(Exception):
    """A patch does not match the rendered text: the template has changed, and so must the patch."""


class Part(NamedTuple):
    """A stretch of a rendered file, from one text that occurs once to the next occurrence of another."""

    begin: str
    end: str


class Patch(NamedTuple):
    """One replacement in a rendered file."""

    old: str  # Text that occurs exactly `times`; at line breaks any indentation matches.
    new: str  # The replacement; its lines are indented as the first one is.
    part: Part | None = None  # The part to search; by default the whole file.
    times: int = 1  # Number of its occurrences, all replaced.


class Subject(NamedTuple):
    """A kernel to break, and the problem that it is verified at as if it had been tuned there."""

    family: str
    problem: Problem
    config: Config
    specialization: Specialization = Specialization()

    @property
    def label(self) -> str:
        """The subject in a line."""
        lse = ", lse" if self.specialization.lse else ""
        return f"{self.family}: {self.problem.key}, {self.config.label()}{lse}"


class Mutant(NamedTuple):
    """A subject and the error in it."""

    name: str  # The error, in a few words; no other mutant of the family has it.
    subject: Subject  # The kernel under which it changes results.
    patches: tuple[Patch, ...]  # The change, as replacements one after the other.
    racy: bool = False  # Whether it changes results by a race alone, and so not in every run.
    hangs: bool = False  # Whether some launch may never end.

    @property
    def id(self) -> str:
        """The family and the name."""
        return f"{self.subject.family}: {self.name}"


# A mutant's name, and the fields of its patch or several patches.
Row = (
    tuple[str, str, str]
    | tuple[str, str, str, Part]
    | tuple[str, str, str, Part | None, int]
    | tuple[str, tuple[Patch, ...]]
)


def mutants_of(
    subject: Subject, rows: Iterable[Row], *, racy: bool = False, hangs: bool = False, prefix: str = ""
) -> tuple[Mutant, ...]:
    """The mutants of one kernel; their names begin with `prefix`."""
    mutants = []
    for row in rows:
        name, *fields = cast(tuple[Any, ...], row)
        patches = (Patch(*fields),) if isinstance(fields[0], str) else fields[0]
        mutants.append(Mutant(prefix + name, subject, patches, racy, hangs))
    return tuple(mutants)


@functools.cache
def rendered(subject: Subject) -> Kernel:
    """The subject's kernel, unbroken."""
    return render(find_family(subject.family), subject.problem, subject.config, subject.specialization)


@functools.cache
def broken(mutant: Mutant) -> Kernel:
    """The mutant's kernel.

    Raises:
        PatchError: A patch does not match as often as it should.
    """
    kernel = rendered(mutant.subject)
    source = kernel.source
    for patch in mutant.patches:
        source = patched(source, patch, mutant.id)
    return msgspec.structs.replace(kernel, source=source)


def patched(source: str, patch: Patch, name: str) -> str:
    """The source with one patch.

    Args:
        source: A rendered file.
        patch: What to replace.
        name: Whose patch it is, for the error.

    Raises:
        PatchError: It does not match as often as it should.
    """
    start, end = _bounds(source, patch.part, name)
    pattern = r"\n *".join(re.escape(line) for line in patch.old.split("\n"))
    matches = list(re.finditer(pattern, source[start:end]))
    if len(matches) != patch.times:
        where = f" between {patch.part.begin!r} and {patch.part.end!r}" if patch.part else ""
        raise PatchError(
            f"{name}: {patch.old!r} occurs {len(matches)} times{where} and not {patch.times}: "
            "the template has changed, so change the patch"
        )
    for match in reversed(matches):
        first, last = start + match.start(), start + match.end()
        line = source[source.rfind("\n", 0, first) + 1 : first]
        margin = "\n" + " " * (len(line) - len(line.lstrip()) if line.strip() else len(line))
        source = source[:first] + patch.new.replace("\n", margin) + source[last:]
    return source


def _bounds(source: str, part: Part | None, name: str) -> tuple[int, int]:
    # The docstring of the file describes the algorithm in the words of the code.
    code = source.find('"""', 3) + 3 if source.startswith('"""') else 0
    if part is None:
        return code, len(source)
    start = source.find(part.begin, code)
    end = source.find(part.end, start + len(part.begin))
    if source.count(part.begin, code) != 1 or end < 0:
        raise PatchError(f"{name}: there is no one part from {part.begin!r} to {part.end!r}")
    return start, end
