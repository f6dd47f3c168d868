"""Runs a seeded sample of PyTorch's own tests of `flex_attention` with compiled calls served by flashtune.

    python -m benchmarks.integrations.torch_flex_suite FILE --workers 14 --seconds 240 --save OUT.json
    python -m benchmarks.integrations.torch_flex_suite FILE --functions score_mod --cases 50

FILE is `test/inductor/test_flex_attention.py` of the repository pytorch/pytorch. It needs the package
expecttest, and a GPU. Each test function gets an equal number of cases, as far as it has so many. Several
processes share the cases. A case that fails with flashtune runs again without it, and counts if it passes.

Compiled calls are served, and eager calls are torch's, because the tests compare with them. Torch's kernels
count as slower, unless `--measured` is given, so that flashtune serves all calls that it computes. Programs
may break their graph, also with `fullgraph=True`.

A case is refused if flashtune refused one of its calls. `fallbacks` names the cases in which a kernel failed,
for example for lack of memory, and another config or the unfused computation served. `not reached` are cases
without compiled calls, and cases that fail because they read the code or the counters of torch's compiler.
Cases that the file expects to fail do not count.
"""

import argparse
import contextlib
import functools
import hashlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import Tensor
from torch.nn.attention.experimental._paged_attention import PagedAttention

from benchmarks.integrations.torch_sdpa_suite import (
    FAILED,
    PASSED,
    SKIPPED,
    STOPPED,
    Case,
    Outcome,
    is_lost,
    outcome_of,
    parser_of,
    shared,
    work,
)
from benchmarks.saved import save
from flashtune.core.errors import UsageError
from flashtune.core.problem import Problem
from flashtune.integrations import flex_attention as integration
from flashtune.runtime import passes, prepare
from flashtune.runtime.torch_modes import is_compiling

REFUSED, NOT_REACHED, FAILED_WITHOUT = "refused", "not reached", "failed without flashtune"
EXPECTED = "expected to fail"
store = PagedAttention.assign
# Texts in functions that check torch's compiler and not results.
INTERNALS = (
    "run_and_get_code",
    "FileCheck",
    "CompileCounter",
    "counters",
    "metrics.",
    "assertExpectedInline",
)
# Errors of compared results, whatever else a test checks.
COMPARED = re.compile("not close|likes are not equal|does not match|greater than ref error|with NaN")


class FlexOutcome(Outcome, frozen=True):
    """The outcome of a case. `forward` is the number of calls that flashtune served."""

    refused: dict[str, int] = msgspec.field(default_factory=dict)  # Refused calls by their sentence.
    fallback: str = ""  # The reason of the last kernel that failed and was replaced.


class Report(msgspec.Struct, frozen=True):
    """The outcomes of a run."""

    file: str  # SHA-256 of the test file.
    seed: int  # Seed of the sample.
    measured: bool  # Whether flashtune served only gradients that it computes faster than torch.
    seconds: float  # Duration of the run.
    outcomes: dict[str, int]  # Cases by outcome.
    served: int  # Calls that flashtune computed.
    refusals: dict[str, int]  # Refused calls by their sentence.
    failures: dict[str, str]  # The reasons of cases that fail only with flashtune.
    failed_without: dict[str, str]  # The reasons of cases that fail without flashtune too.
    functions: dict[str, dict[str, int]]  # Outcomes by test function.
    # The reasons of kernels that failed in a case, in which another computation served.
    fallbacks: dict[str, str] = msgspec.field(default_factory=dict)


