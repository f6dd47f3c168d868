"""Launches a kernel on one case and compares its results with the reference.

The backward pass has its comparisons in `gradients/comparison.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flashtune.core.kernel import Kernel
from flashtune.core.target import Target
from flashtune.launch.binding import Binary, bind
from flashtune.launch.tensors import BackwardTensors, ForwardTensors
from flashtune.verification.cases import Case
from flashtune.verification.inputs.guarded_tensors import (
    Guarded,
    Role,
    bits_of,
    checksum,
    guarded_flat,
    nonzero,
    poison,
    stray_writes,
)
from flashtune.verification.inputs.placement import pick
from flashtune.verification.inputs.prepared import Prepared
from flashtune.verification.tolerance import worst_ratio

if TYPE_CHECKING:
    from flashtune.launch.bundle_binding import BundledBinary

    # Loaded for a backward pass alone.
    from flashtune.verification.gradients.inputs import Prepared as PreparedGradients


class Finding(NamedTuple):
    """One figure of a check. It must not exceed `limit`, nor be NaN."""

    what: str  # A description of the comparison.
    figure: Tensor  # A scalar on the device.
    limit: float  # 1 for error ratios, 0 for counts.

    def holds(self) -> bool:
        """Returns whether the figure is within its limit. Waits for the device."""
        return self.figure.item() <= self.limit


class Pass(NamedTuple):
    """A launch of a kernel on a case, and the comparison of its results."""

    prepared: Prepared | PreparedGradients  # The case's tensors and reference.
    tensors: ForwardTensors | BackwardTensors  # The tensors to which the launch is bound.
    arguments: tuple[Tensor | None, ...]  # The tensors of a launch.
    # Yields the findings of a launch, given its number, and returns the results that must agree between
    # launches.
    compare: Callable[[int], Generator[Finding, None, dict[str, Tensor]]]
    # Yields the differences of a launch's results from the first one's.
    unlike: Callable[[dict[str, Tensor], dict[str, Tensor]], Iterator[Finding]]


def launch_findings(
    kernel: Kernel,
    compiled: Binary | BundledBinary | None,
    case: Case,
    pass_: Pass,
    target: Target,
    cold: int,
    *,
    launched: bool = True,
) -> Iterator[Finding]:
    """Launches a kernel on a case `case.repeats` times and yields the findings.

    `compiled` is None under the interpreter. Before each launch but the first, `cold` bytes of the L2 cache
    are flushed. Copies then arrive later, which exposes missing waits. Without `launched` there is no launch,
    and the findings report that nothing was written.
    """
    workspaces: list[Guarded] = []
    prepared, tensors = pass_.prepared, pass_.tensors

    def allocate(shape: tuple[int, ...], on: torch.device) -> Tensor:
        workspaces.append(guarded_flat(shape, on, Role.WORKSPACE))
        return workspaces[-1].view

    launch: Callable[..., None] = no_launch
    if launched:
        launch = bind(kernel, target, tensors, prepared.side, compiled=compiled, allocate=allocate)
    first: dict[str, Tensor] = {}
    for repeat in range(case.repeats):
        for tensor in prepared.written.values():
            poison(tensor)
        if repeat and cold:
            torch.empty(2 * cold, dtype=torch.uint8, device=tensors.q.device).zero_()
        launch(pass_.arguments, case.scale, prepared.side)
        results = yield from pass_.compare(repeat)
        if repeat:
            yield from pass_.unlike(first, results)
        elif case.repeats > 1:
            first = {name: result.clone() for name, result in results.items()}
    for name, tensor in prepared.written.items():
        yield Finding(f"{case.label}: writes around {name}", stray_writes(tensor), 0.0)
    for workspace in workspaces:
        yield Finding(f"{case.label}: writes around a workspace", stray_writes(workspace), 0.0)
    changed = nonzero(checksum(prepared.read) - prepared.checksum)
    yield Finding(f"{case.label}: inputs overwritten", changed, 0.0)


def no_launch(*_: object) -> None:
    """Does nothing, in place of a launch."""


def forward_pass(kernel: Kernel, case: Case, prepared: Prepared) -> Pass:
    """Returns the launch of a forward kernel. Later launches must have the same bits as the first."""
    memory = prepared.memory
    q, k, v, out = (tensor.given for tensor in (memory.q, memory.k, memory.v, memory.out))
    lse = memory.lse.given if kernel.specialization.lse else None
    # Rows after those of the sequences are checked like the memory around a tensor.
    outputs = {"out": memory.out.view} | ({} if lse is None else {"lse": memory.lse.view})

    def compare(repeat: int) -> Generator[Finding, None, dict[str, Tensor]]:
        if not repeat:
            yield from _compare(case, prepared, lse=lse is not None)
        return {name: bits_of(tensor) for name, tensor in outputs.items()}

    def unlike(first: dict[str, Tensor], later: dict[str, Tensor]) -> Iterator[Finding]:
        for name, earlier in first.items():
            different = nonzero(earlier - later[name])
            yield Finding(f"{case.label}: elements unlike an earlier launch's", different, 0.0)

    return Pass(prepared, ForwardTensors(q, k, v, out), (q, k, v, out, lse), compare, unlike)


def _compare(case: Case, prepared: Prepared, *, lse: bool) -> Iterator[Finding]:
    expected, out = prepared.expected, prepared.memory.out.view
    # Rows that a sequence lacks are replaced by others.
    compared = (case.problem, prepared.lengths, *prepared.chosen)
    rows = pick(out, *compared)
    yield Finding(f"{case.label}: row errors", worst_ratio(rows, expected.out, expected.allowed), 1.0)
    # Infinity or NaN times zero is NaN, and a finite number times zero is zero.
    yield Finding(f"{case.label}: elements not written or not finite", nonzero(out * 0), 0.0)
    if lse:
        exact = expected.lse[..., None]
        lse_rows = pick(prepared.memory.lse.view[..., None], *compared)
        ratio = worst_ratio(lse_rows, exact, expected.lse_allowed)
        yield Finding(f"{case.label}: log-sum-exp errors", ratio, 1.0)
