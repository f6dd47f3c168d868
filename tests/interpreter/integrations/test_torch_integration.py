"""Tests of torch's operators served by flashtune in the interpreter, on the CPU, against float64."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.integrations import torch as integration
from flashtune.integrations.flash_operators import CudnnForward, CudnnForwardInto
from flashtune.recording.recorder import read_counts
from flashtune.runtime.session import SESSION, record_calls
from tests.support.attention_operators import (
    CUDNN,
    CUDNN_PACKED,
    EFFICIENT,
    FLASH,
    FLASH_BACKWARD,
    FLASH_INTO,
    Originals,
    by_definition,
    close,
)

pytestmark = pytest.mark.filterwarnings("error::flashtune.FlashtuneWarning")
Triple = tuple[Tensor, Tensor, Tensor]
aten = torch.ops.aten


def tensors(
    seqlen_q: int = 20,
    seqlen_kv: int = 28,
    *,
    heads_last: bool = True,
    kv_heads: int = 2,
    requires_grad: bool = False,
) -> Triple:
    torch.manual_seed(seqlen_q)
    inputs = []
    for heads, seqlen, width in ((4, seqlen_q, 32), (kv_heads, seqlen_kv, 32), (kv_heads, seqlen_kv, 16)):
        if heads_last:
            tensor = torch.randn(2, seqlen, heads, width).transpose(1, 2)
        else:
            tensor = torch.randn(2, heads, seqlen, width)
        inputs.append(tensor.requires_grad_(requires_grad))
    return inputs[0], inputs[1], inputs[2]


def blocked(ended: threading.Event) -> None:
    assert ended.wait(600)


def prepared(call: Any) -> Any:
    """Returns the result of a call after its kernels were prepared and it was served once.

    The worker is busy during the first call, so that torch's operator serves this one.
    """
    ended = threading.Event()
    assert SESSION.worker.put(lambda: blocked(ended), SESSION.queue_limit)
    try:
        call()
    finally:
        ended.set()
    SESSION.wait()
    call()
    return call()


def biases(seqlen_q: int, seqlen_kv: int) -> dict[str, Tensor]:
    torch.manual_seed(7)
    dense = torch.randn(2, 4, seqlen_q, seqlen_kv)
    padding = torch.zeros(2, 1, 1, seqlen_kv)
    padding[0, ..., -9:] = -torch.inf
    blind = torch.zeros(1, 1, seqlen_q, seqlen_kv)
    blind[:, :, 3:5] = -torch.inf
    aligned = torch.randn(2, 1, seqlen_q, 64)[..., 1 : 1 + seqlen_kv]
    return {
        "dense": dense,
        "padding": padding.expand(2, 4, seqlen_q, seqlen_kv),
        "blind": blind.expand(2, 4, -1, -1),
        "unaligned": aligned,
        "two dimensions": dense[0, 0],
    }


@pytest.mark.parametrize("heads_last", [True, False])
@pytest.mark.parametrize("name", [CUDNN, EFFICIENT])
@pytest.mark.parametrize("causal", [False, True])
def test_outputs_are_those_of_the_operator(
    originals: Originals, name: str, causal: bool, heads_last: bool
) -> None:
    q, k, v = tensors(heads_last=heads_last)
    op = getattr(aten, name)
    with integration.disabled():
        want = op(q, k, v, None, False, 0.0, causal, scale=0.3)
    assert originals.calls[name] == 1
    results = prepared(lambda: op(q, k, v, None, False, 0.0, causal, scale=0.3))
    assert originals.calls[name] == 2, "the second call is served"
    close(results[0], by_definition(q.double(), k.double(), v.double(), causal=causal, scale=0.3)[0])
    close(results[0], want[0])
    for result, right in zip(results, want, strict=True):
        assert type(result) is type(right)
        if isinstance(result, Tensor):
            assert (result.shape, result.stride(), result.dtype) == (right.shape, right.stride(), right.dtype)
        else:
            assert result == right


@pytest.mark.sampled
@pytest.mark.parametrize("name", [CUDNN, EFFICIENT])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(20, 28), (32, 32), (40, 24)])
def test_both_passes_are_served(
    originals: Originals, name: str, causal: bool, seqlen_q: int, seqlen_kv: int
) -> None:
    qkv = tensors(seqlen_q, seqlen_kv, requires_grad=True)
    op = getattr(aten, name)

    def call() -> tuple[Any, ...]:
        results: tuple[Any, ...] = op(*qkv, None, True, 0.0, causal)
        return results

    results = prepared(call)
    assert originals.calls[name] == 1
    want, want_lse = by_definition(*(tensor.double() for tensor in qkv), causal=causal)
    close(results[0], want)
    lse = results[1]
    if name == CUDNN:
        assert lse.shape == (2, 4, seqlen_q, 1)
        close(lse.squeeze(-1), want_lse)
    else:
        assert lse.shape == (2, 4, -(-seqlen_q // 32) * 32)
        close(lse[..., :seqlen_q], want_lse)
        assert bool((lse[..., seqlen_q:] == torch.inf).all())
    dout = torch.randn_like(results[0])
    grads = torch.autograd.grad(results[0], qkv, dout)
    assert originals.calls[f"{name}_backward"] == 0
    for grad, right, leaf in zip(grads, torch.autograd.grad(want, qkv, dout.double()), qkv, strict=True):
        close(grad, right)
        assert grad.stride() == torch.empty_like(leaf).stride()


@pytest.mark.parametrize("name", [CUDNN, EFFICIENT])
def test_passes_of_torch_and_flashtune_can_be_mixed(originals: Originals, name: str) -> None:
    inputs = tensors(requires_grad=True)
    op = getattr(aten, name)

    def call() -> Tensor:
        out: Tensor = op(*inputs, None, True, 0.0, True)[0]
        return out

    served = prepared(call)
    want, _ = by_definition(*(tensor.double() for tensor in inputs), causal=True)
    dout = torch.randn_like(want)
    expected = torch.autograd.grad(want, inputs, dout)
    with integration.disabled():
        passed_on = call()
    by_torch = torch.autograd.grad(passed_on, inputs, dout.float())
    assert originals.calls[f"{name}_backward"] == 1, "a call that is passed on stays with torch"
    integration.deactivate()
    after_deactivation = torch.autograd.grad(served, inputs, dout.float())
    assert originals.calls[f"{name}_backward"] == 2
    for first, second, reference in zip(by_torch, after_deactivation, expected, strict=True):
        close(first, reference)
        close(second, reference)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [CUDNN, EFFICIENT])
@pytest.mark.parametrize("kind", biases(20, 28))
@pytest.mark.parametrize("scale", [None, 0.0])
def test_biases(originals: Originals, name: str, kind: str, scale: float | None) -> None:
    q, k, v = tensors()
    bias = biases(20, 28)[kind]
    op = getattr(aten, name)
    results = prepared(lambda: op(q, k, v, bias, False, scale=scale))
    assert originals.calls[name] == 1
    want, _ = by_definition(q.double(), k.double(), v.double(), bias.double(), scale=scale)
    close(results[0], want)


@pytest.mark.parametrize("name", [CUDNN, EFFICIENT])
def test_gradients_with_a_bias(originals: Originals, name: str) -> None:
    inputs = tensors(requires_grad=True)
    bias = biases(20, 28)["blind"]
    op = getattr(aten, name)
    out = prepared(lambda: op(*inputs, bias, True))[0]
    q, k, v = (tensor.double() for tensor in inputs)
    want, _ = by_definition(q, k, v, bias.double())
    dout = torch.randn_like(out)
    close(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(want, inputs, dout.double()))
    assert originals.calls[f"{name}_backward"] == 0


def test_calls_are_recorded(originals: Originals, tmp_path: Path) -> None:
    inputs = tensors(requires_grad=True)
    op = aten._scaled_dot_product_cudnn_attention
    prepared(lambda: op(*inputs, None, True))
    with record_calls(tmp_path / "calls.jsonl"):
        for _ in range(3):
            op(*inputs, None, True)
            SESSION.wait()
    counts = {count.problem: count.calls for count in read_counts(tmp_path / "calls.jsonl")}
    assert sorted(problem.direction for problem in counts) == ["backward", "forward"]
    assert set(counts.values()) == {3}


def passed_on(q: Tensor, k: Tensor, v: Tensor) -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]:
    bias = torch.zeros(20, 28)
    trained = bias.clone().requires_grad_()
    shifted = torch.empty(q.numel() + 1)[1:].as_strided(q.shape, q.stride()).copy_(q)
    sequences_inside = q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    return {
        "dropout": (CUDNN, (q, k, v, None, False, 0.1), {}),
        "debug mask": (CUDNN, (q, k, v, None, False, 0.0, False, True), {}),
        "trained bias": (EFFICIENT, (q, k, v, trained, True), {}),
        "unaligned": (CUDNN, (shifted, k, v, None, False), {}),
        "expanded": (CUDNN, (q[:1].expand(2, -1, -1, -1), k, v, None, False), {}),
        "another order": (CUDNN, (sequences_inside, k, v, None, False), {}),
        "negative scale": (CUDNN, (q, k, v, None, False), {"scale": -0.1}),
        "no sequences": (CUDNN, (q[:0], k[:0], v[:0], None, False), {}),
        "no queries": (EFFICIENT, (q[:, :, :0], k, v, None, False), {}),
        "float64": (EFFICIENT, (q.double(), k.double(), v.double(), None, False), {}),
        "bias of another type": (CUDNN, (q, k, v, bias.double(), False), {}),
        "bias expanded over keys": (CUDNN, (q, k, v, bias[:, :1].expand(20, 28), False), {}),
        "heads first, efficient": (EFFICIENT, (q.contiguous(), k, v, None, True), {}),
    }


@pytest.mark.parametrize("kind", passed_on(*tensors()))
def test_other_calls_are_passed_on_unchanged(originals: Originals, kind: str) -> None:
    name, args, options = passed_on(*tensors())[kind]
    op = getattr(aten, name)
    for _ in range(3):
        results = op(*args, **options)
        SESSION.wait()
    assert originals.calls[name] == 3
    with integration.disabled():
        want = op(*args, **options)
    for result, expected in zip(results, want, strict=True):
        if isinstance(result, Tensor):
            assert torch.equal(result.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("heads_first", [(), (0,), (0, 1), (1, 2), (0, 1, 2)])
def test_flash_attention_of_dense_tensors(originals: Originals, heads_first: tuple[int, ...]) -> None:
    inputs = tuple(
        tensor.contiguous().transpose(1, 2) if index in heads_first else tensor.transpose(1, 2).contiguous()
        for index, tensor in enumerate(tensors(20, 28))
    )
    for tensor in inputs:
        tensor.requires_grad_()
    out, lse, state, unused, _ = prepared(
        lambda: aten._flash_attention_forward(*inputs, None, None, 20, 28, 0.0, True, False)
    )
    assert originals.calls[FLASH] == 1
    want, want_lse = by_definition(
        *(tensor.double().transpose(1, 2) for tensor in inputs), causal=True, bottom_right=True
    )
    close(out, want.transpose(1, 2))
    close(lse, want_lse)
    assert (state.shape, state.dtype) == ((2,), torch.uint64)
    dout = torch.randn_like(out)
    more = None, None, 20, 28, 0.0, True, state, unused
    gradients = aten._flash_attention_backward(dout, *inputs, out, lse, *more)
    assert originals.calls[FLASH_BACKWARD] == 0
    close(gradients, torch.autograd.grad(want.transpose(1, 2), inputs, dout.double()))
    out_like = torch.empty_like(inputs[0][..., : inputs[2].shape[3]])
    for actual, like in zip((out, *gradients), (out_like, *inputs), strict=True):
        assert (actual.shape, actual.stride()) == (like.shape, like.stride())


STARTS = torch.tensor([0, 5, 5, 21], dtype=torch.int32)
KEYS = torch.tensor([0, 9, 12, 30], dtype=torch.int32)


def in_sequences(
    q: Tensor, k: Tensor, v: Tensor, starts_k: Tensor = KEYS, **options: Any
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of packed sequences, one after another."""
    outs, sums = [], []
    for start, end, first, last in zip(STARTS, STARTS[1:], starts_k, starts_k[1:], strict=False):
        sequence = q[start:end], k[first:last], v[first:last]
        out, lse = by_definition(*(x.transpose(0, 1)[None] for x in sequence), bottom_right=True, **options)
        outs.append(out[0].transpose(0, 1))
        sums.append(lse[0])
    return torch.cat(outs), torch.cat(sums, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(originals: Originals, causal: bool) -> None:
    torch.manual_seed(3)
    rows = torch.randn(21, 4, 32), torch.randn(30, 2, 32), torch.randn(30, 2, 32)
    for tensor in rows:
        tensor.requires_grad_()
    starts = STARTS, KEYS, 16, 18

    def call() -> Any:
        with torch.no_grad():
            try:
                return aten._flash_attention_forward(*rows, *starts, 0.0, causal, False, window_size_left=-1)
            except AssertionError:
                return None

    out, lse, _, unused, _ = prepared(call)
    want, want_lse = in_sequences(*(tensor.double() for tensor in rows), causal=causal)
    close(out, want)
    close(lse, want_lse)
    dout = torch.randn_like(out)
    zero = torch.zeros(2, dtype=torch.uint64)

    def backward() -> Any:
        with torch.no_grad():
            try:
                return aten._flash_attention_backward(
                    dout, *rows, out, lse, *starts, 0.0, causal, zero, unused, window_size_right=-1
                )
            except RuntimeError:
                return None

    gradients = prepared(backward)
    close(gradients, torch.autograd.grad(want, rows, dout.double()))


@pytest.fixture
def cudnn_packed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Originals:
    """`originals`, where cuDNN's operators of packed sequences are overridden under any version of torch."""
    monkeypatch.setattr(integration, "has_known_results", lambda name: hasattr(aten, name))
    operators: Originals = request.getfixturevalue("originals")
    return operators


def or_none(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Returns the results of an operator, or None if it is passed on to one without a reference."""
    with torch.no_grad():
        try:
            return call(*args, **options)
        except NotImplementedError:
            return None


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_of_cudnn(cudnn_packed: Originals, causal: bool) -> None:
    torch.manual_seed(3)
    inputs = torch.randn(21, 4, 32), torch.randn(21, 2, 32), torch.randn(21, 2, 32)
    for tensor in inputs:
        tensor.requires_grad_()
    starts = STARTS, STARTS, 16, 16
    forward = aten._cudnn_attention_forward
    results = prepared(lambda: or_none(forward, *inputs, None, *starts, True, 0.0, causal, scale=0.3))
    assert cudnn_packed.calls[CUDNN_PACKED] == 1
    out, lse, state = results[0], results[1], results[6]
    q, k, v = (tensor.double() for tensor in inputs)
    want, want_lse = in_sequences(q, k, v, STARTS, causal=causal, scale=0.3)
    close(out, want)
    close(lse, want_lse)
    dout = torch.randn_like(out)
    more = out, lse, state, state, None, *starts, 0.0, causal
    backward = aten._cudnn_attention_backward
    gradients = prepared(lambda: or_none(backward, dout, *inputs, *more, scale=0.3))
    close(gradients, torch.autograd.grad(want, inputs, dout.double()))


def test_calls_of_cudnn_that_are_passed_on(cudnn_packed: Originals) -> None:
    q = torch.randn(21, 4, 32)
    # The mask of cuDNN is aligned top-left, and that of flashtune bottom-right.
    args = q, q, q, None, STARTS, STARTS.clone(), 16, 16, True, 0.0, True
    dense = (*(q.view(1, 4, 21, 32),) * 3, None, None, None, 21, 21, True)
    for call in (args, args, dense):
        assert or_none(aten._cudnn_attention_forward, *call) is None
        SESSION.wait()
    assert cudnn_packed.calls[CUDNN_PACKED] == 3


def test_pages_of_cudnn_are_aligned_bottom_right() -> None:
    q, cache = torch.empty(4, 4, 32), torch.empty(6, 16, 2, 32)
    lengths = torch.zeros(3, dtype=torch.int32)
    starts = torch.arange(4, dtype=torch.int32)
    options = {"seqused_k": lengths, "block_table": torch.zeros(3, 2, dtype=torch.int32)}
    for operator, args in (
        (CudnnForward(), (q, cache, cache, None, starts, None, 1, 32, True, 0.0, True)),
        (CudnnForwardInto(), (q, q, cache, cache, starts, None, 1, 32, True)),
    ):
        reading = operator.read(args, options)
        assert reading is not None
        assert reading.call.options.causal == "bottom_right"
        assert reading.call.side.seqlens_kv is lengths
        out = torch.ones_like(q)
        results = operator.results((out, torch.ones(4, 4)), args, reading.call.options)
        assert (args[0] if isinstance(results, Tensor) else results[0]).eq(1).all()


@pytest.mark.skipif(not hasattr(aten, FLASH_INTO), reason="this torch has no operator with pages")
@pytest.mark.parametrize("into", [False, True])
def test_pages(originals: Originals, into: bool) -> None:
    torch.manual_seed(4)
    q, k, v = torch.randn(3, 4, 32), torch.randn(6, 16, 2, 32), torch.randn(6, 16, 2, 32)
    table = torch.tensor([[4, 1], [0, 5], [2, 3]], dtype=torch.int32)
    lengths = torch.tensor([20, 3, 32], dtype=torch.int32)
    starts = torch.arange(4, dtype=torch.int32)
    options = {"seqused_k": lengths, "block_table": table}
    buffer = torch.empty_like(q)

    def call() -> Any:
        args = q, k, v, starts, None, 1, 32, 0.0, True, False
        try:
            if into:
                return buffer, aten._flash_attention_forward_no_dropout_inplace(buffer, *args, **options)
            return aten._flash_attention_forward(*args, **options)
        except AssertionError:
            return None

    out, lse = prepared(call)[:2]
    for row in range(3):
        length = int(lengths[row])
        keys = [
            cache[table[row].long()].reshape(32, 2, 32)[:length].transpose(0, 1)[None] for cache in (k, v)
        ]
        want, want_lse = by_definition(q[row][None, :, None].double(), *(cached.double() for cached in keys))
        close(out[row], want[0, :, 0])
        close(lse[:, row], want_lse[0, :, 0])


def test_windows_of_dense_tensors(originals: Originals) -> None:
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors(24, 24))
    args = None, None, 24, 24, 0.0, False, False
    with torch.no_grad():
        out = prepared(
            lambda: aten._flash_attention_forward(q, k, v, *args, window_size_left=5, window_size_right=0)
        )[0]
    assert originals.calls[FLASH] == 1
    distance = torch.arange(24)[:, None] - torch.arange(24)
    bias = torch.zeros(24, 24).masked_fill((distance < 0) | (distance > 5), -torch.inf)
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    want, _ = by_definition(q, k, v, bias.double())
    close(out, want.transpose(1, 2))


@pytest.mark.parametrize(
    "options", [{"num_splits": 1}, {"alibi_slopes": torch.ones(4)}], ids=["num_splits", "alibi_slopes"]
)
def test_flash_options_that_are_passed_on(originals: Originals, options: dict[str, Any]) -> None:
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors(24, 24))
    schema = str(aten._flash_attention_forward.default._schema)
    if not all(name in schema for name in options):
        pytest.skip("this torch has no such option")
    for _ in range(2):
        aten._flash_attention_forward(q, k, v, None, None, 24, 24, 0.0, False, False, **options)
        SESSION.wait()
    assert originals.calls[FLASH] == 2


@pytest.mark.parametrize("warn_only", [False, True])
def test_deterministic_mode_takes_reproducible_kernels(originals: Originals, warn_only: bool) -> None:
    inputs = tensors(requires_grad=True)

    def both_passes() -> None:
        out = prepared(lambda: aten._scaled_dot_product_cudnn_attention(*inputs, None, True)[0])
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    both_passes()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        both_passes()
    finally:
        torch.use_deterministic_algorithms(False)
    assert originals.calls[f"{CUDNN}_backward"] == 0
    entries: list[Any] = [*SESSION.entries.values()]
    kernels = [entry.bucket.choices[1].selection.record for entry in entries]
    assert [kernel.problem.deterministic for kernel in kernels] == [False, True]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls(originals: Originals, dynamic: bool) -> None:
    inputs = tensors(requires_grad=True)
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = aten._scaled_dot_product_cudnn_attention(q * 2, k, v, None, True, 0.0, True)[0]
        return out + 1

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)

    def call() -> tuple[Tensor, ...]:
        out = compiled(*inputs)
        return (out, *torch.autograd.grad(out, inputs, torch.ones_like(out)))

    results = prepared(call)
    assert originals.calls == {CUDNN: 1, f"{CUDNN}_backward": 1}, "the first call is passed on"
    q, k, v = (tensor.double() for tensor in inputs)
    want = by_definition(q * 2, k, v, causal=True)[0] + 1
    close(results, (want, *torch.autograd.grad(want, inputs, torch.ones_like(want))))


@pytest.mark.parametrize("name", [CUDNN, EFFICIENT])
def test_results_are_those_of_the_meta_kernel(originals: Originals, name: str) -> None:
    op = getattr(aten, name).default
    args = (*tensors(), None, True, 0.0, True)
    prepared(lambda: op(*args))
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    assert originals.calls[name] == 1
