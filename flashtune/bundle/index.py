"""The index of a bundle: where its entries and machine code are.

    bytes
    4 x 4    sizes of the head in bytes, and of three tables in rows
             the head: JSON with the fields of `Head`
             entries: kernel 16, offset 8, size 4, decompressed size 4, SHA-256 32
             machine code: SHA-256 32, group 4, offset 4, size 4
             recipes: recipe 16, kernel 16

Rows are sorted by their first field. A reader searches them and decodes the rows that it needs: a bundle has
thousands, and a process uses a few.
"""

import bisect
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from flashtune.bundle.records import Sha256
from flashtune.core.decoders import json_decoder
from flashtune.core.record import ShortText
from flashtune.core.target import ArchName

COUNTS = struct.Struct("<IIII")
ENTRY, CODE, RECIPE = struct.Struct("<16sQII32s"), struct.Struct("<32sIII"), struct.Struct("<16s16s")

Position = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Row = TypeVar("Row")


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Compressed bytes of a file."""

    offset: Position
    size: Position
    full_size: Position  # The number of decompressed bytes.
    sha256: Sha256  # Of the decompressed bytes.


class Piece(msgspec.Struct, frozen=True):
    """Machine code in a frame."""

    group: int  # The frame's position in `Index.groups`.
    offset: int  # Of the decompressed bytes.
    size: int


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of an index that is read at once."""

    arch: ArchName  # The architecture of all machine code.
    flashtune: ShortText  # The version that wrote the bundle.
    size: Position  # The number of bytes of all frames.
    groups: tuple[Frame, ...]  # Frames of machine code.


class Index(NamedTuple):
    """The contents of a bundle. The first fields are those of `Head`."""

    arch: str
    flashtune: str
    size: int
    groups: tuple[Frame, ...]
    entries: Mapping[str, Frame]  # By the digest of the kernel.
    codes: Mapping[str, Piece]  # Machine code by its SHA-256.
    recipes: Mapping[str, str]  # Digests of kernels by the hashes of `recipe_of`.


class _Table(Mapping[str, Row]):
    """Sorted rows of a file. A row is decoded when it is read. Keys are hex digits."""

    def __init__(self, rows: bytes, layout: struct.Struct, make: Callable[..., Row]) -> None:
        self._rows, self._layout, self._make = rows, layout, make

    def __len__(self) -> int:
        return len(self._rows) // self._layout.size

    def __iter__(self) -> Iterator[str]:
        return (key.hex() for key, *_ in self._layout.iter_unpack(self._rows))

    def __getitem__(self, key: str) -> Row:
        wanted = bytes.fromhex(key)
        number = bisect.bisect_left(range(len(self)), wanted, key=lambda number: self._row(number)[0])
        if number < len(self):
            first, *values = self._row(number)
            if first == wanted:
                return self._make(*values)
        raise KeyError(key)

    def _row(self, number: int) -> tuple[bytes, *tuple[int, ...]]:
        return self._layout.unpack_from(self._rows, number * self._layout.size)


def encode_index(index: Index) -> bytes:
    """Returns the index as bytes, the same for every order of its mappings."""
    code = bytes.fromhex
    entries = sorted(
        ENTRY.pack(code(key), frame.offset, frame.size, frame.full_size, code(frame.sha256))
        for key, frame in index.entries.items()
    )
    codes = sorted(
        CODE.pack(code(key), piece.group, piece.offset, piece.size) for key, piece in index.codes.items()
    )
    recipes = sorted(RECIPE.pack(code(recipe), code(kernel)) for recipe, kernel in index.recipes.items())
    head = msgspec.json.encode(Head(*index[:4]))
    counts = COUNTS.pack(len(head), len(entries), len(codes), len(recipes))
    return b"".join((counts, head, *entries, *codes, *recipes))


def decode_index(raw: bytes) -> Index:
    """Returns the index in bytes.

    Raises:
        ValueError: They are no index. `struct.error` and `msgspec.DecodeError` too.
    """
    head_size, *counts = COUNTS.unpack_from(raw)
    position = COUNTS.size + head_size
    head = json_decoder(Head).decode(raw[COUNTS.size : position])
    tables = []
    for layout, count in zip((ENTRY, CODE, RECIPE), counts, strict=True):
        tables.append(raw[position : position + layout.size * count])
        position += layout.size * count
    if position != len(raw):
        raise ValueError("the sizes of its tables do not match")
    entries, codes, recipes = tables
    return Index(
        head.arch,
        head.flashtune,
        head.size,
        head.groups,
        _Table(entries, ENTRY, lambda offset, size, full, sha256: Frame(offset, size, full, sha256.hex())),
        _Table(codes, CODE, Piece),
        _Table(recipes, RECIPE, bytes.hex),
    )
