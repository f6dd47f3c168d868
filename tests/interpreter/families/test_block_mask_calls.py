"""Tests of calls with block masks in the interpreter: forms of masks, compilers, operators and errors."""

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune import BlockMask, ProblemError
from flashtune.request.call import dense_call
from flashtune.request.read_call import read_call
from flashtune.runtime import op_library
from flashtune.runtime.call_cache import run_call
from flashtune.runtime.torch_ops import call_operator
from tests.interpreter.feature_calls import check_dense

pytestmark = pytest.mark.usefixtures("fresh_runtime")

HEADS, KV_HEADS, QUERIES, KEYS = 4, 2, 140, 270
Triple = tuple[Tensor, Tensor, Tensor]


def tensors(layout: str = "bhsd") -> Triple:
    torch.manual_seed(0)
    q = torch.randn(2, HEADS, QUERIES, 16)
    k, v = torch.randn(2, KV_HEADS, KEYS, 16), torch.randn(2, KV_HEADS, KEYS, 16)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q, k, v


def a_mask(batch: int = 2, heads: int = HEADS, size: int = 64) -> BlockMask:
    generator = torch.Generator().manual_seed(1)
    visible = torch.rand(batch, heads, -(-QUERIES // size), -(-KEYS // size), generator=generator) < 0.5
    return BlockMask.from_blocks(visible, size)


@pytest.mark.parametrize(
    ("batch", "heads", "causal"),
    [(1, 1, False), (2, 1, True), (1, KV_HEADS, True), (2, KV_HEADS, False), (2, HEADS, True)],
)
def test_shared_lists(batch: int, heads: int, causal: bool) -> None:
    mask = a_mask(batch, heads)
    problem = read_call(dense_call(*tensors(), block_mask=mask)).problem
    assert problem.key.endswith("blocks64-head" if heads == HEADS else "blocks64-group")
    check_dense(*tensors(), causal=causal, block_mask=mask)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": "top_left", "layout": "bshd"},
        {"kv_lengths": torch.tensor([200, 0], dtype=torch.int32)},
        {"causal": True, "window": (80, 0), "sinks": torch.randn(HEADS)},
        {"scale": -0.3, "softcap": 2.0},
    ],
)
def test_other_options(options: dict[str, Any]) -> None:
    mask = a_mask(size=128)
    check_dense(*tensors(options.get("layout", "bhsd")), block_mask=mask, **options)


def test_lists_of_the_caller() -> None:
    """Sliced, narrow lists, and one list for each sequence."""
    counts = torch.tensor([[[2, 0, 1]], [[1, 1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[0, 3, 9], [5, 5, 5], [4, 0, 0]], [[2, 0, 0], [0, 7, 7], [1, 2, 3]]]).int()
    mask = BlockMask(counts, indices[:, None, :, :2], 64)
    check_dense(*tensors(), block_mask=mask)
    out, lse = flashtune.attention(*tensors(), block_mask=mask, return_lse=True)
    assert not out[0, :, 64:128].any()
    assert (lse[0, :, 64:128] == -torch.inf).all()


def test_one_head_for_all_without_groups() -> None:
    q, k, v = torch.randn(3, 1, 2, 70, 16).unbind()
    mask = BlockMask.from_blocks(torch.tensor([[True, False], [True, True]]), 64)
    assert read_call(dense_call(q, k, v, block_mask=mask)).problem.key.endswith("blocks64-head")
    check_dense(q, k, v, block_mask=mask)


def test_compile_traces_one_node_and_builders() -> None:
    torch._dynamo.reset()
    q, k, v = tensors()
    scores = torch.randn(2, HEADS, 3, 5)

    def attend(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> Tensor:
        return flashtune.attention(q, k, v, causal=True, block_mask=BlockMask.from_scores(scores, 2, 64))

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attend, backend=keep, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, scores), attend(q, k, v, scores))
    [graph] = graphs
    assert sum("flashtune" in str(node.target) for node in graph.graph.nodes) == 1


def test_compile_takes_a_mask_as_argument() -> None:
    torch._dynamo.reset()
    q, k, v = tensors()
    attend = torch.compile(
        lambda q, k, v, mask: flashtune.attention(q, k, v, block_mask=mask),
        backend="aot_eager",
        fullgraph=True,
    )
    torch.testing.assert_close(attend(q, k, v, a_mask()), flashtune.attention(q, k, v, block_mask=a_mask()))


def test_operator() -> None:
    call = dense_call(*tensors(), causal=True, return_lse=True, block_mask=a_mask())
    assert op_library.call_of(op_library.operands(call)).options == call.options
    for result, expected in zip(call_operator(call), run_call(call), strict=True):
        assert torch.equal(result, expected)


