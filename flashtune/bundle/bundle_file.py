"""The file of a bundle.

    offset  bytes
    0       8     the text FTBUNDLE
    8       4     version of the format
    12      8     size of the index
    20      32    SHA-256 of the index
    52            the index, compressed by zlib
                  frames, each compressed by LZMA: an entry as JSON, or machine code of some kernels

Numbers are little-endian. Offsets of frames count from the end of the index. A reader takes the
index, and then one frame at a time. Two builds of the same kernels give the same bytes.
"""

import contextlib
import hashlib
import lzma
import os
import stat
import struct
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from flashtune.bundle.cubin import machine_digest
from flashtune.bundle.index import Frame, Index, Piece, decode_index, encode_index
from flashtune.bundle.program import check_entry
from flashtune.bundle.records import Entry, Receipt
from flashtune.core.decoders import json_decoder
from flashtune.core.errors import BundleError
from flashtune.core.files import is_own

MAGIC = b"FTBUNDLE"
VERSION = 1
HEAD = struct.Struct("<8sIQ32s")
MAX_INDEX_BYTES = 64 * 1024 * 1024
MAX_ENTRY_BYTES = 1024 * 1024
MAX_CODE_BYTES = 32 * 1024 * 1024
# Similar machine code shares a frame, which halves the size of a bundle. A frame of this size is full.
GROUP_BYTES = 2 * 1024 * 1024
# Without a checksum, because frames have SHA-256. A reader allocates the dictionary, so it has the size of a
# group. An instruction has 16 bytes, which `lp` and `pb` tell the compressor.
FILTER = {
    "id": lzma.FILTER_LZMA1, "preset": 6 | lzma.PRESET_EXTREME, "dict_size": GROUP_BYTES,
    "lc": 0, "lp": 3, "pb": 4,
}  # fmt: skip
COMPRESSION = {"format": lzma.FORMAT_ALONE, "filters": [FILTER]}
# Entries are texts of numbers and digests, each compressed alone.
TEXT_FILTER = FILTER | {"dict_size": 2**16, "lp": 0, "pb": 0}
TEXT_COMPRESSION = COMPRESSION | {"filters": [TEXT_FILTER]}
AGAIN = "build or download it again"


class Bundle:
    """An open bundle. Entries and machine code are read when they are used."""

    def __init__(self, read: Callable[[int, int], bytes], length: int, where: str) -> None:
        """Reads the index. `read` returns a number of bytes from an offset of `length` bytes.

        Raises:
            BundleError: It is no bundle of this format, or it is damaged.
        """
        self.where = where
        self._read_bytes = read
        head = read(0, HEAD.size)
        if len(head) < HEAD.size or not head.startswith(MAGIC):
            raise BundleError(f"{where} is not a bundle of kernels: {AGAIN}")
        _, version, size, digest = HEAD.unpack(head)
        if version != VERSION:
            raise BundleError(
                f"{where} has format {version} and this flashtune reads {VERSION}: use a matching bundle"
            )
        self.digest = digest.hex()  # Of the index, and so of the contents.
        self._frames = HEAD.size + size
        raw = read(HEAD.size, size) if self._frames <= length and size <= MAX_INDEX_BYTES else b""
        if hashlib.sha256(raw).digest() != digest:
            raise self._damaged("its index is incomplete or changed")
        try:
            unpacked = zlib.decompressobj().decompress(raw, MAX_INDEX_BYTES)
            self.index = decode_index(unpacked)
        except (zlib.error, struct.error, ValueError, RecursionError) as error:
            raise self._damaged("its index cannot be read") from error
        if length != self._frames + self.index.size:
            raise self._damaged("it is truncated, or bytes were added")

    def _damaged(self, reason: str) -> BundleError:
        return BundleError(f"the bundle {self.where} is damaged ({reason}): {AGAIN}")

    def entry(self, kernel: str) -> Entry | None:
        """Returns the entry of a kernel by the kernel's digest, None without one."""
        frame = self.index.entries.get(kernel)
        if frame is None:
            return None
        raw = self._read(frame, frame.full_size, MAX_ENTRY_BYTES)
        self._check(raw, frame.sha256)
        try:
            entry = json_decoder(Entry).decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._damaged("an entry cannot be read") from error
        if entry.kernel != kernel:
            raise self._damaged("an entry has the place of another")
        return check_entry(entry)

    def entries(self) -> Iterator[Entry]:
        """Yields all entries in the order of their digests."""
        return (entry for kernel in self.index.entries if (entry := self.entry(kernel)) is not None)

    def entry_of_recipe(self, recipe: str) -> Entry | None:
        """Returns the entry of the kernel that is rendered from some values, None without one."""
        kernel = self.index.recipes.get(recipe)
        entry = None if kernel is None else self.entry(kernel)
        if entry is not None and recipe not in entry.recipes:
            raise self._damaged("a recipe has the place of another")
        return entry

    def code(self, sha256: str) -> bytes:
        """Returns machine code."""
        piece = self.index.codes.get(sha256)
        if piece is None or piece.group >= len(self.index.groups):
            raise self._damaged("machine code is missing")
        content = self._read(self.index.groups[piece.group], piece.offset + piece.size, MAX_CODE_BYTES)
        return self._check(content[piece.offset :], sha256)

    def _check(self, content: bytes, sha256: str) -> bytes:
        if hashlib.sha256(content).hexdigest() != sha256:
            raise self._damaged("a part of it does not match its checksum")
        return content

    def _read(self, frame: Frame, size: int, limit: int) -> bytes:
        """Returns the first decompressed bytes of a frame."""
        if size > limit or frame.offset + frame.size > self.index.size:
            raise self._damaged("a part of it is outside of the file")
        try:
            packed = self.packed(frame)
            decompressor = lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=2 * MAX_CODE_BYTES)
            return decompressor.decompress(packed, size)
        except (OSError, lzma.LZMAError, EOFError) as error:
            raise self._damaged("a part of it cannot be read") from error

    def packed(self, frame: Frame) -> bytes:
        """Returns the compressed bytes of a frame, without a check."""
        return self._read_bytes(self._frames + frame.offset, frame.size)

    def check_all(self) -> None:
        """Reads everything, and checks that the digests of machine code are those of the entries."""
        for entry in self.entries():
            for stage in entry.stages:
                if machine_digest(self.code(stage.code), stage.function) != stage.machine:
                    raise self._damaged("a digest is not that of its machine code")


