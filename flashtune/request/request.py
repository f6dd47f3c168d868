"""`Request`: a checked call as a `Problem` and options."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from flashtune.core.arguments import read_flag, shown
from flashtune.core.errors import ProblemError
from flashtune.core.extra_inputs import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.layouts import DENSE_LAYOUTS, DTYPES, KV_DTYPES, TORCH_DTYPES, Layout
from flashtune.core.problem import Causal, Direction, Problem
from flashtune.request.quantization import check_scales
from flashtune.request.tensor_checks import (
    check_alike,
    check_double,
    check_extents,
    check_shapes,
    check_tensor,
    dtype_of,
    require_dense,
)

# The output, or the output and the log-sum-exp.
Result = Tensor | tuple[Tensor, Tensor]
Executor = Callable[..., Result]

Option = TypeVar("Option", bound=enum.StrEnum)


class Prefer(enum.StrEnum):
    """Whether another implementation may serve a call for which it was measured as faster."""

    FASTEST = "fastest"
    GENERATED = "generated"


class Request(msgspec.Struct, frozen=True):
    """One valid call, without the values of its tensors and its scale.

    Attributes:
        problem: The problem. With varlen sequences and pages, its numbers of tokens are rounded up.
        device: The device of the tensors.
        layout: The order of the dimensions of q and the output.
        return_lse: Whether to return the log-sum-exp.
        prefer: Whether SDPA may serve.
        needs_grad: Whether autograd needs a backward pass of the call.
        kv_layout: The order of the dimensions of k and v if it is not q's.
        tokens: Number of query tokens of a varlen batch.
        deterministic: Whether gradients must be reproducible bit for bit.
        is_double: Whether the tensors are float64. No kernel takes them, and the problem then has fp32.
    """

    problem: Problem
    device: torch.device
    layout: Layout
    return_lse: bool
    prefer: Prefer
    needs_grad: bool = False
    kv_layout: Layout | None = None
    tokens: int = 0
    deterministic: bool = False
    is_double: bool = False

    @property
    def forward(self) -> Request:
        """The request of the forward pass under autograd, which needs the log-sum-exp."""
        return msgspec.structs.replace(self, needs_grad=False, return_lse=True)

    @property
    def backward(self) -> Problem:
        """The problem of the backward pass."""
        return msgspec.structs.replace(
            self.problem, direction=Direction.BACKWARD, deterministic=self.deterministic
        )

    @property
    def is_empty(self) -> bool:
        """Whether there are no queries or no keys."""
        return 0 in (self.problem.batch, self.rows, self.problem.seqlen_kv)

    @property
    def rows(self) -> int:
        """Queries per sequence, or of the whole varlen batch."""
        return self.tokens if self.problem.total_q else self.problem.seqlen_q

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output, in the call's layout."""
        problem = self.problem
        return self.layout.shape(problem.batch, problem.heads, self.rows, problem.value_head_dim)

    @property
    def out_dtype(self) -> torch.dtype:
        """Element type of the output."""
        return torch.float64 if self.is_double else TORCH_DTYPES[self.problem.out_dtype]

    @property
    def lse_dtype(self) -> torch.dtype:
        """Element type of the log-sum-exp."""
        return torch.float64 if self.is_double else torch.float32

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sum-exp: [batch, heads, seqlen_q], or [heads, tokens] of varlen batches."""
        if self.layout is Layout.THD:
            return self.problem.heads, self.tokens
        ends = () if self.layout is Layout.BHD else (self.problem.seqlen_q,)
        return self.problem.batch, self.problem.heads, *ends

    @property
    def default_scale(self) -> float:
        """The scale of a call that gives none."""
        return 1 / math.sqrt(self.problem.head_dim)

    def views(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns views of q, k and v as [batch, heads, seqlen, head_dim]."""
        kv_layout = self.kv_layout or self.layout
        values = kv_layout.heads_first(v)
        if self.problem.mla:
            values = values[..., : self.problem.value_head_dim]
        return self.layout.heads_first(q), kv_layout.heads_first(k), values