def test_saved_operators_have_no_operands_of_block_masks() -> None:
    """Graphs that were saved before block masks pass fewer operands."""
    call = dense_call(*tensors(), causal=True, return_lse=True, window=(30, 0))
    earlier = op_library.operands(call)[: -len(op_library.LATER)]
    assert op_library.ALL[len(earlier)] == "block_size"
    for result, right in zip(torch.ops.flashtune.attention_features(*earlier), run_call(call), strict=True):
        assert torch.equal(result, right)
    assert op_library.call_of(earlier).options == call.options


@pytest.mark.filterwarnings("ignore")
def test_torch_opcheck() -> None:
    call = dense_call(*tensors(), causal=True, return_lse=True, block_mask=a_mask())
    operands = op_library.operands(call)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.flashtune.attention_features.default, operands, test_utils=tests)


def test_plan_and_explain() -> None:
    plan = flashtune.plan(*tensors(), block_mask=a_mask())
    other = a_mask()._replace(counts=a_mask().counts.clamp(max=1))
    planned = plan(*tensors(), block_mask=other)
    assert torch.equal(planned, flashtune.attention(*tensors(), block_mask=other))
    assert "block_mask=64" in str(flashtune.explain(*tensors(), block_mask=a_mask()))


@pytest.mark.parametrize(("way", "heads"), [("eager", HEADS), ("aot_eager", KV_HEADS)])
def test_gradients(way: str, heads: int) -> None:
    torch._dynamo.reset()
    mask = a_mask(heads=heads)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = flashtune.attention(q, k, v, causal=True, block_mask=mask, return_lse=True)
        return out.square().sum() + lse.nan_to_num(neginf=0.0).sum()

    inputs = [tensor.requires_grad_() for tensor in tensors()]
    (loss if way == "eager" else torch.compile(loss, backend=way))(*inputs).backward()
    wide = [leaf.double().requires_grad_() for leaf in tensors()]
    loss(*wide).backward()
    for tensor, exact in zip(inputs, wide, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad.double(), exact.grad, atol=1e-4, rtol=1e-4)


def test_gradients_with_alibi_are_unfused() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in tensors())
    slopes = torch.rand(HEADS)
    with pytest.warns(flashtune.FlashtuneWarning, match="no ALiBi and no additive bias with a block mask"):
        flashtune.attention(q, k, v, block_mask=a_mask(), alibi_slopes=slopes).sum().backward()
    assert q.grad is not None
    with pytest.raises(ProblemError, match="no ALiBi and no additive bias with a block mask"):
        flashtune.attention(q, k, v, block_mask=a_mask(), alibi_slopes=slopes, prefer="generated")


def wrong(**changes: Any) -> BlockMask:
    return a_mask()._replace(**changes)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3, 5) > 0, "block_mask cannot be a Tensor: pass a flashtune.BlockMask"),
        (wrong(block_size=32), "block_mask.block_size cannot be 32: pass 64 or 128"),
        (wrong(counts=a_mask().counts.long()), "block_mask.counts is torch.int64"),
        (wrong(indices=a_mask().indices.float()), "block_mask.indices is torch.float32"),
        (wrong(counts=a_mask().counts[0]), "block_mask has counts"),
        (wrong(block_size=128), r"pass counts \[2 or 1, 4, 2 or 1, 2\] for 140 queries in blocks of 128"),
        (a_mask(heads=3), r"block_mask has counts \[2, 3, 3\]"),
        (a_mask(batch=3), r"block_mask has counts \[3, 4, 3\]"),
        (wrong(indices=a_mask().indices[..., :0]), "at least one key block"),
        (wrong(indices=a_mask().indices[:1]), "block_mask has counts"),
        (wrong(indices=a_mask().indices.mT.contiguous().mT), "last dimension has stride"),
        (
            wrong(indices=torch.full_like(a_mask().indices, 5)),
            r"indices\[.*\] is 5: pass numbers from 0 to 4",
        ),
        (wrong(indices=torch.zeros_like(a_mask().indices)), "in ascending order"),
        (wrong(counts=a_mask().counts + 9), "a list has 5 elements: pass counts from 0 to 5"),
    ],
)
def test_wrong_masks(mask: Any, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        flashtune.attention(*tensors(), block_mask=mask)


def test_packed_sequences_have_no_block_mask() -> None:
    q, k, v = (tensor[0].transpose(0, 1) for tensor in tensors())
    starts = torch.tensor([0, QUERIES], dtype=torch.int32)
    options: dict[str, Any] = {"block_mask": a_mask()}
    with pytest.raises(TypeError, match="block_mask"):
        flashtune.attention_varlen(q, k, v, starts, starts, QUERIES, QUERIES, **options)
