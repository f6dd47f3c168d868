"""Runs a seeded sample of PyTorch's own attention tests without flashtune and with it active.

    python -m benchmarks.integrations.torch_sdpa_suite FILE --workers 16 --seconds 300 --save OUT.json

FILE is `test/test_transformers.py` of the repository pytorch/pytorch, of the installed version. It needs the
package expecttest. Each case runs first with torch's operators. A case that passes then runs again with
flashtune active, three times: the first calls are passed on while kernels are prepared. Torch's operators
count as slower, unless `--measured` is given, so that flashtune serves all calls that it computes.

Each test function gets an equal number of cases, as far as it has so many. Cases that the file skips do not
count. Several processes share the cases. A process that loses its GPU or hangs is replaced by another one.
"""

import argparse
import ast
import contextlib
import functools
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import msgspec
import torch

from benchmarks.integrations.flash_attn_suite import module_of
from benchmarks.saved import save
from flashtune.core.errors import KernelError, UsageError
from flashtune.dispatch import decision
from flashtune.integrations import torch as integration
from flashtune.runtime.session import SESSION

PASSED, SKIPPED, FAILED, STOPPED = "passed", "skipped", "failed", "stopped"
# Runs with flashtune: the records, the kernels and their launch are prepared after one call each.
ROUNDS = 3
# Cases to draw for each that must run, because the file skips many.
DRAWN_PER_CASE = 4
# The longest wait for kernels of a case, and the longest case, in s.
LONGEST_WAIT, LONGEST_CASE = 120.0, 240.0
# A process exits with this code after an error of the GPU, which later calls would report too.
LOST_DEVICE = 17
# The longest text of a failure.
WORDS = 400


class Case(NamedTuple):
    """One case of the file: its class, its name and its test function."""

    owner: str
    name: str
    function: str


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a case."""

    case: str  # Its class and name.
    function: str  # Its test function.
    without: str  # Outcome with torch's operators.
    active: str | None = None  # Outcome with flashtune. None if it did not run.
    forward: int = 0  # Number of calls that flashtune served in one run of the case.
    backward: int = 0  # Number of backward passes, likewise.
    why: str = ""  # The reason of a failure.


Kind = TypeVar("Kind", bound=Outcome)


class Report(msgspec.Struct, frozen=True):
    """The outcomes of a run."""

    file: str  # SHA-256 of the test file.
    seed: int  # Seed of the sample.
    measured: bool  # Whether flashtune served only calls that it was measured as faster for.
    seconds: float  # Duration of the run.
    cases: int  # Cases that ran without flashtune and were not skipped.
    passed_without: int  # Cases that passed without flashtune.
    passed_with: int  # Cases that passed without flashtune and with it.
    served: int  # Of these, cases in which flashtune served calls.
    served_backward: int  # Likewise backward passes.
    skipped: int  # Cases that the file skips.
    failures: dict[str, str]  # Cases that passed without flashtune only, with the reason.
    failed_without: dict[str, str]  # Cases that fail with torch's operators, with the reason.
    # Cases, cases that passed with flashtune and cases with served calls, by test function.
    functions: dict[str, tuple[int, int, int]]


class Served:
    """Counts the calls that flashtune serves."""

    def __init__(self) -> None:
        self.passes: Counter[str] = Counter()

    def counting(self, way: str, make: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that makes overrides, as `make` does, which count served calls."""

        def made(operator: Any, original: Callable[..., Any]) -> Callable[..., Any]:
            def passed_on(*args: Any, **options: Any) -> Any:
                self.passes[way] -= 1
                return original(*args, **options)

            override = make(operator, passed_on)

            def run(*args: Any, **options: Any) -> Any:
                self.passes[way] += 1
                return override(*args, **options)

            return run

        return made


def main() -> None:
    """Runs the command line."""
    options = parser_of(__doc__).parse_args()
    if options.part is not None:
        served = Served()
        with serving(served, options.measured):
            work(options, functools.partial(compared, served=served))
        return
    start = time.monotonic()
    outcomes = shared("torch_sdpa_suite", options, Outcome)
    report = summary(outcomes, options, time.monotonic() - start)
    show(report)
    if options.save:
        save(options.save, report)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Returns the options of a run of a test file of PyTorch."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=existing, help="the test file of the repository pytorch/pytorch")
    parser.add_argument("--cases", type=int, default=1000, help="cases that must run, without skipped ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="when to stop before all cases ran")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the cases")
    parser.add_argument("--functions", default="", help="only test functions whose names contain this")
    parser.add_argument("--measured", action="store_true", help="serve only calls measured as faster")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the report to FILE, in JSON")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    return parser


def existing(path: str) -> Path:
    """Returns the path of a test file, which must exist."""
    if not Path(path).exists():
        raise UsageError(f"{path} is missing: fetch it from pytorch/pytorch")
    return Path(path)


