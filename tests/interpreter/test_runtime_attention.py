"""Tests of `attention` in the interpreter: against float64, and under compilers and tracers."""

import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import flashtune
from flashtune.request.call import CausalOption, LayoutOption
from tests.interpreter.feature_calls import check_dense, dense

pytestmark = pytest.mark.usefixtures("fresh_runtime")
# Bounds for the errors of float32, and of rounding the result to 16 bits.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPE = {"batch": 1, "kv_heads": 1, "group": 2, "head_dim": 32, "value_head_dim": 16, "layout": "bhsd"}


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scales(scale: float) -> None:
    check_dense(*dense(), causal=True, scale=scale)


def test_unaligned_and_non_contiguous_views() -> None:
    q, k, v = dense()
    shifted = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    check_dense(shifted, k, v)
    wide = torch.empty(*k.shape[:3], 37)[..., 2:34].copy_(k)
    check_dense(q, wide, v, causal=True)
    k_head, v_head = (tensor[:, :1].expand(-1, 2, -1, -1) for tensor in (k, v))
    check_dense(q, k_head, v_head, causal=True)
    check_dense(q, k[:, :, ::2], v[:, :, ::2])
    packed = torch.randn(2, 20, 3, 4, 32)
    q, k, v = packed.unbind(2)
    check_dense(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
    check_dense(q, k, v, causal=True, layout="bshd")


@hypothesis.settings(max_examples=12)
@hypothesis.given(
    batch=st.integers(0, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    seqlen_q=st.integers(0, 70),
    seqlen_kv=st.integers(0, 70),
    head_dim=st.integers(1, 48),
    value_head_dim=st.integers(1, 48),
    causal=st.sampled_from([False, True, "top_left"]),
    layout=st.sampled_from(["bhsd", "bshd"]),
    dtype=st.sampled_from(list(TOLERANCE)),
)
@hypothesis.example(**SHAPE, seqlen_q=0, seqlen_kv=5, causal=True, dtype=torch.float32)
@hypothesis.example(**SHAPE, seqlen_q=5, seqlen_kv=0, causal=True, dtype=torch.float32)
@hypothesis.example(**SHAPE | {"batch": 0}, seqlen_q=5, seqlen_kv=5, causal=True, dtype=torch.float32)
@hypothesis.example(**SHAPE | {"head_dim": 96}, seqlen_q=65, seqlen_kv=31, causal=False, dtype=torch.float16)
def test_any_shape(
    batch: int,
    kv_heads: int,
    group: int,
    seqlen_q: int,
    seqlen_kv: int,
    head_dim: int,
    value_head_dim: int,
    causal: CausalOption,
    layout: LayoutOption,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(seqlen_q + 1000 * seqlen_kv)
    q = torch.randn(batch, kv_heads * group, seqlen_q, head_dim, dtype=dtype)
    k = torch.randn(batch, kv_heads, seqlen_kv, head_dim, dtype=dtype)
    v = torch.randn(batch, kv_heads, seqlen_kv, value_head_dim, dtype=dtype)
    if layout == "bshd":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    check_dense(q, k, v, TOLERANCE[dtype], causal=causal, layout=layout)


def test_plan_and_explain() -> None:
    q, k, v = dense()
    planned = flashtune.plan(q, k, v, causal=True, scale=-0.2)
    assert torch.equal(planned(q, k, v), flashtune.attention(q, k, v, causal=True, scale=-0.2))
    told = flashtune.explain(q, k, v, causal=True)
    assert told.backend == "interpreter"
    assert "TRITON_INTERPRET=1" in str(told)


def test_calls_do_not_warn_or_search() -> None:
    with warnings.catch_warnings():
        # Triton 3.6's interpreter warns of its own use of numpy.
        warnings.simplefilter("error", flashtune.FlashtuneWarning)
        flashtune.attention(*dense(), prefer="generated")


@pytest.mark.parametrize("return_lse", [False, True])
def test_rows_after_the_last_packed_sequence_are_zero(return_lse: bool) -> None:
    q, k, v = (torch.randn(20, 2, 16, requires_grad=True) for _ in range(3))
    starts = torch.tensor([0, 5, 13], dtype=torch.int32)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            if return_lse:
                packed = q, k, v, starts, starts, 8, 8
                out, lse = flashtune.attention_varlen(*packed, causal=True, return_lse=True)
                assert (lse[:, 13:] == -torch.inf).all()
            else:
                out = flashtune.attention_varlen(q, k, v, starts, starts, 8, 8, causal=True)
        assert not out[13:].any()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not gradient[13:].any()


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


@pytest.mark.parametrize(("return_lse", "layout"), [(False, "bhsd"), (True, "bshd")])
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