def main() -> None:
    """Runs the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--on-cpu", action="store_true", help="run them in Triton's interpreter")
    options = parser.parse_args()
    if options.on_cpu:
        integration.DEVICES.add("cpu")
    elif not torch.cuda.is_available():
        raise UsageError("there is no GPU: run this on one, or pass --on-cpu")
    if options.part is not None:
        # Several processes compile at the same time.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        work(options, functools.partial(compared, options=options))
        return
    start = time.monotonic()
    outcomes = shared("torch_flex_suite", options, FlexOutcome)
    report = summary(outcomes, options, time.monotonic() - start)
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    if options.save:
        save(options.save, report)


def compared(module: ModuleType, case: Case, options: argparse.Namespace) -> FlexOutcome:
    """Returns the outcome of a case with flashtune and, unless it passes, without it."""
    kind = getattr(module, case.owner)
    made = functools.partial(FlexOutcome, f"{case.owner}.{case.name}", case.function)
    if getattr(getattr(kind, case.name), "__unittest_expecting_failure__", False):
        return made(SKIPPED, EXPECTED)
    torch.compiler.reset()
    if torch.cuda.is_available():
        # Other processes need the memory too.
        torch.cuda.empty_cache()
    failures: list[str] = [""]

    def note(failure: Exception, instead: str, problem: Problem) -> None:
        failures.append(f"{failure}, so {instead} serves {problem.key}")

    with mock.patch.object(PagedAttention, "assign", assign):
        with (
            mock.patch.object(passes, "warn_of_failure", note),
            mock.patch.object(prepare, "warn_of_failure", note),
            serving(module, options.measured) as active,
        ):
            outcome, why = outcome_of(kind, case.name)
        noted = {"refused": dict(active.refused), "fallback": failures[-1]}
        made = functools.partial(made, forward=active.served, **noted)
        if outcome == PASSED:
            return made(PASSED, REFUSED if active.refused else PASSED if active.served else NOT_REACHED)
        if outcome == SKIPPED and not active.served:
            return made(SKIPPED, SKIPPED, why=why)
        if is_lost():
            return made(PASSED, STOPPED, why=f"the GPU was lost: {why}")
        # Some tests skip themselves if the result is inaccurate.
        torch.compiler.reset()
        without, others = outcome_of(kind, case.name)
    if without == SKIPPED:
        return made(SKIPPED, SKIPPED, why=others)
    if without == FAILED:
        return made(FAILED, FAILED_WITHOUT, why=f"{others}; with flashtune: {why}")
    if reads_compiler(options.file.read_text(), case.function) and not COMPARED.search(why):
        return made(PASSED, NOT_REACHED, why=why)
    return made(PASSED, FAILED, why=why)


def assign(cache: PagedAttention, batch: Tensor, positions: Tensor, *tensors: Tensor) -> None:
    """Stores keys and values. In tests of torch 2.6, positions have no dimension of sequences."""
    store(cache, batch, positions.expand(len(batch), -1), *tensors)


def reads_compiler(text: str, function: str) -> bool:
    """Returns whether a test function, or a method that it calls, checks torch's compiler."""
    own = text.partition(f"    def {function}(")[2].partition("\n    def ")[0]
    called = [text.partition(f"    def {name}(")[2] for name in re.findall(r"self\.(run_\w+)\(", own)]
    bodies = [own, *(rest.partition("\n    def ")[0] for rest in called)]
    return any(word in body for word in INTERNALS for body in bodies)


@contextlib.contextmanager
def serving(module: ModuleType, measured: bool) -> Iterator[integration.Activation]:
    """Serves compiled calls of the test module's function by flashtune."""
    torchs, compile_ = vars(module)["flex_attention"], torch.compile

    def compiled(*arguments: Any, **options: Any) -> Any:
        return compile_(*arguments, **{**options, "fullgraph": False})

    with contextlib.ExitStack() as stack:
        active = stack.enter_context(integration.activate())

        def flex_attention(*arguments: Any, **options: Any) -> Any:
            if is_compiling():
                return torch.compiler.disable(active.from_compiled)(*arguments, **options)
            return torchs(*arguments, **options)

        stack.enter_context(mock.patch.object(module, "flex_attention", flex_attention))
        stack.enter_context(mock.patch.object(torch, "compile", compiled))
        if not measured:
            stack.enter_context(mock.patch.object(integration, "_has_fast_gradients", return_value=True))
        yield active


def summary(outcomes: Sequence[FlexOutcome], options: argparse.Namespace, seconds: float) -> Report:
    """Returns the report of all outcomes."""
    refusals: Counter[str] = Counter()
    functions: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        refusals.update(outcome.refused)
        functions.setdefault(outcome.function, Counter())[str(outcome.active)] += 1
    fails = [outcome for outcome in outcomes if outcome.active in (FAILED, STOPPED)]
    without = [outcome for outcome in outcomes if outcome.active == FAILED_WITHOUT]
    return Report(
        hashlib.sha256(options.file.read_bytes()).hexdigest(),
        options.seed,
        options.measured,
        round(seconds, 1),
        dict(Counter(str(outcome.active) for outcome in outcomes)),
        sum(outcome.forward for outcome in outcomes),
        dict(refusals.most_common()),
        {outcome.case: f"{outcome.active}: {outcome.why}" for outcome in fails},
        {outcome.case: outcome.why for outcome in without},
        {name: dict(counts) for name, counts in sorted(functions.items())},
        {outcome.case: outcome.fallback for outcome in outcomes if outcome.fallback},
    )


if __name__ == "__main__":
    main()
