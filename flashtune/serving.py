"""Servers: what computes one kind of call, prepared once and then called for every call alike."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from flashtune.binaries import binary_of
from flashtune.decision import Server, baseline, decide, needed_specialization, output_like
from flashtune.dispatch import default_selections, of_nearest, proven_by
from flashtune.errors import KernelError, VerificationError
from flashtune.launch import bind
from flashtune.nearest import is_far
from flashtune.notices import search_command, tell_once
from flashtune.rendered import kernel_of
from flashtune.request import Prefer, Request
from flashtune.self_check import passes_self_check
from flashtune.servers import Result, Serve, baseline_server, in_words, interpreted, launcher, nothing
from flashtune.side import NO_SIDE, Side
from flashtune.side_inputs import side_views

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from flashtune.decision import Decision
    from flashtune.kernel import Kernel, Specialization
    from flashtune.launch import Binary
    from flashtune.problem import Problem
    from flashtune.record import Selection
    from flashtune.target import Target

__all__ = ["Result", "Serve", "forget_choices", "prepare"]

# Choices of calls with features that are kept, a few of each kind of model and batch.
CHOICES_LIMIT = 1024


class Choice(NamedTuple):
    """A kernel that was chosen, compiled and proven: what shapes of one problem have in common."""

    kernel: Kernel
    target: Target
    binary: Binary


class Asked(NamedTuple):
    """What a choice hangs on."""

    problem: Problem
    specialization: Specialization
    prefer: Prefer
    device: torch.device


_choices: dict[Asked, Choice] = {}


def prepare(request: Request, q: Tensor, k: Tensor, v: Tensor, side: Side = NO_SIDE) -> Serve:
    """What serves a request from now on: compiled, loaded and proven.

    Raises:
        ProblemError: Nobody can serve it.
        KernelError: Only generated kernels may serve, and none compiles or loads.
        VerificationError: Only generated kernels may serve, and they are wrong on this GPU.
    """
    if request.problem.features and not request.needs_grad and not request.is_empty:
        # Packed sequences come in ever new numbers of tokens.
        choice = _choices.get(_asked(request, q, k, v, side))
        if choice is not None:
            return _bound(choice, request, q, k, v, side)
    decision = decide(request, q, k, v, side)
    if decision.server is Server.GENERATED:
        return _generated_or_baseline(decision, request, q, k, v, side)
    if decision.server is Server.INTERPRETER:
        return functools.partial(interpreted, decision, request)
    if decision.server is Server.NOBODY:
        return functools.partial(nothing, request)
    if request.needs_grad:
        tell_once(
            "gradients",
            "an input requires grad and flashtune generates no backward pass yet: "
            f"{in_words(decision.server)} serves",
        )
    return baseline_server(decision.server, request)


def forget_choices() -> None:
    """Every problem is new again."""
    _choices.clear()


def _asked(request: Request, q: Tensor, k: Tensor, v: Tensor, side: Side) -> Asked:
    needed = needed_specialization(request, q, k, v, side)
    return Asked(request.problem, needed, request.prefer, request.device)


def _generated_or_baseline(
    decision: Decision, request: Request, q: Tensor, k: Tensor, v: Tensor, side: Side = NO_SIDE
) -> Serve:
    assert decision.selection is not None
    assert decision.target is not None
    failure: KernelError | VerificationError
    try:
        serve = _generated(decision.selection, decision.target, request, q, k, v, side)
    except (KernelError, VerificationError) as error:
        failure = error
    else:
        _tell_of_fallback(decision.selection, request)
        return serve
    # A server that meets ever new lengths would be told of the same kernel at each of them.
    matter, advice = "failed", f"run {search_command(request.problem)}"
    for other, name in _instead(decision, request, q, k, v, side):
        try:
            serve = _generated(other, decision.target, request, q, k, v, side)
        except (KernelError, VerificationError):
            # The first failure is the one to be told; another kernel may still do.
            continue
        tell_once(matter, f"{failure}, so {name} serves: {advice}")
        return serve
    if request.prefer is Prefer.GENERATED:
        raise failure
    instead = baseline(request)
    tell_once(matter, f"{failure}, so {in_words(instead)} serves: {advice}")
    return baseline_server(instead, request)


def _instead(
    decision: Decision, request: Request, q: Tensor, k: Tensor, v: Tensor, side: Side
) -> Iterator[tuple[Selection, str]]:
    """What is tried, each with a name, where the kernel of a decision fails."""
    selection, target = decision.selection, decision.target
    assert selection is not None
    assert target is not None
    tuned = of_nearest(selection)
    if tuned is not None:
        yield tuned, "the config of the nearest tuned shape"
    if request.prefer is Prefer.GENERATED:
        needed = needed_specialization(request, q, k, v, side)
        for default in default_selections(request.problem, target, needed):
            if default != selection:
                yield default, "a default config"


def _generated(
    selection: Selection, target: Target, request: Request, q: Tensor, k: Tensor, v: Tensor, side: Side
) -> Serve:
    """A generated kernel, proven and bound to these strides.

    Raises:
        KernelError: It does not compile or load.
        VerificationError: It is wrong on this GPU.
    """
    record = selection.record
    assert record.config is not None
    asked = _asked(request, q, k, v, side)
    kernel = kernel_of(record, asked.specialization)
    binary = binary_of(kernel, target, q.device)
    if not proven_by(selection, kernel.digest):
        problem = msgspec.structs.replace(request.problem, causal=record.problem.causal)
        if not passes_self_check(kernel, problem, record.config, target, q.device, binary):
            raise VerificationError(
                f"the {record.family} kernel for {request.problem.key} failed its self-check on {target.name}"
            )
    choice = Choice(kernel, target, binary)
    served = _bound(choice, request, q, k, v, side)
    if request.problem.features:
        if len(_choices) >= CHOICES_LIMIT:
            _choices.clear()
        _choices[asked] = choice
    return served


def _bound(choice: Choice, request: Request, q: Tensor, k: Tensor, v: Tensor, side: Side) -> Serve:
    """A chosen kernel bound to these strides.

    Raises:
        KernelError: It does not load.
    """
    tensors = *request.views(q, k, v), output_like(request)
    if not request.problem.features:
        return launcher(bind(choice.kernel, choice.target, *tensors, compiled=choice.binary), request, q)
    beside = side_views(request.problem, side, tensors[1].shape[0])
    return launcher(bind(choice.kernel, choice.target, *tensors, beside, compiled=choice.binary), request, q)


def _tell_of_fallback(selection: Selection, request: Request) -> None:
    problem = request.problem
    if selection.source == "default":
        what = f"nothing like {problem.key} is tuned for this GPU, so a default config serves"
    elif selection.source == "nearest" and is_far(selection.measured.problem, problem):
        what = f"{problem.key} is not tuned here and its nearest, {selection.measured.problem.key}, is far"
    else:
        return
    tell_once("untuned", f"{what}: run {search_command(problem)}")
