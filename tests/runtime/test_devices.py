"""Tests that results are allocated on the device of the inputs if another device is current."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from flashtune.dispatch.platform import Platform
from flashtune.launch.binding import bind
from flashtune.request.call import dense_call
from flashtune.request.read_call import read_call
from flashtune.request.request import Request
from flashtune.runtime import executors
from flashtune.runtime.backward_executors import Bound, BoundBackward
from flashtune.runtime.gradients import BackwardInputs
from tests.runtime.conftest import Devices

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
