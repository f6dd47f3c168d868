"""Tests of torch's attention served by flashtune on a GPU, against float64 and torch's own operators."""

import gc
import itertools
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flashtune.integrations import operator_overrides
from flashtune.integrations import torch as integration
from flashtune.runtime.session import SESSION
from tests.gpu.calls import forget
from tests.support.attention_operators import by_definition

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::flashtune.FlashtuneWarning"),
    pytest.mark.filterwarnings("error:.*override failed.*"),
]
Triple = tuple[Tensor, Tensor, Tensor]
aten = torch.ops.aten
BF16_ERROR = 2e-2
# The bound for the time that a new length adds to a call, in s. While the worker thread prepares kernels, so
# many lengths may exceed it.
LONGEST_WAIT, LATE_CALLS = 5e-3, 20
# The most time for which the worker thread prepares kernels while this thread makes calls, in s.
PREPARING_SECONDS = 120.0
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}


class Served:
    """The calls that flashtune served, by whether they are a backward pass."""

    def __init__(self) -> None:
        self.passes: Counter[str] = Counter()

    def clear(self) -> None:
        self.passes.clear()


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Flashtune is active with its tables, and the calls that it serves are counted."""
    torch.manual_seed(0)
    forget()
    SESSION.forget()
    served = Served()
    overrides: dict[str, Callable[..., Any]] = {
        "forward": operator_overrides.forward_override,
        "backward": operator_overrides.backward_override,
    }

    def counted(way: str) -> Callable[..., Any]:
        def make(operator: Any, original: Any) -> Any:
            def passed_on(*args: Any, **options: Any) -> Any:
                served.passes[way] -= 1
                return original(*args, **options)

            override = overrides[way](operator, passed_on)

            def run(*args: Any, **options: Any) -> Any:
                served.passes[way] += 1
                return override(*args, **options)

            return run

        return make

    for way in overrides:
        monkeypatch.setattr(integration, f"{way}_override", counted(way))
    with integration.activate():
        yield served
    SESSION.wait()
    SESSION.forget()


@pytest.fixture
def served(table: Served, kernels_win: Callable[[bool], None]) -> Served:
    """As `table`, and torch's operators count as slower."""
    kernels_win(True)
    return table


def tensors(
    seqlen_q: int = 300,
    seqlen_kv: int = 300,
    *,
    batch: int = 2,
    heads: int = 8,
    kv_heads: int = 2,
    width: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    requires_grad: bool = False,
    heads_first: bool = False,
) -> Triple:
    """Queries, keys and values. Tokens precede heads in memory, or heads tokens with `heads_first`."""
    generator = torch.Generator("cuda").manual_seed(seqlen_q)

    def normal(count: int, length: int) -> Tensor:
        drawn = torch.randn(batch, length, count, width, generator=generator, device="cuda", dtype=dtype)
        made = drawn.transpose(1, 2)
        return (made.contiguous() if heads_first else made).requires_grad_(requires_grad)

    return normal(heads, seqlen_q), normal(kv_heads, seqlen_kv), normal(kv_heads, seqlen_kv)


def prepared(call: Callable[[], Any]) -> Any:
    """The result of a call whose kernels are prepared, in both passes."""
    for _ in range(2):
        call()
        assert SESSION.wait(300)
    return call()


def close(actual: Tensor, want: Tensor, bound: float = BF16_ERROR) -> None:
    torch.testing.assert_close(actual.double(), want.double(), atol=bound, rtol=bound)


def reference(inputs: Triple, mask: Tensor | None = None, **options: Any) -> Tensor:
    q, k, v = (tensor.double() for tensor in inputs)
    return by_definition(q, k, v, mask, **options)[0]


