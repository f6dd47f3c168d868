"""Moves receipts to kernels with changed source and unchanged machine code, from files of their sources."""

import ast
import enum
import functools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from flashtune.core.canonical_source import canonical_source
from flashtune.core.errors import FlashtuneError, KernelError
from flashtune.core.files import read_bounded, read_own
from flashtune.core.kernel import Argument, Kernel, Step
from flashtune.core.record import Record
from flashtune.core.target import Target
from flashtune.db.codec import fingerprint
from flashtune.dispatch.versions import current_versions
from flashtune.launch.compilation import MAX_SOURCE_BYTES, first_line, kernel_folder
from flashtune.templates.registry import find_family, template_hash
from flashtune.templates.rendering import render
from flashtune.tuner.execution.cpus import available_cpus
from flashtune.tuner.execution.processes import failure_of, start_pool, stop_pool
from flashtune.tuner.tables.admission import facts_of
from scripts.restamp.equivalence import difference

FILE_NAME = re.compile(r"_([0-9a-f]{8,32})\.py")
# Size of the caches. It is small, because digests are looked up one after another.
MAX_CACHED_SOURCES = 16

# Time limit of a comparison: two kernels compile, each with its prologue and epilogue.
SECONDS = 600.0

Progress = Callable[[str, int, int], None]


class EarlierSources:
    """Files with rendered sources in the kernel cache and in some folders."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """Lists the files by the first eight digits of the digest in their names."""
        folders = [kernel_folder(), *folders]
        self._text = functools.lru_cache(maxsize=MAX_CACHED_SOURCES)(_text)
        self._paths: dict[str, list[Path]] = {}
        for folder in folders:
            for path in sorted(folder.glob("*.py")) if folder.is_dir() else ():
                name = FILE_NAME.search(path.name)
                if name:
                    self._paths.setdefault(name[1][:8], []).append(path)

    def kernel(self, digest: str, like: Kernel) -> Kernel | None:
        """Returns the kernel of a digest with the arguments and options of `like`, None if no file has it."""
        for path in self._paths.get(digest[:8], ()):
            for old in _candidates(like, self._text(path)):
                # The digest authenticates the canonical form, so only that is run.
                plain = msgspec.structs.replace(old, source=canonical_source(old.source))
                if digest == old.digest == plain.digest:
                    return plain
        return None


def _text(path: Path) -> str:
    """Returns the text of a file; empty if it is unreadable, not a regular file, or too large.

    Other users may write to the kernel cache, but a folder that a user names is trusted.
    """
    read = read_own if path.parent == kernel_folder() else read_bounded
    try:
        raw = read(path, MAX_SOURCE_BYTES + 1)
        return raw.decode() if len(raw) <= MAX_SOURCE_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _candidates(like: Kernel, source: str) -> Iterator[Kernel]:
    """Yields possible kernels of a source: with the present names of arguments, then with its own names."""
    parameters = _parameters(source)
    if like.entry not in parameters:
        return
    kernel = msgspec.structs.replace(like, source=source)
    yield kernel
    steps = {name: getattr(kernel, name) for name in ("prologue", "epilogue")}
    renamed = {
        name: msgspec.structs.replace(step, arguments=_renamed(step, parameters))
        for name, step in steps.items()
        if step is not None
    }
    arguments = _renamed(kernel, parameters)
    yield msgspec.structs.replace(kernel, arguments=arguments, **renamed)


@functools.lru_cache(maxsize=MAX_CACHED_SOURCES)
def _parameters(source: str) -> dict[str, tuple[str, ...]]:
    """Returns the parameters of each top-level function of a source."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {
        node.name: tuple(argument.arg for argument in node.args.args)
        for node in body
        if isinstance(node, ast.FunctionDef)
    }


def _renamed(kernel: Kernel | Step, parameters: Mapping[str, tuple[str, ...]]) -> tuple[Argument, ...]:
    """Returns a kernel's arguments with the names in the source, if the numbers of parameters are equal."""
    names = parameters.get(kernel.entry, ())
    if len(names) != len(kernel.arguments):
        return kernel.arguments
    pairs = zip(kernel.arguments, names, strict=True)
    return tuple(msgspec.structs.replace(argument, name=name) for argument, name in pairs)


def quiet(phase: str, done: int, total: int) -> None:
    """Shows no progress."""


_Key = tuple[str, str, str, str, str]
_Name = TypeVar("_Name", bound=Hashable)


class Fate(enum.StrEnum):
    """The result of a record's comparison.

    current       It names the present kernel and template version.
    carried       Its receipt was moved.
    changed       The two kernels differ, or one cannot be compiled.
    other_triton  The sources differ, and the record is of another Triton or ptxas than the installed one.
    no_source     No file has the source of its kernel.
    """

    CURRENT = "current"
    CARRIED = "carried"
    CHANGED = "changed"
    OTHER_TRITON = "other_triton"
    NO_SOURCE = "no_source"


