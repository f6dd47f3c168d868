"""Emulates Hopper backward kernels on the CPU, with concurrent programs and the order of their dq sums."""

from typing import Any, NamedTuple

import numpy as np
import torch

from flashtune.core.kernel import Kernel
from flashtune.launch.compilation import load_module
from tests.emulator.hardware import Array, Clock, Descriptor, Pointer, Shared, Tensor, plain
from tests.emulator.program import Program, functions_of, small_steps


class Base(int):
    """The base address of a workspace."""

    def to(self, dtype: object, bitcast: bool) -> int:
        return int(self)


class Addition(NamedTuple):
    """An addition of one group of one program to half a block of dq, or to all of it."""

    program: int
    values: Array


class Sums:
    """Additions to dq by address, in order, and the counters of turns."""

    def __init__(self) -> None:
        self.clock = Clock(1)
        self.added: dict[int, list[Addition]] = {}
        self.counters: dict[int, int] = {}

    def add(self, program: int, address: int, values: Array) -> None:
        with self.clock.changed:
            # Additions of zeros have no effect.
            if values.any():
                self.added.setdefault(int(address), []).append(Addition(program, values.copy()))

    def wait_counter(self, counter: int, block: int) -> None:
        self.clock.wait_for(lambda: self.counters.get(int(counter), 0) == block, "a turn")

    def set_counter(self, counter: int, block: int) -> None:
        with self.clock.changed:
            self.counters[int(counter)] = block + 1
            self.clock.changed.notify_all()


class BackwardProgram(Program):
    """One program of a backward launch."""

    def __init__(self, number: int, programs: int, module: Any, sums: Sums) -> None:
        super().__init__(number, programs, module, sums.clock)
        self.sums = sums

    def names(self) -> dict[str, Any]:
        module = self.module

        def zeros() -> Tensor:
            return Tensor(np.zeros([plain(module.ROWS), plain(module.WIDTH)]))

        def broadcast_row(row: Shared) -> Tensor:
            return Tensor(np.broadcast_to(row.values, (plain(module.ROWS), row.values.shape[1])))

        return {
            **super().names(),
            "opaque": lambda value: value,
            "opaque_zeros": zeros,
            "broadcast_row": broadcast_row,
            "reciprocals": lambda numbers: Tensor(1.0 / numbers.values),
            "atomic_add": lambda address, values: self.sums.add(self.number, address, values.values),
            "wait_counter": self.sums.wait_counter,
            "set_counter": self.sums.set_counter,
        }


def as_array(tensor: torch.Tensor) -> Array:
    """A captured tensor as an array, of which there is none in bf16."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy()


def emulate_backward(
    kernel: Kernel,
    planned: tuple[Any, ...],
    memory: dict[str, Array],
    stats: Any,
    scale: float,
    workspaces: int,
    at_once: int,
    extra_inputs: tuple[Array, ...] = (),
    numbers: tuple[float, ...] = (),
    steps: tuple[Array, ...] = (),
    dtables: Array | None = None,
) -> Sums:
    """Runs all programs of a launch.

    Args:
        kernel: A kernel of Hopper's backward family.
        planned: Arguments of the launch plan; only shapes and strides are used.
        memory: Flat arrays by name: q, k, v, dout, workspace_0, dk and dv, of which the last two are written.
        stats: workspace_0 of the launch plan.
        scale: Of the scores.
        workspaces: Number of workspaces of the main kernel other than the rows.
        at_once: Number of concurrent programs; they start in order of their numbers.
        extra_inputs: Extra inputs as arrays.
        numbers: Scalars after the scale.
        steps: The workspace of a block mask's steps, if there is one.
        dtables: Gradients of captured tensors, which the launch adds to.
    """
    module = load_module(kernel)
    planned = (*planned, *(torch.empty(array.shape, device="meta") for array in extra_inputs))
    (programs,), shapes, integers = module.launch_plan(*planned)
    made = module.descriptors(*planned, stats, *([None] * (len(shapes) - 1)))
    descriptors = [
        Descriptor(descriptor, memory[name]) for name, parts in made.items() for descriptor in parts
    ]
    tables = () if dtables is None else (Pointer(dtables),)
    sums = Sums()

    waiting = iter(range(programs))

    def multiprocessor() -> None:
        for number in waiting:
            names = BackwardProgram(number, programs, module, sums).names()
            exec(functions_of(kernel, names), names)
            arrays = (Pointer(array.reshape(-1)) for array in extra_inputs)
            listed = (Pointer(array.reshape(-1)) for array in steps)
            further = (*[Base(0)] * workspaces, *listed, *tables, *arrays)
            names[kernel.entry](*descriptors, *further, scale, *numbers, *integers)

    with small_steps():
        sums.clock.together([multiprocessor] * at_once)
    return sums
