"""The rendered kernels that ship are those of the shipped tables, byte for byte, and no others."""

from __future__ import annotations

from importlib import resources

import pytest

from flashtune.db.table import shipped_table
from flashtune.record import Record
from flashtune.target import TARGETS
from flashtune.tuner.export import kernel_files

SHIPPED: tuple[Record, ...] = tuple(
    record
    for target in TARGETS
    if (table := shipped_table(target.name)) is not None
    for record in table.records
)


def test_the_folder_holds_the_kernels_of_the_tables_and_no_others() -> None:
    expected = {file.name: file.text for file in kernel_files(SHIPPED)}
    folder = resources.files("flashtune.kernels_generated")
    found = {
        entry.name: entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".py") and entry.name != "__init__.py"
    }
    assert found.keys() == expected.keys()
    assert found == expected


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_the_h200_table_covers_its_grid(dtype: str, head_dim: int, causal: str) -> None:
    lengths = {
        (record.problem.heads != record.problem.kv_heads, record.problem.seqlen_q)
        for record in SHIPPED
        if (record.target, record.problem.dtype, record.problem.head_dim, record.problem.causal)
        == ("nvidia-h200", dtype, head_dim, causal)
    }
    # fp16 goes by its nearest shape at lengths between.
    expected = range(7, 15) if dtype == "bf16" else (9, 11, 13)
    assert lengths >= {(gqa, 2**power) for gqa in (False, True) for power in expected}
