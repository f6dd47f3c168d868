"""Descriptors as arguments and launches that pass them: made once for an address, by Triton's own code."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from flashtune import launch as launching
from flashtune.descriptors import (
    LEAST_SCALE,
    MOST_ADDRESSES,
    DescriptorArguments,
    DescriptorLaunch,
    typed,
    without_making,
)
from flashtune.errors import KernelError
from flashtune.launch import QuantizedLaunch, bind
from flashtune.problem import Dtype
from flashtune.quantization import E4M3, Scales, unit_scales
from flashtune.queueing import Queue
from flashtune.templates.rendering import render
from tests.hopper import FAMILY, H200, PLAIN, a_config, a_problem

NOTES = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64], "fp4_padded": False}


class Map(NamedTuple):
    """What the driver would encode."""

    address: int
    block_size: list[int]
    shape: list[int]
    strides: list[int]


class Driver:
    """A GPU's driver that notes which tensor maps it fills and what it launches."""

    def __init__(self) -> None:
        self.filled: list[Map] = []
        self.utils = SimpleNamespace(
            fill_tma_descriptor=self._fill, fill_tma_descriptor_tiled=self._fill, launch=None
        )

    def _fill(
        self,
        address: int,
        swizzle: int,
        size: int,
        kind: int,
        block: Any,
        shape: Any,
        strides: Any,
        padding: int,
    ) -> Map:
        assert padding == 0
        self.filled.append(Map(address, list(block), list(shape), list(strides)))
        return self.filled[-1]

    def get_current_stream(self, device: int) -> int:
        return 70 + device


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(driver, "_active", fake)
    return fake


def pattern(tensor: Tensor, width: int = 64) -> TensorDescriptor:
    size = tensor.element_size()
    layout = NVMMASharedLayout(min(128, width * size), 8 * size, 4)
    return TensorDescriptor(tensor, [*tensor.shape], [*tensor.stride()[:3], 1], [1, 1, 64, width], layout)


def a_tensor(*shape: int) -> Tensor:
    return torch.empty(shape or (2, 4, 128, 96), dtype=torch.bfloat16)


# ---- arguments -------------------------------------------------------------------------------------


def test_arguments_come_in_order_of_tensors_and_their_tiles(gpu: Driver) -> None:
    q, k = a_tensor(), a_tensor(2, 2, 256, 96)
    notes = [{**NOTES, "block_size": [number]} for number in range(3)]
    arguments = DescriptorArguments([[pattern(q), pattern(q, 32)], [pattern(k)]], notes)
    values = arguments((q, k))
    maps = [
        Map(tensor.data_ptr(), [number], [*tensor.shape], [*tensor.stride()])
        for number, tensor in enumerate((q, q, k))
    ]
    assert gpu.filled == maps
    # A tensor map, then shape and strides, as the kernel's signature expands.
    assert values == [
        value
        for made, tensor in zip(maps, (q, q, k), strict=True)
        for value in (made, *tensor.shape, *tensor.stride())
    ]


def test_they_are_made_once_for_an_address(gpu: Driver) -> None:
    first, second = a_tensor(), a_tensor()
    arguments = DescriptorArguments([[pattern(first)], [pattern(first)]], [NOTES, NOTES])
    once = arguments((first, second))
    assert len(gpu.filled) == 2
    for _ in range(3):
        assert arguments((first, second)) == once
    assert len(gpu.filled) == 2
    # The same address in another place is another tensor.
    assert [value for value in arguments((second, first)) if isinstance(value, Map)] == gpu.filled[2:]
    assert [made.address for made in gpu.filled[2:]] == [second.data_ptr(), first.data_ptr()]
    assert arguments((first, second)) == once


def test_only_addresses_are_read(gpu: Driver) -> None:
    base = torch.empty(2, 128, 4, 96, dtype=torch.bfloat16)
    view = base.transpose(1, 2)
    arguments = DescriptorArguments([[pattern(view)]], [NOTES])
    of_view = arguments((view,))
    assert arguments((base,)) == of_view
    assert arguments((view.detach(),)) == of_view
    assert len(gpu.filled) == 1
    # Another allocation of either layout gets the strides that are bound.
    other = torch.empty_like(base)
    arguments((other,))
    assert gpu.filled[1] == Map(other.data_ptr(), NOTES["block_size"], [*view.shape], [*view.stride()])  # type: ignore[arg-type]


def test_all_are_forgotten_when_there_are_many(gpu: Driver) -> None:
    room = torch.empty(MOST_ADDRESSES + 2, 1, 1, 64, 64, dtype=torch.bfloat16)
    arguments = DescriptorArguments([[pattern(room[0])]], [NOTES])
    for tensor in room[:MOST_ADDRESSES]:
        arguments((tensor,))
    arguments((room[0],))
    assert len(gpu.filled) == MOST_ADDRESSES
    arguments((room[MOST_ADDRESSES],))
    arguments((room[MOST_ADDRESSES],))
    assert len(gpu.filled) == MOST_ADDRESSES + 1
    arguments((room[0],))
    assert [made.address for made in gpu.filled[-2:]] == [room[MOST_ADDRESSES].data_ptr(), room[0].data_ptr()]


