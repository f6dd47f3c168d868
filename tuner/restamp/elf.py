"""Reads the parts of an ELF file that affect a kernel's execution on a GPU."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

# Prefixes of the names of sections with code, constants and parameters. The others have debug information,
# or locate the kernel by its name.
SECTIONS = (".text", ".nv.constant", ".nv.info", ".nv.shared", ".nv.global", ".rodata", ".data", ".bss")
# Section types.
NO_BITS, RELA, NOTE, REL = 8, 4, 7, 9
# AMD's compiler stores the launch parameters in a note.
AMD = b"AMDGPU\0"
NAMES = (".name", ".symbol")


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

    Names of kernels and symbols are left out, because they have no effect. Indices of sections are left
    out, because they follow from the names.

    Args:
        binary: The file.
        entry: The kernel's name, which is part of section names.
    """
    sections = list(_sections(binary))
    found: dict[str, object] = {}
    for section in sections:
        name = section.name.replace(entry, "*")
        relocated = section.name.removeprefix(".rela" if section.type == RELA else ".rel")
        if section.name.startswith(SECTIONS):
            found[name] = section.flags, section.size, section.content
        elif section.type in (RELA, REL) and relocated.startswith(SECTIONS):
            found[name] = _relocations(section, sections, entry)
        elif section.type == NOTE and (notes := list(_amd_notes(section.content))):
            found[name] = notes
    return found


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
        (place, kind & 0xFFFFFFFF, _symbol(symbols.content, kind >> 32, names, sections, entry), *addend)
        for place, kind, *addend in struct.iter_unpack(layout, section.content)
    ]


def _symbol(
    table: bytes, index: int, names: bytes, sections: list[_Section], entry: str
) -> tuple[str, int, int]:
    """Returns a symbol's section, value and size; the name replaces the section of external symbols."""
    name_at, _, _, place, value, size = struct.unpack_from("<IBBHQQ", table, 24 * index)
    inside = 0 < place < len(sections)
    return (
        sections[place].name.replace(entry, "*") if inside else _string(names, name_at),
        value,
        size,
    )


def _amd_notes(content: bytes) -> Iterator[object]:
    """Yields the launch parameters of AMD's notes, without the kernels' names."""
    place = 0
    while place < len(content):
        owner_size, size, _ = struct.unpack_from("<III", content, place)
        start = place + 12 + (owner_size + 3) // 4 * 4
        if content[place + 12 : place + 12 + owner_size] == AMD:
            values = msgspec.msgpack.decode(content[start : start + size])
            for kernel in values.get("amdhsa.kernels", ()):
                for name in NAMES:
                    kernel.pop(name, None)
            yield values
        place = start + (size + 3) // 4 * 4
