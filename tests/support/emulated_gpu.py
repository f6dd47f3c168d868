"""An H200 whose driver library is emulated: launches are noted and compute nothing. Imports no Triton."""

import contextlib
from collections.abc import Iterator
from ctypes import c_void_p
from typing import Any
from unittest import mock

import torch

from flashtune.bundle.driver import Driver
from flashtune.bundle.records import Stage
from flashtune.core.target import Target, find_target
from flashtune.dispatch.platform import Platform
from flashtune.launch import launch, workspaces
from flashtune.launch.bundles import Bundles
from flashtune.launch.workspaces import Memory
from flashtune.runtime import backward_executors, executors
from flashtune.runtime.kernel_loader import KernelLoader
from flashtune.runtime.session import SESSION
from tests.emulator.cuda_library import CudaLibrary


class EmulatedGpu(Platform):
    """Takes tensors on the CPU as tensors on an H200."""

    def target(self, device: torch.device) -> Target:
        return find_target("h200")

    def has_kernels(self, device: torch.device) -> bool:
        return True

    def is_capturing(self, device: torch.device) -> bool:
        return False

    def sdpa_backend(self, *_: object) -> str:
        return "sdpa-cudnn"


class CpuDriver(Driver):
    """Takes the CPU, whose device has no index, as the first GPU."""

    def load(self, code: bytes, stage: Stage, device: int | None) -> c_void_p:
        return super().load(code, stage, device or 0)


def made(size: int, device: torch.device, stream: int) -> Memory:
    tensor = torch.empty(size, dtype=torch.uint8, device=device)
    return Memory(tensor, tensor.data_ptr(), size)


@contextlib.contextmanager
def emulated_gpu() -> Iterator[CudaLibrary]:
    """Prepares calls of this session for the GPU in the context, by kernels of the bundle of the process."""
    library, platform = CudaLibrary(), EmulatedGpu()
    platform.bundles = Bundles(CpuDriver(library))
    properties = mock.Mock(multi_processor_count=132)
    patches: list[Any] = [
        mock.patch.object(module, name, value)
        for module, name, value in (
            (torch.cuda, "get_device_properties", lambda device: properties),
            (torch.cuda, "device", lambda device: contextlib.nullcontext()),
            (launch, "current_device", lambda: None),
            (launch, "current_stream", lambda device: 0),
            (executors, "current_device", lambda: None),
            (backward_executors, "current_device", lambda: None),
            (workspaces, "_made", made),
            (workspaces, "capturing", lambda: False),
            (SESSION, "platform", platform),
            (SESSION, "loader", KernelLoader(bundles=platform.bundles)),
        )
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield library
