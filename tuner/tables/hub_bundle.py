"""Launches the kernels of a package from machine code, without a compilation; needs only torch.

The package's file `kernels.ARCH.bundle` has the verified machine code of kernels. The functions in the source
of a kernel still check and plan a call, and this module launches it.

`flashtune export --format hf-kernel` copies this module into packages, so it imports nothing of flashtune.
"""

import functools
import hashlib
import json
import lzma
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

HEAD = struct.Struct("<8sIQ32s")
# Of the index: sizes, and rows of entries and machine code.
COUNTS, ENTRY, CODE = struct.Struct("<IIII"), struct.Struct("<16sQII32s"), struct.Struct("<32sIII")
BEGIN = b"FTBUNDLE\x01\0\0\0"
# Most grids of a kernel whose launches are kept.
MAX_GRIDS = 512


class Parameter(NamedTuple):
    """One parameter of a kernel."""

    type: str
    name: str = ""  # Empty for descriptors.
    value: int = 0  # Number of a descriptor.


class Bundle:
    """A file of machine code, whose parts are decompressed when they are used."""

    def __init__(self, path: Path) -> None:
        self._damaged = RuntimeError(f"{path} is damaged: download the package again")
        self._content = path.read_bytes()
        if len(self._content) < HEAD.size or not self._content.startswith(BEGIN):
            raise self._damaged
        _, _, size, digest = HEAD.unpack_from(self._content)
        self._frames = HEAD.size + size
        packed = self._content[HEAD.size : self._frames]
        if hashlib.sha256(packed).digest() != digest:
            raise self._damaged
        index = zlib.decompress(packed)
        head_size, entries, codes, _ = COUNTS.unpack_from(index)
        start = COUNTS.size + head_size
        self._groups = json.loads(index[COUNTS.size : start])["groups"]
        end = start + entries * ENTRY.size
        rows = ENTRY.iter_unpack(index[start:end])
        self._entries = {key.hex(): (*frame, sha256.hex()) for key, *frame, sha256 in rows}
        pieces = CODE.iter_unpack(index[end : end + codes * CODE.size])
        self._codes = {key.hex(): piece for key, *piece in pieces}

    def _frame(self, frame: Sequence[Any]) -> bytes:
        offset, size, _, digest = frame
        start = self._frames + offset
        try:
            content = lzma.decompress(self._content[start : start + size])
        except lzma.LZMAError as error:
            raise self._damaged from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise self._damaged
        return content

    def entry(self, kernel: str, gpu: str) -> Any:
        """Returns the launch of a kernel that was verified on this GPU, otherwise None."""
        frame = self._entries.get(kernel)
        if frame is None:
            return None
        entry = json.loads(self._frame(frame), object_hook=lambda fields: SimpleNamespace(**fields))
        return entry if any(gpu.startswith(receipt.target) for receipt in entry.receipts) else None

    def code(self, sha256: str) -> bytes:
        """Returns machine code."""
        group, offset, size = self._codes[sha256]
        return self._frame(self._groups[group])[offset : offset + size]


def use(module: Any, bundle: Bundle, kernel: str, gpu: str, driver: Any) -> None:
    """Makes the functions of a kernel's module launch machine code, if it was verified on this GPU.

    Args:
        module: The module of the kernel's source, which no other device uses.
        bundle: The machine code.
        kernel: The kernel's digest.
        gpu: The name of the present GPU.
        driver: An instance of `Driver` in the package's module `driver`.
    """
    entry = bundle.entry(kernel, gpu)
    # A call's arguments do not contain the scratch memory of the compiler.
    if entry is None or any(workspace.name.startswith("scratch_") for workspace in entry.plan.workspaces):
        return
    device = torch.cuda.current_device()
    for stage in entry.stages:
        function = driver.load(bundle.code(stage.code), stage, device)
        compiled = getattr(module, stage.function)
        setattr(module, stage.function, Launcher(compiled, stage, entry.plan.descriptors, function, driver))


class Launcher:
    """Replaces a kernel of Triton, takes its arguments, and launches its machine code."""

    def __init__(
        self, compiled: Any, stage: Any, descriptors: Sequence[Any], function: Any, driver: Any
    ) -> None:
        """Makes the launcher of a stage, which is loaded as `function`, on the present device."""
        parameters = [Parameter(*fields) for fields in stage.parameters]
        maps = [descriptors[parameter.value] for parameter in parameters if parameter.type == "map"]
        self.params = compiled.params  # The source reads it.
        self._driver, self._function, self._maps = driver, function, maps
        self._count, self._device = len(parameters), torch.cuda.current_device()
        numbers = iter(range(len(maps)))
        # All parameters change with calls.
        stage.parameters = [
            Parameter("map", "", next(numbers)) if kind == "map" else Parameter(kind, "changing")
            for kind, *_ in parameters
        ]
        self._stage = stage
        self._queues: dict[tuple[int, ...], Callable[..., None]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Returns the function that launches a grid, as a kernel of Triton does."""
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        del options  # The machine code has them.
        patterns, maps, values = iter(self._maps), [], []
        for argument in arguments:
            if isinstance(argument, Tensor):
                values.append(argument.data_ptr())
            elif hasattr(argument, "block_shape"):
                shape, strides, address = argument.shape, argument.strides, argument.base.data_ptr()
                maps.append(self._driver.descriptor(next(patterns), shape, strides, address))
                values += [*shape, *strides]
            else:
                values.append(argument)
        values += [0, 0]  # No scratch memory of the compiler or a profiler.
        if len(maps) + len(values) != self._count:
            raise RuntimeError(f"{self._stage.function} takes {self._count} arguments, not {len(values)}")
        queue = self._queues.get(grid)
        if queue is None:
            queue = self._driver.queue(self._function, self._stage, grid, (), len(maps), self._device)
            if len(self._queues) >= MAX_GRIDS:
                self._queues.clear()
            self._queues[grid] = queue
        queue(torch.cuda.current_stream().cuda_stream, [*maps, *values])
