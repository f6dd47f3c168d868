"""Tests that the emulator detects mutants of Gluon kernels other than races and PTX errors."""

from __future__ import annotations

import contextlib

import msgspec
import pytest

from flashtune.core.kernel import Kernel
from flashtune.verification.cases import splits_of
from tests.emulator.hardware import BarrierError
from tests.mutants import third_tiles
from tests.mutants.core import Mutant, Subject, broken, rendered
from tests.mutants.forward_hopper import hopper_pages
from tests.mutants.gluon import gluon_mutants
from tests.templates.backward import test_backward_hopper_emulated
from tests.templates.decode import test_latent_emulated
from tests.templates.hopper.emulated import test_hopper_emulated, test_hopper_pages_emulated

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
# Their error is a race between threads, which some runs do not show.
RACES = ("order: halves: one counter for both",)
RACE_REPEATS = 5
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


def subjects(family: str, names: tuple[str, ...]) -> list[Subject]:
    return list(dict.fromkeys(MUTANTS[f"{family}: {name}"].subject for name in names))


def emulated_backward(
    kernel: Kernel, subject: Subject, monkeypatch: pytest.MonkeyPatch, keys: int = 190
) -> None:
    made = (kernel, subject.config)
    monkeypatch.setattr(test_backward_hopper_emulated, "kernel_of", lambda *_, **__: made)
    lengths = {"heads": 4, "kv_heads": 2, "batch": 1, "seqlen_q": 150, "seqlen_kv": keys}
    test_backward_hopper_emulated.emulated(msgspec.structs.replace(subject.problem, **lengths), 2)


@pytest.mark.slow
@pytest.mark.parametrize("subject", subjects("backward_hopper", BACKWARD), ids=lambda one: one.label)
def test_gradients_of_unmodified_kernels_are_correct(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated_backward(rendered(subject), subject, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_of_mutants_are_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[f"backward_hopper: {name}"]

    def emulate_all() -> None:
        for _ in range(RACE_REPEATS if name in RACES else 1):
            emulated_backward(broken(mutant), mutant.subject, monkeypatch)

    with pytest.raises((AssertionError, BarrierError, IndexError)):
        emulate_all()


def worst_of_latent(kernel: Kernel, subject: Subject) -> float:
    problem = subject.problem
    lengths = (63, 1, 320, 197, 0) if problem.page_size else ()
    shape = {"heads": 40, "seqlen_q": 3, "batch": len(lengths) or 2, "seqlen_kv": 384 if lengths else 129}
    shaped = msgspec.structs.replace(problem, **shape)
    return test_latent_emulated.worst_error(kernel, shaped, lengths, splits_of(subject.config) or 1)


@pytest.mark.slow
@pytest.mark.parametrize("subject", subjects("decode_latent_hopper", LATENT), ids=lambda one: one.label)
def test_outputs_of_unmodified_kernels_are_correct(subject: Subject) -> None:
    assert worst_of_latent(rendered(subject), subject) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", LATENT)
def test_outputs_of_mutants_are_wrong(name: str) -> None:
    mutant = MUTANTS[f"decode_latent_hopper: {name}"]
    with contextlib.suppress(BarrierError, IndexError):
        assert not worst_of_latent(broken(mutant), mutant.subject) < 1e-6


PAGES = {
    mutant.name: mutant
    for mutant in (
        *hopper_pages.pages(),
        *hopper_pages.rows(),
        *hopper_pages.conversion(),
        *hopper_pages.page_scales(),
        *hopper_pages.conversion_waits(),
    )
    if not mutant.racy
}


def worst_of_pages(kernel: Kernel, subject: Subject) -> float:
    problem = subject.problem
    lengths = [(70, keys) for keys in (63, 257, 512, 0, 200)]
    shape = {"heads": 4, "kv_heads": 2, "batch": len(lengths), "seqlen_q": 70}
    shaped = msgspec.structs.replace(problem, **shape)
    return test_hopper_pages_emulated.worst_error(kernel, shaped, lengths)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_kernels_of_pages_are_right_and_mutants_wrong(name: str) -> None:
    mutant = PAGES[name]
    assert worst_of_pages(rendered(mutant.subject), mutant.subject) < 1e-12
    with contextlib.suppress(BarrierError, IndexError):
        assert not worst_of_pages(broken(mutant), mutant.subject) < 1e-6


def is_right(kernel: Kernel, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a kernel is right where there are three tiles of queries and of keys."""
    if subject.family == "decode_latent_hopper":
        return worst_of_latent(kernel, subject) < 1e-6
    if subject.family == "forward_hopper":
        lengths = {"heads": 1, "kv_heads": 1, "seqlen_q": 290, "seqlen_kv": 270}
        problem = msgspec.structs.replace(subject.problem, **lengths)
        return test_hopper_emulated.worst_error(kernel, problem, 2) < 1e-6
    try:
        emulated_backward(kernel, subject, monkeypatch, keys=270)
    except AssertionError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("mutant", third_tiles.gluon(), ids=lambda mutant: mutant.id)
def test_outputs_of_third_tile_mutants_are_wrong(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_right(rendered(mutant.subject), mutant.subject, monkeypatch)
    assert not is_right(broken(mutant), mutant.subject, monkeypatch)
