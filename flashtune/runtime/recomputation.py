"""Backward passes that compute the forward pass again, unfused."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from flashtune.core.features.table import score_tensors
from flashtune.core.layouts import Layout
from flashtune.dispatch.decision import Backend
from flashtune.request.request import Request, Result
from flashtune.request.side_inputs import side_views
from flashtune.runtime.executors import baseline_executor
from flashtune.runtime.gradients import BackwardExecutor, BackwardInputs, Gradients


def recomputed(request: Request) -> BackwardExecutor:
    """Returns an executor that computes the forward pass again, unfused, and differentiates it.

    As with kernels, the given output and log-sum-exp may be those over more keys than the call's.
    """
    standard = baseline_executor(Backend.UNFUSED, request.forward)
    names = score_tensors(request.problem)

    def run(inputs: BackwardInputs) -> Gradients:
        q, k, v, scale, side = *inputs[:3], inputs.scale, inputs.side
        if request.is_empty:
            return Gradients(*map(torch.zeros_like, (q, k, v)))
        views = side_views(request.problem, side, request.views(q, k, v)[1].shape[0])
        with _autograd_inside_operator():
            leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            given = {name: getattr(views, name).detach() for name in names}
            # A boolean mask has no gradient.
            floats = {name: tensor for name, tensor in given.items() if tensor.is_floating_point()}
            extra = {name: tensor.clone().requires_grad_() for name, tensor in floats.items()}
            result = standard(*leaves, scale, side._replace(**extra))
            wanted = _of_given_softmax(request, result, inputs)
            found = torch.autograd.grad(result, (*leaves, *extra.values()), wanted)
        # Return the strides that the fake implementation declares to compilers.
        gradients = Gradients(*map(_with_layout_of, (q, k, v), found))
        return gradients._replace(**{f"d{name}": one for name, one in zip(extra, found[3:], strict=True)})

    return run


def _of_given_softmax(request: Request, result: Result, inputs: BackwardInputs) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a call's own output and log-sum-exp, from those of a softmax over more keys.

    The weights of that softmax are a share of the own ones in each row.
    """
    out, lse, dout, dlse = inputs.out, inputs.lse, inputs.dout, inputs.dlse
    own_out, own_lse = (tensor.detach() for tensor in result)
    share = torch.exp(own_lse - lse).masked_fill(own_lse == -torch.inf, 0.0)
    by_row = share if request.layout in (Layout.BHSD, Layout.BHD) else share.transpose(-1, -2)
    own_dout = (dout * by_row.unsqueeze(-1)).to(dout.dtype)
    sums = (dout.to(lse.dtype) * (own_out - out).to(lse.dtype)).sum(-1)
    sums = sums if request.layout in (Layout.BHSD, Layout.BHD) else sums.transpose(-1, -2)
    return own_dout, share * (sums if dlse is None else sums + dlse)


def _with_layout_of(tensor: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(tensor).copy_(values)


@contextlib.contextmanager
def _autograd_inside_operator() -> Iterator[None]:
    """Enables autograd within an operator, where the dispatcher has excluded it."""
    included = torch._C._dispatch_tls_local_include_set()
    # Removing the key of one device enables autograd on all devices.
    recording = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradCPU)
    with torch._C._ForceDispatchKeyGuard(included, recording), torch.enable_grad():
        yield
