"""Tests that the emulator accepts Gluon kernels and detects their mutants."""

import time

import msgspec
import pytest

from flashtune.core.kernel import Kernel
from flashtune.core.problem import Bias
from flashtune.templates.backward_hopper.space import HopperBackwardConfig
from flashtune.templates.forward_hopper.space import HopperConfig
from flashtune.verification.cases import splits_of
from tests.emulator.hardware import BarrierError
from tests.emulator.invariance import differing
from tests.emulator.program import Program
from tests.mutants.core import Mutant, Subject, broken, rendered
from tests.mutants.emulated import emulated_mutants
from tests.mutants.forward_hopper.hopper_invariance import FOLDED
from tests.templates.backward.test_backward_hopper_emulated import emulated
from tests.templates.decode import test_latent_emulated
from tests.templates.hopper.emulated import test_hopper_emulated, test_hopper_pages_emulated

MUTANTS = emulated_mutants()
# Their error is a race between threads, which some runs do not show.
REPEATS = {"backward_hopper: order: halves: one counter for both": 5}
# Delay between the last copy of a tile and the index of the next tile, in seconds.
LATE = 0.3
# The emulator computes in float64.
ALLOWED = 1e-11
# Queries and keys of packed sequences.
FORWARD_LENGTHS = [(200, 260), (130, 130), (70, 300)]
BACKWARD_LENGTHS = [(70, 300), (0, 9), (150, 40), (5, 131), (130, 130)]


def forward_error(kernel: Kernel, subject: Subject) -> float:
    """The largest error where there are more tiles than programs, and three tiles of queries and of keys."""
    problem, config = subject.problem, subject.config
    assert isinstance(config, HopperConfig)
    shape = {"heads": 2 * max(2, config.pack_gqa), "kv_heads": 2, "seqlen_q": 291, "seqlen_kv": 330}
    shaped = msgspec.structs.replace(problem, **shape)
    lengths = FORWARD_LENGTHS if problem.packed else None
    return test_hopper_emulated.worst_error(kernel, shaped, 3, lengths, config=config)


def error_with_pages(kernel: Kernel, subject: Subject) -> float:
    lengths = [(70, keys) for keys in (63, 257, 512, 0, 200)]
    shape = {"heads": 4, "kv_heads": 2, "batch": len(lengths), "seqlen_q": 70}
    shaped = msgspec.structs.replace(subject.problem, **shape)
    return test_hopper_pages_emulated.worst_error(kernel, shaped, lengths)


def latent_error(kernel: Kernel, subject: Subject) -> float:
    problem = subject.problem
    lengths = (63, 1, 320, 197, 0) if problem.page_size else ()
    shape = {"heads": 40, "seqlen_q": 3, "batch": len(lengths) or 2, "seqlen_kv": 384 if lengths else 129}
    shaped = msgspec.structs.replace(problem, **shape)
    return test_latent_emulated.worst_error(kernel, shaped, lengths, splits_of(subject.config) or 1)


def assert_right_gradients(kernel: Kernel, subject: Subject) -> None:
    problem = subject.problem
    assert isinstance(subject.config, HopperBackwardConfig)
    rendered = kernel, subject.config
    featured = problem.features or problem.packed
    shape = {"heads": 4, "kv_heads": 2, "batch": 1}
    # Tiles of a bias are of keys in steps of 8.
    keys = 408 if problem.bias is Bias.ADDITIVE else 410
    shape |= {"seqlen_q": 350, "seqlen_kv": keys} if featured else {"seqlen_q": 150, "seqlen_kv": 270}
    shaped = msgspec.structs.replace(problem, **shape)
    if problem.packed:
        emulated(shaped, 3, BACKWARD_LENGTHS, spare=30, rendered=rendered)
    else:
        emulated(shaped, 3 if featured else 2, rendered=rendered)


def assert_right(kernel: Kernel, subject: Subject) -> None:
    """Emulates a kernel and compares its results with plain attention."""
    if subject.family == "backward_hopper":
        assert_right_gradients(kernel, subject)
    elif subject.family == "decode_latent_hopper":
        assert latent_error(kernel, subject) < ALLOWED
    elif subject.problem.batch_invariant:
        assert not differing(kernel, subject.problem, rendered(FOLDED))
    elif subject.problem.page_size:
        assert error_with_pages(kernel, subject) < ALLOWED
    else:
        assert forward_error(kernel, subject) < ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize(
    "subject", dict.fromkeys(mutant.subject for mutant in MUTANTS), ids=lambda subject: subject.label
)
def test_unmodified_kernels_are_right(subject: Subject) -> None:
    assert_right(rendered(subject), subject)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_mutants_are_wrong(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant.racy:

        def read_late(_: Program, ticket: int) -> int:
            time.sleep(LATE)
            return ticket

        monkeypatch.setattr(Program, "read_ticket", read_late)

    def emulate() -> None:
        for _ in range(REPEATS.get(mutant.id, 1)):
            assert_right(broken(mutant), mutant.subject)

    with pytest.raises((AssertionError, BarrierError, IndexError)):
        emulate()