def both_passes(call: Callable[[], Tensor], inputs: Triple, dout: Tensor) -> tuple[Tensor, ...]:
    out = call()
    return (out, *torch.autograd.grad(out, inputs, dout.to(out.dtype)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("heads_first", [False, True])
def test_both_passes(served: Served, backend: str, causal: bool, kv_heads: int, heads_first: bool) -> None:
    if backend == "efficient" and (kv_heads != 8 or heads_first):
        pytest.skip("the efficient backend takes no groups of heads, and its gradients have heads last")
    inputs = tensors(kv_heads=kv_heads, requires_grad=True, heads_first=heads_first)
    dout = torch.randn_like(inputs[0])

    def call() -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return sdpa(*inputs, is_causal=causal, enable_gqa=kv_heads != 8)

    prepared(lambda: both_passes(call, inputs, dout))
    served.clear()
    results = both_passes(call, inputs, dout)
    assert served.passes == {"forward": 1, "backward": 1}
    want = both_passes(lambda: reference(inputs, causal=causal), inputs, dout)
    for result, expected in zip(results, want, strict=True):
        close(result, expected)
    with integration.disabled():
        theirs = both_passes(call, inputs, dout)
    for result, expected in zip(results, theirs, strict=True):
        assert (result.shape, result.stride(), result.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )


def test_a_measured_gain_is_served(table: Served) -> None:
    if torch.cuda.get_device_name() != "NVIDIA H200":
        pytest.skip("the shipped table is for another GPU")
    inputs = tensors(4096, 4096, batch=4, heads=32, kv_heads=8)
    with torch.no_grad():
        prepared(lambda: sdpa(*inputs, is_causal=True, enable_gqa=True))
        table.clear()
        out = sdpa(*inputs, is_causal=True, enable_gqa=True)
        assert table.passes["forward"] == 1
        with integration.disabled():
            close(out, sdpa(*inputs, is_causal=True, enable_gqa=True))


MASKS = "padding", "fully masked rows", "boolean rows", "bias", "expanded bias", "bias with gaps"


def masks(seqlen_q: int, seqlen_kv: int) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(7)
    shape = 2, 8, seqlen_q, seqlen_kv
    padding = torch.ones(2, 1, 1, seqlen_kv, dtype=torch.bool, device="cuda")
    padding[0, ..., -90:] = False
    blind = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool, device="cuda")
    blind[3:70] = False
    dense = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    return {
        "padding": padding.expand(2, 1, seqlen_q, seqlen_kv),
        "fully masked rows": torch.zeros(shape, device="cuda").bfloat16().masked_fill(~blind, -torch.inf),
        "boolean rows": blind,
        "bias": dense,
        "expanded bias": dense[:1, :1].expand(shape),
        "bias with gaps": torch.cat([dense, dense], -1)[..., :seqlen_kv],
    }


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("scale", [None, 0.0, 0.2])
def test_masks_and_biases(served: Served, kind: str, scale: float | None) -> None:
    inputs, mask = tensors(304, 304), masks(304, 304)[kind]
    with torch.no_grad():

        def call() -> Tensor:
            return sdpa(*inputs, mask, scale=scale, enable_gqa=True)

        prepared(call)
        served.clear()
        out = call()
        assert served.passes["forward"] == 1
        if kind == "boolean rows":
            # Of some versions, torch's bias for a boolean mask is finite: such rows see all keys.
            with integration.disabled():
                close(out, call())
        else:
            close(out, reference(inputs, mask, scale=scale))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_pass_of_torch_and_one_of_flashtune(served: Served, backend: str) -> None:
    inputs = tensors(kv_heads=8, requires_grad=True)
    dout = torch.randn_like(inputs[0])

    def call() -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return sdpa(*inputs, is_causal=True)

    prepared(lambda: both_passes(call, inputs, dout))
    want = both_passes(lambda: reference(inputs, causal=True), inputs, dout)[1:]
    served.clear()
    out = call()
    assert served.passes["forward"] == 1
    integration.deactivate()
    for gradient, expected in zip(torch.autograd.grad(out, inputs, dout), want, strict=True):
        close(gradient, expected)
    out = call()
    with integration.activate():
        served.clear()
        for gradient, expected in zip(torch.autograd.grad(out, inputs, dout), want, strict=True):
            close(gradient, expected)
        assert not +served.passes, "torch's forward pass is followed by torch's backward pass"


def others() -> dict[str, tuple[Triple, dict[str, Any]]]:
    inputs = tensors()
    trained = torch.zeros(300, 300, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    x = torch.randn(2 * 8 * 304 * 64 + 8, device="cuda", dtype=torch.bfloat16)[1 : 1 + 2 * 8 * 300 * 64]
    return {
        "dropout": (inputs, {"dropout_p": 0.3}),
        "trained bias": (inputs, {"attn_mask": trained}),
        "unaligned": ((x.view(2, 8, 300, 64), *inputs[1:]), {}),
        "expanded queries": ((inputs[0][:1].expand(2, -1, -1, -1), *inputs[1:]), {}),
        "float64": (tuple(tensor.double() for tensor in inputs), {}),  # type: ignore[dict-item]
        "no sequences": (tuple(tensor[:0] for tensor in inputs), {}),  # type: ignore[dict-item]
    }


@pytest.mark.parametrize(
    "kind",
    ["dropout", "trained bias", "unaligned", "expanded queries", "float64", "no sequences"],
)
def test_other_calls_have_the_bits_of_torch(served: Served, kind: str) -> None:
    inputs, options = others()[kind]

    def call() -> Tensor:
        torch.manual_seed(3)
        return sdpa(*inputs, enable_gqa=True, **options)

    prepared(call)
    served.clear()
    out = call()
    assert not +served.passes
    with integration.disabled():
        want = call()
    # torch returns None without sequences.
    assert out is want is None or torch.equal(out, want)


def test_calls_that_are_not_faster_have_the_bits_of_torch(
    table: Served, kernels_win: Callable[[bool], None]
) -> None:
    kernels_win(False)
    inputs = tensors(requires_grad=True)
    dout = torch.randn_like(inputs[0])

    def call() -> Tensor:
        return sdpa(*inputs, enable_gqa=True)

    results = prepared(lambda: both_passes(call, inputs, dout))
    with integration.disabled():
        want = both_passes(call, inputs, dout)
    assert torch.equal(results[0], want[0])
    assert not +table.passes


STARTS = (0, 70, 70, 300, 555)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (64, 0)])
def test_packed_sequences(served: Served, window: tuple[int, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn(555, 8, 64, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    )
    starts = torch.tensor(STARTS, device="cuda", dtype=torch.int32)
    dout = torch.randn_like(q)

    def call() -> Tensor:
        out = varlen_attn(q, k, v, starts, starts, 255, 255, window_size=window)
        assert isinstance(out, Tensor)
        return out

    prepared(lambda: both_passes(call, (q, k, v), dout))
    served.clear()
    results = both_passes(call, (q, k, v), dout)
    assert served.passes == {"forward": 1, "backward": 1}

    def sequences() -> Tensor:
        outs = []
        for first, last in itertools.pairwise(STARTS):
            queries, keys, values = (x[first:last].transpose(0, 1)[None].double() for x in (q, k, v))
            bias = None
            if window[0] >= 0:
                rows = torch.arange(last - first, device="cuda")
                far = rows[:, None] - rows > window[0]
                bias = torch.zeros(far.shape, device="cuda").double().masked_fill(far, -torch.inf)
            out, _ = by_definition(queries, keys, values, bias, causal=window[1] == 0)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    want = both_passes(sequences, (q, k, v), dout)
    for result, expected in zip(results, want, strict=True):
        close(result, expected)


def test_pages(served: Served) -> None:
    if "block_table" not in str(aten._flash_attention_forward.default._schema):
        pytest.skip("this torch has no pages")
    generator = torch.Generator("cuda").manual_seed(2)
    q, k, v = (
        torch.randn(*shape, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in ((3, 8), (12, 64, 2), (12, 64, 2))
    )
    table = torch.randperm(12, generator=generator, device="cuda").view(3, 4).int()
    lengths = torch.tensor([200, 3, 256], device="cuda", dtype=torch.int32)
    starts = torch.arange(4, device="cuda", dtype=torch.int32)
    options = {"seqused_k": lengths, "block_table": table, "enable_gqa": True, "window_size": (-1, 0)}
    with torch.no_grad():
        prepared(lambda: varlen_attn(q, k, v, starts, None, 1, 256, **options))  # type: ignore[arg-type]
        served.clear()
        out = varlen_attn(q, k, v, starts, None, 1, 256, **options)  # type: ignore[arg-type]
        assert served.passes["forward"] == 1
        for row in range(3):
            keys, values = (
                cache[table[row].long()].reshape(256, 2, 64)[: int(lengths[row])].transpose(0, 1)[None]
                for cache in (k, v)
            )
            close(out[row], reference((q[row][None, :, None], keys, values))[0, :, 0])


@pytest.mark.alone
def test_new_lengths_never_wait(served: Served) -> None:
    """No call with a new length takes 5 ms longer than with torch's operator.

    While kernels are prepared, calls at a few lengths may: CUDA locks its driver while it loads a kernel.
    The efficient backend serves before. The cuDNN backend needs 50 ms for each new length itself.
    """
    lengths = list(range(64, 1064))
    q, k, v = tensors(1064, 1064, batch=1, kv_heads=8)

    def seconds() -> list[float]:
        times = []
        with torch.no_grad(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            for length in lengths:
                queries, keys, values = (each[:, :, :length] for each in (q, k, v))
                start = time.perf_counter()
                sdpa(queries, keys, values, is_causal=True)
                times.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        return times

    gc.collect()
    gc.disable()
    try:
        with integration.disabled():
            seconds()
            theirs = seconds()
        ours = {"new": seconds()}
        # The worker thread prepares during these calls.
        end = time.monotonic() + PREPARING_SECONDS
        ours["preparing"] = seconds()
        while not SESSION.wait(0) and time.monotonic() < end:
            ours["preparing"] = [*map(max, ours["preparing"], seconds())]
        served.clear()
        ours["later"] = seconds()
    finally:
        gc.enable()
    for name, times in {"torch": theirs, **ours}.items():
        slowest = max(range(len(times)), key=times.__getitem__)
        sys.stdout.write(f"\n{name}: at most {1e3 * times[slowest]:.2f} ms, at length {lengths[slowest]}")
    assert served.passes["forward"] >= 1000
    waits = {
        name: [own - original for own, original in zip(times, theirs, strict=True)]
        for name, times in ours.items()
    }
    assert max(waits["new"]) < LONGEST_WAIT
    assert max(waits["later"]) < LONGEST_WAIT
    # A launch may wait while the worker thread loads a kernel. The times are the longest of many calls.
    assert sum(wait >= LONGEST_WAIT for wait in waits["preparing"]) <= LATE_CALLS


@pytest.mark.alone
def test_host_time_of_a_call_that_is_passed_on(
    table: Served, monkeypatch: pytest.MonkeyPatch, kernels_win: Callable[[bool], None]
) -> None:
    """The host time that the override adds is compared with that of an empty override."""
    monkeypatch.undo()
    integration.deactivate()
    kernels_win(False)
    inputs = tensors(16, 16, batch=1)

    def microseconds(calls: int = 500) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            sdpa(*inputs, enable_gqa=True)
        return 1e6 * (time.perf_counter() - start) / calls

    original = torch.library.get_kernel(aten._scaled_dot_product_cudnn_attention.default, "CUDA").call_boxed

    def empty(*args: Any, **options: Any) -> Any:
        return original(*args, **options)

    least = {"empty": float("inf"), "flashtune": float("inf")}
    with torch.no_grad():
        with integration.activate():
            prepared(lambda: sdpa(*inputs, enable_gqa=True))
        for _ in range(30):
            library: Any = torch.library.Library("aten", "IMPL")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                library.impl("_scaled_dot_product_cudnn_attention", empty, "CUDA", with_keyset=True)
            least["empty"] = min(least["empty"], microseconds())
            library._destroy()
            with integration.activate():
                microseconds(3)
                least["flashtune"] = min(least["flashtune"], microseconds())
    assert least["flashtune"] - least["empty"] < 4, f"host time of a call in us: {least}"


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls(served: Served, dynamic: bool) -> None:
    inputs = tensors(requires_grad=True)
    dout = torch.randn_like(inputs[0])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q * 2, k, v, is_causal=True, enable_gqa=True) + 1

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)

    def call() -> tuple[Tensor, ...]:
        return both_passes(lambda: compiled(*inputs), inputs, dout)

    prepared(call)
    served.clear()
    results = call()
    assert served.passes == {"forward": 1, "backward": 1}
    want = both_passes(lambda: reference((inputs[0] * 2, *inputs[1:]), causal=True) + 1, inputs, dout)
    for result, expected in zip(results, want, strict=True):
        close(result, expected, 4e-2)


def test_compiled_calls_in_cuda_graphs(served: Served) -> None:
    inputs = tensors(requires_grad=True)
    dout = torch.randn_like(inputs[0])
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True) * 2, mode="reduce-overhead"
    )

    def call() -> tuple[Tensor, ...]:
        torch.compiler.cudagraph_mark_step_begin()
        return tuple(result.clone() for result in both_passes(lambda: compiled(*inputs), inputs, dout))

    def eager() -> tuple[Tensor, ...]:
        return both_passes(lambda: sdpa(*inputs, is_causal=True, enable_gqa=True) * 2, inputs, dout)

    want = both_passes(lambda: reference(inputs, causal=True) * 2, inputs, dout)
    prepared(eager)
    for _ in range(4):
        last = call()
        SESSION.wait()
    # Calls that were passed on are not compared. torch 2.11 caches cuDNN's backward graphs without the
    # strides of the output's gradient, so gradients depend on the calls of earlier tests.
    for name, results in {"compiled": last, "eager": eager()}.items():
        for part, result, expected in zip(("out", "dq", "dk", "dv"), results, want, strict=True):
            right = (result.double() - expected).abs() <= 4e-2 * (1 + expected.abs())
            rows = (~right).any(-1).nonzero()
            assert right.all(), f"{name}: {part}, strides {result.stride()}, rows {rows[:8].tolist()}"


