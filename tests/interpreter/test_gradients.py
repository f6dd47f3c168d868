"""Gradients of `attention` on the CPU, against float64, also with transforms, compilers and hooks."""

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

import flashtune
from flashtune.core.errors import KernelError, ProblemError
from flashtune.core.kernel import Kernel
from flashtune.core.notices import FlashtuneWarning
from flashtune.dispatch.decision import Decision
from flashtune.launch import binding
from flashtune.request.call import dense_call
from flashtune.runtime import backward_executors, prepare
from flashtune.runtime.passes import Pass, prepared
from flashtune.runtime.torch_ops import call_operator
from tests.interpreter.autograd_calls import (
    HEADS,
    KV_HEADS,
    Triple,
    attend,
    definition,
    exact_gradients,
    expected,
    loss,
    tensors,
)
from tests.support.attention_operators import close
from tests.support.values import present

pytestmark = pytest.mark.usefixtures("fresh_runtime")


def attend_by_operator(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return call_operator(dense_call(q, k, v, **options))


@pytest.mark.parametrize("way", ["eager", "operator", "aot_eager"])
def test_gradient_of_lse_is_included(way: str) -> None:
    call: Callable[..., Any] = attend_by_operator if way == "operator" else flashtune.attention
    if way == "aot_eager":
        call = torch.compile(call, backend=way, fullgraph=True)
    q, k, v = tensors()
    out, lse = call(q, k, v, causal=True, return_lse=True, prefer="generated")
    weights = torch.randn(lse.shape)
    gradients = torch.autograd.grad(out.square().sum() + (lse * weights).sum(), (q, k, v))
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    out, lse = definition(*wide)
    close(gradients, torch.autograd.grad(out.square().sum() + (lse * weights).sum(), wide))
    lse = call(q, k, v, causal=True, return_lse=True, prefer="generated")[1]
    alone = torch.autograd.grad((lse * weights).sum(), (q, k))
    close(alone, torch.autograd.grad((definition(*wide)[1] * weights).sum(), wide[:2]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_have_their_inputs_types(dtype: torch.dtype) -> None:
    q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in tensors())
    gradients = torch.autograd.grad(loss(q, k, v), (q, k, v))
    assert {gradient.dtype for gradient in gradients} == {dtype}
    for actual, reference in zip(gradients, expected(q, k, v), strict=True):
        torch.testing.assert_close(actual.double(), reference, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("way", ["expanded", "transposed", "every_other", "misaligned"])
def test_output_gradient_may_have_any_strides(way: str) -> None:
    q, k, v = tensors()
    out = attend(q, k, v)
    dout = torch.randn(out.shape)
    if way == "expanded":
        dout = torch.tensor(0.5).expand(out.shape)
    elif way == "transposed":
        dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    elif way == "every_other":
        dout = torch.stack([dout, dout], -1).flatten(-2)[..., ::2]
    else:
        dout = torch.empty(out.numel() + 1)[1:].view(out.shape).copy_(dout)
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    wanted = torch.autograd.grad(definition(*wide)[0], wide, dout.double())
    close(torch.autograd.grad(out, (q, k, v), dout), wanted)


def test_gradients_have_the_strides_of_inputs() -> None:
    q, k, v = (tensor.detach().transpose(1, 2).contiguous() for tensor in tensors())
    views = [tensor.transpose(1, 2).requires_grad_() for tensor in (q, k, v)]
    gradients = torch.autograd.grad(loss(*views), views)
    assert [gradient.stride() for gradient in gradients] == [view.stride() for view in views]
    moved = [tensor.requires_grad_() for tensor in (q, k, v)]
    by_layout = torch.autograd.grad(attend(*moved, layout="bshd").square().sum(), moved)
    close([gradient.transpose(1, 2) for gradient in by_layout], expected(*views))
    close(gradients, expected(*views))


def test_only_inputs_that_require_grad_get_gradients() -> None:
    q, k, v = tensors()
    q.requires_grad_(False)
    v.requires_grad_(False)
    loss(q, k, v).backward()
    assert q.grad is None
    assert v.grad is None
    assert k.grad is not None
    close([k.grad], expected(q, k, v)[1:2])


def test_gradcheck() -> None:
    q, k, v = (tensor.detach()[:1, :2, :3, :8].requires_grad_() for tensor in tensors())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it would rather have float64
        assert torch.autograd.gradcheck(attend, (q, k, v), eps=1e-2, atol=2e-3, rtol=2e-2, fast_mode=True)


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_gradient_of_a_bias_is_written_if_it_requires_grad(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    writes: list[bool] = []

    def bind(kernel: Kernel, *arguments: Any, **options: Any) -> Any:
        writes.append(kernel.writes("dbias"))
        return binding.bind(kernel, *arguments, **options)

    monkeypatch.setattr(backward_executors, "bind", bind)
    call = attend if way == "eager" else torch.compile(attend, backend="aot_eager", fullgraph=True)
    q, k, v = tensors()
    bias = torch.randn(1, HEADS, 20, 28)
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v, bias)]
    expected = torch.autograd.grad(definition(*wide)[0].square().sum(), wide)
    for is_trained in (False, True, False):
        inputs = q, k, v, bias.clone().requires_grad_(is_trained)
        result = call(q, k, v, attn_bias=inputs[3]).square().sum()
        close(torch.autograd.grad(result, inputs[: 3 + is_trained]), expected[: 3 + is_trained])
    # Tensors of compiled operators do not show whether they require grad.
    assert writes == ([False, True, False] if way == "eager" else [True, True, True])


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_gradients_of_extra_inputs(way: str) -> None:
    call = attend if way == "eager" else torch.compile(attend, backend="aot_eager", fullgraph=True)
    q, k, v = tensors()
    bias = torch.randn(1, HEADS, 20, 28, requires_grad=True)
    gradients = torch.autograd.grad(call(q, k, v, attn_bias=bias).square().sum(), (q, k, v, bias))
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v, bias)]
    close(gradients, torch.autograd.grad(definition(*wide)[0].square().sum(), wide))

    slopes, sinks = torch.rand(HEADS, requires_grad=True), torch.randn(HEADS, requires_grad=True)
    options: dict[str, Any] = {"alibi_slopes": slopes, "sinks": sinks, "softcap": 3.0}
    gradients = torch.autograd.grad(call(q, k, v, **options).square().sum(), (q, k, v, slopes, sinks))
    close(gradients, exact_gradients(q, k, v, **options))


