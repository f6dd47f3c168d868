"""`explain`: what would serve a call and why, without compiling, launching or warning."""

from __future__ import annotations

import msgspec
from torch import Tensor

from flashtune.api import CausalOption, LayoutOption, PreferOption
from flashtune.decision import Decision, Server, baseline, decide, needed_specialization
from flashtune.dispatch import of_nearest, proven_by
from flashtune.kernel import Specialization
from flashtune.notices import search_command
from flashtune.problem import Problem
from flashtune.quantization import given_scales
from flashtune.record import Selection, Standing
from flashtune.rendered import kernel_of
from flashtune.request import Prefer, Request, read_request, require_tensors, requires_grad
from flashtune.self_check import known_seconds, known_verdict


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What would serve a call.

    Attributes:
        problem: What the call poses.
        target: Name of the GPU, empty where it does not matter.
        server: Who computes it: `generated`, `interpreter`, `sdpa`, `standard` or `nobody`.
        reason: Why.
        selection: The record that was found, with its standing and source; None if none was sought.
        specialization: What the kernel may assume of these tensors; None where no kernel serves.
        kernel: The kernel's digest, empty where no kernel serves.
        standing: What is known of that very kernel here, its specialisation included.
        check_seconds: What its self-check took beyond compiling; None where it had none on this machine.
        command: What tunes this shape.
    """

    problem: Problem
    target: str
    server: Server
    reason: str
    selection: Selection | None = None
    specialization: Specialization | None = None
    kernel: str = ""
    standing: Standing | None = None
    check_seconds: float | None = None
    command: str

    def __str__(self) -> str:
        lines = [
            f"{self.problem.key} on {self.target or 'any device'}: {self.server}",
            f"  because {self.reason}",
        ]
        if self.selection is not None:
            lines += _record_lines(self.selection)
        if self.specialization is not None:
            alignment, bits = int(self.specialization.alignment), self.specialization.index_bits
            lse = ", with log-sum-exp" if self.specialization.lse else ""
            lines.append(
                f"  kernel {self.kernel}: strides of {alignment}, {bits}-bit offsets{lse}; {self.standing}"
            )
        if self.check_seconds is not None:
            lines.append(f"  its self-check on this machine took {1e3 * self.check_seconds:.0f} ms")
        if self.standing is not Standing.TIMED:
            lines.append(f"  tune this shape with: {self.command}")
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: CausalOption = False,
    scale: float | None = None,
    layout: LayoutOption = "bhsd",
    return_lse: bool = False,
    prefer: PreferOption = "fastest",
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Explanation:
    """What `attention` would do with these arguments, which are its own.

    Raises:
        ProblemError: As `attention`.
        StoreError: The user's database cannot be read.
    """
    del scale  # any scale is served alike
    require_tensors(q, k, v)
    scales = given_scales(q_scale, k_scale, v_scale)
    needs_grad = requires_grad(q, k, v, scales)
    request = read_request(q, k, v, causal, layout, return_lse, prefer, needs_grad, scales)
    decision = decide(request, q, k, v)
    if decision.server is not Server.GENERATED:
        return _explanation(request, decision)
    return _of_kernel(request, decision, needed_specialization(request, q, k, v))


def _of_kernel(request: Request, decision: Decision, specialization: Specialization) -> Explanation:
    assert decision.selection is not None
    assert decision.target is not None
    kernel = kernel_of(decision.selection.record, specialization)
    known = proven_by(decision.selection, kernel.digest) or known_verdict(kernel, decision.target)
    tuned = of_nearest(decision.selection)
    if known is False and tuned is not None:
        near = tuned.record.problem.key
        reason = f"the nearest tuned shape is {near}, and what was expected to be faster failed here"
        return _of_kernel(
            request, msgspec.structs.replace(decision, selection=tuned, reason=reason), specialization
        )
    if known is False and request.prefer is Prefer.FASTEST:
        refused = Decision(
            baseline(request),
            "the selected kernel failed its self-check here",
            decision.target,
            decision.selection,
        )
        return _explanation(request, refused)
    standing, seconds = decision.selection.standing, None
    if not proven_by(decision.selection, kernel.digest):
        standing = Standing.VERIFIED if known else Standing.UNPROVEN
        seconds = known_seconds(kernel, decision.target)
    return msgspec.structs.replace(
        _explanation(request, decision),
        specialization=specialization,
        kernel=kernel.digest,
        standing=standing,
        check_seconds=seconds,
    )


def _explanation(request: Request, decision: Decision) -> Explanation:
    return Explanation(
        problem=request.problem,
        target=decision.target.name if decision.target else "",
        server=decision.server,
        reason=decision.reason,
        selection=decision.selection,
        command=search_command(request.problem),
    )


def _record_lines(selection: Selection) -> list[str]:
    record = selection.record
    label = record.config.label() if record.config else "no config"
    lines = [
        f"  {selection.source} record of {record.problem.key}: {record.family}, {label}; {selection.standing}"
    ]
    if record.measurement is not None:
        peers = "".join(f", {peer.name} {peer.ms:.4g} ms" for peer in record.measurement.peers)
        lines.append(f"  measured there: {record.measurement.ms:.4g} ms{peers}")
    return lines
