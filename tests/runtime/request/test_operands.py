"""Each operand of a call reaches the kernels of both passes, as values of a launch or in the kernel."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

import flashtune
from flashtune.core.block_mask import BlockMask
from flashtune.core.features.records import NO_EXTRA_INPUTS, TABLES, ExtraInputs
from flashtune.core.kernel import Kernel
from flashtune.request.call import Options
from flashtune.runtime.op_library import OPERANDS
from flashtune.runtime.session import SESSION
from tests.problems.features import paged, starts
from tests.runtime.training.training_calls import quiet
from tests.support.machine import Machine

pytestmark = [quiet, pytest.mark.slow]

HEADS, KV_HEADS, WIDTH, LENGTH = 4, 2, 64, 256
LENGTHS = (100, 156)


class Launched(NamedTuple):
    """A launch: its kernel, its tensors, the scale and the extra inputs."""

    kernel: Kernel
    tensors: tuple[Tensor | None, ...]
    scale: float
    side: ExtraInputs


@pytest.fixture
def launched(machine: Machine) -> list[Launched]:
    """Launches in order. They write ones."""
    launches: list[Launched] = []

    def bind(kernel: Kernel, *_: object, **__: object) -> Callable[..., None]:
        def launch(
            tensors: tuple[Tensor | None, ...], scale: float, side: ExtraInputs = NO_EXTRA_INPUTS
        ) -> None:
            launches.append(Launched(kernel, tuple(tensors), scale, side))
            # Outputs follow q, k and v, or in a backward pass also the output, log-sum-exp and its gradient.
            for tensor in tensors[3:] if len(tensors) == 5 else tensors[6:]:
                if tensor is not None:
                    tensor.fill_(1.0)

        return launch

    machine.launch = bind
    return launches


class Operators(TorchDispatchMode):
    """A mode without effect, in which calls go through torch's operators."""

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        return op(*arguments, **(options or {}))


class Case(NamedTuple):
    """A call that has other values of some operands than the usual call."""

    values: dict[str, Any]  # Values that every launch must have, by operand.
    options: dict[str, Any]  # Keyword arguments of the call.
    names: tuple[str, ...] = ()  # Further operands, which change the kernel.
    call: str = "dense"  # The form of the call.


SLOPES, SINKS = torch.rand(HEADS), torch.randn(HEADS)
BIAS = torch.randn(2, HEADS, LENGTH, LENGTH, dtype=torch.bfloat16)
PREFIX = torch.tensor([3, 70], dtype=torch.int32)
BLOCKS = BlockMask.from_blocks(torch.eye(2, dtype=torch.bool).expand(2, HEADS, 2, 2))
CACHE_SCALE = torch.tensor(0.25)
CASES = {
    "scale": Case({"scale": 0.3}, {"scale": 0.3}),
    "scale and log-sum-exp": Case({"scale": 0.3}, {"scale": 0.3, "return_lse": True}, ("return_lse",)),
    "scale and window": Case(
        {"scale": 0.3},
        {"scale": 0.3, "causal": True, "window": (9, 0)},
        ("causal", "window_left", "window_right"),
    ),
    "scale of packed tokens": Case(
        {"scale": 0.3, "cu_seqlens_q": starts(LENGTHS), "cu_seqlens_kv": starts(LENGTHS)},
        {"scale": 0.3},
        ("max_seqlen_q", "max_seqlen_k"),
        "packed",
    ),
    "scale and bias": Case({"scale": 0.3, "bias": BIAS}, {"scale": 0.3, "attn_bias": BIAS}),
    "softcap": Case({"softcap": 0.7}, {"softcap": 0.7}),
    "dropout": Case({"dropout": 0.125}, {"dropout_p": 0.125}, ("seed",)),
    "slopes": Case({"slopes": SLOPES.expand(2, HEADS)}, {"alibi_slopes": SLOPES}),
    "sinks": Case({"sinks": SINKS}, {"sinks": SINKS}),
    "prefix": Case({"prefix": PREFIX}, {"prefix_lengths": PREFIX, "causal": True}),
    "lengths": Case({"seqlens_kv": PREFIX}, {"kv_lengths": PREFIX}),
    "chunk": Case({}, {"chunk": 64}, ("chunk",)),
    "sink tokens": Case({}, {"causal": True, "window": (9, 0), "sink_tokens": 3}, ("sink_tokens",)),
    "deterministic": Case({}, {"deterministic": True}, ("deterministic",)),
    "batch_invariant": Case({}, {"batch_invariant": True}, ("batch_invariant",)),
    "block mask": Case(
        {"block_counts": BLOCKS.counts, "block_indices": BLOCKS.indices},
        {"block_mask": BLOCKS},
        ("block_size",),
    ),
    "pages": Case({"scale": 0.3}, {"scale": 0.3}, ("block_table", "kv_layout"), "pages"),
    "tree": Case({}, {"tree_mask": torch.ones(2, 1, 1, dtype=torch.bool)}, ("tree",), "pages"),
    "pages of 8 bits": Case(
        {"scale": 0.3},
        {"scale": 0.3, "k_scale": CACHE_SCALE, "v_scale": CACHE_SCALE},
        ("k_scale", "v_scale"),
        "pages of 8 bits",
    ),
    "quantised": Case({"scale": 0.3, "q_scale": torch.full((2, HEADS), 0.5)}, {"scale": 0.3}, (), "e4m3"),
    "latent keys": Case({"scale": 0.3}, {"scale": 0.3}, ("latent",), "latent"),
    "order of dimensions": Case({"scale": 0.3}, {"scale": 0.3, "layout": "bshd"}, ("layout",)),
}
# `prefer` decides whether SDPA may serve. Every call here asks for kernels.
OF_FUNCTIONS = {"functions", "full_counts", "function_ints", "function_floats", *TABLES}
COVERED = {"q", "k", "v", "prefer", "out_order", *OF_FUNCTIONS}.union(
    *({*case.values, *case.names} for case in CASES.values())
)


