"""A GPU's driver that only notes: which tensor maps it fills, and what it launches."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashtune.launch.launch import Stage
from flashtune.launch.launcher import Queue
from flashtune.launch.tma_descriptors import DescriptorArguments

NOTES = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64], "fp4_padded": False}


class Map(NamedTuple):
    """The arguments of a tensor map that the driver would encode."""

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


def pattern(tensor: Tensor, width: int = 64) -> TensorDescriptor:
    size = tensor.element_size()
    layout = NVMMASharedLayout(min(128, width * size), 8 * size, 4)
    return TensorDescriptor(tensor, [*tensor.shape], [*tensor.stride()[:3], 1], [1, 1, 64, width], layout)


def found(arguments: DescriptorArguments, *tensors: Tensor) -> tuple[Any, ...]:
    """The arguments for some tensors, as launches find them."""
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    return arguments.at(addresses) or arguments.made(addresses, tensors[0].device)


def a_tensor(*shape: int) -> Tensor:
    return torch.empty(shape or (2, 4, 128, 96), dtype=torch.bfloat16)


class Noted:
    """A driver's function that notes a kernel's own arguments, and what its queue was made of."""

    def __init__(self, *made_of: Any) -> None:
        self.made_of = made_of
        self.values: list[tuple[Any, ...]] = []

    def __call__(self, stream: int, *values: Any) -> None:
        self.values.append(values)

    @property
    def queue(self) -> Queue:
        """A queue that calls it."""
        return Queue(self, (), (), as_one=False)


def queued(*noted: tuple[Noted, str]) -> tuple[Stage, ...]:
    """Kernels with the names of their arguments. Descriptors are named `described`, first."""
    stages = []
    for recorder, names in noted:
        described, *rest = names.split() if names.startswith("described") else ["", *names.split()]
        stages.append(Stage(recorder.queue, tuple(rest), bool(described)))
    return tuple(stages)
