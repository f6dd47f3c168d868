"""Tests of files of receipts of machine code."""

from pathlib import Path

import msgspec
import pytest

from flashtune.bundle.bundle_file import dump_bundle
from flashtune.bundle.records import Entry
from flashtune.core.errors import TableError
from flashtune.db.machine_receipts import files_with, load_receipts
from tests.bundle.conftest import VERDICT, make_entry
from tests.tuner.cli.conftest import Run

ENTRY, CODES = make_entry(1, b"code" * 50)
(RECEIPT,) = ENTRY.receipts


def with_receipt(**changes: object) -> Entry:
    return msgspec.structs.replace(ENTRY, receipts=(msgspec.structs.replace(RECEIPT, **changes),))


def test_receipts_of_a_bundle_are_added_to_the_file_of_their_gpu(run: Run, tmp_path: Path) -> None:
    first, second = make_entry(1, b"one" * 9), make_entry(2, b"two" * 9)
    for entry, codes in (first, second, first):
        bundle = tmp_path / "kernels.bundle"
        bundle.write_bytes(dump_bundle("sm_90", "1.0", [entry], codes))
        done = run("bundle", "list", bundle, "--receipts", tmp_path)
        assert done.exit_code == 0, done.output
    receipts = load_receipts("nvidia-h200", tmp_path)
    assert list(receipts) == sorted(entry.machine for entry, _ in (first, second))
    lines = (tmp_path / "nvidia-h200.json").read_text(encoding="utf-8").splitlines()
    assert [line.count("verdict") for line in lines] == [0, 0, 0, 0, 1, 1, 0, 0]
    assert load_receipts("nvidia-h100", tmp_path) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"machine": "e" * 32},
        {"target": "../nvidia-h200"},
        {"target": "nvidia-h100"},
        {"verdict": msgspec.structs.replace(VERDICT, passed=False)},
        {"verdict": msgspec.structs.replace(VERDICT, device="interpreter")},
    ],
)
def test_receipts_that_are_no_passes_of_the_machine_code_are_not_written(
    changes: dict[str, object], tmp_path: Path
) -> None:
    assert files_with([with_receipt(**changes)], tmp_path) == {}
    assert files_with([ENTRY], tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"schema": 1', b'"schema": 2'),
        (b'"passed":true', b'"passed":false'),
        (b'"target":"nvidia-h200"', b'"target":"nvidia-h100"'),
        (b'"target": "nvidia-h200"', b'"target": "nvidia-h100"'),
        (b"NVIDIA H200", b"NVIDIA H100"),
        (b"}\n  ]", b"},\n" + msgspec.json.encode(RECEIPT) + b"\n  ]"),
        (b"}\n  ]", b"}"),
    ],
)
def test_changed_files_are_refused(old: bytes, new: bytes, tmp_path: Path) -> None:
    ((path, content),) = files_with([ENTRY], tmp_path).items()
    assert old in content
    path.write_bytes(content.replace(old, new))
    with pytest.raises(TableError, match="write it again"):
        load_receipts("nvidia-h200", tmp_path)
