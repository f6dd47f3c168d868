"""Tests of the operators under compilers, tracers and autograd."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import flashtune

Triple = tuple[Tensor, Tensor, Tensor]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "return_lse": True},
    {"causal": "top_left", "layout": "bshd", "scale": 0.3},
    {"causal": True, "scale": -0.3, "prefer": "generated"},
]


def tensors(layout: str = "bhsd", grad: bool = False) -> Triple:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 20, 32), torch.randn(2, 2, 28, 32), torch.randn(2, 2, 28, 16)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q.requires_grad_(grad), k.requires_grad_(grad), v.requires_grad_(grad)


def test_gradients_of_a_negative_scale() -> None:
    q, k, v = tensors(grad=True)
    parameters = [torch.nn.Parameter(tensor.detach().clone()) for tensor in (q, k, v)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flashtune.FlashtuneWarning)
        flashtune.attention(*parameters, scale=-0.3).sum().backward()
        flashtune.attention(-q, k, v, scale=0.3).sum().backward()
    for parameter, tensor in zip(parameters, (q, k, v), strict=True):
        torch.testing.assert_close(parameter.grad, tensor.grad)


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[GraphModule]]:
    """A function under torch.compile, and the graphs that it became."""
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return torch.compile(function, backend=keep, fullgraph=True), graphs


@pytest.mark.parametrize("options", OPTIONS)
def test_compile_traces_one_node(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    q, k, v = tensors(options.get("layout", "bhsd"))
    expected = flashtune.attention(q, k, v, **options)
    call, graphs = compiled(lambda q, k, v: flashtune.attention(q, k, v, **options))
    torch.testing.assert_close(call(q, k, v), expected)
    [graph] = graphs
    nodes = [
        node for node in graph.graph.nodes if node.op == "call_function" and "flashtune" in str(node.target)
    ]
    assert len(nodes) == 1
    others = {node.op for node in graph.graph.nodes} - {"placeholder", "output", "call_function"}
    assert not others


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.filterwarnings("ignore")
def test_torch_opcheck(return_lse: bool, layout: str) -> None:
    op = torch.ops.flashtune.attention_with_lse if return_lse else torch.ops.flashtune.attention
    arguments = (*tensors(layout), "bottom_right", None, layout, "fastest")
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    torch.library.opcheck(op.default, arguments, test_utils=tests)


def test_make_fx_traces_the_operator() -> None:
    graph = make_fx(lambda q, k, v: flashtune.attention(q, k, v, causal=True))(*tensors())
    assert [str(node.target) for node in graph.graph.nodes if node.op == "call_function"] == [
        "flashtune.attention.default"
    ]


def test_device_modes_and_subclasses_are_supported() -> None:
    q, k, v = tensors()
    expected = flashtune.attention(q, k, v)
    with torch.device("cpu"):
        assert torch.equal(flashtune.attention(q, k, v), expected)
    q = torch.nn.Parameter(q, requires_grad=False)
    assert torch.equal(flashtune.attention(q, k, v), expected)


def test_invalid_input_is_refused_during_compilation() -> None:
    torch._dynamo.reset()
    call, _ = compiled(flashtune.attention)
    q, k, v = tensors()
    with pytest.raises(Exception, match="give them one dtype"):
        call(q.half(), k, v)
