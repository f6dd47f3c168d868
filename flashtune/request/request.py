"""`Request`: a checked call as a `Problem` and options."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from flashtune.core.layouts import TORCH_DTYPES, Layout
from flashtune.core.problem import Direction, Problem

# The output, or the output and the log-sum-exp.
Result = Tensor | tuple[Tensor, Tensor]
Executor = Callable[..., Result]


class Prefer(enum.StrEnum):
    """Whether another implementation may serve a call for which it was measured as faster."""

    FASTEST = "fastest"
    GENERATED = "generated"


PREFERENCES = tuple(Prefer)


class Request(msgspec.Struct, frozen=True):
    """One valid call, without the values of its tensors and its scale."""

    # The problem. With varlen sequences and pages, its numbers of tokens are rounded up.
    problem: Problem
    device: torch.device
    layout: Layout  # The order of the dimensions of q and the output.
    return_lse: bool  # Whether to return the log-sum-exp.
    prefer: Prefer  # Whether SDPA may serve.
    needs_grad: bool = False  # Whether autograd needs a backward pass of the call.
    kv_layout: Layout | None = None  # The order of the dimensions of k and v, as q's by default.
    tokens: int = 0  # Number of query tokens of a varlen batch.
    deterministic: bool = False  # Whether gradients must be reproducible bit for bit.
    # Whether the tensors are float64. No kernel takes them, and the problem then has fp32.
    is_double: bool = False
    constant_bias: bool = False  # Whether the backward pass needs no gradient of the additive bias.
    # The captured tensors of functions that require grad, by their places.
    trained_tables: tuple[int, ...] = ()
    out_order: str = ""  # Dimensions of the output in memory, outermost first. "" for the layout's order.

    @property
    def forward(self) -> Request:
        """The request of the forward pass under autograd, which needs the log-sum-exp."""
        return msgspec.structs.replace(self, needs_grad=False, return_lse=True)

    @property
    def backward(self) -> Problem:
        """The problem of the backward pass."""
        return msgspec.structs.replace(
            self.problem,
            direction=Direction.BACKWARD,
            functions=self.problem.functions.with_gradients(self.trained_tables),
            deterministic=self.deterministic,
            batch_invariant=False,
        )

    @property
    def is_empty(self) -> bool:
        """Whether there are no queries or no keys."""
        return 0 in (self.problem.batch, self.rows, self.problem.seqlen_kv)

    @property
    def has_values(self) -> bool:
        """Whether there is something to compute. Meta tensors have no values."""
        return not self.is_empty and self.device.type != "meta"

    @property
    def rows(self) -> int:
        """Queries per sequence, or of the whole varlen batch."""
        return self.tokens if self.problem.packed else self.problem.seqlen_q

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
    def out_like(self) -> Tensor:
        """A meta tensor with the shape, strides and type of the output."""
        order = [*map(self.layout.index, self.out_order or self.layout)]
        return torch.empty_permuted(self.out_shape, order, dtype=self.out_dtype, device="meta")

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
