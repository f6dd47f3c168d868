"""Runs a seeded sample of FlashAttention's own tests with flashtune in place of flash_attn.

    python -m benchmarks.integrations.flash_attn_suite FOLDER --version 2 --workers 8 --out FILE

FOLDER has files of the repository Dao-AILab/flash-attention at commit 0251105a2fb1, at their places there:

- version 2: `tests/test_flash_attn.py`.
- version 3: `hopper/test_flash_attn.py`, `hopper/test_util.py` and `hopper/padding.py`.
- version 4: `tests/cute/test_flash_attn.py`, `tests/cute/test_flash_attn_varlen.py`,
  `tests/cute/test_flash_attn_combine.py` and `flash_attn/cute/testing.py`.

Each test function gets an equal number of cases, as far as it has so many. The tests need einops. They
compare results on the GPU with a computation by torch. A case is refused if flashtune raises
`UnsupportedError`. Cases that the files skip do not count. Most of the time is for compiling kernels, so
several processes share the cases. A case waits if the others leave too little memory.
"""

import argparse
import functools
import importlib.util
import inspect
import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.saved import save
from flashtune.core.errors import KernelError, UsageError
from flashtune.core.files import alone_with
from flashtune.integrations.flash_attn import UnsupportedError, patch

FILES = {
    2: ("tests/test_flash_attn.py",),
    3: ("hopper/test_flash_attn.py",),
    4: (
        "tests/cute/test_flash_attn.py",
        "tests/cute/test_flash_attn_varlen.py",
        "tests/cute/test_flash_attn_combine.py",
    ),
}
# Folders that the test files import from.
PATHS = {3: "hopper"}
# Tests of flash_attn itself, which do not run.
LEFT_OUT = {
    "test_flash_attn_invalid_head_dim": "expects errors for head dims that flashtune computes",
    "test_splitkv_forwards_explicit_arch": "replaces the cache of flash_attn's compiled kernels",
    "test_flash_attn_combine_dynamic_splits_and_semaphore": "counts flash_attn's compiled kernels",
    "test_flash_attn_cache_separates_broadcast_layouts": "counts flash_attn's compiled kernels",
    "test_flash3_bw_compatibility": "reads the schemas of flash_attn's torch operators",
}
OUTCOMES = ("passed", "refused", "failed", "skipped")
# Cases to draw for each that must run, because the files skip many.
DRAWN_PER_CASE = 3
# Seconds for which a case waits for the memory of other processes, and for other waiting cases.
MEMORY_WAIT, TURN_WAIT = 120.0, 600.0
LOCK = "flash_attn_suite.lock"


class JITCache:
    """In place of flash_attn's cache of compiled kernels, which its tests clear."""

    def __init__(self) -> None:
        self.cache: dict[object, object] = {}

    def clear(self) -> None:
        """Does nothing."""


