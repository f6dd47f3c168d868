"""Tests of gradients of `attention` with transforms, compilers and hooks, on the CPU."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from flashtune.core.errors import ProblemError
from tests.interpreter.autograd_calls import attend, expected, loss, tensors
from tests.support.attention_operators import close
from tests.support.values import present

pytestmark = pytest.mark.usefixtures("fresh_runtime")


@pytest.mark.parametrize("way", ["grad", "vjp", "vmap", "compiled"])
def test_transforms(way: str) -> None:
    q, k, v = tensors()
    wanted = expected(q, k, v)
    q, k, v = q.detach(), k.detach(), v.detach()
    gradients = torch.func.grad(loss, argnums=(0, 1, 2))
    if way == "vjp":
        out, back = torch.func.vjp(attend, q, k, v)[:2]
        close(back(2 * out), wanted)
    elif way == "vmap":
        batches = [torch.stack([tensor, tensor + 1]) for tensor in (q, k, v)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # there is a loop where no rule is
            batched = torch.func.vmap(gradients)(*batches)
        close([gradient[0] for gradient in batched], wanted)
        close([gradient[1] for gradient in batched], expected(q + 1, k + 1, v + 1))
    elif way == "compiled":
        close(torch.compile(gradients, backend="aot_eager", fullgraph=True)(q, k, v), wanted)
    else:
        close(gradients(q, k, v), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    q, k, v = tensors()
    result: Tensor = checkpoint(loss, q, k, v, use_reentrant=reentrant)
    result.backward()
    close([present(leaf.grad) for leaf in (q, k, v)], expected(q, k, v))


def test_concurrent_backward_passes() -> None:
    wanted = expected(*tensors())
    with ThreadPoolExecutor(4) as threads:
        for gradients in threads.map(
            lambda inputs: torch.autograd.grad(loss(*inputs), inputs), [tensors() for _ in range(4)]
        ):
            close(gradients, wanted)


def test_saved_tensor_hooks_may_move_tensors() -> None:
    q, k, v = tensors()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda kept: kept.clone()):
        result = loss(q, k, v)
    close(torch.autograd.grad(result, (q, k, v)), expected(q, k, v))


def test_compile_traces_a_node_for_each_pass() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(keep(graph, inputs)))
    q, k, v = tensors()
    call = torch.compile(loss, backend=backend, fullgraph=True)
    close(torch.autograd.grad(call(q, k, v), (q, k, v)), expected(q, k, v))
    nodes = [
        [str(node.target) for node in graph.graph.nodes if "flashtune" in str(node.target)]
        for graph in graphs
    ]
    assert nodes == [["flashtune.attention_with_lse.default"], ["flashtune.attention_backward.default"]]


def test_other_lengths_do_not_recompile() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(loss, backend=counter, fullgraph=True)
    q, k, v = tensors()
    for length in (20, 18, 16, 12):
        part = q[:, :, :length]
        close(
            torch.autograd.grad(call(part, k, v), (q, k, v)), torch.autograd.grad(loss(part, k, v), (q, k, v))
        )
    assert counter.frame_count <= 2, "once for one length, once for all"


def test_programs_are_exported_with_gradients_on() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v)

    q, k, v = tensors()
    program = torch.export.export(Module(), (q, k, v))
    close([program.module()(q, k, v)], [attend(q, k, v)])


@pytest.mark.parametrize("way", ["eager", "operator", "func"])
def test_second_derivatives_are_refused(way: str) -> None:
    q, k, v = tensors()
    if way == "func":

        def first(q: Tensor) -> Tensor:
            gradient: Tensor = torch.func.grad(loss)(q, k.detach(), v.detach())
            return gradient.square().sum()

        with pytest.raises(ProblemError, match="differentiated twice"):
            torch.func.grad(first)(q.detach())
        return
    if way == "operator":
        q = torch.nn.Parameter(q.detach())
    (first_gradient,) = torch.autograd.grad(loss(q, k, v), (q,), create_graph=True)
    close([first_gradient], expected(q, k, v)[:1])
    with pytest.raises(ProblemError, match="differentiated twice"):
        torch.autograd.grad(first_gradient.sum(), (q,))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": (3, 0)}, {"return_lse": True}], ids=str)
def test_batches_of_gradients_are_refused(options: dict[str, Any], create_graph: bool) -> None:
    q, k, v = tensors()
    result = attend(q, k, v, **options)
    out = result[0] if "return_lse" in options else result

    def go_back(gradient: Tensor, is_batched: bool = False) -> Any:
        return torch.autograd.grad(
            out,
            (q, k, v),
            gradient,
            retain_graph=True,
            create_graph=create_graph,
            is_grads_batched=is_batched,
        )

    batch = out.detach().expand(3, *out.shape)
    with pytest.raises(ProblemError, match=r"not a batch .*: loop over them"):
        go_back(batch, True)
    with pytest.raises(ProblemError, match=r"not a batch .*: loop over them"):
        torch.func.vmap(go_back)(batch)


def test_suggested_loop_computes_batches_of_gradients() -> None:
    q, k, v = (tensor.detach() for tensor in tensors())
    out, back = torch.func.vjp(attend, q, k, v)[:2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # there is a loop where no rule is
        batched = torch.func.vmap(back)(torch.stack([out, 2 * out]))
    for index, factor in enumerate((1, 2)):
        close([gradient[index] for gradient in batched], back(factor * out))


@pytest.mark.parametrize("way", ["func", "dual"])
@pytest.mark.parametrize("options", [{}, {"window": (3, 0)}], ids=str)
def test_forward_mode_derivatives_are_refused(way: str, options: dict[str, Any]) -> None:
    q, k, v = (tensor.detach() for tensor in tensors())

    def of_queries(q: Tensor) -> Tensor:
        return attend(q, k, v, **options)

    def tangent() -> object:
        if way == "func":
            return torch.func.jvp(of_queries, (q,), (q,))[1]
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(of_queries(forward_ad.make_dual(q, q))).tangent

    with pytest.raises(ProblemError, match="no forward-mode derivatives"):
        tangent()
    with forward_ad.dual_level():
        assert torch.equal(of_queries(q), of_queries(q.clone())), "without a tangent there is no derivative"
