"""Receipts of machine code as JSON, one receipt a line: `receipts/TARGET.json` for each GPU.

`flashtune bundle build` binds them to kernels of the same machine code. Dispatch does not read them.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from flashtune.bundle.records import Entry, Receipt
from flashtune.core.decoders import json_decoder
from flashtune.core.errors import TableError
from flashtune.core.files import read_bounded
from flashtune.core.target import TARGETS, TargetName, names_gpu
from flashtune.db.codec import UNDECODABLE, brief

MAX_BYTES = 64 * 1024 * 1024
# The files that ship.
SHIPPED = Path(__file__).with_name("receipts")


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: Literal[1]
    target: TargetName
    receipts: Annotated[tuple[Receipt, ...], msgspec.Meta(max_length=100_000)]


def load_receipts(target: str, folder: Path = SHIPPED) -> dict[str, Receipt]:
    """Returns the receipts of a listed GPU by the digest of machine code. Without a file there are none.

    Raises:
        TableError: The file is damaged, or has something else than passes on the GPU.
    """
    path = folder / f"{target}.json"
    try:
        raw = read_bounded(path, MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TableError(f"cannot read the receipts {path}: {error.strerror}") from error
    try:
        file = json_decoder(_File).decode(raw if len(raw) <= MAX_BYTES else b"")
    except UNDECODABLE as error:
        raise TableError(f"{path} is not a file of receipts ({brief(error)}): write it again") from error
    receipts = {receipt.machine: receipt for receipt in file.receipts}
    sound = all(receipt.target == target and _is_pass(receipt) for receipt in file.receipts)
    if file.target != target or len(receipts) < len(file.receipts) or not sound:
        raise TableError(f"{path} must have one pass on {target} for each machine code: write it again")
    return receipts


def files_with(entries: Iterable[Entry], folder: Path) -> dict[Path, bytes]:
    """Returns the files of a folder with the passes of entries on listed GPUs. Earlier receipts stay."""
    listed = {target.name for target in TARGETS}
    added: dict[str, dict[str, Receipt]] = defaultdict(dict)
    for entry in entries:
        for receipt in entry.receipts:
            if receipt.target in listed and receipt.machine == entry.machine and _is_pass(receipt):
                added[receipt.target][receipt.machine] = receipt
    return {
        folder / f"{target}.json": _dumped(target, receipts | load_receipts(target, folder))
        for target, receipts in added.items()
    }


def _dumped(target: str, receipts: dict[str, Receipt]) -> bytes:
    lines = (b"    " + msgspec.json.encode(receipt) for _, receipt in sorted(receipts.items()))
    head = b'{\n  "schema": 1,\n  "target": "%s",\n  "receipts": [\n' % target.encode()
    return head + b",\n".join(lines) + b"\n  ]\n}\n"


def _is_pass(receipt: Receipt) -> bool:
    return receipt.verdict.passed and names_gpu(receipt.target, receipt.verdict.device)