class Sample:
    """A pytest plugin that parametrizes tests with a sample of their cases, and counts outcomes.

    Attributes:
        outcomes: Numbers of passed, refused, failed and skipped cases.
        sentences: How often each reason of a refusal occurred.
        failures: The names of failed cases, with their last line.
        sizes: Number of cases of each test function.
        left_out: Test functions that do not run, with the reason.
    """

    def __init__(self, cases: int, seed: int, seconds: float, part: tuple[int, int] = (0, 1)) -> None:
        """Takes every `part[1]`-th case from number `part[0]` on, and of `cases` an equal share."""
        self.part = part
        self.cases = -(-(cases - part[0]) // part[1])
        self.drawn = cases * DRAWN_PER_CASE
        self.seed = seed
        self.end = time.monotonic() + seconds
        self.outcomes: Counter[str] = Counter()
        self.sentences: Counter[str] = Counter()
        self.failures: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.left_out: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Replaces the parameters of a test by drawn ones."""
        marks = list(metafunc.definition.iter_markers("parametrize"))
        if not marks:
            return
        axes = [(names_of(mark), list(mark.args[1])) for mark in marks]
        size = math.prod(len(values) for _, values in axes)
        name = metafunc.definition.originalname
        self.sizes[name] = size
        generator = random.Random(f"{self.seed} {name}")  # noqa: S311 - a sample needs no secret
        count = min(size, self.drawn)
        numbers = sorted(generator.sample(range(size), count), key=lambda _: generator.random())
        metafunc.definition.own_markers[:] = [
            mark for mark in metafunc.definition.own_markers if mark.name != "parametrize"
        ]
        names = list(itertools.chain(*(own for own, _ in axes)))
        rows = [case(axes, number) for number in numbers]
        metafunc.parametrize(names, rows, ids=["-".join(map(text, row)) for row in rows])

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves out tests, and orders cases so that all test functions get the same number."""
        places: Counter[str] = Counter()
        order = {}
        names = {function_name(item) for item in items}
        self.left_out = {name: why for name, why in LEFT_OUT.items() if name in names}
        items[:] = [item for item in items if function_name(item) not in LEFT_OUT]
        for item in items:
            name = function_name(item)
            order[item.nodeid] = places[name]
            places[name] += 1
        items.sort(key=lambda item: order[item.nodeid])
        items[:] = items[self.part[0] :: self.part[1]]

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool:
        """Runs a case. One without enough memory runs again while other processes free theirs."""
        test = pyfuncitem.obj
        values = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
        if not had_memory(test, values, math.inf):
            with alone_with(Path(tempfile.gettempdir()) / LOCK, TURN_WAIT):
                end = time.monotonic() + MEMORY_WAIT
                while not had_memory(test, values, end):
                    time.sleep(0.5)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Counts the outcome of a case, and ends the run after enough cases or the time."""
        report = yield
        if call.when == "call" or (call.when == "setup" and not report.passed):
            self.count(item, call, report)
            ran = sum(self.outcomes.values()) - self.outcomes["skipped"]
            if ran >= self.cases or time.monotonic() > self.end:
                item.session.shouldstop = f"{ran} cases ran"
        return report

    def count(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """Counts the outcome of a case."""
        error = None if call.excinfo is None else call.excinfo.value
        if isinstance(error, UnsupportedError):
            self.outcomes["refused"] += 1
            self.sentences[str(error)] += 1
            return
        self.outcomes[report.outcome] += 1
        if report.failed:
            self.failures[item.nodeid] = f"{type(error).__name__}: {error}"[:500]


def had_memory(test: Callable[..., None], values: dict[str, Any], end: float) -> bool:
    """Runs a case, and returns False if there was too little memory before the time `end`."""
    try:
        test(**values)
    except torch.OutOfMemoryError:
        if time.monotonic() > end:
            raise
        return False
    finally:
        torch.cuda.empty_cache()
    return True


def function_name(item: pytest.Item) -> str:
    """Returns the name of a case's test function."""
    return str(getattr(item, "originalname", item.name))


def names_of(mark: pytest.Mark) -> list[str]:
    """Returns the parameters of a mark."""
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def case(axes: Sequence[tuple[list[str], list[Any]]], number: int) -> tuple[Any, ...]:
    """Returns the values of a case. Cases are numbered as the product of all axes."""
    values: list[Any] = []
    for names, choices in axes:
        number, index = divmod(number, len(choices))
        choice = getattr(choices[index], "values", choices[index])
        is_row = len(names) > 1 or hasattr(choices[index], "marks")
        values.extend(choice) if is_row else values.append(choice)
    return tuple(values)


def text(value: object) -> str:
    """Returns a value as a part of a test's name."""
    return str(value).removeprefix("torch.")


def install(folder: Path, version: int) -> None:
    """Installs flashtune as flash_attn, and modules of the test files."""
    missing = [name for name in FILES[version] if not (folder / name).exists()]
    if missing:
        raise UsageError(f"{folder} has no {missing[0]}: fetch it from Dao-AILab/flash-attention")
    patch()
    if version in PATHS:
        sys.path.insert(0, str(folder / PATHS[version]))
    if version == 4:
        cache = ModuleType("flash_attn.cute.cache_utils")
        cache.__dict__["JITCache"] = JITCache
        sys.modules[cache.__name__] = cache
        module_of("flash_attn.cute.testing", folder / "flash_attn/cute/testing.py")


def module_of(name: str, path: Path) -> ModuleType:
    """Returns the module of a file, which other modules can import by its name."""
    if not path.exists():
        raise UsageError(f"{path} is missing: fetch it from Dao-AILab/flash-attention")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(folder: Path, version: int, sample: Sample, options: Sequence[str] = ()) -> int:
    """Runs the tests of a version. Returns pytest's exit code."""
    files = [str(folder / name) for name in FILES[version]]
    own = ["--import-mode=importlib", "--noconftest", "-p", "no:cacheprovider", "-q", "--no-header"]
    own += ["--tb=no", "-c", "/dev/null", "--rootdir", str(folder)]
    return int(pytest.main([*files, *own, *options], plugins=[sample]))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="files of FlashAttention's repository")
    parser.add_argument("--version", type=int, choices=sorted(FILES), default=2)
    parser.add_argument("--cases", type=int, default=1000, help="cases that must run, without skipped ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="when to stop before all cases ran")
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the cases")
    parser.add_argument("--part", type=int, help="run the cases of one of these processes")
    parser.add_argument("--collect", action="store_true", help="only import and collect, also without a GPU")
    arguments = parser.parse_args()
    if arguments.workers > 1 and arguments.part is None:
        report(shared(arguments.workers), arguments.out)
        return
    if arguments.collect and not torch.cuda.is_available():
        # The files ask for it when they are imported.
        torch.cuda.get_device_capability = functools.partial(lambda *_: (9, 0))
    install(arguments.folder.resolve(), arguments.version)
    part = arguments.part or 0, arguments.workers
    sample = Sample(arguments.cases, arguments.seed, arguments.seconds, part)
    start = time.monotonic()
    options = ("--collect-only",) if arguments.collect else ()
    code = run(arguments.folder.resolve(), arguments.version, sample, options)
    document = {
        "version": arguments.version,
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - start, 1),
        "exit_code": code,
        **{name: sample.outcomes[name] for name in OUTCOMES},
        "refusals": dict(sample.sentences),
        "failures": sample.failures,
        "left_out": sample.left_out,
        "sizes": sample.sizes,
    }
    report(document, arguments.out, is_part=arguments.part is not None)


