"""Tests of allocation: outputs, their device, and memory for all workspaces of a launch."""

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune.dispatch.platform import Platform
from flashtune.launch import workspaces
from flashtune.launch.binding import bind
from flashtune.launch.workspaces import BORDER, MIN_KEPT_BYTES, Workspaces, allocator, kept_memory
from flashtune.request.call import dense_call
from flashtune.request.gradients import BackwardInputs
from flashtune.request.read_call import read_call
from flashtune.request.request import Request
from flashtune.runtime import executors
from flashtune.runtime.backward_executors import Bound, BoundBackward
from tests.runtime.conftest import Devices, Pool

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 1, 5, 8), (2, 0, 3), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_allocations_are_those_of_torch(
    shape: tuple[int, ...], dtype: torch.dtype, is_transposed: bool
) -> None:
    like = torch.empty(shape, dtype=dtype, device="meta")
    like = like.movedim(0, -1) if is_transposed and shape else like
    made, plain = allocator(like, CPU)(), torch.empty_strided(like.shape, like.stride(), dtype=dtype)
    assert (made.shape, made.dtype, made.stride()) == (plain.shape, plain.dtype, plain.stride())
    made.fill_(3.0)
    assert (made == 3).all()
    assert made.untyped_storage().nbytes() == made.numel() * made.element_size()


@pytest.mark.parametrize("inference", [True, False])
def test_allocations_work_in_and_out_of_inference_mode(inference: bool) -> None:
    with torch.inference_mode(inference):
        allocate = allocator(torch.empty(2, 3, device="meta"), CPU)
    with torch.inference_mode(not inference):
        made = allocate()
    assert made.is_inference() is not inference
    assert not made.requires_grad


SHAPES = {"one": (3, 50), "two": (1,), "three": (2, 64)}
SIZE = 3 * BORDER + BORDER


def test_workspaces_are_disjoint_and_aligned(pool: Pool) -> None:
    planned = Workspaces(SHAPES, CPU)
    assert planned.names == ("one", "two", "three")
    addresses, _, _ = planned.take(0)
    assert [address - addresses[0] for address in addresses] == [0, 2 * BORDER, 3 * BORDER]
    assert pool.made == [(SIZE, 0)]


def test_returned_memory_serves_later_launches_of_its_stream(pool: Pool) -> None:
    kept = kept_memory()
    planned, other = Workspaces(SHAPES, CPU, kept=kept), Workspaces({"one": (1,)}, CPU, kept=kept)
    addresses, held, give_back = planned.take(7)
    give_back(held)
    assert planned.take(7)[0] == addresses
    assert other.take(8)[0] != addresses
    give_back(held)
    assert other.take(7)[0] == addresses[:1]
    assert [stream for _, stream in pool.made] == [7, 8]


def test_launches_that_overlap_have_memory_of_their_own(pool: Pool) -> None:
    """Two threads on one stream, of which each queues a kernel before the other's combine kernel."""
    planned = Workspaces(SHAPES, CPU)
    first, second = planned.take(0), planned.take(0)
    assert not {*first[0]} & {*second[0]}
    first[2](first[1])
    second[2](second[1])
    assert {planned.take(0)[0][0], planned.take(0)[0][0]} == {first[0][0], second[0][0]}


def test_memory_grows(pool: Pool) -> None:
    kept = kept_memory()
    small, large = Workspaces({"one": (1,)}, CPU, kept=kept), Workspaces(SHAPES, CPU, kept=kept)
    for planned in (small, large, small):
        _, held, give_back = planned.take(0)
        give_back(held)
    assert [size for size, _ in pool.made] == [BORDER, SIZE]


def test_graphs_and_large_workspaces_allocate(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Workspaces(SHAPES, CPU)
    pool.is_capturing = True
    first, held, give_back = planned.take(0)
    give_back(held)
    second, _, _ = planned.take(0)
    assert first != second, "the graph's pool owns both, and neither is kept"
    pool.is_capturing = False
    monkeypatch.setattr(workspaces, "MAX_KEPT_BYTES", SIZE - 1)
    planned.take(0)
    assert pool.made == []


def test_memory_is_allocated_on_its_stream_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[tuple[Any, bool]] = []

    @contextlib.contextmanager
    def stream(external: Any) -> Iterator[None]:
        entered.append((external, threading.current_thread() is threading.main_thread()))
        yield

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda *arguments: arguments)
    memory = workspaces._made(MIN_KEPT_BYTES + 1, CPU, 7)
    assert entered == [((7, CPU), False)]
    assert memory.size == memory.tensor.numel() == 2 * MIN_KEPT_BYTES
    assert memory.address == memory.tensor.data_ptr()


def test_custom_allocator_is_called_for_each_workspace(pool: Pool) -> None:
    kept: list[Tensor] = []

    def allocate(shape: tuple[int, ...], device: torch.device) -> Tensor:
        assert device == CPU
        kept.append(torch.empty(shape))
        return kept[-1]

    planned = Workspaces({"one": (2, 3), "other": (4,)}, CPU, allocate)
    addresses, _, _ = planned.take(0)
    assert [tuple(tensor.shape) for tensor in kept] == [(2, 3), (4,)]
    assert addresses == [tensor.data_ptr() for tensor in kept]
    assert pool.made == []


GPU = torch.device("cuda", 3)


@pytest.fixture
def request_on_gpu() -> Request:
    q = torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    return msgspec.structs.replace(read_call(dense_call(q, q, q)), device=GPU)


@pytest.mark.parametrize("current", [0, 3])
def test_output_is_on_the_device_of_q(
    devices: Devices, request_on_gpu: Request, current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "allocator", lambda like, device: lambda: devices.current)
    devices.current = current
    q: Any = SimpleNamespace(device=GPU, dtype=torch.bfloat16)
    executor = executors.launcher(lambda *_: None, request_on_gpu, q)
    assert executor(q, q, q, None) == 3
    assert devices.current == current


@pytest.mark.parametrize("current", [0, 3])
def test_gradients_are_on_the_devices_of_their_inputs(
    devices: Devices, request_on_gpu: Request, current: int
) -> None:
    devices.current = current
    q, out = torch.zeros(1, 2, 16, 64), torch.zeros(1, 2, 16, 64)
    on_current_device = torch.ones(1, 2, 16, 64)
    choice = SimpleNamespace(kernel=SimpleNamespace(writes=lambda _: False))
    backward = BoundBackward(choice, request_on_gpu, Platform(), bind)  # type: ignore[arg-type]
    bound = Bound(lambda *_: None, *(lambda: on_current_device,) * 3)
    backward._launches[(q.stride(),) * 5] = bound
    gradients = backward.plainly(BackwardInputs(q, q, q, out, torch.zeros(1, 2, 16), out, None, None))
    assert [gradient is on_current_device for gradient in gradients[:3]] == [current == 3] * 3
