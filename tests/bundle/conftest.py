"""Entries of small kernels."""

import hashlib
import struct

import msgspec
import pytest

from flashtune.bundle.bundle_file import dump_bundle
from flashtune.bundle.cubin import machine_digest
from flashtune.bundle.records import Entry, Instruction, Parameter, Plan, Receipt, Stage
from flashtune.core.record import Verdict

VERDICT = Verdict(passed=True, worst_ratio=0.5, checks=3, failed="", device="NVIDIA H200")


def cubin(function: str, code: bytes, debug: bytes = b"") -> bytes:
    """An ELF file with a kernel's code and a debug section."""
    names = b"\0.shstrtab\0.text." + function.encode() + b"\0.debug_line\0"
    contents = [b"", names, code, debug]
    at, headers = 64, b""
    for name, content in zip((b"", b".shstrtab", b".text.", b".debug_line"), contents, strict=True):
        place = names.index(b"\0" + name) + 1 if name else 0
        headers += struct.pack("<IIQQQQIIQQ", place, 1, 6, 0, at, len(content), 0, 0, 1, 0)
        at += len(content)
    head = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<QIHHHHHH", at, 0, 64, 0, 0, 64, 4, 1)
    return head + b"".join(contents) + headers


def make_entry(number: int, code: bytes, function: str = "kernel") -> tuple[Entry, dict[str, bytes]]:
    content = cubin(function, code)
    sha256 = hashlib.sha256(content).hexdigest()
    stage = Stage(
        function, sha256, machine_digest(content, function), 0, 128, early=False,
        parameters=(Parameter("pointer", "q"), Parameter("i32", value=1)), grid=(0,)
    )  # fmt: skip
    plan = Plan(("q",), (Instruction("const", 1), Instruction("size", 0, 2)))
    digest = f"{number:032x}"
    entry = Entry(digest, "forward_q_outer", (stage,), plan, "3.7.1", "12.8", (f"{number + 100:032x}",))
    receipt = Receipt(entry.machine, "nvidia-h200", "580.1", VERDICT)
    return msgspec.structs.replace(entry, receipts=(receipt,)), {sha256: content}


@pytest.fixture
def entries() -> list[tuple[Entry, dict[str, bytes]]]:
    """Three kernels, of which two have the same code."""
    return [make_entry(1, b"one" * 200), make_entry(2, b"two" * 90), make_entry(3, b"one" * 200)]


@pytest.fixture
def content(entries: list[tuple[Entry, dict[str, bytes]]]) -> bytes:
    """A bundle of these kernels."""
    codes = {sha256: code for _, codes in entries for sha256, code in codes.items()}
    return dump_bundle("sm_90", "1.0", [entry for entry, _ in entries], codes)