def test_cuda_graph(served: Served) -> None:
    inputs, other = tensors(), tensors(301, 300)
    with torch.no_grad():
        prepared(lambda: sdpa(*inputs, is_causal=True, enable_gqa=True))
        served.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sdpa(*inputs, is_causal=True, enable_gqa=True)
            unknown = sdpa(*other, enable_gqa=True)
        assert served.passes["forward"] == 1, "a call that is new during the capture is passed on"
        inputs[0].copy_(inputs[0].flip(2))
        graph.replay()
        close(out, reference(inputs, causal=True))
        close(unknown, reference(other))


def test_preparations_and_captures_at_once(served: Served) -> None:
    """The worker thread compiles, loads and checks a kernel while this thread captures graphs."""
    captured, new = tensors(), tensors(1000, 1000, width=128)
    with torch.no_grad():
        prepared(lambda: sdpa(*captured, is_causal=True, enable_gqa=True))
        sdpa(*new, is_causal=True, enable_gqa=True)
        graphs = 0
        while not SESSION.wait(0) or not graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = sdpa(*captured, is_causal=True, enable_gqa=True)
            graph.replay()
            close(out, reference(captured, causal=True))
            graphs += 1
        sdpa(*new, is_causal=True, enable_gqa=True)
        SESSION.wait()
        served.clear()
        close(sdpa(*new, is_causal=True, enable_gqa=True), reference(new, causal=True))
        assert served.passes["forward"] == 1
    sys.stdout.write(f"\n{graphs} graphs captured beside preparations\n")


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (RuntimeError, NotImplementedError) as error:
        return type(error)