def test_an_address_off_its_border_is_refused(gpu: Driver) -> None:
    tensor = a_tensor()
    arguments = DescriptorArguments([[pattern(tensor)]], [NOTES])
    off = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    with pytest.raises(AssertionError, match="16-byte aligned"):
        arguments((off,))
    assert gpu.filled == []


# ---- this Triton's launcher ------------------------------------------------------------------------


class Launcher:
    """As Triton's own: calls `launch`, which makes descriptors on the way to the driver."""

    def __init__(self, launch: Callable[..., Any]) -> None:
        self.launch = launch

    def __call__(self, *values: Any) -> Any:
        return self.launch(*values)


def test_a_launcher_takes_descriptors_that_are_made(gpu: Driver) -> None:
    passed: list[Any] = []
    signature = {"q_desc": "tensordesc<bf16[1, 1, 64, 64],NVMMASharedLayout(128, 16, 4)>", "scale": "fp32"}

    def to_the_driver(*values: Any) -> None:
        passed.append(values)

    run = Launcher(nvidia.wrap_handle_tensordesc(to_the_driver, signature, [NOTES]))
    bare = without_making(run)
    bare("grid", "made before", 0.5)
    assert passed == [("grid", "made before", 0.5)]
    assert gpu.filled == []
    assert run.launch is not to_the_driver, "Triton's own launches still make theirs"


def test_a_launcher_of_another_kind_is_refused() -> None:
    with pytest.raises(KernelError, match="in a way that flashtune does not know"):
        without_making(Launcher(lambda *values: values))


@pytest.mark.parametrize("described", [True, False])
def test_a_queue_bypasses_the_making(gpu: Driver, monkeypatch: pytest.MonkeyPatch, described: bool) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    passed: list[Any] = []

    def to_the_driver(*values: Any) -> None:
        passed.append(values)

    signature = {"q_desc": "tensordesc<bf16[1, 1, 64, 64],NVMMASharedLayout(128, 16, 4)>"}
    wrapped = nvidia.wrap_handle_tensordesc(to_the_driver, signature, [NOTES])
    compiled = SimpleNamespace(
        run=Launcher(wrapped if described else to_the_driver),
        function="function",
        packed_metadata="packed",
        metadata=SimpleNamespace(tensordesc_meta=[NOTES] if described else None, global_scratch_size=0),
    )
    queue = Queue(compiled, (5,), (8, 9), torch.device("cuda", 3))
    queue(("made", 0.5))
    assert passed == [(5, 1, 1, 73, "function", "packed", None, None, None, "made", 0.5, 8, 9)]


# ---- launches --------------------------------------------------------------------------------------


class Noted:
    """A queue that notes what it was made of and given."""

    def __init__(self, *made_of: Any) -> None:
        self.made_of = made_of
        self.values: list[tuple[Any, ...]] = []

    def __call__(self, values: tuple[Any, ...]) -> None:
        self.values.append(values)


def test_a_launch_passes_descriptors_then_the_rest(gpu: Driver) -> None:
    q, k, v, out = (a_tensor() for _ in range(4))
    lse = torch.empty(2, 4, 128)
    arguments = DescriptorArguments([[pattern(q)] for _ in range(4)], [NOTES] * 4)
    queue = Noted()
    launch = DescriptorLaunch(queue, arguments)
    launch(q, k, v, out, lse, 0.25)
    launch(q, k, v, out, None, 0.0)
    described = arguments((q, k, v, out))
    assert queue.values == [
        (*described, lse.data_ptr(), 0.25),
        # Without a log-sum-exp something else stands there; plain averages have a scale that is no zero.
        (*described, out.data_ptr(), LEAST_SCALE),
    ]
    assert len(gpu.filled) == 4


