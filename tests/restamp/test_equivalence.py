"""The parts of two binaries that decide whether they are the same machine code."""

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from flashtune import testing
from flashtune.core.kernel import Specialization
from flashtune.core.target import find_target
from flashtune.launch.compilation import compile_kernel
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from scripts.restamp import equivalence
from scripts.restamp.equivalence import parts

FAMILY = find_family("forward_q_outer")
PROBLEM = testing.problem("heads=4,kv_heads=2,seqlen=512,head_dim=64,dtype=bf16,causal")


def compiled(target_name: str) -> tuple[bytes, str]:
    """A binary, and the name of its kernel."""
    target = find_target(target_name)
    made = compile_kernel(render(FAMILY, PROBLEM, FAMILY.default(PROBLEM, target), Specialization()), target)
    return made.asm["cubin" if target.is_nvidia else "hsaco"], made.metadata.name


def headers_of(binary: bytes) -> dict[str, int]:
    """Where the header of each section of an ELF file is."""
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", binary, 0x3A)
    (names,) = struct.unpack_from("<Q", binary, table + size * names_at + 24)
    headers = {}
    for offset in range(table, table + size * count, size):
        start = names + int.from_bytes(binary[offset : offset + 4], "little")
        headers[binary[start : binary.index(b"\0", start)].decode()] = offset
    return headers


def test_flags_and_relocations_of_sections_are_compared() -> None:
    binary, name = compiled("nvidia-h200")
    headers = headers_of(binary)
    # A block's barriers are counted in the flags.
    barriers = headers[f".text.{name}"] + 10
    (relocation,) = struct.unpack_from("<Q", binary, headers[".rela.nv.constant4"] + 24)
    (lines,) = struct.unpack_from("<Q", binary, headers[".debug_line"] + 24)
    changes = {
        barriers: ".text.*",
        relocation + 16: ".rela.nv.constant4",
        lines: "",
    }
    before = parts(binary, name)
    for offset, section in changes.items():
        other = bytearray(binary)
        other[offset] ^= 1
        after = parts(bytes(other), name)
        assert [key for key in before if before[key] != after[key]] == ([section] if section else [])


class Metadata(NamedTuple):
    """Launch metadata, as Triton gives it."""

    name: str
    num_warps: int
    extern_libs: list[list[str]]


def metadata_with(library: Path) -> dict[str, str]:
    kernel: Any = SimpleNamespace(metadata=Metadata("k", 4, [["libdevice", str(library)]]))
    return equivalence._metadata(kernel)


def test_libraries_are_compared_by_content(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.bc", "same.bc", "other.bc", "missing.bc")]
    for path, content in zip(paths, (b"a", b"a", b"b"), strict=False):
        path.write_bytes(content)
    first, same, other, missing = (metadata_with(path) for path in paths)
    assert first == same
    assert first != other
    assert missing not in (first, other)