def transformed(inputs: Triple) -> dict[str, Callable[[], Any]]:
    q, k, v = inputs

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, is_causal=True, enable_gqa=True)

    def twice() -> Any:
        leaf = q.detach().requires_grad_()
        (first,) = torch.autograd.grad(attend(leaf, k, v).sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.sum(), leaf)

    return {
        "vmap": lambda: torch.vmap(attend)(*(tensor[None].expand(3, -1, -1, -1, -1) for tensor in inputs)),
        "jvp": lambda: torch.func.jvp(lambda x: attend(x, k, v), (q,), (q,))[1],
        "grad": lambda: torch.func.grad(lambda x: attend(x, k, v).float().sum())(q),
        "twice": twice,
    }


@pytest.mark.parametrize("kind", ["vmap", "jvp", "grad", "twice"])
def test_transforms_do_what_they_do_with_torch(served: Served, kind: str) -> None:
    call = transformed(tensors())[kind]
    for _ in range(3):
        result = outcome(call)
        SESSION.wait()
    with integration.disabled():
        want = outcome(call)
    assert type(result) is type(want)
    if isinstance(result, Tensor):
        close(result, want)
    else:
        assert result == want


def test_deterministic_mode_repeats_gradients(served: Served) -> None:
    inputs = tensors(requires_grad=True)
    dout = torch.randn_like(inputs[0])

    def call() -> tuple[Tensor, ...]:
        return both_passes(lambda: sdpa(*inputs, is_causal=True, enable_gqa=True), inputs, dout)

    torch.use_deterministic_algorithms(True)
    try:
        want = prepared(call)
        served.clear()
        for _ in range(5):
            assert all(torch.equal(result, expected) for result, expected in zip(call(), want, strict=True))
        assert served.passes == {"forward": 5, "backward": 5}
    finally:
        torch.use_deterministic_algorithms(False)


