"""Runs PyTorch's own tests of `flex_attention` with compiled calls served by flashtune.

    python -m benchmarks.integrations.torch_flex_suite FILE --seconds 540 --save OUT.json
    python -m benchmarks.integrations.torch_flex_suite FILE --only score_mod --cases 50

FILE is `test/inductor/test_flex_attention.py` of the repository pytorch/pytorch. It needs the package
expecttest, and a GPU. Each case runs first with torch's function. A case that passes then runs again, with
compiled calls of the function served by flashtune. Eager calls are torch's, because the tests compare with
them. A case is refused if flashtune refused one of its calls. `not reached` are cases without such calls, and
cases that read the code or the counters of torch's compiler. `--part 0/4` runs every fourth case from the
first one on.
"""

import argparse
import hashlib
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

from benchmarks.integrations.torch_sdpa_suite import (
    FAILED,
    PASSED,
    SKIPPED,
    Case,
    cases,
    is_lost,
    loaded,
    outcome_of,
)
from benchmarks.saved import save
from flashtune.core.errors import KernelError, UsageError
from flashtune.integrations import flex_attention as integration
from flashtune.runtime.torch_modes import is_compiling

REFUSED, NOT_REACHED = "refused", "not reached"
# Texts in functions that check torch's compiler and not results.
INTERNALS = (
    "run_and_get_code",
    "FileCheck",
    "CompileCounter",
    "counters",
    "metrics.",
    "assertExpectedInline",
    "fullgraph",
)
# Errors of compared results, whatever else a test checks.
COMPARED = re.compile("not close|likes are not equal|does not match")


class Report(msgspec.Struct, frozen=True):
    """The outcomes of a run."""

    file: str  # SHA-256 of the test file.
    seconds: float
    # Cases by outcome: `passed`, `refused`, `failed`, `not reached`, and `skipped` or failed by torch alone.
    outcomes: dict[str, int]
    served: int  # Calls that flashtune computed.
    refusals: dict[str, int]  # Refused calls by their sentence.
    failures: dict[str, str]  # The reasons of failed cases.
    functions: dict[str, dict[str, int]]  # Outcomes by test function.


class Run:
    """Outcomes of cases, one after the other."""

    def __init__(self, module: ModuleType, file: Path) -> None:
        self.module = module
        self.text = file.read_text()
        self.outcomes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.failures: dict[str, str] = {}
        self.functions: dict[str, Counter[str]] = {}
        self.served = 0

    def add(self, case: Case) -> str:
        """Runs a case, and returns its outcome."""
        kind = getattr(self.module, case.owner)
        torch.compiler.reset()
        outcome, why = outcome_of(kind, case.name)
        if outcome == FAILED:
            outcome = "failed by torch"
            print(f"{case.owner}.{case.name}: {why}", flush=True)
        elif outcome == PASSED:
            torch.compiler.reset()
            with served(self.module) as active:
                outcome, why = outcome_of(kind, case.name)
            self.served += active.served
            self.refusals += active.refused
            if outcome == PASSED:
                outcome = REFUSED if active.refused else PASSED if active.served else NOT_REACHED
            elif self.reads_compiler(case.function) and not COMPARED.search(why):
                outcome = NOT_REACHED
            elif active.refused and not active.served:
                outcome = REFUSED
            else:
                self.failures[f"{case.owner}.{case.name}"] = why
        self.outcomes[outcome] += 1
        self.functions.setdefault(case.function, Counter())[outcome] += 1
        return outcome

    def reads_compiler(self, function: str) -> bool:
        """Returns whether a test function checks torch's compiler."""
        _, _, rest = self.text.partition(f"    def {function}(")
        return any(word in rest.partition("\n    def ")[0] for word in INTERNALS)

    def report(self, file: Path, seconds: float) -> Report:
        """Returns the sums."""
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        functions = {name: dict(counts) for name, counts in sorted(self.functions.items())}
        return Report(
            digest,
            round(seconds, 1),
            dict(self.outcomes),
            self.served,
            dict(self.refusals.most_common()),
            self.failures,
            functions,
        )


@contextmanager
def served(module: ModuleType) -> Iterator[integration.Activation]:
    """Serves compiled calls of the test module's function by flashtune."""
    torchs = vars(module)["flex_attention"]
    with integration.activate() as active:

        def flex_attention(*arguments: Any, **options: Any) -> Any:
            if is_compiling():
                return torch.compiler.disable(active.from_compiled)(*arguments, **options)
            return torchs(*arguments, **options)

        vars(module)["flex_attention"] = flex_attention
        try:
            yield active
        finally:
            vars(module)["flex_attention"] = torchs


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path, help="test/inductor/test_flex_attention.py of pytorch/pytorch")
    parser.add_argument("--only", default="", help="run test functions with this text in their names")
    parser.add_argument("--cases", type=int, help="draw so many cases; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="when to stop before all cases ran")
    parser.add_argument("--part", default="0/1", metavar="PART/PARTS", help="run a part of the cases")
    parser.add_argument("--collect", action="store_true", help="only list the cases, also without a GPU")
    parser.add_argument("--on-cpu", action="store_true", help="run them in Triton's interpreter")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the report to FILE, in JSON")
    options = parser.parse_args()
    if not options.file.exists():
        raise UsageError(f"{options.file} is missing: fetch it from pytorch/pytorch")
    if options.on_cpu:
        integration.DEVICES.add("cpu")
    elif not torch.cuda.is_available() and not options.collect:
        raise UsageError("there is no GPU: run this on one, or pass --on-cpu")
    warnings.simplefilter("ignore")
    module = loaded(options.file, "cuda" if torch.cuda.is_available() else "cpu")
    listed = cases(module, options.file, options.only)
    random.Random(options.seed).shuffle(listed)  # noqa: S311 - a sample needs no secret
    part, _, parts = options.part.partition("/")
    listed = listed[: options.cases][int(part) :: int(parts)]
    if options.collect:
        print(*(f"{case.owner}.{case.name}" for case in listed), f"{len(listed)} cases", sep="\n")
        return
    run, start = Run(module, options.file), time.monotonic()
    for case in listed:
        if time.monotonic() - start > options.seconds:
            break
        outcome = run.add(case)
        if outcome != SKIPPED:
            print(f"{outcome:15} {case.owner}.{case.name}", flush=True)
        if is_lost():
            raise KernelError(f"{case.owner}.{case.name} lost the GPU: run the others with --only or --part")
    report = run.report(options.file, time.monotonic() - start)
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    if options.save:
        save(options.save, report)


if __name__ == "__main__":
    main()
