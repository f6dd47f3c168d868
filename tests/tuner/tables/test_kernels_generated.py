"""Tests of the files of kernels_generated/, and of the grid of the H200's table."""

from pathlib import Path

import msgspec
import pytest

from flashtune.core.errors import FlashtuneError
from flashtune.core.record import Record
from scripts import kernels
from scripts.kernels import FOLDER, choose, files, shipped_records

SHIPPED = shipped_records()
FULL = "forward_q_outer/bf16_d128_full"
SHORTEST = next(
    record for record in SHIPPED if record.problem.key == "forward_bf16_d128_h16x16_b32_q512_k512_none"
)


def selection(kernel: str, target: str, **changes: object) -> Record:
    """Returns a selection of a kernel of `FULL`; the changes are those of a problem with 512 queries."""
    problem = msgspec.structs.replace(SHORTEST.problem, **changes)
    return msgspec.structs.replace(
        SHORTEST, family="forward_q_outer", kernel=kernel, target=target, problem=problem
    )


def test_folder_contains_exactly_the_examples() -> None:
    written = {
        path.relative_to(FOLDER).as_posix(): path.read_text(encoding="utf-8")
        for path in FOLDER.rglob("*")
        if path.is_file()
    }
    expected = files(SHIPPED)
    assert written.keys() == expected.keys(), "make kernels"
    assert written == expected, "make kernels"
    # No two examples are the same kernel.
    assert len({text.partition('"""')[2] for text in written.values()}) == len(written)
    assert sum(text.count("\n") for text in written.values()) < 8000


def test_files_are_written_without_a_folder_and_others_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels"
    monkeypatch.setattr(kernels, "FOLDER", folder)
    for name in ("first", "second"):
        monkeypatch.setattr(kernels, "files", lambda records, name=name: {f"{name}/a.py": "1"})
        kernels.main()
        assert [path.relative_to(folder) for path in folder.rglob("*.py")] == [Path(name, "a.py")]


def test_example_is_the_kernel_that_most_gpus_select() -> None:
    shared = [selection("a", "nvidia-h100"), selection("a", "nvidia-h200")]
    longer = [selection("b", "nvidia-h200", seqlen_q=8192, seqlen_kv=8192)]
    assert choose(FULL, [shared, longer]) == choose(FULL, [longer, shared]) == shared


def test_example_of_equally_many_gpus_has_the_most_work() -> None:
    short = [selection("a", "nvidia-h100")]
    longer = [selection("b", "nvidia-h200", seqlen_q=8192, seqlen_kv=8192)]
    assert choose(FULL, [short, longer]) == choose(FULL, [longer, short]) == longer


def test_work_on_other_problems_does_not_count() -> None:
    short = [selection("a", "nvidia-h100"), selection("a", "nvidia-h100", seqlen_q=8192, softcap=True)]
    longer = [selection("b", "nvidia-h200", seqlen_q=1024)]
    assert choose(FULL, [short, longer]) == longer


def test_examples_and_index_do_not_depend_on_times() -> None:
    untimed = [msgspec.structs.replace(record, measurement=None) for record in SHIPPED]
    assert files(untimed) == files(SHIPPED)


def test_example_without_a_selection_is_an_error() -> None:
    with pytest.raises(FlashtuneError, match="for \\*_bf16_d128_\\*_none: change EXAMPLES"):
        choose(FULL, [[selection("a", "nvidia-h100", softcap=True)]])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_h200_table_covers_its_grid(dtype: str, head_dim: int, causal: str) -> None:
    lengths = {
        (record.problem.heads != record.problem.kv_heads, record.problem.seqlen_q)
        for record in SHIPPED
        if (record.target, record.problem.dtype, record.problem.head_dim, record.problem.causal)
        == ("nvidia-h200", dtype, head_dim, causal)
    }
    # At lengths between, fp16 uses the config of the nearest shape.
    expected = range(7, 15) if dtype == "bf16" else (9, 11, 13)
    assert lengths >= {(gqa, 2**power) for gqa in (False, True) for power in expected}
