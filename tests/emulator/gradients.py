"""Emulates rendered `backward_hopper` kernels on arrays, without prologue and epilogue."""

import threading
from typing import Any

import numpy as np
import torch

from flashtune.core.kernel import Kernel
from flashtune.launch.compilation import load_module
from tests.emulator.hardware import Array, Descriptor, Tensor, plain
from tests.emulator.program import Program, functions_of, small_steps


class Sums:
    """The dq workspace by blocks; a group's additions are tiles instead of registers."""

    def __init__(self, blocks: int, block_m: int, width: int) -> None:
        self.tiles = np.zeros((blocks, block_m, width))
        self.clock = threading.Lock()

    def to(self, dtype: object, bitcast: bool) -> int:
        """Its address."""
        return 0

    def add(self, address: int, values: Tensor) -> None:
        """Adds half a block or all of it, [queries, columns], or [columns, queries] for 64 columns."""
        tile = self.tiles[address // (4 * self.tiles[0].size)]
        half = address % (4 * self.tiles[0].size) // (2 * self.tiles[0].size)
        turned = tile.T if tile.shape[1] == 64 else tile
        with self.clock:
            turned[:, 64 * half : 64 * half + values.values.shape[1]] += values.values


def emulate_backward(
    kernel: Kernel,
    tensors: tuple[Any, ...],
    memory: dict[str, Array],
    numbers: tuple[float, ...],
    config: Any,
    width: int,
) -> Array:
    """Runs all programs and returns the sums of dq, [batch * heads, queries in whole blocks, width].

    Args:
        kernel: A kernel of up to 128 columns.
        tensors: Arguments of the launch plan; only shapes and strides are used.
        memory: Flat arrays by the names of descriptors; dk and dv are written.
        numbers: The scale, and the dropout rate if there is dropout.
        config: The config of the kernel.
        width: Columns of a tile.
    """
    module = load_module(kernel)
    (programs,), shapes, integers = module.launch_plan(*tensors)
    workspaces = [torch.empty(shape, device="meta") for shape in shapes]
    made = module.descriptors(*tensors, *workspaces)
    descriptors = [Descriptor(descriptor, memory[name]) for name, (descriptor,) in made.items()]
    sums = Sums(shapes[1][0] * shapes[1][1], config.block_m, width)
    key_tile = [plain(module.ROWS), plain(module.WIDTH)]
    with small_steps():
        for number in range(programs):
            program = Program(number, programs, module)
            names = program.names()
            names |= {
                "opaque": lambda value: value,
                "opaque_zeros": lambda: Tensor(np.zeros(key_tile)),
                "broadcast_row": lambda row: row.load(None),
                "atomic_add": sums.add,
            }
            exec(functions_of(kernel, names), names)
            names[kernel.entry](*descriptors, sums, *numbers, *integers)
    return sums.tiles.reshape(shapes[1][0], -1, width)
