"""Loads and launches machine code by CUDA's driver library, as Triton's launcher does, without a compiler."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_uint32, c_uint64, c_void_p
from typing import Any

from flashtune.bundle.records import Descriptor, Parameter, Stage
from flashtune.core.errors import KernelError, MachineError

LIBRARY = "libcuda.so.1"
# Values of the driver's enumerations.
MAX_THREADS_PER_BLOCK, STATIC_SHARED_BYTES, MAX_DYNAMIC_SHARED_BYTES = 0, 1, 8  # CUfunction_attribute
SHARED_BYTES_OPTIN = 97  # CUdevice_attribute
PREFER_SHARED = 1  # CUfunc_cache
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
L2_128B = 2  # CUtensorMapL2promotion
INVALID_CONTEXT = 201
# Without more shared memory than this, a kernel needs no attribute.
DEFAULT_SHARED_BYTES = 48 * 1024
MAP_BYTES = 128
# Up to this version, a flag of descriptors of small tensors is cleared, as CUTLASS and Triton do.
LAST_FLAGGED_VERSION = 13010
SMALL_TENSOR_BYTES = 128 * 1024
SMALL_TENSOR_FLAG = 1 << 21
# Formats of `struct`, with native alignment.
FORMATS = {"map": "128s", "pointer": "Q", "i32": "i", "i64": "q", "f32": "f"}
SIZES = {name: struct.calcsize(text) for name, text in FORMATS.items()}

# Queues a kernel on a stream, with the values of its parameters that change.
QueueKernel = Callable[[int, Sequence[Any]], None]


class LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute`."""

    _fields_ = (("id", c_int), ("padding", c_int), ("value", c_int), ("rest", ctypes.c_byte * 60))


class LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("shared_bytes", c_uint32),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", c_uint32),
    )


