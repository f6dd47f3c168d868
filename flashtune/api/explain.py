"""`explain` and its variants: the backend of a call and the reason, without compiling or launching."""

from __future__ import annotations

from typing import Unpack

import msgspec
from torch import Tensor

from flashtune.core.kernel import Specialization
from flashtune.core.notices import search_command
from flashtune.core.problem import Problem
from flashtune.core.record import PeerTime, Selection, VerificationStatus
from flashtune.dispatch.bound_request import BoundRequest, KernelKey
from flashtune.dispatch.decision import Backend, Decision, baseline, choose
from flashtune.dispatch.lookup import nearest_selection
from flashtune.request.call import (
    Call,
    DenseOptions,
    PagedFlexOptions,
    VarlenOptions,
    dense_call,
    varlen_call,
)
from flashtune.request.functions.call import paged_flex_call
from flashtune.request.read_call import read_call
from flashtune.request.request import Prefer, Request
from flashtune.runtime.call_key import unsigned
from flashtune.runtime.session import SESSION
from flashtune.templates.config_text import config_text
from flashtune.templates.registry import find_family


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The backend of a call and the reason for it.

    Attributes:
        problem: The problem of the call.
        target: Name of the GPU, or an empty string if it does not matter.
        backend: The backend: `generated`, `interpreter`, `sdpa`, `unfused` or `none`.
        reason: The reason for the backend.
        selection: The selected record, with its status and source. None if no record was looked up.
        specialization: Properties of the tensors that the kernel assumes. None without a generated kernel.
        kernel: Digest of the kernel. Empty without a generated kernel.
        code: Origin of the kernel's machine code: `bundle FILE`, or `Triton`, which compiles it at the first
            call unless its cache has it. Empty without a generated kernel.
        standing: Verification status of this kernel and specialization on this machine.
        check_seconds: Time of its self-check after loading, in s. None if this machine ran no self-check.
        command: The command that tunes this shape.
        backward: The explanation of the backward pass, if an input requires grad.
        caller: The module of `flashtune.integrations` that called last in this process, or empty.
        recognised: The features that serve in place of score and mask functions, as words of a shape. Empty
            without functions, and if kernels compute these.
    """

    problem: Problem
    target: str
    backend: Backend
    reason: str
    selection: Selection | None = None
    specialization: Specialization | None = None
    kernel: str = ""
    code: str = ""
    standing: VerificationStatus | None = None
    check_seconds: float | None = None
    command: str
    backward: Explanation | None = None
    caller: str = ""
    recognised: str = ""

    @property
    def server(self) -> Backend:
        """Returns `backend`. Deprecated: version 0.2 removes this name."""
        return self.backend

    def __str__(self) -> str:
        lines = [
            f"{self.problem.key} on {self.target or 'any device'}: {self.backend}",
            f"  because {self.reason}",
        ]
        if self.recognised:
            lines.append(f"  the functions are recognised as features: {self.recognised}")
        if self.caller:
            lines.append(f"  called by flashtune.integrations.{self.caller}")
        if self.selection is not None:
            lines += _record_lines(self.selection)
        if self.specialization is not None:
            alignment, bits = int(self.specialization.alignment), self.specialization.index_bits
            lse = ", with log-sum-exp" if self.specialization.lse else ""
            bias = ", no gradient of the bias" if self.specialization.constant_bias is True else ""
            assumed = f"strides of {alignment}, {bits}-bit offsets{lse}{bias}"
            lines.append(f"  kernel {self.kernel}: {assumed}; {self.standing}")
            lines.append(f"  its machine code is from {self.code}")
        if self.check_seconds is not None:
            lines.append(f"  its self-check on this machine took {1e3 * self.check_seconds:.0f} ms")
        if self.standing is not VerificationStatus.TIMED:
            lines.append(f"  tune this shape with: {self.command}")
        if self.backward is not None:
            lines.append(str(self.backward))
        return "\n".join(lines)


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[DenseOptions]
) -> Explanation:
    """Returns the backend that `attention` would use for these arguments.

    Raises:
        ProblemError: As `attention`.
        StoreError: The user's database cannot be read.
    """
    return explain_call(dense_call(q, k, v, return_lse=return_lse, **options))


def explain_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool = False,
    **options: Unpack[VarlenOptions],
) -> Explanation:
    """Returns the backend that `attention_varlen` would use for these arguments.

    Raises:
        ProblemError: As `attention_varlen`.
        StoreError: The user's database cannot be read.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return explain_call(varlen_call(q, k, v, *lengths, return_lse=return_lse, **options))


def explain_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[PagedFlexOptions],
) -> Explanation:
    """Returns the backend that `attention_paged` would use for these arguments, without `shared_prefix`.

    Raises:
        ProblemError: As `attention_paged`.
        StoreError: The user's database cannot be read.
    """
    return explain_call(
        paged_flex_call(q, k_cache, v_cache, block_table, kv_lengths, return_lse=return_lse, **options)
    )


