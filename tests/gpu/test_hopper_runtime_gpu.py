"""Attention by Hopper kernels on their GPU: tensors of every kind, graphs, streams, threads, huge outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from flashtune.descriptors import MOST_ADDRESSES
from flashtune.errors import ProblemError
from flashtune.quantization import quantize

NATIVE, PORTABLE = "forward_hopper", "forward_q_outer"
TOLERANCE = 1.6e-2
BATCH, HEADS, KV_HEADS, LENGTH = 2, 8, 2, 333
Triple = tuple[Tensor, Tensor, Tensor]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("untuned"),
    # Nothing interrupts a thread that waits for the GPU: a hang ends the whole run, and says where it was.
    pytest.mark.timeout(300, method="thread"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
    pytest.mark.filterwarnings("ignore::flashtune.notices.FlashtuneWarning"),
]


def tensors(head_dim: int = 128, seed: int = 0, length: int = LENGTH, kv_heads: int = KV_HEADS) -> Triple:
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (
        torch.randn(BATCH, heads, length, head_dim, dtype=torch.bfloat16, device="cuda", generator=generator)
        for heads in (HEADS, kv_heads, kv_heads)
    )
    return q, k, v


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flashtune.attention(q, k, v, causal=True, prefer="generated")


def family_of(q: Tensor, k: Tensor, v: Tensor) -> str:
    told = flashtune.explain(q, k, v, causal=True, prefer="generated")
    assert told.selection is not None
    return told.selection.record.family


def assert_right(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    wide = q.double(), k.double(), v.double()
    expected = scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE, rtol=TOLERANCE)


# ---- how tensors lie -------------------------------------------------------------------------------


def off_border(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def odd_rows(tensor: Tensor) -> Tensor:
    return tensor.new_empty(*tensor.shape[:3], tensor.shape[3] + 3)[..., : tensor.shape[3]].copy_(tensor)


def one_row(tensor: Tensor) -> Tensor:
    return tensor[:, :, :1].expand(-1, -1, tensor.shape[2], -1)


@pytest.mark.parametrize("place", [off_border, odd_rows, one_row])
@pytest.mark.parametrize("position", range(3), ids="qkv")
def test_one_tensor_that_cannot_be_copied_in_tiles_is_enough_for_the_portable_family(
    place: Callable[[Tensor], Tensor], position: int
) -> None:
    given = list(tensors())
    assert family_of(*given) == NATIVE
    given[position] = place(given[position])
    assert family_of(*given) == PORTABLE
    assert_right(attention(*given), *given)


def of_a_fused_projection(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """Rows of one matrix that hold the heads of all three side by side."""
    heads = [tensor.shape[1] for tensor in (q, k, v)]
    fused = torch.cat([tensor.transpose(1, 2) for tensor in (q, k, v)], dim=2).contiguous()
    one, two, three = (part.transpose(1, 2) for part in fused.split(heads, dim=2))
    return one, two, three


def positions_first(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    one, two, three = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v))
    return one, two, three


def every_other_head(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    one, two, three = (tensor.repeat_interleave(2, 1)[:, ::2] for tensor in (q, k, v))
    return one, two, three


def shared_over_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    return q, k[:1].expand(BATCH, -1, -1, -1), v[:1].expand(BATCH, -1, -1, -1)


def queries_alike(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    return q[:, :1].expand(-1, HEADS, -1, -1), k, v


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(
    "place",
    [of_a_fused_projection, positions_first, every_other_head, shared_over_the_batch, queries_alike],
)
def test_strided_tensors_are_right(place: Callable[..., Triple], head_dim: int) -> None:
    given = place(*tensors(head_dim))
    assert_right(attention(*given), *given)
    if all(all(tensor.stride()) for tensor in given):
        assert family_of(*given) == NATIVE


@pytest.mark.parametrize("shown", [2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_key_head_that_is_shown_several_times_is_right(head_dim: int, shown: int) -> None:
    """Keys and values expanded over their heads, with a stride of zero, whoever serves them."""
    q, k, v = tensors(head_dim, kv_heads=1)
    expanded = q, k.expand(-1, shown, -1, -1), v.expand(-1, shown, -1, -1)
    assert expanded[1].stride(1) == 0
    assert_right(attention(*expanded), q, k, v)
    planned = flashtune.plan(*expanded, causal=True, prefer="generated")
    assert_right(planned(*expanded), q, k, v)


def test_quantised_tensors_may_be_expanded_and_must_lie_on_borders() -> None:
    q, k, v = tensors(kv_heads=1)
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (quantize(tensor) for tensor in (q, k, v))

    def scaled(k: Tensor, v: Tensor, heads: int) -> Tensor:
        of_k, of_v = k_scale.expand(-1, heads), v_scale.expand(-1, heads)
        return flashtune.attention(q8, k, v, causal=True, q_scale=q_scale, k_scale=of_k, v_scale=of_v)

    plain = scaled(k8, v8, 1)
    shown = scaled(k8.expand(-1, 4, -1, -1), v8.expand(-1, 4, -1, -1), 4)
    assert torch.equal(plain, shown)
    # Eight elements of one byte are half of what the copy engine's strides are counted in.
    half = torch.empty(*k8.shape[:3], 136, dtype=k8.dtype, device="cuda")[..., :128].copy_(k8)
    with pytest.raises(ProblemError, match="cannot address"):
        scaled(half, v8, 1)


# ---- graphs, streams, threads ----------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_captured_call_replays_on_new_values(head_dim: int) -> None:
    q, k, v = tensors(head_dim)
    planned = flashtune.plan(q, k, v, causal=True, prefer="generated")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Tensors of the graph's own pool: their descriptors are made while it is captured.
        copied = q * 1.0
        out = planned(copied, k, v)
        again = planned(q, k, v)
    for step in range(3):
        for tensor, fresh in zip((q, k, v), tensors(head_dim, seed=step + 1), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        assert_right(out, q, k, v)
        assert torch.equal(out, again)
    # Other descriptors in between change nothing of what was captured.
    attention(*tensors(head_dim, seed=9))
    graph.replay()
    assert_right(out, q, k, v)


def test_two_streams_take_turns() -> None:
    given = [tensors(seed=seed) for seed in range(2)]
    expected = [attention(*each) for each in given]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    outs: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for stream, each, kept in zip(streams, given, outs, strict=True):
            with torch.cuda.stream(stream):
                kept.append(attention(*each))
    torch.cuda.synchronize()
    for kept, right in zip(outs, expected, strict=True):
        assert all(torch.equal(out, right) for out in kept)


def test_two_threads_call_at_once() -> None:
    given = [tensors(seed=seed) for seed in range(2)]
    expected = [attention(*each) for each in given]
    torch.cuda.synchronize()
    together = threading.Barrier(len(given))
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                together.wait()
                for turn in range(200):
                    # Addresses that the other thread has just given back are met as well.
                    fresh = [tensor.clone() for tensor in given[number]]
                    if not torch.equal(attention(*fresh), expected[number]):
                        wrong.append(f"thread {number}, turn {turn}")
        except Exception as error:  # noqa: BLE001 - told below: pytest does not see into threads
            wrong.append(f"thread {number}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_more_addresses_than_are_remembered() -> None:
    q, k, v = tensors(64, length=64)
    expected = attention(q, k, v)
    room = torch.empty(MOST_ADDRESSES + 40, *q.shape, dtype=q.dtype, device="cuda").copy_(q)
    outs = [attention(each, k, v) for each in room]
    assert all(torch.equal(out, expected) for out in outs)
    assert torch.equal(attention(q, k, v), expected)


# ---- huge tensors ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_outputs_of_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    heads, length = 33, 2**20
    q = torch.empty(1, heads, length, 64, dtype=torch.bfloat16, device="cuda").normal_()
    k, v = (torch.randn(1, 1, 48, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert q.numel() > 2**31
    told = flashtune.explain(q, k, v, prefer="generated", return_lse=True)
    assert told.selection is not None
    assert told.selection.record.family == NATIVE
    out, lse = flashtune.attention(q, k, v, prefer="generated", return_lse=True)
    for start in (0, length // 2, length - 300):
        rows = slice(start, start + 300)
        scores = q[:, :, rows].double() @ k.double().mT * 64**-0.5
        expected = scores.softmax(-1) @ v.double()
        torch.testing.assert_close(out[:, :, rows].double(), expected, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(lse[:, :, rows].double(), scores.logsumexp(-1), atol=1e-4, rtol=1e-4)
    # Nothing between is left unwritten, head by head: the whole would not fit in float64.
    assert all(bool(out[:, head].isfinite().all()) for head in range(heads))
