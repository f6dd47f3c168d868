"""Compares two kernels: machine code, launch metadata and host launch code.

If all of these are equal, a receipt of one kernel is valid for the other. In a binary, code, constants,
parameters, their relocations and AMD's launch parameters count. Debug information and names do not.
"""

import dataclasses
import functools
import hashlib
import struct
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from flashtune.core.config import Config
from flashtune.core.features.records import NUMBERS
from flashtune.core.files import read_bounded
from flashtune.core.kernel import Kernel
from flashtune.core.layouts import Layout
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.launch.compilation import compile_kernel, load_module
from flashtune.launch.tma_descriptors import typed
from flashtune.launch.workspaces import allocate_workspace
from flashtune.request.quantization import E4M3
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import find_family
from flashtune.tuner.execution.inputs import make_inputs
from flashtune.tuner.workloads.models import forward_of
from flashtune.verification.cases import Level
from flashtune.verification.passes import planned_cases

# Prefixes of the names of sections with code, constants and parameters. The others have debug information,
# or locate the kernel by its name.
SECTIONS = (".text", ".nv.constant", ".nv.info", ".nv.shared", ".nv.global", ".rodata", ".data", ".bss")
# Section types.
NO_BITS, RELA, NOTE, REL = 8, 4, 7, 9
# AMD's compiler stores the launch parameters in a note.
AMD = b"AMDGPU\0"
AMD_NAMES = (".name", ".symbol")

META = torch.device("meta")
SEED = 0
# Metadata with the name of a kernel or of a cache entry, which does not affect the launch.
NAMES = frozenset({"hash", "name"})
LIBRARIES = Path(triton.__file__).with_name("backends") / "nvidia" / "lib"
MAX_LIBRARY_BYTES = 256 * 1024 * 1024


class _Section(NamedTuple):
    """A section: its name, content and the needed fields of its header."""

    name: str
    type: int
    flags: int
    size: int
    content: bytes
    link: int


def parts(binary: bytes, entry: str) -> dict[str, object]:
    """Returns the parts of an ELF file by section.

    - Code, constants and parameters: flags, size and content.
    - Their relocations: offset, type, symbol and addend.
    - AMD's notes: the launch parameters.

    Names of kernels and symbols are left out, because they have no effect. Indices of sections are left out,
    because they follow from the names. `entry` is the kernel's name, which is part of section names.
    """
    sections = list(_sections(binary))
    contents: dict[str, object] = {}
    for section in sections:
        name = section.name.replace(entry, "*")
        relocated = section.name.removeprefix(".rela" if section.type == RELA else ".rel")
        if section.name.startswith(SECTIONS):
            contents[name] = section.flags, section.size, section.content
        elif section.type in (RELA, REL) and relocated.startswith(SECTIONS):
            contents[name] = _relocations(section, sections, entry)
        elif section.type == NOTE and (notes := list(_amd_notes(section.content))):
            contents[name] = notes
    return contents


def _sections(binary: bytes) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", binary, table + size * index) for index in range(count)]
    names = headers[names_at][4]
    for name_at, kind, flags, _, offset, length, link, *_ in headers:
        content = b"" if kind == NO_BITS else binary[offset : offset + length]
        yield _Section(_string(binary, names + name_at), kind, flags, length, content, link)


def _string(content: bytes, start: int) -> str:
    return content[start : content.index(b"\0", start)].decode()


def _relocations(section: _Section, sections: list[_Section], entry: str) -> list[tuple[object, ...]]:
    """Returns the relocations of a section: offset, type, symbol, and addend if there is one."""
    layout = "<QQq" if section.type == RELA else "<QQ"
    symbols = sections[section.link]
    names = sections[symbols.link].content
    return [
        (offset, kind & 0xFFFFFFFF, _symbol(symbols.content, kind >> 32, names, sections, entry), *addend)
        for offset, kind, *addend in struct.iter_unpack(layout, section.content)
    ]


