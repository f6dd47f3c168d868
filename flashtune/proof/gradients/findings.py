"""Launches a backward kernel on one case and says what decides whether it is right there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from flashtune.backward import bind_backward
from flashtune.proof.findings import Finding
from flashtune.proof.gate import worst_ratio
from flashtune.proof.inputs import Guarded, Role, checksum, guarded_flat, poison, stray_writes
from flashtune.proof.placing import missing, pick

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.kernel import Kernel
    from flashtune.launch import Binary
    from flashtune.proof.cases import Case
    from flashtune.proof.gradients.prepared import Prepared
    from flashtune.proof.gradients.reference import Gradient
    from flashtune.target import Target


def gradient_findings(
    kernel: Kernel,
    compiled: Binary | None,
    case: Case,
    prepared: Prepared,
    target: Target,
    cold: int,
) -> Iterator[Finding]:
    """Launches a kernel on a case, as often as the case asks, and yields what decides.

    Every launch must be right by itself; of a deterministic problem all must agree bit for bit.

    Args:
        kernel: The kernel.
        compiled: Its binary; None under the interpreter.
        case: The problem.
        prepared: Its tensors, and what must come of them.
        target: The GPU.
        cold: Bytes of the cache that is emptied before each launch but the first; 0 to leave it.
    """
    workspaces: list[Guarded] = []

    def allocate(shape: tuple[int, ...], on: torch.device) -> Tensor:
        workspaces.append(guarded_flat(shape, on, Role.WORKSPACE))
        return workspaces[-1].view

    tensors, side = prepared.tensors, prepared.side
    launch = bind_backward(kernel, target, tensors, side, compiled=compiled, allocate=allocate)
    first: dict[str, Tensor] = {}
    for repeat in range(case.repeats):
        for one in prepared.written.values():
            poison(one)
        if repeat and cold:
            torch.empty(2 * cold, dtype=torch.uint8, device=tensors.q.device).zero_()
        launch(tensors, case.scale, side)
        yield from _compare(case, prepared)
        if not case.problem.deterministic or case.repeats == 1:
            continue
        if not repeat:
            first = {name: one.view.clone() for name, one in prepared.written.items()}
            continue
        for name, earlier in first.items():
            unlike = (earlier != prepared.written[name].view).sum()
            yield Finding(f"{case.label}: elements of {name} unlike an earlier launch's", unlike, 0.0)
    for name, one in prepared.written.items():
        yield Finding(f"{case.label}: writes around {name}", stray_writes(one), 0.0)
    for workspace in workspaces:
        yield Finding(f"{case.label}: writes around a workspace", stray_writes(workspace), 0.0)
    changed = checksum(prepared.read) != prepared.checksum
    yield Finding(f"{case.label}: inputs overwritten", changed.sum(), 0.0)


def _compare(case: Case, prepared: Prepared) -> Iterator[Finding]:
    expected, pairs = prepared.expected, prepared.chosen
    for name, one in prepared.written.items():
        gradient: Gradient = getattr(expected, name)
        if name == "dq":
            result = _of_queries(case, prepared, one.view, gradient.exact)
        else:
            result = one.view[pairs.batch, pairs.kv_head]
        ratio = worst_ratio(result, gradient.exact, gradient.allowed)
        yield Finding(f"{case.label}: row errors of {name}", ratio, 1.0)
        # Infinity times zero is NaN, and nothing else than zero comes of a number.
        lost = (one.view * 0 != 0).sum()
        yield Finding(f"{case.label}: elements of {name} not written or not finite", lost, 0.0)


def _of_queries(case: Case, prepared: Prepared, written: Tensor, exact: Tensor) -> Tensor:
    """Rows of all heads of the compared pairs, as in `Expected`; where there is no row, what is exact."""
    problem, pairs = case.problem, prepared.chosen
    heads = (pairs.batch[:, None] * problem.heads + pairs.heads(problem)).flatten()
    everything = torch.arange(problem.seqlen_q)
    picked = pick(written, problem, prepared.lengths, heads, everything)
    absent = missing(problem, prepared.lengths, heads, everything)
    if absent is not None:
        picked = torch.where(absent.to(picked.device)[..., None], exact.view(picked.shape), picked)
    return picked.reshape(exact.shape)