def read_request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    layout: str,
    return_lse: bool,
    prefer: str,
    scales: ExtraInputs = NO_EXTRA_INPUTS,
    deterministic: bool = False,
    needs_grad: bool = False,
) -> Request:
    """Returns the request of a call.

    Raises:
        ProblemError: The tensors do not match one another, no kernel takes them, or an option has an
            invalid value.
    """
    require_tensors(q, k, v)
    order = read_option("layout", layout, DENSE_LAYOUTS)
    if k.dtype is v.dtype and k.dtype in KV_DTYPES and q.dtype in DTYPES and not DTYPES[q.dtype].is_quantized:
        raise ProblemError(scales_wanted(q, k))
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor, order)
    check_alike(q, k, v)
    heads_axis, length_axis = (2, 1) if order is Layout.BSHD else (1, 2)
    check_shapes(q, k, v, heads_axis, length_axis)
    problem = Problem(
        dtype=dtype_of(q),
        head_dim=q.shape[3],
        value_head_dim=v.shape[3],
        heads=q.shape[heads_axis],
        kv_heads=k.shape[heads_axis],
        batch=q.shape[0],
        seqlen_q=q.shape[length_axis],
        seqlen_kv=k.shape[length_axis],
        causal=read_causal(causal),
    )
    check_extents(problem)
    if scales is not NO_EXTRA_INPUTS:
        check_scales(problem, q.device, scales)
    preference = read_option("prefer", prefer, tuple(Prefer))
    if problem.dtype.is_quantized:
        preference = Prefer.GENERATED  # no other implementation supports it
    check_double(q, preference is Prefer.GENERATED)
    return Request(
        problem,
        q.device,
        order,
        return_lse,
        preference,
        needs_grad,
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        is_double=q.dtype is torch.float64,
    )


def scales_wanted(q: Tensor, k: Tensor) -> str:
    """Returns the error for quantised keys and values without scales."""
    return (
        f"k and v are {k.dtype} and q is {q.dtype}: pass k_scale and v_scale, float32 tensors of what their "
        "elements are to be multiplied with"
    )


def require_tensors(q: object, k: object, v: object) -> None:
    """Checks that queries, keys and values are tensors with strides.

    Raises:
        ProblemError: One of them is not.
    """
    for name, value in (("q", q), ("k", k), ("v", v)):
        require_dense(name, value)


def requires_grad(q: Tensor, k: Tensor, v: Tensor, scales: ExtraInputs) -> bool:
    """Returns whether autograd needs a backward pass of a call."""
    tensors = (q, k, v) if scales is NO_EXTRA_INPUTS else (q, k, v, *scales.tensors)
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def check_flags(causal: object, return_lse: object, deterministic: object = False) -> None:
    """Checks the boolean arguments. Every call does so, because 1 equals True in the call cache's keys.

    Raises:
        ProblemError: An argument has another type.
    """
    # Compare types inline first: one function call would cost as much as all these checks.
    if type(return_lse) is not bool:
        read_flag("return_lse", return_lse)
    if type(deterministic) is not bool:
        read_flag("deterministic", deterministic)
    if type(causal) is not bool and not isinstance(causal, str):
        read_causal(causal)


def read_causal(causal: object) -> Causal:
    """Returns the causal mask. `True` means bottom-right, as in flash_attn.

    Raises:
        ProblemError: The value is neither a bool nor the name of an alignment.
    """
    if isinstance(causal, bool):
        return Causal.BOTTOM_RIGHT if causal else Causal.NONE
    if isinstance(causal, str) and causal in list(Causal):
        return Causal(causal)
    raise ProblemError(f"causal cannot be {shown(causal)}: pass False, True, 'top_left' or 'bottom_right'")


def read_option(name: str, value: object, known: tuple[Option, ...]) -> Option:
    """Returns the known value of an option.

    Raises:
        ProblemError: The value is unknown.
    """
    for choice in known:
        if isinstance(value, str) and value == choice:
            return choice
    choices = " or ".join(repr(choice.value) for choice in known)
    raise ProblemError(f"{name} cannot be {shown(value)}: pass {choices}")
