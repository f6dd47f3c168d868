"""Tests that the emulator detects mutants of Hopper backward kernels with features."""

from __future__ import annotations

import msgspec
import pytest

from flashtune.core.kernel import Kernel
from tests.emulator.hardware import BarrierError
from tests.mutants.backward_hopper import backward_hopper_features
from tests.mutants.core import Mutant, Subject, broken, rendered
from tests.templates.backward import test_backward_hopper_emulated

MUTANTS = (
    *backward_hopper_features.windows(),
    *backward_hopper_features.caps(),
    *backward_hopper_features.packed(),
)
# The emulator runs the main kernel alone, without its inline PTX, and a race has no effect there.
OTHERS = ("prepare", "finish", "overflow", "swapped")
EMULATED = [one for one in MUTANTS if not one.racy and not any(other in one.name for other in OTHERS)]
LENGTHS = [(70, 300), (0, 9), (150, 40), (5, 131), (130, 130)]


def emulate(kernel: Kernel, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    made = (kernel, subject.config)
    monkeypatch.setattr(test_backward_hopper_emulated, "kernel_of", lambda *_, **__: made)
    lengths = {"heads": 4, "kv_heads": 2, "batch": 1, "seqlen_q": 350, "seqlen_kv": 410}
    problem = msgspec.structs.replace(subject.problem, **lengths)
    if subject.problem.packed:
        test_backward_hopper_emulated.emulated(problem, 3, LENGTHS, spare=30)
    else:
        test_backward_hopper_emulated.emulated(problem, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "subject", dict.fromkeys(one.subject for one in EMULATED), ids=lambda subject: subject.label
)
def test_gradients_of_unmodified_kernels_are_correct(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(rendered(subject), subject, monkeypatch)


@pytest.mark.slow
@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("mutant", EMULATED, ids=lambda mutant: mutant.name)
def test_gradients_of_mutants_are_wrong(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, BarrierError, IndexError)):
        emulate(broken(mutant), mutant.subject, monkeypatch)
