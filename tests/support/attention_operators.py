"""Torch's attention operators on the CPU, which has none. They compute by definition and count calls."""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library

from flashtune.integrations import torch as integration

CUDNN = "_scaled_dot_product_cudnn_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
FLASH = "_flash_attention_forward"
FLASH_INTO = "_flash_attention_forward_no_dropout_inplace"
FLASH_BACKWARD = "_flash_attention_backward"
CUDNN_PACKED = "_cudnn_attention_forward"
CUDNN_PACKED_INTO = "_cudnn_attention_forward_no_dropout_inplace"
CUDNN_PACKED_BACKWARD = "_cudnn_attention_backward"


def by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    bottom_right: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in the type of q, heads first. A bias of bools is a mask."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype is torch.bool else scores + bias
    if causal:
        diagonal = k.shape[2] - q.shape[2] if bottom_right else 0
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(diagonal)
        scores = scores.masked_fill(~seen, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0.0)
    lse = scores.logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)
    weights = scores.softmax(-1).masked_fill(blind, 0.0)
    return weights @ v, lse


def close(actual: Tensor | Iterable[Tensor], want: Tensor | Iterable[Tensor]) -> None:
    """Checks tensors, or each of several, in float64."""
    actual, want = ((each,) if isinstance(each, Tensor) else each for each in (actual, want))
    for result, right in zip(actual, want, strict=True):
        torch.testing.assert_close(result.double(), right.double(), atol=2e-5, rtol=2e-5)


def derived(dout: Tensor, tensors: tuple[Tensor, ...], bias: Tensor | None, **options: Any) -> list[Tensor]:
    """Gradients of q, k and v."""
    with (
        torch.enable_grad(),
        torch._C._ForceDispatchKeyGuard(
            torch._C._dispatch_tls_local_include_set(),
            torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradCPU),
        ),
    ):
        q, k, v = leaves = [tensor.detach().double().requires_grad_() for tensor in tensors]
        out, _ = by_definition(q, k, v, None if bias is None else bias.double(), **options)
        return [
            torch.empty_like(tensor).copy_(gradient)
            for tensor, gradient in zip(tensors, torch.autograd.grad(out, leaves, dout.double()), strict=True)
        ]


def _like(q: Tensor, out: Tensor) -> Tensor:
    """The output with the order of q's dimensions in memory."""
    if q.stride(1) < q.stride(2):
        return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return out.to(q.dtype).contiguous()


class Originals:
    """The operators. `calls` counts them by name."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def cudnn(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        compute_lse: bool,
        dropout: float = 0.0,
        causal: bool = False,
        debug: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        self.calls[CUDNN] += 1
        out, lse = by_definition(q.double(), k.double(), v.double(), bias, causal=causal, scale=scale)
        states = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
        stored = lse.float().unsqueeze(-1) if compute_lse else None
        return _like(q, out), stored, None, None, q.shape[2], k.shape[2], *states, None

    def cudnn_backward(self, dout: Tensor, *args: Any, scale: float | None = None) -> tuple[Tensor, ...]:
        self.calls[f"{CUDNN}_backward"] += 1
        assert args[4].shape == (*dout.shape[:3], 1)
        return tuple(derived(dout, args[:3], args[7], causal=args[13], scale=scale))

    def cudnn_packed(self, *args: Any, **options: Any) -> None:
        self.calls[CUDNN_PACKED] += 1
        raise NotImplementedError("packed sequences have no reference here")

    def efficient(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        compute_lse: bool,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        self.calls[EFFICIENT] += 1
        out, lse = by_definition(q.double(), k.double(), v.double(), bias, causal=causal, scale=scale)
        rows = -(-q.shape[2] // 32) * 32 if compute_lse else 0
        stored = torch.full((*q.shape[:2], rows), torch.inf)
        if compute_lse:
            stored[..., : q.shape[2]] = lse
        states = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
        return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), stored, *states

    def efficient_backward(
        self, dout: Tensor, *args: Any, scale: float | None = None
    ) -> tuple[Tensor | None, ...]:
        self.calls[f"{EFFICIENT}_backward"] += 1
        causal = len(args) > 10 and args[10]
        gradients = derived(dout, args[:3], args[3], causal=causal, scale=scale)
        dbias = torch.zeros_like(args[3]) if args[9][3] else None
        return (*(gradient.transpose(1, 2).contiguous().transpose(1, 2) for gradient in gradients), dbias)

    def flash(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        self.calls[FLASH] += 1
        assert args[0] is None, "packed sequences have no reference here"
        tensors = [tensor.double().transpose(1, 2) for tensor in (q, k, v)]
        scale = options.get("scale")
        out, lse = by_definition(*tensors, causal=args[5], scale=scale, bottom_right=True)
        states = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        own = torch.empty_like(q[..., : v.shape[3]]).copy_(out.transpose(1, 2))
        return own, lse.float().contiguous(), *states, q.new_empty(0)

    def flash_into(self, out: Tensor, *args: Any, **options: Any) -> Tensor:
        self.calls[FLASH_INTO] += 1
        result = self.flash(*args, **options)
        out.copy_(result[0])
        return result[1]

    def flash_backward(self, dout: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        self.calls[FLASH_BACKWARD] += 1
        tensors = tuple(tensor.transpose(1, 2) for tensor in args[:3])
        gradients = derived(
            dout.transpose(1, 2),
            tensors,
            None,
            causal=args[10],
            scale=options.get("scale"),
            bottom_right=True,
        )
        pairs = zip(args[:3], gradients, strict=True)
        return tuple(torch.empty_like(own).copy_(gradient.transpose(1, 2)) for own, gradient in pairs)


@contextmanager
def registered() -> Iterator[Originals]:
    """The operators while they are registered for the CPU, where flashtune overrides them too."""
    originals = Originals()
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, kernel in (
            (CUDNN, originals.cudnn),
            (f"{CUDNN}_backward", originals.cudnn_backward),
            (EFFICIENT, originals.efficient),
            (f"{EFFICIENT}_backward", originals.efficient_backward),
            (FLASH, originals.flash),
            (FLASH_INTO, originals.flash_into),
            (FLASH_BACKWARD, originals.flash_backward),
            (CUDNN_PACKED, originals.cudnn_packed),
            (CUDNN_PACKED_INTO, originals.cudnn_packed),
            (CUDNN_PACKED_BACKWARD, originals.cudnn_packed),
        ):
            if hasattr(torch.ops.aten, name):
                library.impl(name, kernel, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "KEY", "CPU")
        try:
            yield originals
        finally:
            library._destroy()