class Driver:
    """The driver's library."""

    def __init__(self, library: Any = None) -> None:
        """Loads the library. Tests pass another one."""
        try:
            self.library = library or ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise MachineError(f"CUDA's driver library did not load ({error}): install a driver") from error
        version = c_int()
        self.check(self.library.cuDriverGetVersion(byref(version)), "its version")
        self.version = version.value

    def check(self, status: int, action: str) -> None:
        """Raises an error for a status other than success."""
        if status:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, byref(text))
            words = (text.value or b"unknown error").decode(errors="replace")
            raise KernelError(f"CUDA's driver failed at {action}: {words} ({status})")

    def make_context_current(self, device: int) -> None:
        """Makes a device's primary context current in this thread."""
        number, context = c_int(), c_void_p()
        self.check(self.library.cuDeviceGet(byref(number), device), "a device")
        self.check(self.library.cuDevicePrimaryCtxRetain(byref(context), number), "a device's context")
        self.check(self.library.cuCtxSetCurrent(context), "a device's context")

    def load(self, code: bytes, stage: Stage, device: int) -> c_void_p:
        """Returns a kernel's function in the context of a device, which becomes current. It stays loaded.

        Raises:
            KernelError: The driver refuses the machine code, or the device is too small.
        """
        self.make_context_current(device)
        module, function = c_void_p(), c_void_p()
        library, name = self.library, stage.function.encode()
        self.check(library.cuModuleLoadData(byref(module), code), "loading a kernel")
        self.check(library.cuModuleGetFunction(byref(function), module, name), "finding a kernel")
        if stage.threads > self._attribute(function, MAX_THREADS_PER_BLOCK):
            raise KernelError(f"{stage.function} needs {stage.threads} threads per block: use another kernel")
        available = c_int()
        status = library.cuDeviceGetAttribute(byref(available), SHARED_BYTES_OPTIN, c_int(device))
        self.check(status, "an attribute of a device")
        dynamic = available.value - self._attribute(function, STATIC_SHARED_BYTES)
        if stage.shared_bytes > dynamic:
            raise KernelError(
                f"{stage.function} needs {stage.shared_bytes} bytes of shared memory of {dynamic}: "
                "use another kernel"
            )
        if stage.shared_bytes > DEFAULT_SHARED_BYTES:
            self.check(library.cuFuncSetCacheConfig(function, PREFER_SHARED), "a kernel's cache")
            status = library.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_BYTES, dynamic)
            self.check(status, "a kernel's shared memory")
        return function

    def _attribute(self, function: c_void_p, attribute: int) -> int:
        value = c_int()
        self.check(
            self.library.cuFuncGetAttribute(byref(value), attribute, function), "an attribute of a kernel"
        )
        return value.value

    def descriptor(
        self, pattern: Descriptor, shape: Sequence[int], strides: Sequence[int], address: int
    ) -> bytes:
        """Returns a TMA descriptor of a tensor at an address. A device's context is current.

        `shape` and `strides` are outermost first, strides in elements.
        """
        rank = len(shape)
        sizes = (c_uint64 * rank)(*shape[::-1])
        # All but the innermost one, in bytes. The driver reads one less than `rank`.
        steps = (c_uint64 * rank)(*(step * pattern.element_bytes for step in strides[-2::-1]))
        aligned = _aligned(MAP_BYTES)
        status = self.library.cuTensorMapEncodeTiled(
            byref(aligned), pattern.element_type, c_uint32(rank), c_void_p(address), sizes, steps,
            (c_uint32 * rank)(*pattern.box[::-1]), (c_uint32 * rank)(*[1] * rank), 0, pattern.swizzle,
            L2_128B, 0,
        )  # fmt: skip
        self.check(status, f"a descriptor of shape {list(shape)} with strides {list(strides)}")
        made = bytearray(aligned)
        if self.version <= LAST_FLAGGED_VERSION and _seems_small([pattern.element_bytes, *steps], [*sizes]):
            (flags,) = struct.unpack_from("<Q", made, 8)
            struct.pack_into("<Q", made, 8, flags & ~SMALL_TENSOR_FLAG)
        return bytes(made)

    def queue(
        self,
        function: c_void_p,
        stage: Stage,
        grid: Sequence[int],
        values: Sequence[int],
        maps: int,
        device: int,
    ) -> QueueKernel:
        """Returns the function that queues a kernel.

        Its arguments are a stream and the changing parameters: `maps` descriptors, if the kernel takes any,
        and the named parameters in order. All others have the program's `values`.
        """
        dims = (*grid, 1, 1)[:3]
        if 0 in dims:
            return lambda stream, own: None
        layout = _Layout(stage.parameters, maps)
        launch = self.library.cuLaunchKernelEx
        # Memory of launches that no thread uses. Each has its own, because a launch releases Python's lock.
        free = [self._prepared(function, stage, dims, values, layout)]

        def queue(stream: int, own: Sequence[Any]) -> None:
            try:
                prepared = free.pop()
            except IndexError:
                prepared = self._prepared(function, stage, dims, values, layout)
            config, pack, arguments = prepared
            try:
                pack(*own)
            except struct.error as error:
                raise KernelError(f"an argument of {stage.function} is out of range: {error}") from error
            config.stream = stream
            status = launch(*arguments)
            if status == INVALID_CONTEXT:
                # A thread starts without a context, and a launch is often its first use of the driver.
                self.make_context_current(device)
                status = launch(*arguments)
            free.append(prepared)
            if status:
                self.check(status, f"the launch of {stage.function}")

        return queue

    def _prepared(
        self,
        function: c_void_p,
        stage: Stage,
        dims: Sequence[int],
        values: Sequence[int],
        layout: _Layout,
    ) -> tuple[LaunchConfig, Callable[..., None], tuple[Any, ...]]:
        """Returns a configuration, the function that writes parameters, and the driver's arguments."""
        buffer = _aligned(layout.size)
        address = ctypes.addressof(buffer)
        try:
            for offset, parameter in zip(layout.offsets, stage.parameters, strict=True):
                if parameter.type != "map" and not parameter.name:
                    struct.pack_into(FORMATS[parameter.type], buffer, offset, values[parameter.value])
        except struct.error as error:
            raise KernelError(f"an integer of {stage.function} is out of range: {error}") from error
        attributes = (LaunchAttribute * 1)(LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1))
        config = LaunchConfig(
            (c_uint32 * 3)(*dims), (c_uint32 * 3)(stage.threads, 1, 1), stage.shared_bytes, None, attributes,
            int(stage.early),
        )  # fmt: skip
        pointers = (c_void_p * len(layout.offsets))(*(address + offset for offset in layout.offsets))
        pack = functools.partial(struct.Struct(layout.changing).pack_into, buffer, 0)
        return config, pack, (byref(config), function, pointers, None)


class _Layout:
    """The offsets of parameters in the memory of a launch. Changing ones are first, and written at once."""

    def __init__(self, parameters: Sequence[Parameter], maps: int) -> None:
        takes_maps = any(parameter.type == "map" for parameter in parameters)
        # `struct` aligns numbers, and descriptors are first.
        self.changing = FORMATS["map"] * maps if takes_maps else ""
        self.offsets: list[int] = []
        fixed: list[int] = []
        for position, parameter in enumerate(parameters):
            if parameter.type == "map":
                self.offsets.append(MAP_BYTES * parameter.value)
            elif parameter.name:
                self.changing += FORMATS[parameter.type]
                self.offsets.append(struct.calcsize(self.changing) - SIZES[parameter.type])
            else:
                fixed.append(position)
                self.offsets.append(0)
        self.size = -(-struct.calcsize(self.changing) // 8) * 8
        for position in fixed:
            self.offsets[position] = self.size
            self.size += 8


def _aligned(size: int) -> Any:
    """Returns zeroed memory with the alignment of descriptors."""
    memory = (ctypes.c_byte * (size + MAP_BYTES))()
    return (ctypes.c_byte * size).from_buffer(memory, -ctypes.addressof(memory) % MAP_BYTES)


def _seems_small(steps: Sequence[int], sizes: Sequence[int]) -> bool:
    """Returns whether Triton takes a tensor for a small one: it computes the size in 32 bits."""
    last = sum((size - 1) * _int32(step) for size, step in zip(sizes, steps, strict=False))
    return _int32(last) + 1 < SMALL_TENSOR_BYTES


def _int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31
