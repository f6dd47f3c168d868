"""Python implementations of registers, shared memory, barriers, and tensor descriptors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
ADDRESSES = 2**64


class BarrierError(RuntimeError):
    """No thread can end a wait, or a barrier received too many arrivals."""


class Clock:
    """The threads of a launch, which wait for one another. Finds waits without end, whatever they take.

    Attributes:
        changed: Its lock guards all that threads wait for. Each change notifies it.
    """

    def __init__(self, threads: int) -> None:
        self.changed = threading.Condition()
        self._threads, self._is_stuck = threads, False
        self._waits: list[Callable[[], bool]] = []

    def wait_for(self, predicate: Callable[[], bool], name: str) -> None:
        with self.changed:
            self._wait(predicate, lambda: self._is_stuck)
            if not predicate():
                raise BarrierError(f"a wait for {name} has no end")

    def together(self, jobs: list[Callable[[], None]]) -> None:
        """Runs jobs in further threads. This thread waits for them."""
        left = [len(jobs)]

        def run(job: Callable[[], None]) -> None:
            try:
                job()
            finally:
                with self.changed:
                    left[0] -= 1
                    self._threads -= 1
                    self._look()
                    self.changed.notify_all()

        with ThreadPoolExecutor(len(jobs)) as threads, self.changed:
            self._threads += len(jobs)
            running = [threads.submit(run, job) for job in jobs]
            self._wait(lambda: not left[0], lambda: False)
        for future in running:
            future.result()

    def _wait(self, predicate: Callable[[], bool], is_cancelled: Callable[[], bool]) -> None:
        self._waits.append(predicate)
        self._look()
        self.changed.wait_for(lambda: predicate() or is_cancelled())
        self._waits.remove(predicate)

    def _look(self) -> None:
        if len(self._waits) == self._threads and not any(predicate() for predicate in self._waits):
            self._is_stuck = True
            self.changed.notify_all()


class Tensor:
    """A tensor in registers; layouts are ignored."""

    type = SimpleNamespace(layout=None)

    def __init__(self, values: Array | float) -> None:
        self.values = np.asarray(values)

    def __getitem__(self, key: Any) -> Tensor:
        return type(self)(self.values[key])

    def __neg__(self) -> Tensor:
        return type(self)(-self.values)

    def to(self, dtype: object, bitcast: bool = False) -> Tensor:
        return self

    def reshape(self, shape: list[int]) -> Tensor:
        return Tensor(self.values.reshape(shape))

    def permute(self, *axes: int) -> Tensor:
        return Tensor(self.values.transpose(axes))

    def split(self) -> tuple[Tensor, Tensor]:
        return Tensor(self.values[..., 0]), Tensor(self.values[..., 1])


def _operator(name: str) -> Callable[..., Tensor]:
    def operate(self: Tensor, other: Any) -> Tensor:
        with np.errstate(all="ignore"):
            return type(self)(getattr(np.asarray(self.values), name)(plain(other)))

    return operate


COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
BITS = ("and", "or", "xor", "lshift", "rshift", "rand", "ror", "rxor", "rlshift", "rrshift")
ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "radd",
    "rsub",
    "rmul",
    "rtruediv",
    "rfloordiv",
)
for _name in (*COMPARISONS, *BITS, *ARITHMETIC):
    setattr(Tensor, f"__{_name}__", _operator(f"__{_name}__"))


def _quotient(one: Tensor, other: Any) -> Tensor:
    """Returns the quotient of integers without the digits after its point, as in Triton."""
    floor, rest = np.divmod(one.values, plain(other))
    return type(one)(floor + ((rest != 0) & (floor < 0)))


def _quotient_from(own: Tensor, other: Any) -> Tensor:
    return _quotient(type(own)(other), own)


for _name, _function in (("__floordiv__", _quotient), ("__rfloordiv__", _quotient_from)):
    setattr(Tensor, _name, _function)


def as_word(value: Any) -> Tensor:
    """Returns the lowest 32 bits of a number or of each element of a tensor, unsigned."""
    return Tensor((np.asarray(plain(value)).astype(np.int64) & 0xFFFFFFFF).astype(np.uint32))


def converted(value: Any, dtype: str) -> Any:
    """Returns the value as a float, or without the digits after its point as an int."""
    if not isinstance(value, Tensor):
        # Numpy's numbers can be divided by zero.
        return int(value) if dtype == "i32" else np.float64(value)
    is_integer = value.values.dtype.kind in "iu"
    return value if is_integer else Tensor(value.values.astype(np.int64 if dtype == "i32" else np.float64))


def plain(value: Any) -> Any:
    """Returns the value as a numpy array or a number."""
    return value.values if isinstance(value, Tensor) else getattr(value, "value", value)


class Shared:
    """A ring or a tile in shared memory: a view of one array."""

    def __init__(self, values: Array) -> None:
        self.values = values

    def index(self, slot: int) -> Shared:
        return Shared(self.values[int(slot)])

    def reshape(self, shape: list[Any]) -> Shared:
        return Shared(self.values.reshape([plain(side) for side in shape]))

    def permute(self, axes: tuple[int, ...]) -> Shared:
        return Shared(self.values.transpose(axes))

    def slice(self, start: int, length: int, axis: int) -> Shared:
        rows = slice(plain(start), plain(start) + plain(length))
        return Shared(self.values[(slice(None),) * axis + (rows,)])

    def store(self, value: Tensor) -> None:
        self.values[...] = value.values

    def load(self, layout: object) -> Tensor:
        return Tensor(self.values.copy())


class Barrier:
    """An mbarrier of a ring: its phase flips after all arrivals and bytes."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.count, self.pending, self.bytes, self.phase = clock, 0, 0, 0, 0

    def change(self, arrivals: int, size: int) -> None:
        with self.clock.changed:
            self.pending -= arrivals
            self.bytes += size
            if self.pending < 0:
                raise BarrierError("more arrivals than a barrier expects")
            if not self.pending and not self.bytes:
                self.phase, self.pending = self.phase ^ 1, self.count
                self.clock.changed.notify_all()

    def wait(self, parity: int) -> None:
        self.clock.wait_for(lambda: self.phase != int(parity), "a tile or its slot")