def _symbol(
    table: bytes, index: int, names: bytes, sections: list[_Section], entry: str
) -> tuple[str, int, int]:
    """Returns a symbol's section, value and size; the name replaces the section of external symbols."""
    name_at, _, _, number, value, size = struct.unpack_from("<IBBHQQ", table, 24 * index)
    inside = 0 < number < len(sections)
    return (sections[number].name.replace(entry, "*") if inside else _string(names, name_at), value, size)


def _amd_notes(content: bytes) -> Iterator[object]:
    """Yields the launch parameters of AMD's notes, without the kernels' names."""
    offset = 0
    while offset < len(content):
        owner_size, size, _ = struct.unpack_from("<III", content, offset)
        start = offset + 12 + (owner_size + 3) // 4 * 4
        if content[offset + 12 : offset + 12 + owner_size] == AMD:
            values = msgspec.msgpack.decode(content[start : start + size])
            for kernel in values.get("amdhsa.kernels", ()):
                for name in AMD_NAMES:
                    kernel.pop(name, None)
            yield values
        offset = start + (size + 3) // 4 * 4


def difference(old: Kernel, new: Kernel, problem: Problem, config: Config, target: Target) -> str:
    """Returns the first difference between two kernels of one problem; empty if there is none.

    Both are compiled for the target by the installed Triton. Their launch code runs on meta tensors, for
    every case of the verifier's full level.

    Raises:
        KernelError: One of them does not compile.
    """
    if (old.prologue is None) != (new.prologue is None) or len(old.parts) != len(new.parts):
        return "the number of kernels of a launch"
    for before, after in zip(old.parts, new.parts, strict=True):
        if _bound(before) != _bound(after):
            return "the tensors and numbers that its arguments are bound to"
        reason = _binary_difference(compile_kernel(before, target), compile_kernel(after, target), target)
        if reason:
            return reason
    return _plan_difference(old, new, problem, config, target)


def _bound(kernel: Kernel) -> list[tuple[str, str, int]]:
    """Returns a kernel's arguments as a launch binds them, integers by position instead of by name."""
    return [
        ("" if argument.type.startswith("i") else argument.name, argument.type, argument.divisibility)
        for argument in kernel.arguments
    ]


def _binary_difference(old: CompiledKernel, new: CompiledKernel, target: Target) -> str:
    before, after = (_metadata(compiled) for compiled in (old, new))
    if before != after:
        changed = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
        return f"launch metadata: {', '.join(changed)}"
    kind = "cubin" if target.is_nvidia else "hsaco"
    first, second = (parts(compiled.asm[kind], compiled.metadata.name) for compiled in (old, new))
    changed = sorted(name for name in {*first, *second} if first.get(name) != second.get(name))
    return f"machine code: {', '.join(changed)}" if changed else ""


def _metadata(compiled: CompiledKernel) -> dict[str, str]:
    """Returns the launch metadata in comparable form. Libraries are compared by content, not by path."""
    values = compiled.metadata._asdict()
    libraries = [(name, _content(Path(path))) for name, path in values.pop("extern_libs", None) or ()]
    named = {name: repr(value) for name, value in values.items() if name not in NAMES}
    return {**named, "extern_libs": repr(libraries)}


@functools.cache
def _content(path: Path) -> str:
    """Returns a hash of a file; its path if it is unreadable or too large, so that it equals no other file.

    Triton's cache key has the content of NVIDIA's libraries, not their paths. A cached binary may name
    files of a deleted installation. The installed files of the same names then have the same content.
    """
    try:
        content = read_bounded(path if path.exists() else LIBRARIES / path.name, MAX_LIBRARY_BYTES + 1)
    except OSError:
        return str(path)
    return str(path) if len(content) > MAX_LIBRARY_BYTES else hashlib.sha256(content).hexdigest()


class _Plan(NamedTuple):
    """The results of a module's launch code for one problem's tensors."""

    launch: Any
    prologue: Any
    epilogue: Any
    descriptors: Any