def test_a_quantised_launch_describes_what_its_prologue_wrote(gpu: Driver) -> None:
    q, k, v = (torch.zeros(2, 4, 128, 64).to(E4M3) for _ in range(3))
    out, ones = a_tensor(2, 4, 128, 64), torch.ones(8)
    kept: list[Tensor] = []

    def allocate(shape: tuple[int, ...], device: torch.device) -> Tensor:
        kept.append(torch.empty(shape, device=device))
        return kept[-1]

    transposed = typed(torch.empty(2, 4, 64, 32), v)
    assert transposed.dtype is E4M3
    assert transposed.shape == (2, 4, 64, 128)
    patterns = [[pattern(tensor)] for tensor in (q, k, transposed, out)]
    arguments = DescriptorArguments(patterns, [NOTES] * 4)
    kernel, prologue = Noted(), Noted()
    launch = QuantizedLaunch(kernel, prologue, ones, ((2, 4, 64, 32),), allocate, arguments)
    k_scale = torch.ones(2, 4)
    launch(q, k, v, out, None, 0.5, Scales(k=k_scale))
    (workspace,) = kept
    assert prologue.values == [(v.data_ptr(), workspace.data_ptr())]
    assert [made.address for made in gpu.filled] == [t.data_ptr() for t in (q, k, workspace, out)]
    assert gpu.filled[2].shape == [2, 4, 64, 128]
    (values,) = kernel.values
    scales = (ones.data_ptr(), k_scale.data_ptr(), ones.data_ptr())
    assert values[-5:] == (out.data_ptr(), *scales, 0.5)
    assert len(values) == 4 * 9 + 5


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> list[Noted]:
    """What `bind` makes of binaries: nothing is loaded."""
    made: list[Noted] = []

    def queue(*made_of: Any) -> Noted:
        made.append(Noted(*made_of))
        return made[-1]

    monkeypatch.setattr(launching, "Queue", queue)
    return made


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.E4M3])
def test_a_rendered_kernel_is_bound(gpu: Driver, queues: list[Noted], dtype: Dtype) -> None:
    problem = a_problem(96, 80, dtype=dtype, kv_heads=2, seqlen_q=100, seqlen_kv=300)
    kernel = render(FAMILY, problem, a_config(problem, section=4), PLAIN)
    element = E4M3 if dtype.is_quantized else torch.bfloat16
    # As [batch, seqlen, heads, head_dim], seen heads first.
    q = torch.zeros(2, 100, 8, 96).to(element).transpose(1, 2)
    k = torch.zeros(2, 300, 2, 96).to(element).transpose(1, 2)
    v = torch.zeros(2, 300, 2, 80).to(element).transpose(1, 2)
    out = torch.zeros(2, 8, 100, 80, dtype=torch.bfloat16)
    launch = bind(kernel, H200, q, k, v, out)
    launch(q, k, v, out, None, 0.1)
    main, *first = queues
    _, grid, integers, _ = main.made_of
    assert grid == (1,), "one program for the only multiprocessor of a machine without a GPU"
    assert integers == (8, 4, 16, 100, 300, 4)
    # A map, sides and strides of each: five of queries and outputs, by groups, and four of the others.
    assert len(main.values[0]) == 4 * 11 + 4 * 9 + 2 + (3 if dtype.is_quantized else 0)
    described = [value for value in main.values[0] if isinstance(value, Map)]
    # Two tiles of each: 64 and 32 columns, 64 and 16.
    assert [made.address for made in described[:4]] == [q.data_ptr()] * 2 + [k.data_ptr()] * 2
    assert [made.address for made in described[6:]] == [out.data_ptr()] * 2
    assert described[0].strides == [*q.unflatten(1, (2, 4)).stride()]
    assert described[2].strides == [*k.stride()]
    if dtype.is_quantized:
        (prologue,) = first
        assert prologue.values[0][0] == v.data_ptr()
        assert [made.address for made in described[4:6]] == [prologue.values[0][1]] * 2
        assert described[4].shape == [2, 2, 80, 304]
    else:
        assert first == []
        assert [made.address for made in described[4:6]] == [v.data_ptr()] * 2


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.E4M3])
def test_what_is_bound_keeps_no_tensor(gpu: Driver, queues: list[Noted], dtype: Dtype) -> None:
    problem = a_problem(64, 64, dtype=dtype, kv_heads=8, seqlen_q=128, seqlen_kv=128)
    kernel = render(FAMILY, problem, a_config(problem), PLAIN)
    element = E4M3 if dtype.is_quantized else torch.bfloat16
    q, k, v = (torch.zeros(2, 8, 128, 64).to(element) for _ in range(3))
    out = torch.zeros(2, 8, 128, 64, dtype=torch.bfloat16)
    seen = [weakref.ref(tensor) for tensor in (q, k, v, out)]
    launch = bind(kernel, H200, q, k, v, out)
    launch(q, k, v, out, None, 0.1)
    del q, k, v, out
    gc.collect()
    assert [tensor() for tensor in seen] == [None] * 4
    assert callable(launch)


def test_ones_outlive_the_launches_that_read_them(gpu: Driver, queues: list[Noted]) -> None:
    problem = a_problem(64, 64, dtype=Dtype.E4M3, heads=6, kv_heads=6, seqlen_q=128, seqlen_kv=128)
    kernel = render(FAMILY, problem, a_config(problem), PLAIN)
    q, k, v = (torch.zeros(2, 6, 128, 64).to(E4M3) for _ in range(3))
    out = torch.zeros(2, 6, 128, 64, dtype=torch.bfloat16)
    addresses = []
    for _ in range(2):
        queues.clear()
        bind(kernel, H200, q, k, v, out)(q, k, v, out, None, 0.1)
        gc.collect()
        addresses.append(queues[0].values[0][-4:-1])
    assert addresses[0] == addresses[1]
    ones = unit_scales(q)
    assert set(addresses[0]) == {ones.data_ptr()}
    assert (ones == 1).all()
