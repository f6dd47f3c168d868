"""Fuzzing of bundles: a mutated file is refused in one sentence, or launches what the whole file launches."""

import hashlib
import json
import lzma
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from flashtune import testing
from flashtune.bundle.bundle_file import HEAD, MAGIC, assembled, bundle_of, dump_bundle
from flashtune.bundle.driver import Driver
from flashtune.bundle.index import Frame, Index
from flashtune.bundle.records import Entry, Receipt
from flashtune.core.errors import KernelError
from flashtune.core.record import Record
from flashtune.core.target import find_target
from flashtune.launch.binding import bind, compile_binary
from flashtune.launch.bundle_entries import entry_of
from flashtune.launch.bundles import VARIABLE, Bundles, bundled_kernel, recipe_of
from flashtune.launch.kernel_cache import kernel_of
from flashtune.launch.tensors import ForwardTensors
from tests.emulator.cuda_library import CudaLibrary, Launched
from tests.support.records import CONTIGUOUS, VERDICT, make_record

H200 = find_target("h200")
CPU = torch.device("cpu", 0)
PROBLEM = testing.problem("heads=4,seqlen=256,head_dim=64,dtype=fp16")
ODD: tuple[Any, ...] = (
    0, 1, -1, 255, 2**31, 2**40, 2**63, 10**30, 0.5, "", "q", "x" * 99, None, True, [], {}, [0]
)  # fmt: skip
Result = tuple[list[bytes], list[Launched], list[tuple[int, ...]]] | None
Position = tuple[Any, Any]