def test_autocast_and_checkpoints(served: Served) -> None:
    from torch.utils.checkpoint import checkpoint

    inputs = tensors(dtype=torch.float32, requires_grad=True)
    dout = torch.randn_like(inputs[0])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, is_causal=True, enable_gqa=True)

    def call() -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16):
            out = checkpoint(attend, *inputs, use_reentrant=False)
        return (out, *torch.autograd.grad(out, inputs, dout.to(out.dtype)))

    prepared(call)
    served.clear()
    results = call()
    assert served.passes == {"forward": 2, "backward": 1}
    for result, expected in zip(
        results, both_passes(lambda: reference(inputs, causal=True), inputs, dout), strict=True
    ):
        close(result, expected, 3e-2)


def test_jagged_nested_tensors(served: Served) -> None:
    lengths = (50, 200, 7)
    parts = [torch.randn(length, 8, 64, device="cuda", dtype=torch.bfloat16) for length in lengths]
    q = torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    with torch.no_grad():
        out = prepared(lambda: sdpa(q, q, q))
    for row, part in zip(out.transpose(1, 2).unbind(), parts, strict=True):
        heads_first = part.transpose(0, 1)[None]
        close(row.transpose(0, 1), reference((heads_first, heads_first, heads_first))[0])


def test_exported_programs(served: Served) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q, k, v, is_causal=True)

    inputs = tensors(kv_heads=8)
    with torch.no_grad():
        program = torch.export.export(Attention(), inputs).module()
        prepared(lambda: program(*inputs))
        served.clear()
        close(program(*inputs), reference(inputs, causal=True))
        assert served.passes["forward"] == 1
