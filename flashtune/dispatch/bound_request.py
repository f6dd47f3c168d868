"""`BoundRequest`: a request with its tensors, and the facts that follow from both."""

import functools
import math
from typing import NamedTuple, Self

import msgspec
import torch
from torch import Tensor

from flashtune.core.errors import ProblemError
from flashtune.core.features.records import NO_EXTRA_INPUTS, TENSORS, ExtraInputs
from flashtune.core.kernel import POINTER_ALIGNMENT, Alignment, Specialization, specialization_of
from flashtune.core.mask_sharing import MaskSharing
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.dispatch.masked_sdpa import sharing_of
from flashtune.dispatch.platform import PLATFORM, Platform
from flashtune.dispatch.sdpa import copy_ms, default_backend, is_unaligned, seen_keys
from flashtune.dispatch.tables import Tables
from flashtune.launch.compilation import interpreting
from flashtune.launch.tensors import BackwardTensors, ForwardTensors
from flashtune.request.call import Call
from flashtune.request.read_call import read_call
from flashtune.request.request import Prefer, Request
from flashtune.request.side_inputs import side_views
from flashtune.templates.common.model.sram import power_of_two
from flashtune.templates.common.model.tile_schedule import RESIDENT
from flashtune.templates.common.model.traffic import unpacked

# Queries, keys and values.
Tensors = tuple["Tensor", "Tensor", "Tensor"]
# Additional time of a program with unaligned tensors for a block of 64 queries and 64 keys, per column of a
# head, in ms. Measured at 20 shapes on an H200. It is a half or a quarter of this if strides are multiples of
# two or four elements.
UNALIGNED_TILE, UNALIGNED_MS = 64, 3e-5


class KernelKey(NamedTuple):
    """All on which the selected kernel of one pass depends."""

    problem: Problem
    specialization: Specialization
    prefer: Prefer
    device: torch.device