def work(options: argparse.Namespace, compared: Callable[[ModuleType, Case], Outcome]) -> None:
    """Runs the cases of one process, and writes a line before and after each."""
    warnings.simplefilter("ignore")
    end = time.monotonic() + options.seconds
    module = loaded(options.file, "cuda" if torch.cuda.is_available() else "cpu")
    drawn = sample(cases(module, options.file, options.functions), options)
    own = drawn[options.part :: options.workers]
    wanted = -(-(options.cases - options.part) // options.workers)
    ran = sum(outcome.without != SKIPPED for outcome in read(options.lines, Outcome)) if options.first else 0
    with options.lines.open("a") as lines:
        for number, case in enumerate(own[options.first :], options.first):
            if ran >= wanted or time.monotonic() > end:
                break
            lines.write(json.dumps({"number": number, "case": f"{case.owner}.{case.name}"}) + "\n")
            lines.flush()
            outcome = compared(module, case)
            ran += outcome.without != SKIPPED
            lines.write(msgspec.json.encode(outcome).decode() + "\n")
            lines.flush()
            if outcome.active != PASSED and is_lost():
                os._exit(LOST_DEVICE)
    # Threads and processes that prepare kernels must not delay the end.
    sys.stdout.flush()
    os._exit(0)


def loaded(file: Path, device: str) -> ModuleType:
    """Returns the module of the test file, with the test classes of one kind of device."""
    os.environ |= {"PYTORCH_TESTING_DEVICE_ONLY_FOR": device, "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}
    # Torch's test modules read the command line.
    sys.argv = sys.argv[:1]
    return module_of(file.stem, file)


def cases(module: ModuleType, file: Path, part: str = "") -> list[Case]:
    """Returns the cases of a module, in the order of their names. `part` is a part of function names."""
    functions = {
        (node.name, each.name)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test")
    }
    listed = []
    for owner, kind in sorted(vars(module).items()):
        if not (isinstance(kind, type) and issubclass(kind, unittest.TestCase)):
            continue
        own = [function for base, function in functions if owner.startswith(base)]
        for name in sorted(attribute for attribute in dir(kind) if attribute.startswith("test")):
            function = max((base for base in own if name.startswith(base)), key=len, default=None)
            if function is not None and part in function:
                listed.append(Case(owner, name, function))
    return listed


def sample(listed: Sequence[Case], options: argparse.Namespace) -> list[Case]:
    """Returns drawn cases. Their order gives each test function the same number of them."""
    generator = random.Random(options.seed)  # noqa: S311 - a sample needs no secret
    functions: dict[tuple[str, str], list[Case]] = {}
    for case in listed:
        functions.setdefault((case.owner, case.function), []).append(case)
    for group in functions.values():
        generator.shuffle(group)
    drawn: list[Case] = []
    index = 0
    while len(drawn) < min(len(listed), options.cases * DRAWN_PER_CASE):
        row = [group[index] for group in functions.values() if index < len(group)]
        generator.shuffle(row)
        drawn.extend(row)
        index += 1
    return drawn


@contextlib.contextmanager
def serving(served: Served, measured: bool) -> Iterator[None]:
    """Counts served calls in its context. Torch's operators count as slower, unless `measured`."""
    with contextlib.ExitStack() as stack:
        for way in ("forward", "backward"):
            made = served.counting(way, getattr(integration, f"{way}_override"))
            stack.enter_context(mock.patch.object(integration, f"{way}_override", made))
        if not measured:
            stack.enter_context(mock.patch.object(decision, "beats", return_value=True))
        yield


def compared(module: ModuleType, case: Case, served: Served) -> Outcome:
    """Returns the outcome of a case without flashtune and, if it passes, with flashtune."""
    run = functools.partial(outcome_of, getattr(module, case.owner), case.name)
    made = functools.partial(Outcome, f"{case.owner}.{case.name}", case.function)
    without, why = run()
    if without != PASSED:
        return made(without, why=why)
    forward = backward = 0
    active = PASSED
    for _ in range(ROUNDS):
        served.passes.clear()
        with integration.activate() if torch.cuda.is_available() else contextlib.nullcontext():
            active, why = run()
        forward = max(forward, served.passes["forward"])
        backward = max(backward, served.passes["backward"])
        if active != PASSED:
            break
        SESSION.wait(LONGEST_WAIT)
    if active != PASSED and run()[0] != PASSED and not is_lost():
        return made(FAILED, why=f"passed once: {why}")
    return made(PASSED, active, forward, backward, why)


def outcome_of(kind: type[unittest.TestCase], name: str) -> tuple[str, str]:
    """Runs a case. Returns its outcome and the last line of its error."""
    result = unittest.TestResult()
    unittest.TestSuite([kind(name)]).run(result)
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
    problems = [text for _, text in (*result.errors, *result.failures)]
    if problems:
        lines = [line for line in problems[0].splitlines() if line.strip()]
        return FAILED, " ".join(errors_of(lines))[:WORDS]
    if result.unexpectedSuccesses:
        return FAILED, "unexpected success"
    return (SKIPPED, str(result.skipped[0][1])[:WORDS]) if result.skipped else (PASSED, "")


def errors_of(lines: Sequence[str]) -> list[str]:
    """Returns the lines of a traceback from its error on."""
    first = max((index for index, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    return [line for line in lines[first + 1 :] if not line.startswith(" ")] or list(lines[-1:])


def is_lost() -> bool:
    """Whether the GPU reports an error to any call from now on."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def read(lines: Path, kind: type[Kind]) -> list[Kind]:
    """Returns the outcomes in a file of lines."""
    records = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return [msgspec.convert(record, kind) for record in records if "function" in record]


def shared(suite: str, options: argparse.Namespace, kind: type[Kind]) -> list[Kind]:
    """Returns the outcomes of all processes. Each runs the module `suite` of this package."""
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{part}.jsonl" for part in range(options.workers)]
        errors: list[str] = []
        threads = [
            threading.Thread(target=supervised, args=(suite, part, file, end, options, errors))
            for part, file in enumerate(files)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        outcomes = [outcome for file in files for outcome in read(file, kind)]
    if errors and not outcomes:
        raise KernelError(f"a process of the tests ended: {errors[0]}")
    return outcomes


def supervised(
    suite: str, part: int, lines: Path, end: float, options: argparse.Namespace, errors: list[str]
) -> None:
    """Runs the cases of one part, in a new process after each that was lost."""
    first = 0
    while (left := end - time.monotonic()) > 0:
        own = {"seconds": left, "part": part, "first": first, "lines": lines, "file": None, "save": None}
        command = [sys.executable, "-m", f"benchmarks.integrations.{suite}", str(options.file)]
        for name, value in {**vars(options), **own}.items():
            option = f"--{name.replace('_', '-')}"
            if value is not None and value is not False:
                command.append(option if value is True else f"{option}={value}")
        with tempfile.TemporaryFile() as words:
            process = subprocess.Popen(command, stdout=words, stderr=words)
            code = watched(process, lines, end)
            words.seek(0)
            said = words.read().decode(errors="replace")[-2000:]
        if code == 0:
            return
        started = last_started(lines)
        if started is None:
            errors.append(f"exit code {code}: {said}")
            return
        number, case, is_done = started
        if code is None and time.monotonic() > end:
            return
        if not is_done:
            why = (
                "it took too long"
                if code is None
                else f"its process ended with exit code {code}: {said[-200:]}"
            )
            ended = Outcome(case, case.split(".")[1], PASSED, STOPPED, why=why)
            with lines.open("a") as file:
                file.write(msgspec.json.encode(ended).decode() + "\n")
        first = number + 1


def watched(process: subprocess.Popen[bytes], lines: Path, end: float) -> int | None:
    """Waits for a process. Returns its exit code, or None if a case or all took too long."""
    size, changed = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.5)
        now = time.monotonic()
        if lines.exists() and lines.stat().st_size != size:
            size, changed = lines.stat().st_size, now
        if now > end or now > changed + LONGEST_CASE:
            process.kill()
            process.wait()
            return None
    return process.returncode


def last_started(lines: Path) -> tuple[int, str, bool] | None:
    """Returns the number and the name of the last case that started, and whether it has an outcome."""
    records = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    started = [record for record in records if "number" in record]
    return (started[-1]["number"], started[-1]["case"], "function" in records[-1]) if started else None


def summary(outcomes: Sequence[Outcome], options: argparse.Namespace, seconds: float) -> Report:
    """Returns the report of all outcomes."""
    ran = [outcome for outcome in outcomes if outcome.without != SKIPPED]
    both = [outcome for outcome in ran if outcome.without == PASSED]
    fine = [outcome for outcome in both if outcome.active == PASSED]
    functions = {
        function: (
            sum(outcome.function == function for outcome in ran),
            sum(outcome.function == function for outcome in fine),
            sum(outcome.function == function and outcome.forward + outcome.backward > 0 for outcome in fine),
        )
        for function in sorted({outcome.function for outcome in ran})
    }
    return Report(
        hashlib.sha256(options.file.read_bytes()).hexdigest(),
        options.seed,
        options.measured,
        round(seconds, 1),
        len(ran),
        len(both),
        len(fine),
        sum(outcome.forward > 0 for outcome in fine),
        sum(outcome.backward > 0 for outcome in fine),
        len(outcomes) - len(ran),
        {outcome.case: f"{outcome.active}: {outcome.why}" for outcome in both if outcome.active != PASSED},
        {outcome.case: outcome.why for outcome in ran if outcome.without != PASSED},
        functions,
    )


def show(report: Report) -> None:
    """Prints the counts and the failures."""
    words = [
        f"{report.cases} cases in {report.seconds:.0f} s, {report.skipped} skipped",
        f"{report.passed_without} passed without flashtune, {report.passed_with} of them with it",
        f"{report.served} of these had served calls, {report.served_backward} served backward passes",
        *(f"FAILED {case}: {why}" for case, why in report.failures.items()),
        *(f"failed without flashtune: {case}: {why}" for case, why in report.failed_without.items()),
    ]
    sys.stdout.write("\n".join(words) + "\n")


if __name__ == "__main__":
    main()