class Restamped(msgspec.Struct, frozen=True):
    """A record after the comparison."""

    # The record, with the present digest and template version if its receipt was moved.
    record: Record
    fate: Fate  # The result of the comparison.
    reason: str = ""  # The first difference, if any.


class _Pair(NamedTuple):
    """The kernel that a record names, and the present one of its config."""

    old: Kernel
    new: Kernel
    target: Target


def restamp(
    records: Iterable[Record], folders: Iterable[Path] = (), progress: Progress = quiet
) -> tuple[Restamped, ...]:
    """Compares each record's kernel with the present one, and moves the receipt if they are equal.

    Both kernels are compiled by the installed Triton for the record's target; see `equivalence.difference`.
    Records without a kernel are not changed. `folders` have sources of earlier kernels, in addition to the
    kernel cache. `progress` gets the phase, the number done and the total.
    """
    listed = list(records)
    sources = EarlierSources(folders)
    pairs = [_pair(record, sources) for record in listed]
    compared = _compare(listed, pairs, progress)
    return tuple(_judged(record, pair, compared) for record, pair in zip(listed, pairs, strict=True))


def fates(restamped: Iterable[Restamped]) -> dict[str, int]:
    """Returns the number of records by fate."""
    counts = Counter(entry.fate for entry in restamped)
    return {fate.value: counts[fate] for fate in Fate}


def _pair(record: Record, sources: EarlierSources) -> _Pair | Restamped:
    if record.config is None or record.kernel is None:
        return Restamped(record, Fate.CURRENT)
    target = facts_of(record)
    if target is None:
        return Restamped(record, Fate.CHANGED, f"there is no target {record.target!r} here")
    try:
        family = find_family(record.family)
        new = render(family, record.problem, record.config, record.specialization)
    except FlashtuneError as error:
        return Restamped(record, Fate.CHANGED, str(error))
    if record.kernel == new.digest:
        return _Pair(new, new, target)
    here = current_versions(record.family)
    if record.versions.compilers != here.compilers:
        # Equal code of one compiler does not imply equal code of another.
        return Restamped(record, Fate.OTHER_TRITON)
    old = sources.kernel(record.kernel, new)
    return _Pair(old, new, target) if old else Restamped(record, Fate.NO_SOURCE)


def _compare(records: list[Record], pairs: list[_Pair | Restamped], progress: Progress) -> dict[_Key, str]:
    """Returns the first difference of each distinct pair of kernels on a target."""
    jobs = {
        _key(record, pair): (pair.old, pair.new, record.problem, record.config, pair.target)
        for record, pair in zip(records, pairs, strict=True)
        if isinstance(pair, _Pair) and pair.old is not pair.new
    }
    return differences("comparing", jobs, progress)


def differences(phase: str, jobs: Mapping[_Name, tuple[object, ...]], progress: Progress) -> dict[_Name, str]:
    """Returns the first difference of each pair of kernels; empty if there is none."""
    if not jobs:
        return {}
    pool = start_pool(available_cpus())
    try:
        futures: dict[_Name, Future[str]] = {
            key: pool.schedule(_difference, args=job, timeout=SECONDS) for key, job in jobs.items()
        }
        for done, _ in enumerate(as_completed(futures.values()), start=1):
            progress(phase, done, len(futures))
        lost = {key: failure_of(future) for key, future in futures.items()}
        return {key: why[1] if (why := lost[key]) else future.result() for key, future in futures.items()}
    finally:
        stop_pool(pool)


def _key(record: Record, pair: _Pair) -> _Key:
    """Returns the key of a comparison. It has the problem, because launch code depends on lengths."""
    return (
        pair.old.digest,
        pair.new.digest,
        record.target,
        record.problem.key,
        fingerprint(msgspec.json.encode(record.config)),
    )


def _difference(*job: object) -> str:
    try:
        return difference(*job)  # type: ignore[arg-type]
    except KernelError as error:
        return str(error)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        return f"the earlier launch code fails here: {first_line(error)}"


def _judged(record: Record, pair: _Pair | Restamped, compared: Mapping[_Key, str]) -> Restamped:
    if isinstance(pair, Restamped):
        return pair
    reason = compared.get(_key(record, pair), "")
    if reason:
        return Restamped(record, Fate.CHANGED, reason)
    version = template_hash(record.family)
    if pair.old is pair.new and record.versions.template == version:
        return Restamped(record, Fate.CURRENT)
    versions = msgspec.structs.replace(record.versions, template=version)
    carried = msgspec.structs.replace(record, kernel=pair.new.digest, versions=versions)
    return Restamped(carried, Fate.CARRIED)