def open_bundle(path: Path, *, own: bool = False) -> Bundle:
    """Returns the bundle of a file, whose parts are read and checked when they are used.

    The file stays open, so that another process may replace it. With `own`, a file that another user can
    have written is refused.
    """
    try:
        with contextlib.ExitStack() as stack:
            # A pipe is opened at once.
            number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, number)
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode):
                raise BundleError(f"the bundle {path} is a folder, pipe or device: name a regular file")
            if own and not is_own(status):
                raise BundleError(f"another user can have written the bundle {path}: remove it")
            # Threads share the file, and `pread` does not move its position.
            bundle = Bundle(lambda offset, size: os.pread(number, size, offset), status.st_size, str(path))
            weakref.finalize(bundle, stack.pop_all().close)
            return bundle
    except OSError as error:
        raise BundleError(f"cannot read the bundle {path}: {error.strerror}") from error


def bundle_of(content: bytes, where: str) -> Bundle:
    """Returns the bundle in a file's bytes. `where` names it in errors."""
    return Bundle(lambda offset, size: content[offset : offset + size], len(content), where)


def dump_bundle(arch: str, version: str, entries: Iterable[Entry], codes: Mapping[str, bytes]) -> bytes:
    """Returns a bundle as a file's bytes, the same for every order of entries.

    Args:
        arch: The architecture of all machine code.
        version: The version of flashtune.
        entries: The entries, one for each kernel.
        codes: Their machine code by SHA-256. Code that no entry uses is left out.
    """
    by_kernel = {entry.kernel: check_entry(entry) for entry in entries}
    frames, kernels = Frames(), sorted(by_kernel)
    shared = _groups(by_kernel.values(), codes)
    texts = (msgspec.json.encode(by_kernel[kernel]) for kernel in kernels)
    entry_frames = frames.add(texts, TEXT_COMPRESSION)
    groups = frames.add(b"".join(codes[sha256] for sha256 in group) for group in shared)
    pieces = {}
    for number, group in enumerate(shared):
        start = 0
        for sha256 in group:
            pieces[sha256] = Piece(number, start, len(codes[sha256]))
            start += len(codes[sha256])
    recipes = {recipe: kernel for kernel, entry in sorted(by_kernel.items()) for recipe in entry.recipes}
    listed = dict(zip(kernels, entry_frames, strict=True))
    index = Index(arch, version, frames.size, groups, listed, pieces, recipes)
    return assembled(index, frames.packed)