class Turn:
    """A named barrier of two groups, one of which waits."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.arrived, self.round = clock, 0, 0

    def arrive(self) -> int:
        with self.clock.changed:
            ours = self.round
            self.arrived += 1
            if self.arrived == 2:
                self.arrived, self.round = 0, self.round + 1
                self.clock.changed.notify_all()
            return ours

    def sync(self) -> None:
        ours = self.arrive()
        self.clock.wait_for(lambda: self.round > ours, "a turn")


class Descriptor:
    """The addressing of one tensor descriptor, on a flat array."""

    def __init__(self, made: Any, memory: Array) -> None:
        self.shape, self.strides, self.box = made.shape, made.strides, made.block_shape
        self.memory, self.size = memory, made.base.element_size()

    def places(self, coordinates: list[Any]) -> tuple[Array, Array]:
        """Returns offsets of a box's elements in memory, and whether they lie within the tensor."""
        # Unsigned numbers of 64 bits wrap as addresses do.
        addresses, inside = np.zeros(self.box, np.uint64), np.ones(self.box, dtype=bool)
        for axis, (at, extent) in enumerate(zip(coordinates, self.shape, strict=True)):
            sides = [1] * len(self.box)
            sides[axis] = self.box[axis]
            along = int(plain(at)) + np.arange(self.box[axis]).reshape(sides)
            inside = inside & (along >= 0) & (along < extent)
            addresses = addresses + along.astype(np.uint64) * np.uint64(
                self.strides[axis] * self.size % ADDRESSES
            )
        return np.where(inside, addresses // np.uint64(self.size), 0).astype(np.int64), inside


class Pointer:
    """An address in a flat array, or one for each element of a tensor."""

    def __init__(self, memory: Array, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(self.memory, self.offset + plain(steps))

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.memory, self.offset[key])

    def read(self) -> Any:
        """Returns a number, or a tensor of the numbers at several addresses."""
        values = self.memory[self.offset]
        if np.ndim(self.offset):
            return Tensor(values)
        return np.float64(values) if values.dtype.kind == "f" else values.item()

    def write(self, value: Tensor, mask: Tensor) -> None:
        written, offset = np.broadcast_arrays(mask.values, self.offset)
        self.memory[offset[written]] = value.values[written]

    def add(self, value: Tensor, mask: Tensor) -> None:
        """Adds to the numbers at several addresses, of which some may be the same."""
        added, offset, values = np.broadcast_arrays(mask.values, self.offset, value.values)
        assert offset.shape == np.shape(self.offset)
        np.add.at(self.memory, offset[added], values[added])