def shared(workers: int) -> dict[str, Any]:
    """Returns the sums of the reports of processes that share the cases of this command line."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{part}.json" for part in range(workers)]
        command = [sys.executable, "-m", "benchmarks.integrations.flash_attn_suite", *sys.argv[1:]]
        running = [
            subprocess.Popen([*command, "--part", str(part), "--out", str(file)], stdout=subprocess.DEVNULL)
            for part, file in enumerate(files)
        ]
        codes = [process.wait() for process in running]
        reports = [json.loads(file.read_bytes()) for file in files if file.exists()]
    if len(reports) < workers:
        raise KernelError(f"a process of the tests ended with exit code {max(codes, key=abs)}: run it alone")
    return summed(reports)


def summed(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns one report of several processes."""
    total = dict(reports[0])
    for name in OUTCOMES:
        total[name] = sum(report[name] for report in reports)
    total["refusals"] = dict(sum((Counter(report["refusals"]) for report in reports), Counter()))
    total["failures"] = {case: why for report in reports for case, why in report["failures"].items()}
    total["seconds"] = max(report["seconds"] for report in reports)
    return total


def report(document: dict[str, Any], out: Path | None, *, is_part: bool = False) -> None:
    """Prints a report and writes it to a file, with its source unless it is a part of another report."""
    words = json.dumps(document, indent=1)
    print(words)
    if out is not None and is_part:
        out.write_text(words + "\n")
    elif out is not None:
        save(out, document)


if __name__ == "__main__":
    main()
