"""The backward pass of SDPA's calls with dropout, for processes in which flashtune may have served them.

Torch's operator would drop other weights than flashtune's forward pass did. So these overrides stay
registered, and they never pass on the backward pass of a call that flashtune served. Hooks may copy the saved
random states, for example to the CPU. Then no address marks the call, but its offset does. The host reads it,
or the device selects the gradients while a CUDA graph is captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashtune.core.features.records import ExtraInputs
from flashtune.integrations.operator_overrides import DRAWN, Kernel, Reading, is_marked, known_passes
from flashtune.integrations.sdpa_operators import DenseBackward, alignment_of, had_dropout
from flashtune.request.call import Call, Options
from flashtune.runtime import backward_ops
from flashtune.runtime.op_library import operands
from flashtune.runtime.value_checks import is_capturing

if TYPE_CHECKING:
    from torch import Tensor

# The efficient backend pads rows of the gradient of a bias to a multiple of this number of elements.
PADDED_KEYS = 16


class DropoutBackward(DenseBackward):
    """The backward operator of a backend, for calls with dropout."""

    def read(self, args: tuple[Any, ...], options: dict[str, Any]) -> Reading | None:
        """Returns the call, or None if the kernels of its forward pass do not compute the gradients."""
        seed = self.randomness(args)[0]
        if seed is None or self.wants_bias(args):
            return None
        return self.read_dropout(args, options, seed.reshape(1))

    def gradients(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor | None, ...]:
        """Returns the operator's results. It waits for a kernel if none is prepared.

        Raises:
            KernelError: No kernel is prepared, and a CUDA graph is being captured.
        """
        known = known_passes(self, args, options)
        backward = None if known is None else known[1].backward
        if known is None or backward is None:
            return self._by_any_kernel(args, options)
        reading = known[0]
        call = reading.call
        out, lse, dout = self.saved(args, reading)
        return self.results(
            backward(call.q, call.k, call.v, out, lse, dout, None, call.scale, call.side), reading
        )

    def _by_any_kernel(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor | None, ...]:
        """Returns the operator's results, for tensors with any strides."""
        q, k, v = args[1:4]
        bias, causal = self.mask(args)
        seed, _, dropout = self.randomness(args)
        assert seed is not None
        side = ExtraInputs(bias=bias, seed=seed.reshape(1), dropout=dropout)
        call = Call(q, k, v, options.get("scale"), Options(alignment_of(causal, q, k)), side)
        out, lse, dout = self.saved(args, Reading(call, True, None))
        operator = getattr(torch.ops.flashtune, backward_ops.NAME)
        dq, dk, dv, _, dbias, _ = operator(dout, None, out, lse, *operands(call))
        if self.is_cudnn:
            return dq, dk, dv
        found = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (dq, dk, dv))
        return (*found, _padded(dbias) if self.wants_bias(args) else None)


def dropout_override(operator: DropoutBackward, original: Kernel) -> Kernel:
    """Returns the override of a backward operator with an original kernel."""

    def override(keyset: object, *args: Any, **options: Any) -> Any:
        is_served = _is_served(operator, args)
        if is_served is False:
            return original(keyset, *args, **options)
        found = operator.gradients(args, options)
        if is_served is True:
            return found
        others = original(keyset, *args, **options)
        return tuple(
            other if one is None or other is None else torch.where(is_served, one, other)
            for one, other in zip(found, others, strict=True)
        )

    return override


def _is_served(operator: DropoutBackward, args: tuple[Any, ...]) -> bool | Tensor:
    """Whether flashtune served a forward pass with dropout; in captures a tensor if only the device knows."""
    seed, offset, dropout = operator.randomness(args)
    q = args[1]
    if not dropout or args[0] is None or seed is None or offset is None or offset.device != q.device:
        return False
    if is_marked(seed) and is_marked(offset):
        return True
    if not had_dropout(args[1:4], dropout):
        return False
    if is_capturing(q):
        return offset == DRAWN
    # Except in captures, torch's states of the efficient backend are on the CPU.
    return (q.is_cuda and not operator.is_cudnn) or int(offset) == DRAWN


def _padded(gradient: Tensor) -> Tensor:
    """Returns the gradient of a bias with the strides of the efficient backend."""
    keys = gradient.shape[-1]
    rows = gradient.new_empty((*gradient.shape[:-1], -(-keys // PADDED_KEYS) * PADDED_KEYS))
    return rows[..., :keys].copy_(gradient)
