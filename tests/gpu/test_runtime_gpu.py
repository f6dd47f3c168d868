"""Tests of the runtime on a GPU: kinds of tensors, compilation, capture and threads."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune import testing
from flashtune.core.kernel import Alignment
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.request.call import CausalOption
from tests.gpu.calls import free_memory, generated, reference, request_of, tensors
from tests.gpu.marks import SERVED

pytestmark = SERVED

# On Hopper, its own family serves bfloat16, and a portable one float32.
FAMILIES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_layouts(dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype=dtype)
    expected = reference(q, k, v, True).out
    testing.close(generated(q, k, v), expected)
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    out = generated(q, k, v, layout="bshd")
    assert out.is_contiguous()
    testing.close(out.transpose(1, 2), expected)
    testing.close(generated(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), expected)


@pytest.mark.parametrize(
    ("causal", "lengths"),
    [
        (False, (1, 129)),
        (False, (257, 63)),
        ("top_left", (100, 300)),
        ("top_left", (300, 100)),
        (True, (300, 100)),
        (True, (1, 1000)),
        (True, (1000, 1)),
    ],
)
def test_masks_and_lengths(causal: CausalOption, lengths: tuple[int, int]) -> None:
    q, k, v = tensors(*lengths)
    testing.close(generated(q, k, v, causal), reference(q, k, v, causal).out)


@pytest.mark.parametrize("head_dim", [40, 96, 128, 256])
def test_head_dims(head_dim: int) -> None:
    q, k, v = tensors(head_dim=head_dim)
    testing.close(generated(q, k, v), reference(q, k, v, True).out)


def test_the_log_sum_exp() -> None:
    q, k, v = tensors(400, 300)
    out, lse = generated(q, k, v, return_lse=True)
    expected = reference(q, k, v, True)
    testing.close(out, expected.out)
    testing.close(lse, expected.lse)


def padded(tensor: Tensor, spare: int, offset: int = 0) -> Tensor:
    """The same values in rows that are wider, from an offset on."""
    batch, heads, length, width = tensor.shape
    room = torch.full((batch * heads * length * (width + spare) + offset,), torch.nan, device="cuda")
    rows = room.to(tensor.dtype)[offset:].view(batch, heads, length, width + spare)
    return rows[..., :width].copy_(tensor)


@pytest.mark.parametrize(
    ("spare", "offset", "alignment"),
    [
        (0, 0, Alignment.SIXTEEN),
        (8, 0, Alignment.EIGHT),
        # Copies serve.
        (3, 0, Alignment.SIXTEEN),
        (0, 1, Alignment.ANY),
        (16, 8, Alignment.SIXTEEN),
    ],
)
def test_alignments(spare: int, offset: int, alignment: Alignment) -> None:
    q, k, v = tensors()
    expected = reference(q, k, v, True).out
    for views in (
        (padded(q, spare, offset), k, v),
        (q, padded(k, spare, offset), v),
        (q, k, padded(v, spare, offset)),
    ):
        assert BoundRequest(request_of(*views), *views).forward_properties.alignment is alignment
        testing.close(generated(*views), expected)


def test_expanded_tensors() -> None:
    q, k, v = tensors(kv_heads=1)
    shared = k.expand(-1, 8, -1, -1), v.expand(-1, 8, -1, -1)
    testing.close(generated(q, *shared), reference(q, *shared, True).out)
    repeated = k[:, :, :1].expand(-1, -1, 400, -1), v
    testing.close(generated(q, *repeated), reference(q, *repeated, True).out)


@pytest.mark.alone
def test_more_than_two_to_the_31_elements() -> None:
    """A query tensor and an output of 4.3 GB; the last rows are beyond 32-bit offsets."""
    if free_memory() < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    heads, length = 33, 2**20
    q = torch.empty(1, heads, length, 64, dtype=torch.bfloat16, device="cuda").normal_()
    k, v = (torch.randn(1, 1, 48, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert q.numel() > 2**31
    out, lse = generated(q, k, v, False, return_lse=True)
    for rows in (slice(0, 300), slice(length // 2, length // 2 + 300), slice(length - 300, length)):
        expected = reference(q[:, :, rows], k, v)
        testing.close(out[:, :, rows], expected.out)
        testing.close(lse[:, :, rows], expected.lse)
    # Nothing between is left unwritten, head by head: the whole would not fit in float64.
    assert all(bool(out[:, head].isfinite().all()) for head in range(heads))
    assert BoundRequest(request_of(q, k, v), q, k, v).forward_properties.index_bits == 64
    if torch.cuda.get_device_capability() == (9, 0):
        told = flashtune.explain(q, k, v, prefer="generated", return_lse=True)
        assert told.selection is not None
        assert told.selection.record.family == "forward_hopper"


def test_strides_beyond_two_to_the_31_elements() -> None:
    q, k, v = tensors()
    room = torch.empty(2**31 + k.numel(), dtype=k.dtype, device="cuda")
    far = room.as_strided(k.shape, (2**31, *k.stride()[1:])).copy_(k)
    testing.close(generated(q, far, v), reference(q, k, v, True).out)


def test_compile_traces_one_node() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    q, k, v = tensors()

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtune.attention(q * 2, k, v, causal=True, prefer="generated") + 1

    eager = model(q, k, v)
    torch.testing.assert_close(torch.compile(model, backend=keep, fullgraph=True)(q, k, v), eager)
    [graph] = graphs
    assert sum("flashtune" in str(node.target) for node in graph.graph.nodes) == 1
    torch._dynamo.reset()
    inductor = torch.compile(model, fullgraph=True)(q, k, v)
    torch.testing.assert_close(inductor, eager, atol=2e-2, rtol=2e-2)


@FAMILIES
@pytest.mark.parametrize("head_dim", [64, 128])
def test_plan_is_captured_and_replayed(dtype: torch.dtype, head_dim: int) -> None:
    q, k, v = tensors(head_dim=head_dim, dtype=dtype)
    planned = flashtune.plan(q, k, v, causal=True, prefer="generated")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Tensors of the graph's own pool: their descriptors are made while it is captured.
        copied = q * 1.0
        out = planned(copied, k, v)
        again = planned(q, k, v)
    for step in range(3):
        for tensor in (q, k, v):
            tensor.copy_(torch.randn_like(tensor) * (step + 1))
        graph.replay()
        testing.close(out, reference(q, k, v, True).out)
        assert torch.equal(out, again)
    # Descriptors that are made in between do not change the captured graph.
    generated(*tensors(head_dim=head_dim, dtype=dtype))
    graph.replay()
    testing.close(out, reference(q, k, v, True).out)


# Nothing interrupts a thread that waits for the GPU: a hang ends the whole run, and says where it was.
@pytest.mark.timeout(300, method="thread")
@FAMILIES
def test_threads_on_their_own_streams(dtype: torch.dtype) -> None:
    inputs = [tensors(300 + number, dtype=dtype) for number in range(8)]
    expected = [generated(*each) for each in inputs]
    for each, out in zip(inputs, expected, strict=True):
        testing.close(out, reference(*each, True).out)
    torch.cuda.synchronize()
    together = threading.Barrier(len(inputs))
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                together.wait()
                for turn in range(200):
                    # Addresses that another thread has just given back are met as well.
                    q, k, v = (tensor.clone() for tensor in inputs[number])
                    if not torch.equal(generated(q, k, v), expected[number]):
                        wrong.append(f"thread {number}, turn {turn}")
        except Exception as error:  # noqa: BLE001 - reported below: pytest does not see errors of threads
            wrong.append(f"thread {number}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_than_the_current_device() -> None:
    q, k, v = tensors()
    expected = reference(q, k, v, True).out
    testing.close(generated(q.cuda(1), k.cuda(1), v.cuda(1)).to("cuda:0"), expected)
    testing.close(generated(q, k, v), expected)
