"""Tests of tensor descriptors as arguments: created once per address, by Triton's own code."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.backends.nvidia import driver as nvidia

from flashtune.core.errors import KernelError
from flashtune.launch.tma_descriptors import (
    MAX_ADDRESSES,
    DescriptorArguments,
    makers_of,
    without_making,
)
from tests.emulator.tensor_maps import NOTES, Driver, Map, a_tensor, found, pattern


def test_arguments_come_in_order_of_tensors_and_their_tiles(gpu: Driver) -> None:
    q, k = a_tensor(), a_tensor(2, 2, 256, 96)
    notes = [{**NOTES, "block_size": [number]} for number in range(3)]
    arguments = DescriptorArguments(makers_of([[pattern(q), pattern(q, 32)], [pattern(k)]], notes))
    values = found(arguments, q, k)
    maps = [
        Map(tensor.data_ptr(), [number], [*tensor.shape], [*tensor.stride()])
        for number, tensor in enumerate((q, q, k))
    ]
    assert gpu.filled == maps
    # A tensor map, then shape and strides, as the kernel's signature expands.
    assert [*values] == [
        value
        for made, tensor in zip(maps, (q, q, k), strict=True)
        for value in (made, *tensor.shape, *tensor.stride())
    ]


def test_descriptors_are_created_once_per_address(gpu: Driver) -> None:
    first, second = a_tensor(), a_tensor()
    arguments = DescriptorArguments(makers_of([[pattern(first)], [pattern(first)]], [NOTES, NOTES]))
    once = found(arguments, first, second)
    assert len(gpu.filled) == 2
    for _ in range(3):
        assert found(arguments, first, second) is once
    assert len(gpu.filled) == 2
    # The same address in another place is another tensor.
    assert [value for value in found(arguments, second, first) if isinstance(value, Map)] == gpu.filled[2:]
    assert [made.address for made in gpu.filled[2:]] == [second.data_ptr(), first.data_ptr()]
    assert found(arguments, first, second) == once


def test_thread_has_a_context_before_its_first_descriptor(
    gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = a_tensor(), a_tensor()
    arguments = DescriptorArguments(makers_of([[pattern(first)]], [NOTES]))
    launched: list[int] = []
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: launched.append(len(gpu.filled)))

    def calls() -> None:
        found(arguments, first)
        found(arguments, second)

    for _ in range(2):
        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
    # Once in the thread that made descriptors first; the other found them made.
    assert launched == [0]
    assert len(gpu.filled) == 2


def test_only_tensor_addresses_are_read(gpu: Driver) -> None:
    base = torch.empty(2, 128, 4, 96, dtype=torch.bfloat16)
    view = base.transpose(1, 2)
    arguments = DescriptorArguments(makers_of([[pattern(view)]], [NOTES]))
    of_view = found(arguments, view)
    assert found(arguments, base) == of_view
    assert found(arguments, view.detach()) == of_view
    assert len(gpu.filled) == 1
    # Another allocation of either layout gets the strides that are bound.
    other = torch.empty_like(base)
    found(arguments, other)
    assert gpu.filled[1] == Map(other.data_ptr(), NOTES["block_size"], [*view.shape], [*view.stride()])  # type: ignore[arg-type]


def test_descriptor_cache_is_cleared_when_full(gpu: Driver) -> None:
    room = torch.empty(MAX_ADDRESSES + 2, 1, 1, 64, 64, dtype=torch.bfloat16)
    arguments = DescriptorArguments(makers_of([[pattern(room[0])]], [NOTES]))
    for tensor in room[:MAX_ADDRESSES]:
        found(arguments, tensor)
    found(arguments, room[0])
    assert len(gpu.filled) == MAX_ADDRESSES
    found(arguments, room[MAX_ADDRESSES])
    found(arguments, room[MAX_ADDRESSES])
    assert len(gpu.filled) == MAX_ADDRESSES + 1
    found(arguments, room[0])
    assert [made.address for made in gpu.filled[-2:]] == [room[MAX_ADDRESSES].data_ptr(), room[0].data_ptr()]


def test_unaligned_address_is_refused(gpu: Driver) -> None:
    tensor = a_tensor()
    arguments = DescriptorArguments(makers_of([[pattern(tensor)]], [NOTES]))
    off = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    with pytest.raises(AssertionError, match="16-byte aligned"):
        found(arguments, off)
    assert gpu.filled == []


# ---- this Triton's launcher ------------------------------------------------------------------------


class Launcher:
    """As Triton's own: calls `launch`, which makes descriptors on the way to the driver."""

    def __init__(self, launch: Callable[..., Any]) -> None:
        self.launch = launch

    def __call__(self, *values: Any) -> Any:
        return self.launch(*values)


def test_launcher_accepts_created_descriptors(gpu: Driver) -> None:
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


def test_unknown_launcher_is_refused() -> None:
    with pytest.raises(KernelError, match="in a way that flashtune does not support"):
        without_making(Launcher(lambda *values: values))


def test_unsupported_triton_is_reported_before_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("triton.backends.nvidia.driver.make_tensordesc_arg", raising=False)
    with pytest.raises(KernelError, match=r"install one from 3\.6 to 3\.9"):
        DescriptorArguments(makers_of([[pattern(a_tensor())]], [NOTES]))
