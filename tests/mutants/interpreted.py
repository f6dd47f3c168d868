"""Verifies a mutant under Triton's interpreter, on the CPU."""

import time
import warnings

import torch

from flashtune.core.target import find_target
from flashtune.verification.cases import Level
from flashtune.verification.check import check_rendered
from tests.mutants.core import Mutant, broken
from tests.mutants.results import Fate, Found, found_of

TARGET = find_target("h200")
CPU = torch.device("cpu")


def interpreted(mutant: Mutant, seed: int, level: Level = Level.QUICK) -> Found:
    """Verifies a mutant at a level, and returns its fate."""
    problem, config = mutant.subject.problem, mutant.subject.config
    start = time.perf_counter()
    with warnings.catch_warnings():
        # A mutant may divide by zero, of which numpy warns.
        warnings.simplefilter("ignore", RuntimeWarning)
        verdict = check_rendered(broken(mutant), problem, config, TARGET, CPU, level, seed=seed)
    fate = Fate.SURVIVED if verdict.passed else Fate.REFUSED
    return found_of(mutant, fate, verdict.failed, time.perf_counter() - start)