class BoundRequest:
    """A request and its tensors. Facts are computed at first use and kept, except for SDPA's backend.

    It lives as long as a call is prepared. Executors must not refer to it, because they would keep the
    tensors alive.
    """

    def __init__(
        self,
        request: Request,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        side: ExtraInputs = NO_EXTRA_INPUTS,
        platform: Platform = PLATFORM,
    ) -> None:
        self.request = request
        self.tensors: Tensors = q, k, v
        self.side = side
        self.platform = platform

    @classmethod
    def of(cls, call: Call, needs_grad: bool | None = None, platform: Platform = PLATFORM) -> Self:
        """Returns the request of a call with its tensors, as `read_call`, after all checks of the call."""
        bound = cls(read_call(call, needs_grad), call.q, call.k, call.v, call.side, platform)
        bound.check_supported()
        return bound

    def check_supported(self) -> None:
        """Checks that some backend supports the device of the tensors and, if needed, their gradients."""
        request, problem = self.request, self.request.problem
        if not (request.is_double or self.platform.has_kernels(request.device)):
            if problem.dtype.is_quantized:
                raise ProblemError(
                    f"the tensors are on {request.device} and {problem.dtype} is computed on a GPU alone: "
                    "move them to one, or pass 16-bit inputs"
                )
            if not interpreting():
                raise ProblemError(
                    f"the tensors are on {request.device}: move them to a GPU, or set TRITON_INTERPRET=1 "
                    "before the program starts to run kernels on the CPU, slowly"
                )
        if request.needs_grad and problem.dtype.is_quantized:
            raise ProblemError(
                f"attention of {problem.dtype} inputs has no backward pass and an input or a scale "
                "requires grad: call under torch.no_grad(), or pass 16-bit inputs"
            )
        if request.needs_grad and problem.page_size:
            raise ProblemError(
                "attention of sequences in pages has no backward pass and an input requires grad: call under "
                "torch.no_grad(), or pass dense tensors to flashtune.attention"
            )

    def replaced(self, request: Request, tensors: Tensors | None = None) -> Self:
        """Returns another request with the same side inputs, and by default with the same tensors."""
        return type(self)(request, *(tensors or self.tensors), self.side, self.platform)

    @functools.cached_property
    def target(self) -> Target:
        """The GPU of the tensors."""
        return self.platform.target(self.request.device)

    @functools.cached_property
    def records(self) -> Tables:
        """The tuned records of the GPU."""
        return self.platform.records(self.target.name)

    @functools.cached_property
    def views(self) -> Tensors:
        """The tensors as [batch, heads, seqlen, head_dim]."""
        return self.request.views(*self.tensors)

    @functools.cached_property
    def extra(self) -> ExtraInputs:
        """The extra inputs as kernels take them."""
        if self.side is NO_EXTRA_INPUTS:
            return self.side
        return side_views(self.request.problem, self.side, self.views[1].shape[0])

    @functools.cached_property
    def gradients(self) -> tuple[str, ...]:
        """The names of the side inputs that require grad."""
        return side_gradients(self.side)

    @functools.cached_property
    def sharing(self) -> MaskSharing | None:
        """The way in which the mask is shared, or None without a mask or without times of this way."""
        bias = self.side.bias
        return None if bias is None else sharing_of(self.request.problem, bias)

    @functools.cached_property
    def sdpa_views(self) -> Tensors:
        """The views that SDPA gets."""
        q, k, v = self.views
        problem = self.request.problem
        return self.views if problem.features else (q, *seen_keys(q, k, v, problem.causal))

    @property
    def sdpa_backend(self) -> str | None:
        """The backend that SDPA selects now, or None if it is not known or has no name in records."""
        causal, select = self.request.problem.causal, self.platform.sdpa_backend
        return default_backend(*self.sdpa_views, causal, self.side.bias, select)

    @property
    def sdpa_copies_ms(self) -> float:
        """The time of the copies of unaligned tensors that SDPA gets, in ms."""
        return copy_ms([view for view in self.sdpa_views if is_unaligned(view)], self.target)

    @functools.cached_property
    def copied(self) -> tuple[bool, bool, bool]:
        """Which of q, k and v are copied before a pass, because kernels are faster with aligned tensors.

        Only the flag for all three addresses is part of a call's key. So all three are copied if one of the
        addresses is unaligned.
        """
        none = (False, False, False)
        request, problem = self.request, self.request.problem
        specializations = [specialization_of((view,), False) for view in self.views]
        of_q, of_k, of_v = (
            not specialization.takes_descriptors(problem.dtype) for specialization in specializations
        )
        odd = of_q, of_k, of_v
        if not any(odd) or interpreting() or problem.page_size or problem.mla:
            return none
        if problem.dtype.is_quantized or problem.kv_dtype is not None:
            return none
        if any(view.data_ptr() % POINTER_ALIGNMENT for view in self.views):
            odd = (True, True, True)
        read = _with_copies(self.tensors, odd, "meta")
        out = request.layout.heads_first(request.out_like)
        aligned = specialization_of((*request.views(*read), out), False)
        if not aligned.takes_descriptors(problem.dtype):
            return none
        ms = copy_ms([tensor for tensor in read if tensor.is_meta], self.target)
        worst = min(specialization.alignment for specialization in specializations)
        return odd if ms < _saved_ms(problem, self.target, worst) else none

    @functools.cached_property
    def passes(self) -> tuple[KernelKey, ...]:
        """The forward pass and, if the request needs gradients, the backward pass."""
        request = self.request
        forward = KernelKey(request.problem, self.forward_properties, request.prefer, request.device)
        if not request.needs_grad:
            return (forward,)
        return forward, forward._replace(problem=request.backward, specialization=self.backward_properties)

    @functools.cached_property
    def forward_properties(self) -> Specialization:
        """The properties that a forward kernel may assume of the tensors and of the output."""
        returns_lse = self.request.return_lse or self.request.needs_grad
        return specialization_of(self.forward_tensors().planned, returns_lse, self.extra.bias)

    @functools.cached_property
    def backward_properties(self) -> Specialization:
        """The properties that a backward kernel may assume if dout has the strides of the output."""
        out = self.request.out_like
        return self.properties_of(self.backward_tensors(out, out, out))

    def properties_of(self, tensors: BackwardTensors) -> Specialization:
        """Returns the properties that a backward kernel may assume of tensors in the kernels' layout."""
        specialization = specialization_of(tensors.planned, self.request.return_lse, self.extra.bias)
        return (
            msgspec.structs.replace(specialization, constant_bias=True)
            if self.request.constant_bias
            else specialization
        )

    def forward_tensors(self, device: torch.device | str = "meta") -> ForwardTensors:
        """Returns the tensors of the forward pass. New tensors on a device replace those that are copied."""
        request = self.request
        out = request.layout.heads_first(request.out_like)
        return ForwardTensors(*request.views(*self._as_read(device)), out)

    def backward_tensors(
        self, out: Tensor, lse: Tensor, dout: Tensor, device: torch.device | str = "meta"
    ) -> BackwardTensors:
        """Returns the tensors of the backward pass. The gradients are meta tensors.

        New tensors on a device replace those that are copied first.
        """
        request = self.request
        gradients = [torch.empty_like(tensor, device="meta") for tensor in self.tensors]
        heads_first = request.layout.heads_first
        read = request.views(*self._as_read(device))
        return BackwardTensors(*read, heads_first(out), lse, heads_first(dout), *request.views(*gradients))

    def _as_read(self, device: torch.device | str) -> Tensors:
        """Returns the tensors that kernels read."""
        return _with_copies(self.tensors, self.copied, device) if any(self.copied) else self.tensors


def side_gradients(side: ExtraInputs) -> tuple[str, ...]:
    """Returns the names of the side inputs that require grad."""
    if side is NO_EXTRA_INPUTS:
        return ()
    named = zip(TENSORS, side.optional_tensors, strict=True)
    return tuple(name for name, tensor in named if tensor is not None and tensor.requires_grad)


def _with_copies(tensors: Tensors, flags: tuple[bool, bool, bool], device: torch.device | str) -> Tensors:
    q, k, v = (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if flag else tensor
        for tensor, flag in zip(tensors, flags, strict=True)
    )
    return q, k, v


def _saved_ms(problem: Problem, target: Target, alignment: Alignment) -> float:
    """Returns the time by which a pass with unaligned tensors is longer, roughly, in ms."""
    problem = unpacked(problem)
    tiles = problem.batch * problem.heads * math.ceil(problem.seqlen_q / UNALIGNED_TILE)
    blocks = math.ceil(problem.visible_pairs() / max(1, problem.seqlen_q) / UNALIGNED_TILE)
    width = power_of_two(max(problem.head_dim, problem.value_head_dim))
    rounds = math.ceil(tiles / (RESIDENT * target.sm_count))
    return rounds * blocks * width * UNALIGNED_MS / alignment
