"""Machine code as NVIDIA's compiler writes it: an ELF file with one kernel.

Its digest covers code, constants, parameters and their relocations. Debug information and names do not count,
because they do not affect the launch.
"""

import contextlib
import hashlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

from flashtune.core.errors import BundleError

# Prefixes of the names of sections that the digest covers.
SECTIONS = (".text", ".nv.constant", ".nv.info", ".nv.shared", ".nv.global")
# They hold source lines and paths.
DEBUG = (".debug_line", ".nv_debug_line_sass", ".nv_debug_ptx_txt")
MAGIC = b"\x7fELF\x02\x01"
FILE_HEADER = 64
# Section types.
NO_BITS, RELA = 8, 4
# Formats and attributes of `.nv.info` sections. Only entries of this format have more than four bytes.
SIZED = 4
KERNEL_PARAMETER = 0x17
SIZE_SHIFT = 18


class Section(NamedTuple):
    """A section: its name, the position of its header, and the needed fields of the header."""

    name: str
    header: int
    type: int
    flags: int
    offset: int
    size: int
    link: int

    def content(self, cubin: bytes) -> bytes:
        """Returns the section's bytes."""
        return b"" if self.type == NO_BITS else cubin[self.offset : self.offset + self.size]


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Converts errors of reading a damaged file."""
    try:
        yield
    except (struct.error, ValueError, IndexError) as error:
        raise BundleError(f"a kernel's machine code is damaged ({error}): build the bundle again") from error


@_reading()
def sections(cubin: bytes) -> list[Section]:
    """Returns all sections.

    Raises:
        BundleError: It is no ELF file of 64 bits.
    """
    if not cubin.startswith(MAGIC):
        raise BundleError("a kernel's machine code is not an ELF file of 64 bits: build the bundle again")
    listed = []
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [(table + size * index, struct.unpack_from("<IIQQQQI", cubin, table + size * index))
               for index in range(count)]  # fmt: skip
    names = headers[names_at][1][4]
    for at, (name_at, kind, flags, _, offset, length, link) in headers:
        start = names + name_at
        name = cubin[start : cubin.index(b"\0", start)].decode("ascii")
        listed.append(Section(name, at, kind, flags, offset, length, link))
    return listed


def without_debug(cubin: bytes) -> bytes:
    """Returns machine code with empty debug sections.

    They hold paths and comments, so they differ between machines. Other sections keep their order, alignment
    and contents, and headers their positions in their tables.

    Raises:
        BundleError: The file has another structure than those of NVIDIA's compiler.
    """
    listed = sections(cubin)
    (segments_at,) = struct.unpack_from("<Q", cubin, 0x20)
    segment_size, segment_count, size, count = struct.unpack_from("<HHHH", cubin, 0x36)
    table = listed[0].header
    stripped = bytearray(cubin[:FILE_HEADER])
    headers = bytearray(cubin[table : table + size * count])
    # The new position and the size of the section or table at a position.
    moved: dict[int, int] = {}
    sizes = {segments_at: segment_size * segment_count}
    for section in sorted(listed[1:], key=lambda section: section.offset):
        (alignment,) = struct.unpack_from("<Q", cubin, section.header + 0x30)
        stripped.extend(bytes(-len(stripped) % max(alignment, 1)))
        is_debug = section.name.removeprefix(".rela").removeprefix(".rel").startswith(DEBUG)
        kept = 0 if is_debug else section.size
        struct.pack_into("<QQ", headers, section.header - table + 0x18, len(stripped), kept)
        if kept and section.type != NO_BITS:
            moved[section.offset], sizes[section.offset] = len(stripped), section.size
            stripped += section.content(cubin)
    stripped.extend(bytes(-len(stripped) % 8))
    moved[segments_at] = len(stripped) + len(headers)
    struct.pack_into("<QQ", stripped, 0x20, moved[segments_at], len(stripped))
    segments = bytearray(cubin[segments_at : segments_at + segment_size * segment_count])
    for at in range(0, len(segments), segment_size or 1):
        start, *_, length, memory = struct.unpack_from("<QQQQQ", segments, at + 8)
        if not length:
            struct.pack_into("<Q", segments, at + 8, 0)
            continue
        inside = [old for old in moved if start <= old < start + length]
        if start not in moved:
            raise BundleError("a kernel's machine code has segments that bundles do not support")
        # The gaps between its sections depend on their alignment and on the positions in the file.
        end = max(moved[old] + sizes[old] for old in inside)
        struct.pack_into("<Q", segments, at + 8, moved[start])
        struct.pack_into("<QQ", segments, at + 32, end - moved[start], end - moved[start] + memory - length)
    return bytes(stripped + headers + segments)


@_reading()
def machine_digest(cubin: bytes, function: str) -> str:
    """Returns a digest of all parts of a kernel's machine code that affect its launch, 32 hex digits."""
    parts = hashlib.sha256()
    listed = sections(cubin)
    for section in sorted(listed):
        name = section.name.replace(function, "*")
        if name.startswith(SECTIONS):
            parts.update(repr((name, section.flags, section.size, section.content(cubin))).encode())
        elif section.type == RELA and name.removeprefix(".rela").startswith(SECTIONS):
            parts.update(repr((name, _relocations(cubin, section, listed, function))).encode())
    return parts.hexdigest()[:32]


def _relocations(
    cubin: bytes, section: Section, listed: list[Section], function: str
) -> list[tuple[object, ...]]:
    """Returns the relocations of a section: offset, type, addend; the symbol's section, value and size."""
    symbols = listed[section.link]
    found: list[tuple[object, ...]] = []
    for offset, kind, addend in struct.iter_unpack("<QQq", section.content(cubin)):
        _, _, _, number, value, size = struct.unpack_from(
            "<IBBHQQ", cubin, symbols.offset + 24 * (kind >> 32)
        )
        where = listed[number].name.replace(function, "*") if number < len(listed) else ""
        found.append((offset, kind & 0xFFFFFFFF, addend, where, value, size))
    return found


@_reading()
def parameter_sizes(cubin: bytes, function: str) -> list[int]:
    """Returns the sizes of a kernel's parameters in bytes, in order."""
    sizes: dict[int, int] = {}
    for section in sections(cubin):
        if section.name != f".nv.info.{function}":
            continue
        content = section.content(cubin)
        at = 0
        while at + 4 <= len(content):
            kind, attribute, length = struct.unpack_from("<BBH", content, at)
            if kind == SIZED and attribute == KERNEL_PARAMETER:
                _, ordinal, _, bits = struct.unpack_from("<IHHI", content, at + 4)
                sizes[ordinal] = bits >> SIZE_SHIFT
            at += 4 + (length if kind == SIZED else 0)
    return [sizes[ordinal] for ordinal in sorted(sizes)]