def explain_call(call: Call) -> Explanation:
    """Returns the explanation of a call."""
    # Check the call before its queries are negated.
    read_call(call)
    bound = BoundRequest.of(unsigned(call), platform=SESSION.platform)
    request, decisions = bound.request, choose(bound)
    problems = (request.problem, request.backward) if request.needs_grad else (request.problem,)
    passes = [_explanation(*pair) for pair in zip(problems, decisions, strict=True)]
    if decisions[0].backend is Backend.GENERATED:
        explanations = [_of_kernel(*pair, request) for pair in zip(bound.passes, decisions, strict=True)]
        # If the kernel of one pass fails, a baseline computes both.
        failed = next(
            (explanation for explanation in explanations if explanation.backend is not Backend.GENERATED),
            None,
        )
        if failed is None or len(explanations) == 1:
            passes = explanations
        else:
            why = {"backend": failed.backend, "reason": failed.reason}
            passes = [msgspec.structs.replace(explanation, **why) for explanation in passes]
    return passes[0] if len(passes) == 1 else msgspec.structs.replace(passes[0], backward=passes[1])


def _of_kernel(key: KernelKey, decision: Decision, request: Request) -> Explanation:
    problem, specialization = key.problem, key.specialization
    assert decision.selection is not None
    assert decision.target is not None
    located = SESSION.loader.bundles.find(decision.selection.record, specialization, decision.target)
    if located is not None:
        is_tuned = decision.selection.is_tuned
        return msgspec.structs.replace(
            _explanation(problem, decision),
            specialization=specialization,
            kernel=located.entry.kernel,
            code=f"bundle {located.bundle.where}",
            standing=VerificationStatus.TIMED if is_tuned else VerificationStatus.VERIFIED,
        )
    kernel = SESSION.loader.kernel_of(decision.selection.record, specialization, decision.target)
    checks = SESSION.loader.checks
    is_proven = decision.selection.proves(kernel.digest) or checks.known_verdict(kernel, decision.target)
    tuned = nearest_selection(decision.selection)
    if is_proven is False and tuned is not None:
        near = tuned.record.problem.key
        reason = f"the nearest tuned shape is {near}, and what was expected to be faster failed here"
        instead = msgspec.structs.replace(decision, selection=tuned, reason=reason)
        return _of_kernel(key, instead, request)
    if is_proven is False and request.prefer is Prefer.FASTEST:
        failed = checks.failed_comparison(kernel, decision.target)
        refused = Decision(
            baseline(request),
            f"the selected kernel failed its self-check here ({failed})",
            decision.target,
            decision.selection,
        )
        return _explanation(problem, refused)
    standing, seconds = decision.selection.standing, None
    if not decision.selection.proves(kernel.digest):
        standing = VerificationStatus.VERIFIED if is_proven else VerificationStatus.UNPROVEN
        seconds = checks.known_seconds(kernel, decision.target)
    return msgspec.structs.replace(
        _explanation(problem, decision),
        specialization=specialization,
        kernel=kernel.digest,
        code="Triton",
        standing=standing,
        check_seconds=seconds,
    )


def _explanation(problem: Problem, decision: Decision) -> Explanation:
    return Explanation(
        caller=SESSION.callers.get(problem, ""),
        problem=problem,
        target=decision.target.name if decision.target else "",
        backend=decision.backend,
        reason=decision.reason,
        selection=decision.selection,
        command=search_command(problem),
    )


# Words for sources that are no tables or databases.
SOURCES = {"estimated": "another shape's"}


def _record_lines(selection: Selection) -> list[str]:
    record = selection.record
    label = config_text(record) or "no config"
    source = SOURCES.get(selection.source, selection.source)
    lines = [f"  {source} record of {record.problem.key}: {record.family}, {label}; {selection.standing}"]
    if record.problem.batch_invariant:
        order = find_family(record.family).numeric_order(record.problem, record.config)
        lines.append(f"  order of arithmetic: {order}")
    if record.measurement is not None:
        lines.append(f"  measured there: {_times_in_words(record.measurement.ms, record.measurement.peers)}")
        for shared in record.measurement.shared or ():
            times = _times_in_words(shared.ms, shared.peers)
            lines.append(f"  with a mask shared over {shared.sharing}: {times}")
    if selection.forecast is not None:
        why = selection.forecast
        lines.append(f"  expected here: {_times_in_words(why.ms, why.peers)}")
    return lines


def _times_in_words(ms: float, peers: tuple[PeerTime, ...]) -> str:
    return f"{ms:.4g} ms" + "".join(f", {peer.name} {peer.ms:.4g} ms" for peer in peers)