def test_packed_sequences() -> None:
    torch.manual_seed(3)
    lengths = (9, 0, 14)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    # Two rows lie behind the last sequence: their gradients are zeros.
    q, k = torch.randn(25, HEADS, 32, requires_grad=True), torch.randn(25, KV_HEADS, 32, requires_grad=True)
    v = torch.randn(25, KV_HEADS, 16, requires_grad=True)
    out = flashtune.attention_varlen(q, k, v, starts, starts, 14, 14, causal=True, prefer="generated")
    gradients = torch.autograd.grad(out[:23].square().sum(), (q, k, v))
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    total = torch.zeros((), dtype=torch.float64)
    for begin, end in ((0, 9), (9, 23)):
        part = [tensor[begin:end].transpose(0, 1)[None] for tensor in wide]
        total = total + definition(*part)[0].square().sum()
    close(gradients, torch.autograd.grad(total, wide))
    assert not gradients[0][23:].any()


def test_rows_outside_of_sequences_do_not_contribute_to_sinks() -> None:
    torch.manual_seed(3)
    starts = torch.tensor([0, 9, 14], dtype=torch.int32)
    sinks = torch.randn(HEADS, requires_grad=True)
    q = torch.randn(20, HEADS, 32, requires_grad=True)
    k, v = (torch.randn(20, KV_HEADS, 32) for _ in range(2))

    def gradient(rows: int) -> Tensor:
        out = flashtune.attention_varlen(
            q[:rows], k[:rows], v[:rows], starts, starts, 9, 9, causal=True, sinks=sinks
        )
        return torch.autograd.grad(out[:14].square().sum(), sinks)[0]

    try:
        torch.use_deterministic_algorithms(True)  # unwritten memory is full of NaN
        close([gradient(20)], [gradient(14)])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_backward_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward kernels do not compile."""

    def prepared_forward(decision: Decision, pass_: Pass[Any]) -> Any:
        if pass_.key.problem.is_backward:
            raise KernelError("PTXASError: out of registers")
        return prepared(decision, pass_)

    monkeypatch.setattr(prepare, "prepared", prepared_forward)


@pytest.mark.parametrize(
    "options", [{}, {"return_lse": True}, {"window": (9, 0), "return_lse": True}], ids=str
)
def test_autocast_does_not_change_types_of_baselines(
    no_backward_kernels: None, options: dict[str, Any]
) -> None:
    q, k, v = (tensor.bfloat16() for tensor in tensors())

    def attended() -> tuple[Tensor, ...]:
        result = flashtune.attention(q, k, v, causal=True, **options)
        return result if isinstance(result, tuple) else (result,)

    with pytest.warns(FlashtuneWarning, match="out of registers"):
        plain = attended()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, attended(), plain))


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_failed_backward_kernel_uses_torch_for_both_passes(no_backward_kernels: None, way: str) -> None:
    q, k, v = tensors()
    with pytest.raises(KernelError, match="out of registers"):
        loss(q, k, v)

    def gradients() -> Triple:
        result = call(q, k, v, causal=True).square().sum()
        return torch.autograd.grad(result, (q, k, v))  # type: ignore[return-value]

    call: Callable[..., Tensor] = flashtune.attention
    if way == "aot_eager":
        call = torch.compile(flashtune.attention, backend="aot_eager", fullgraph=True)
    with pytest.warns(FlashtuneWarning, match="out of registers"):
        actual = gradients()
    close(actual, expected(q, k, v))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 20, 0), {}),
        ((0, 20, 28), {"return_lse": True}),
        ((2, 0, 28), {"deterministic": True}),
        ((2, 20, 0), {"window": (3, 0)}),
    ],
)
def test_empty_keys_have_zero_gradients(sizes: tuple[int, int, int], options: dict[str, Any]) -> None:
    batch, seqlen_q, seqlen_kv = sizes
    q = torch.full((batch, HEADS, seqlen_q, 32), torch.nan, requires_grad=True)
    k, v = (torch.randn(batch, KV_HEADS, seqlen_kv, 32, requires_grad=True) for _ in range(2))
    for call in (
        flashtune.attention,
        torch.compile(flashtune.attention, backend="aot_eager", fullgraph=True),
    ):
        result = call(q, k, v, causal=True, **options)
        results = result if isinstance(result, tuple) else (result,)
        assert not results[0].any()
        gradients = torch.autograd.grad(results, (q, k, v), [torch.ones_like(tensor) for tensor in results])
        assert not any(gradient.any() for gradient in gradients)
    assert flashtune.explain(q, k, v, causal=True, **options).backend == "none"


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
    for length in (20, 18, 12):
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
