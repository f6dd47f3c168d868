"""CUDA's driver library in Python: notes what is loaded, described and launched."""

import ctypes
import struct
from typing import Any, NamedTuple

from flashtune.bundle.cubin import parameter_sizes

OPTIN_BYTES = 227 * 1024


class Launched(NamedTuple):
    """A launch, with the bytes of each parameter."""

    function: str
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    stream: int
    attributes: tuple[tuple[int, int], ...]
    parameters: tuple[bytes, ...]


class CudaLibrary:
    """The functions that `Driver` calls. Handles of functions are positions in `functions`, from 1 on."""

    def __init__(self) -> None:
        self.codes: list[bytes] = []
        self.functions: list[tuple[str, list[int]]] = []
        self.attributes: list[tuple[int, int]] = []
        self.maps: list[tuple[Any, ...]] = []
        self.launches: list[Launched] = []
        self.statuses: list[int] = []  # Of the next launches.
        self.version = 12080
        self.contexts = 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = f"error {status}".encode()
        return 0

    def cuDeviceGet(self, number: Any, device: int) -> int:
        number._obj.value = device
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, number: Any) -> int:
        context._obj.value = 1000 + number.value
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.contexts += 1
        return 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        self.codes.append(code)
        module._obj.value = len(self.codes)
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        text = name.decode()
        self.functions.append((text, parameter_sizes(self.codes[module.value - 1], text)))
        function._obj.value = len(self.functions)
        return 0

    def cuFuncGetAttribute(self, value: Any, attribute: int, function: Any) -> int:
        value._obj.value = {0: 1024, 1: 1024}[attribute]
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = {97: OPTIN_BYTES}[attribute]
        return 0

    def cuFuncSetCacheConfig(self, function: Any, config: int) -> int:
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.attributes.append((attribute, value))
        return 0

    def cuTensorMapEncodeTiled(self, made: Any, *arguments: Any) -> int:
        kind, rank, address, sizes, steps, box, element_steps, interleave, swizzle, promotion, fill = (
            arguments
        )
        assert (list(element_steps), interleave, promotion, fill) == ([1] * rank.value, 0, 2, 0)
        assert ctypes.addressof(made._obj) % 128 == 0
        steps = list(steps)[: rank.value - 1]
        self.maps.append((kind, address.value, list(sizes), steps, list(box), swizzle))
        content = struct.pack("<QQQ", address.value, 2**64 - 1, len(self.maps))
        ctypes.memmove(made._obj, content, len(content))
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        status = self.statuses.pop(0) if self.statuses else 0
        if status:
            return status
        name, sizes = self.functions[function.value - 1]
        used, count = config._obj, config._obj.attribute_count
        self.launches.append(
            Launched(
                name,
                tuple(used.grid),
                used.block[0],
                used.shared_bytes,
                used.stream or 0,
                tuple((used.attributes[at].id, used.attributes[at].value) for at in range(count)),
                tuple(
                    ctypes.string_at(pointer, size) for pointer, size in zip(parameters, sizes, strict=True)
                ),
            )
        )
        return 0