def _plan_difference(old: Kernel, new: Kernel, problem: Problem, config: Config, target: Target) -> str:
    modules = [_launch_code(kernel, target) for kernel in (old, new)]
    family = find_family(new.family)
    for case, _ in planned_cases(new, problem, config, Level.FULL, SEED):
        if unsupported_reason(family, case.problem, target, new.specialization):
            continue
        tensors = _planned(new, case.problem, case.layout)
        plans = [_plan(module, new, tensors, problem.is_backward) for module in modules]
        for name, before, after in zip(_Plan._fields, *plans, strict=True):
            if before != after:
                return f"{name} of {case.label}"
    return ""


def _launch_code(kernel: Kernel, target: Target) -> dict[str, Any]:
    """Returns the functions of a module, with the target's SM count in place of this machine's."""
    module = load_module(kernel)
    counts = types.SimpleNamespace(multi_processor_count=target.sm_count)
    cuda = types.SimpleNamespace(get_device_properties=lambda device: counts)
    names = {**vars(module), "torch": types.SimpleNamespace(**{**vars(torch), "cuda": cuda})}
    for name, value in vars(module).items():
        if isinstance(value, types.FunctionType):
            names[name] = types.FunctionType(
                value.__code__, names, name, value.__defaults__, value.__closure__
            )
    return names


class _OnGpu(torch.Tensor):
    """A meta tensor with `is_cuda` set."""

    is_cuda = True


def _planned(kernel: Kernel, problem: Problem, layout: Layout) -> list[Tensor]:
    """Returns the tensors of a case for the launch code, as `bind` passes them."""
    inputs = make_inputs(forward_of(problem), META)
    q, k, v, out = inputs.q, inputs.k, inputs.v, inputs.out
    if layout is Layout.BSHD and not (problem.packed or problem.page_size):
        q, k, v, out = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v, out))
    tensors = [q, k, v, out]
    if problem.is_backward:
        tensors += [torch.empty_like(tensor) for tensor in (out, q, k, v)]
    names = kernel.all_side
    # The scales of quantised queries are contiguous, so the launch code does not need them.
    if not problem.dtype.is_quantized:
        tensors += [getattr(inputs.side, name) for name in names if name not in NUMBERS]
    return [tensor.to(META).as_subclass(_OnGpu) for tensor in tensors]


def _plan(module: dict[str, Any], kernel: Kernel, tensors: list[Tensor], backward: bool) -> _Plan:
    launch = module["launch_plan"](*tensors)
    described = None
    if kernel.takes_descriptors:
        scratch = [allocate_workspace(shape, META) for shape in launch[1]]
        described = _described(module, kernel, tensors, scratch, backward=backward)
    return _Plan(
        launch,
        [module[plan](*tensors) for plan in ("first_plan", "prologue_plan") if plan in module],
        module["epilogue_plan"](*tensors) if kernel.epilogue else None,
        described,
    )


def _described(
    module: dict[str, Any], kernel: Kernel, tensors: list[Tensor], scratch: list[Tensor], *, backward: bool
) -> list[Any]:
    """Returns the TMA descriptors of a launch in comparable form, by key or position."""
    if backward:
        passed = [*tensors, *scratch]
        made = [*module["descriptors"](*passed).items()]
    else:
        q, k, v, out = tensors[:4]
        # With a prologue, the kernel reads the values that the prologue writes.
        passed = [q, k, typed(scratch[0], v) if kernel.prologue and v.dtype is E4M3 else v, out]
        if kernel.describes_bias:
            passed.append(next(tensor for tensor in tensors[4:] if tensor.dim() == q.dim()))
        made = [*enumerate(module["descriptors"](*passed))]
    places = [tensor.untyped_storage()._cdata for tensor in passed]
    return [
        (key, [_comparable(descriptor, places) for descriptor in descriptors]) for key, descriptors in made
    ]


def _comparable(descriptor: Any, places: list[int]) -> tuple[Any, ...]:
    fields = {field.name: getattr(descriptor, field.name) for field in dataclasses.fields(descriptor)}
    base = fields.pop("base")
    number = places.index(base.untyped_storage()._cdata)
    tensor = (number, base.storage_offset(), tuple(base.shape), base.stride(), base.dtype)
    return tensor, {name: repr(value) for name, value in fields.items()}
