"""Plans of calls with features, which are prepared once and called with new tensors of the same kinds."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

import msgspec
from torch import Tensor

from flashtune.api.merge_states import attend_shared, shared_calls
from flashtune.core.arguments import checked
from flashtune.core.canonical import shape_text
from flashtune.core.errors import ProblemError
from flashtune.core.extra_inputs import ExtraInputs
from flashtune.request.feature_request import check_call, read_call
from flashtune.request.options import Call, read_bias, seeded
from flashtune.request.request import Request, Result, requires_grad
from flashtune.runtime.autograd import go_back, leaves_like
from flashtune.runtime.feature_call_cache import executor_of_call, key_of_call, unsigned

Planned_co = TypeVar("Planned_co", bound=Result, covariant=True)


def plan_words(request: Request, scale: float | None) -> str:
    """Returns the text that `repr` shows of a plan: its shape and the options that are not in the shape."""
    words = [
        repr(shape_text(request.problem)),
        f"layout={request.layout.value!r}",
        f"device={str(request.device)!r}",
        f"prefer={request.prefer.value!r}",
        f"scale={scale!r}" if scale is not None else "",
        "return_lse=True" if request.return_lse else "",
        "with gradients" if request.needs_grad else "",
    ]
    return ", ".join(filter(None, words))


class CallPlan(Generic[Planned_co]):
    """A prepared call. It has little host overhead and can be captured in a CUDA graph."""

    __slots__ = (
        "_dropout",
        "_key",
        "_options",
        "_parts",
        "_scale",
        "_serve",
        "_shared",
        "_softcap",
        "_words",
    )
    NAME = "plan"

    def __init__(self, call: Call, shared_prefix: int = 0) -> None:
        """Selects, compiles and loads a kernel, checks it if necessary, and runs it once.

        Raises:
            ProblemError: The call is invalid, or no backend supports it.
            KernelError: A CUDA graph is being captured, or `prefer` is "generated" and no kernel loads.
            VerificationError: `prefer` is "generated" and the kernels are wrong on this GPU.
        """
        # Check the call before its key is computed.
        request = read_call(call, False)
        needs_grad = requires_grad(call.q, call.k, call.v, call.side)
        self._words = plan_words(msgspec.structs.replace(request, needs_grad=needs_grad), call.scale)
        # Do not store tensors of the call, so that their memory can be freed.
        self._options, self._scale = call.options, call.scale
        self._softcap, self._dropout = call.side.numbers
        self._shared = shared_prefix
        self._key = key_of_call(call)
        self._parts: list[CallPlan[Result]] = []
        if shared_prefix:
            self._parts = [CallPlan(part) for part in shared_calls(call, shared_prefix)]
        else:
            # Negated queries can have other strides than those of the call: gaps of a view are not preserved.
            served = unsigned(call)
            self._serve = executor_of_call(key_of_call(served), served)
        # Libraries and allocators create state in the first run, which is not possible during a capture.
        q, k, v = leaves_like(call.q, call.k, call.v)
        go_back(self._run(call._replace(q=q, k=k, v=v)), (q, k, v))

    def __repr__(self) -> str:
        """Returns the planned shape, in the syntax of `--shape`, and the options."""
        shared = f", shared_prefix={self._shared}" if self._shared else ""
        return f"flashtune.{self.NAME}({self._words}{shared})"

    def _run(self, call: Call) -> Planned_co:
        """Returns the attention of a call of the planned kind.

        Raises:
            ProblemError: The call is of another kind.
        """
        if checked(key_of_call, check_call, call) != self._key:
            raise ProblemError(
                "these tensors differ from the planned ones in shape, strides, alignment, dtype, device, "
                "grad or which are given: plan again with tensors like these"
            )
        if self._shared:
            return cast("Planned_co", attend_shared(call, self._shared, [part._run for part in self._parts]))
        call = unsigned(seeded(call))
        return cast("Planned_co", self._serve(call.q, call.k, call.v, call.scale, call.side))

    def _with(self, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs) -> Call:
        """Returns the planned call with other tensors."""
        return Call(
            q, k, v, self._scale, self._options, side._replace(softcap=self._softcap, dropout=self._dropout)
        )


class DensePlan(CallPlan[Planned_co]):
    """The plan that `flashtune.plan` returns for calls with masks, lengths or a quantized cache."""

    __slots__ = ()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        attn_bias: Tensor | None = None,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        kv_lengths: Tensor | None = None,
    ) -> Planned_co:
        """Computes `attention` with the planned options and new tensors.

        Raises:
            ProblemError: The tensors differ from the planned ones in more than their values.
        """
        side = ExtraInputs(
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            slopes=alibi_slopes,
            bias=read_bias(attn_bias, attn_mask),
            sinks=sinks,
            prefix=prefix_lengths,
            seqlens_kv=kv_lengths,
        )
        return self._run(self._with(q, k, v, side))


class VarlenPlan(CallPlan[Planned_co]):
    """The plan that `flashtune.plan_varlen` returns."""

    __slots__ = ()
    NAME = "plan_varlen"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
    ) -> Planned_co:
        """Computes `attention_varlen` with the planned options and new tensors.

        Raises:
            ProblemError: The tensors differ from the planned ones in more than their values.
        """
        side = ExtraInputs(
            k_scale=k_scale,
            v_scale=v_scale,
            slopes=alibi_slopes,
            sinks=sinks,
            prefix=prefix_lengths,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_k,
        )
        return self._run(self._with(q, k, v, side))


class PagedPlan(CallPlan[Planned_co]):
    """The plan that `flashtune.plan_paged` returns."""

    __slots__ = ()
    NAME = "plan_paged"

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor | None,
        block_table: Tensor,
        seqlens_k: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
    ) -> Planned_co:
        """Computes `attention_paged` with the planned options and new tensors.

        Raises:
            ProblemError: The tensors differ from the planned ones in more than their values.
        """
        if (v_cache is None) != bool(self._options.latent):
            raise ProblemError(
                "v_cache is None where the plan has a tensor, or the other way round: call it as planned"
            )
        side = ExtraInputs(
            k_scale=k_scale,
            v_scale=v_scale,
            slopes=alibi_slopes,
            sinks=sinks,
            prefix=prefix_lengths,
            cu_seqlens_q=cu_seqlens_q,
            seqlens_kv=seqlens_k,
            block_table=block_table,
        )
        return self._run(self._with(q, k_cache, k_cache if v_cache is None else v_cache, side))