def made(case: Case) -> tuple[Any, tuple[Tensor, ...]]:
    """Makes the call of a case. Returns its result and the leaves that require gradients."""
    options = {**case.options, "prefer": "generated"}
    q, k, v = (torch.randn(2, heads, LENGTH, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    leaves = [tensor.bfloat16().requires_grad_() for tensor in (q, k, v)]
    if case.call == "dense":
        views = leaves
        if options.get("layout") == "bshd":
            views = [tensor.transpose(1, 2) for tensor in leaves]
        return flashtune.attention(*views, **options), tuple(leaves)
    if case.call == "packed":
        leaves = [tensor.detach()[0].transpose(0, 1).contiguous().requires_grad_() for tensor in leaves]
        packed: list[Any] = [*leaves, starts(LENGTHS), starts(LENGTHS), max(LENGTHS), max(LENGTHS)]
        return flashtune.attention_varlen(*packed, **options), tuple(leaves)
    if case.call == "e4m3":
        small = [tensor.to(torch.float8_e4m3fn) for tensor in (q, k, v)]
        options["q_scale"] = torch.full((2, HEADS), 0.5)
        return flashtune.attention(*small, **options), ()
    widths = (576, 512) if case.call == "latent" else (WIDTH, WIDTH)
    cache = paged((40, 12), kv_heads=1 if case.call == "latent" else KV_HEADS, widths=widths)
    token = torch.randn(2, 1, HEADS, widths[0]).bfloat16()
    pages = [cache.k_cache.bfloat16(), cache.v_cache.bfloat16()]
    if case.call == "pages of 8 bits":
        pages = [page.to(torch.float8_e4m3fn) for page in pages]
    if case.call == "latent":
        options["value_head_dim"] = 512
    values = None if case.call == "latent" else pages[1]
    return flashtune.attention_paged(token, pages[0], values, *cache[2:], **options), ()


def run(case: Case, way: str) -> tuple[Tensor, ...]:
    """Makes the call of a case and its backward pass. Returns the leaves that require gradients."""
    SESSION.forget()
    mode: Any = Operators if way == "operators" else contextlib.nullcontext
    with mode():
        result, leaves = made(case)
        out = result[0] if isinstance(result, tuple) else result
        if leaves:
            # The second gradient has the strides of the output, for which the kernel was bound in advance.
            torch.autograd.grad(out.float().sum(), leaves, retain_graph=True)
            torch.autograd.grad(out, leaves, torch.ones_like(out))
    return leaves


def test_the_cases_vary_every_operand() -> None:
    assert set(OPERANDS) == COVERED


@pytest.fixture(scope="module")
def plain_kernels() -> dict[str, set[str]]:
    """The kernels of a call without other values, by the way of the call."""
    return {}


@pytest.mark.parametrize("way", ["eager", "operators"])
@pytest.mark.parametrize("name", CASES)
def test_every_pass_gets_the_operands_of_its_call(
    name: str, way: str, launched: list[Launched], plain_kernels: dict[str, set[str]]
) -> None:
    case = CASES[name]
    leaves = run(case, way)
    launches = tuple(launched)
    assert len(launches) == (3 if leaves else 1)
    # Masks and lengths are in the kernels of both passes. The order of dimensions is in strides alone.
    if set(case.names) & {*Options._fields} - {"layout"}:
        if way not in plain_kernels:
            run(Case({}, {}), way)
            plain_kernels[way] = {launch.kernel.digest for launch in launched[len(launches) :]}
        # Gradients are not batch-invariant.
        changed = launches[0 if name == "batch_invariant" else -1]
        assert changed.kernel.digest not in plain_kernels[way]
    for launch in launches:
        for tensor, leaf in zip(launch.tensors, leaves, strict=False):
            assert tensor is not None
            assert tensor.data_ptr() == leaf.data_ptr()
        for operand, value in case.values.items():
            actual: Any = launch.scale if operand == "scale" else getattr(launch.side, operand)
            if isinstance(value, Tensor):
                assert actual is not None, operand
                assert torch.equal(actual.expand_as(value), value), operand
            else:
                assert actual == value, operand
    for operand in case.names:
        if operand in ExtraInputs._fields:
            actual = [getattr(launch.side, operand) for launch in launches]
            assert all(part is not None and torch.equal(part, actual[0]) for part in actual), operand


@pytest.mark.parametrize("order", ["bhsd", "bshd", "sbhd", "hbsd"])
def test_kernels_write_outputs_in_the_order_of_the_query(order: str, launched: list[Launched]) -> None:
    extents = dict(zip("bhsd", (2, HEADS, LENGTH, WIDTH), strict=True))
    q = torch.randn([extents[dim] for dim in order]).bfloat16().permute([*map(order.index, "bhsd")])
    k, v = (torch.randn(2, HEADS, LENGTH, WIDTH).bfloat16() for _ in range(2))
    q.requires_grad_()
    out = flashtune.flex_attention(q, k, v, lambda s, b, h, q, k: s + q)
    out.backward(torch.ones_like(out))
    assert out.stride() == q.stride()
    written = launched[0].tensors[3]
    assert written is not None
    assert written.data_ptr() == out.data_ptr()
    assert len(launched) == 2


@pytest.mark.parametrize("way", ["eager", "operators"])
def test_captured_values_reach_the_kernel(way: str, launched: list[Launched]) -> None:
    tables, size, slope = [torch.rand(HEADS) for _ in TABLES], 9, 0.75
    q, k, v = (torch.randn(2, heads, LENGTH, WIDTH).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))

    def score(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return sum((table[h] for table in tables), score * slope)

    mask = create_block_mask(lambda b, h, q, k: q - k < size, None, None, LENGTH, LENGTH, device="cpu")
    SESSION.forget()
    mode: Any = Operators if way == "operators" else contextlib.nullcontext
    with mode():
        flashtune.flex_attention(q, k, v, score, mask, enable_gqa=True)
    (launch,) = launched
    assert {name for name, value in launch.side._asdict().items() if value is not None} == {
        *OF_FUNCTIONS, "block_counts", "block_indices"
    } - {"functions"}  # fmt: skip
    taken = [getattr(launch.side, name) for name in TABLES]
    assert sorted(table.data_ptr() for table in taken) == sorted(table.data_ptr() for table in tables)
    assert launch.side.function_ints is not None
    assert launch.side.function_ints.tolist() == [size, *[HEADS, 1] * len(TABLES)]
    assert launch.side.function_floats is not None
    assert launch.side.function_floats.tolist() == [slope]
    assert set(launch.kernel.side) == {*OF_FUNCTIONS, "block_counts", "block_indices"} - {"functions"}