@pytest.fixture(autouse=True)
def on_a_device(no_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run without a GPU."""
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.fixture(name="records", scope="module")
def records_of_three_kernels() -> list[Record]:
    """Two have the same parameters, and one has descriptors."""
    configs = ("block_m=64,block_n=32", "block_m=32,block_n=64", "block_m=32,block_n=64,loads=descriptor")
    return [make_record(PROBLEM, config=config) for config in configs]


@pytest.fixture(name="content", scope="module")
def bundle_of_three_kernels(records: list[Record]) -> bytes:
    entries: list[Entry] = []
    codes: dict[str, bytes] = {}
    for record in records:
        kernel = kernel_of(record, CONTIGUOUS)
        recipes = [recipe_of(record, CONTIGUOUS)]
        entry, own = entry_of(kernel, PROBLEM, compile_binary(kernel, H200), "12.8", recipes)
        receipt = Receipt(entry.machine, "nvidia-h200", "580.95", VERDICT)
        entries.append(msgspec.structs.replace(entry, receipts=(receipt,)))
        codes |= own
    return dump_bundle("sm_90", "1.0", entries, codes)


MEMORY = torch.zeros(1)
TENSORS = ForwardTensors(*(torch.zeros(1, 4, 256, 64, dtype=torch.float16) for _ in "qkvo"))


def result_of(record: Record, *, verified: bool = True) -> Result:
    """The loaded code and the launches of a record's kernel. None if it is compiled instead."""
    library = CudaLibrary()
    bundles = Bundles(Driver(library))
    located = bundles.find(record, CONTIGUOUS, H200)
    if not verified:
        # A verification launches entries without a receipt.
        located = next(bundles.entries(recipe_of(record, CONTIGUOUS), H200), None)
    binary = None if located is None else bundles.load(located, H200, CPU)
    if located is None or binary is None:
        return None
    kernel = bundled_kernel(located.entry, record, CONTIGUOUS)
    shapes: list[tuple[int, ...]] = []

    def allocate(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        shapes.append(shape)
        return MEMORY

    try:
        bind(kernel, H200, TENSORS, compiled=binary, allocate=allocate)((*TENSORS,), 0.125)
    except KernelError:
        return None
    return library.codes, library.launches, shapes


def leaves(tree: Any) -> Iterator[Position]:
    """All places of values in a tree, as a container and a key."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from leaves(value)


def change(tree: Any, chance: random.Random) -> None:
    """Replaces a value by another one or an odd one, removes it, or gives its key another name."""
    places = list(leaves(tree))
    # Each field is as likely as all elements of lists together.
    names = sorted({name for _, name in places if isinstance(name, str)})
    field = chance.choice([*names, None])
    alike = [place for place in places if (place[1] if isinstance(place[1], str) else None) == field]
    container, key = chance.choice(alike)
    value = container[key]
    source = alike if chance.random() < 0.5 else places
    others = [other[at] for other, at in source if type(other[at]) is type(value) and other[at] != value]
    way = chance.randrange(8)
    if way < 4 and others:
        container[key] = json.loads(json.dumps(chance.choice(others)))
    elif way < 6:
        container[key] = chance.choice(ODD)
    elif way == 6 and isinstance(container[key], int):
        container[key] += chance.choice((-1, 1, 32))
    elif isinstance(container, dict) and chance.random() < 0.5:
        container[chance.choice([other for _, other in places if isinstance(other, str)])] = container.pop(
            key
        )
    else:
        del container[key]


def packed(content: bytes) -> bytes:
    return lzma.compress(content, format=lzma.FORMAT_ALONE, preset=0)


def with_entry(content: bytes, chance: random.Random) -> bytes:
    """The file with a change in an entry, and right checksums."""
    bundle = bundle_of(content, "")
    index, frames, offset = bundle.index, [], 0
    read = {
        kernel: json.loads(bundle._read(frame, frame.full_size, 2**20))
        for kernel, frame in index.entries.items()
    }
    trees = dict(read)
    change(trees, chance)
    entries = {}
    for kernel in read:
        raw = json.dumps(trees.get(kernel)).encode()
        frames.append(packed(raw))
        entries[kernel] = Frame(offset, len(frames[-1]), len(raw), hashlib.sha256(raw).hexdigest())
        offset += len(frames[-1])
    groups = []
    for frame in index.groups:
        frames.append(bundle.packed(frame))
        groups.append(msgspec.structs.replace(frame, offset=offset))
        offset += frame.size
    return assembled(index._replace(size=offset, groups=tuple(groups), entries=entries), frames)


def with_index(content: bytes, chance: random.Random) -> bytes:
    """The file with a change in its index, and right checksums."""
    size = HEAD.unpack_from(content)[2]
    raw, frames = zlib.decompress(content[HEAD.size : HEAD.size + size]), content[HEAD.size + size :]
    if chance.random() < 0.5:
        raw = zlib.compress(with_damage(raw, chance), 1)
        return HEAD.pack(MAGIC, 1, len(raw), hashlib.sha256(raw).digest()) + raw + frames
    index = bundle_of(content, "").index
    field = chance.choice(("entries", "codes", "recipes"))
    rows: dict[str, Any] = dict(getattr(index, field))
    one, other = chance.choice(list(rows)), chance.choice(list(rows))
    if isinstance(rows[one], str) or chance.random() < 0.6:
        rows[one], rows[other] = rows[other], rows[one]
    else:
        number = chance.choice([name for name in rows[one].__struct_fields__ if name != "sha256"])
        value = chance.choice((0, 1, 2**31, getattr(rows[one], number) + chance.choice((-1, 1))))
        rows[one] = msgspec.structs.replace(rows[one], **{number: max(0, value)})
    if chance.random() < 0.2:
        del rows[one]
    changed: dict[str, Any] = {**index._asdict(), field: rows}
    return assembled(Index(**changed), [frames])


def with_damage(content: bytes, chance: random.Random) -> bytes:
    """The file with other bytes, without some, or with more."""
    damaged, at = bytearray(content), chance.randrange(len(content))
    way = chance.randrange(4)
    if way == 0:
        damaged[at] ^= 1 << chance.randrange(8)
    elif way == 1:
        del damaged[at:]
    elif way == 2:
        del damaged[at : at + chance.randint(1, 64)]
    else:
        damaged[at:at] = chance.randbytes(chance.randint(1, 64))
    return bytes(damaged)


@pytest.mark.slow
def test_mutated_bundles_are_refused_or_launch_the_same(
    content: bytes,
    records: list[Record],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fuzz_count: Callable[[int, int], int],
) -> None:
    path = tmp_path / "kernels.bundle"
    monkeypatch.setenv(VARIABLE, str(path))
    path.write_bytes(content)
    expected = [result_of(record) for record in records]
    assert all(expected)
    chance, used = random.Random(43), 0
    number = fuzz_count(200, 2000)
    for count in range(number):
        mutate = (with_damage, with_index, with_entry, with_entry)[count % 4]
        path.write_bytes(mutate(content, chance))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for record, wanted in zip(records, expected, strict=True):
                found = result_of(record)
                used += found is not None
                result_of(record, verified=False)
                assert found in (None, wanted), f"mutation {count} launches something else"
        assert all(len(str(warning.message).splitlines()) == 1 for warning in seen)
    # Some changes do not matter, such as those of the other kernel.
    assert 0.2 * number < used < 2.5 * number