def joined(
    bundles: Sequence[Bundle], recipes: Collection[str] | None = None, changed: Iterable[Entry] = ()
) -> bytes:
    """Returns the file of all kernels of some bundles, or of those that have one of some recipes.

    If several bundles have a recipe or a kernel, the first one's kernel serves it. Entries of `changed`
    replace those of their kernels. All other frames are copied as they are.
    """
    own = {entry.kernel: check_entry(entry) for entry in changed}
    frames, entries, kernels = Frames(), dict[str, Frame](), dict[str, str]()
    sources: dict[str, Bundle] = {}  # Of machine code.
    for bundle in bundles:
        for entry in bundle.entries():
            served = (recipe for recipe in entry.recipes if bundle.index.recipes.get(recipe) == entry.kernel)
            named = {recipe: entry.kernel for recipe in served if recipes is None or recipe in recipes}
            if entry.kernel in entries or named.keys() <= kernels.keys():
                continue
            for recipe, kernel in named.items():
                kernels.setdefault(recipe, kernel)
            new = own.get(entry.kernel)
            frame = bundle.index.entries[entry.kernel]
            entries[entry.kernel] = (
                frames.add([msgspec.json.encode(new)], TEXT_COMPRESSION)[0]
                if new
                else frames.copy(bundle, frame)
            )
            for stage in entry.stages:
                sources.setdefault(stage.code, bundle)
    groups: list[Frame] = []
    codes: dict[str, Piece] = {}
    for bundle in bundles:
        pieces = ((bundle.index.codes[code], code) for code, source in sources.items() if source is bundle)
        last = None
        for piece, code in sorted(pieces, key=lambda pair: pair[0].group):
            if piece.group != last:
                last = piece.group
                groups.append(frames.copy(bundle, bundle.index.groups[last]))
            codes[code] = msgspec.structs.replace(piece, group=len(groups) - 1)
    first = bundles[0].index
    index = Index(first.arch, first.flashtune, frames.size, tuple(groups), entries, codes, kernels)
    return assembled(index, frames.packed)


class Frames:
    """The frames of a new file, one after the other.

    Attributes:
        packed: Their compressed bytes.
        size: The number of these bytes.
    """

    def __init__(self) -> None:
        """Has no frames at first."""
        self.packed: list[bytes] = []
        self.size = 0

    def add(self, contents: Iterable[bytes], options: Mapping[str, Any] = COMPRESSION) -> tuple[Frame, ...]:
        """Compresses frames, several at once: the compressor releases the interpreter's lock."""
        listed = [*contents]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            packed = pool.map(lambda content: lzma.compress(content, **options), listed)
            return tuple(
                self._placed(
                    Frame(0, len(compressed), len(content), hashlib.sha256(content).hexdigest()), compressed
                )
                for content, compressed in zip(listed, packed, strict=True)
            )

    def copy(self, bundle: Bundle, frame: Frame) -> Frame:
        """Copies a frame of a bundle as it is."""
        return self._placed(frame, bundle.packed(frame))

    def _placed(self, frame: Frame, packed: bytes) -> Frame:
        self.packed.append(packed)
        self.size += len(packed)
        return msgspec.structs.replace(frame, offset=self.size - len(packed))


def assembled(index: Index, frames: Iterable[bytes]) -> bytes:
    """Returns the bytes of a file with an index and compressed frames."""
    raw = zlib.compress(encode_index(index), 9)
    head = HEAD.pack(MAGIC, VERSION, len(raw), hashlib.sha256(raw).digest())
    return b"".join((head, raw, *frames))


def _groups(entries: Iterable[Entry], codes: Mapping[str, bytes]) -> list[list[str]]:
    """Returns the machine code that shares frames. Kernels of one function and size are often similar."""
    used = {stage.code: stage.function for entry in entries for stage in entry.stages}
    groups: list[list[str]] = []
    size = GROUP_BYTES
    for sha256 in sorted(used, key=lambda sha256: (used[sha256], len(codes[sha256]), sha256)):
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(sha256)
        size += len(codes[sha256])
    return groups


def merged(bundles: Sequence[Bundle]) -> tuple[list[Entry], dict[str, bytes]]:
    """Returns the entries and the machine code of some bundles of one architecture.

    Entries of one kernel with equal machine code become one with all recipes and receipts. Otherwise the
    entry of the earlier bundle stays.

    Raises:
        BundleError: The architectures differ, or a bundle is damaged.
    """
    archs = {bundle.index.arch for bundle in bundles}
    if len(archs) > 1:
        raise BundleError(f"bundles of {' and '.join(sorted(archs))} cannot be merged: merge them apart")
    entries: list[Entry] = []
    codes: dict[str, bytes] = {}
    for bundle in bundles:
        bundle.check_all()
        entries += bundle.entries()
        codes |= {code: bundle.code(code) for code in bundle.index.codes}
    return united(entries), codes


def united(entries: Iterable[Entry]) -> list[Entry]:
    """Returns one entry for each kernel: the first, with the recipes and receipts of equal machine code."""
    by_kernel: dict[str, Entry] = {}
    for entry in entries:
        first = by_kernel.setdefault(entry.kernel, entry)
        if first is not entry and first.machine == entry.machine:
            by_kernel[entry.kernel] = with_both(first, entry)
    return [*by_kernel.values()]


def with_both(first: Entry, second: Entry) -> Entry:
    """Returns an entry with the recipes and receipts of two of equal machine code."""
    receipts: dict[tuple[str, str], Receipt] = {
        (receipt.target, receipt.driver): receipt for receipt in (*second.receipts, *first.receipts)
    }
    return msgspec.structs.replace(
        first,
        recipes=tuple(sorted({*first.recipes, *second.recipes})),
        receipts=tuple(receipts[key] for key in sorted(receipts)),
    )
