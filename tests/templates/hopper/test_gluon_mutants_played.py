"""Some mutants of Gluon kernels, played on the CPU: what is neither a race nor of PTX shows there too."""

from __future__ import annotations

import contextlib

import msgspec
import pytest

from flashtune.core.kernel import Kernel
from flashtune.verification.cases import splits_of
from tests.emulator.played_parts import Stuck
from tests.mutants import third_tiles
from tests.mutants.core import Mutant, Subject, broken, rendered
from tests.mutants.gluon import gluon_mutants
from tests.templates.backward import test_backward_hopper_played
from tests.templates.decode import test_latent_played
from tests.templates.hopper import test_hopper_played

MUTANTS = {mutant.id: mutant for mutant in gluon_mutants()}
BACKWARD = (
    "diagonal one key too far",
    "mask of the first group's keys",
    "divided: diagonal one key too far",
    "rows of the KV head",
    "log-sum-exps for deltas",
    "dq of the other group's keys",
    "transposed: dq of the other group's keys",
    "heads of groups in turn",
    "sums not wound back",
    "sums not moved over hidden blocks",
    "dq: halves swapped",
    "divided: sums of the block before",
    "dq of a program's last step twice",
    "order: halves: one counter for both",
    "order: turns never passed",
)
# Their error is a race between threads, which some plays do not show.
RACES = ("order: halves: one counter for both",)
PLAYS_OF_RACES = 5
LATENT = (
    "diagonal one key too far",
    "later blocks' masks missing",
    "empty rows shifted by -inf",
    "first keys forgotten in some rows",
    "keys of an empty part",
    "right half: rescaling late by a block",
    "rest left out",
    "left half of keys twice",
    "pages a block late",
    "small pages: a page that is not full not looked up",
    "lse beyond the heads",
    "parts: last blocks left out",
    "weights never given back",
)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.emulator.played_parts.PATIENCE_S", 4.0)


def subjects(family: str, names: tuple[str, ...]) -> list[Subject]:
    return list(dict.fromkeys(MUTANTS[f"{family}: {name}"].subject for name in names))


def played_backward(
    kernel: Kernel, subject: Subject, monkeypatch: pytest.MonkeyPatch, keys: int = 190
) -> None:
    made = (kernel, subject.config)
    monkeypatch.setattr(test_backward_hopper_played, "kernel_of", lambda *_, **__: made)
    lengths = {"heads": 4, "kv_heads": 2, "batch": 1, "seqlen_q": 150, "seqlen_kv": keys}
    test_backward_hopper_played.played(msgspec.structs.replace(subject.problem, **lengths), 2)


@pytest.mark.slow
@pytest.mark.parametrize("subject", subjects("backward_hopper", BACKWARD), ids=lambda one: one.label)
def test_gradients_of_the_right_kernels_are_right(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    played_backward(rendered(subject), subject, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_of_a_broken_kernel_are_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[f"backward_hopper: {name}"]

    def play_all() -> None:
        for _ in range(PLAYS_OF_RACES if name in RACES else 1):
            played_backward(broken(mutant), mutant.subject, monkeypatch)

    with pytest.raises((AssertionError, Stuck, IndexError)):
        play_all()


def worst_of_latent(kernel: Kernel, subject: Subject) -> float:
    problem = subject.problem
    lengths = (63, 1, 320, 197, 0) if problem.page_size else ()
    shape = {"heads": 40, "seqlen_q": 3, "batch": len(lengths) or 2, "seqlen_kv": 384 if lengths else 129}
    shaped = msgspec.structs.replace(problem, **shape)
    return test_latent_played.worst_error(kernel, shaped, lengths, splits_of(subject.config) or 1)


@pytest.mark.slow
@pytest.mark.parametrize("subject", subjects("decode_latent_hopper", LATENT), ids=lambda one: one.label)
def test_outputs_of_the_right_kernels_are_right(subject: Subject) -> None:
    assert worst_of_latent(rendered(subject), subject) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", LATENT)
def test_outputs_of_a_broken_kernel_are_wrong(name: str) -> None:
    mutant = MUTANTS[f"decode_latent_hopper: {name}"]
    with contextlib.suppress(Stuck, IndexError):
        assert not worst_of_latent(broken(mutant), mutant.subject) < 1e-6


def is_right(kernel: Kernel, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a kernel is right where there are three tiles of queries and of keys."""
    if subject.family == "decode_latent_hopper":
        return worst_of_latent(kernel, subject) < 1e-6
    if subject.family == "forward_hopper":
        lengths = {"heads": 1, "kv_heads": 1, "seqlen_q": 290, "seqlen_kv": 270}
        problem = msgspec.structs.replace(subject.problem, **lengths)
        return test_hopper_played.worst_error(kernel, problem, 2) < 1e-6
    try:
        played_backward(kernel, subject, monkeypatch, keys=270)
    except AssertionError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("mutant", third_tiles.gluon(), ids=lambda mutant: mutant.id)
def test_a_kernel_that_is_broken_from_a_third_tile_on_is_wrong_there(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_right(rendered(mutant.subject), mutant.subject, monkeypatch)
    assert not is_right(broken(mutant), mutant.subject, monkeypatch)
