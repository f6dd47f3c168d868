"""The rendered kernels that ship and their index are those of the shipped tables, byte for byte."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec
import pytest

from flashtune.core.problem import Bias, Dtype
from flashtune.core.record import PeerTime
from scripts import kernels
from scripts.kernels import files, shipped_records, winners

SHIPPED = shipped_records()
PLAIN = next(record for record in winners(SHIPPED).values() if record.family == "forward_q_outer")


def test_folder_contains_exactly_the_kernels_of_the_tables() -> None:
    folder = Path(str(resources.files("flashtune.kernels_generated")))
    found = {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in (*folder.rglob("*.py"), *folder.rglob("*.md"))
        if path.name != "__init__.py"
    }
    expected = files(SHIPPED)
    assert found.keys() == expected.keys(), "make kernels"
    assert found == expected, "make kernels"


def test_every_selection_has_a_class() -> None:
    classes = {
        (record.target, record.family, record.problem.head_dim, record.problem.causal)
        for record in SHIPPED
        if record.config is not None
    }
    chosen = winners(SHIPPED).values()
    assert {(one.target, one.family, one.problem.head_dim, one.problem.causal) for one in chosen} == classes


def test_shape_with_the_most_work_represents_its_class() -> None:
    longer = msgspec.structs.replace(
        PLAIN, problem=msgspec.structs.replace(PLAIN.problem, seqlen_kv=2 * PLAIN.problem.seqlen_kv)
    )
    assert [*winners((longer, PLAIN)).values()] == [*winners((PLAIN, longer)).values()] == [longer]


def test_shape_with_fewer_features_represents_the_class_in_a_tie() -> None:
    biased = msgspec.structs.replace(
        PLAIN, problem=msgspec.structs.replace(PLAIN.problem, bias=Bias.ADDITIVE)
    )
    assert [*winners((biased, PLAIN)).values()] == [*winners((PLAIN, biased)).values()] == [PLAIN]


def test_types_of_one_width_share_a_class() -> None:
    half, single = (
        msgspec.structs.replace(PLAIN, problem=msgspec.structs.replace(PLAIN.problem, dtype=dtype))
        for dtype in (Dtype.FP16, Dtype.FP32)
    )
    assert len(winners((PLAIN, half))) == 1
    assert len(winners((PLAIN, single))) == 2


def test_speeds_are_over_cudnn_or_else_the_fastest_backend() -> None:
    def speed(*peers: tuple[str, float]) -> str:
        assert PLAIN.measurement is not None
        times = tuple(PeerTime(name, ms * PLAIN.measurement.ms) for name, ms in peers)
        measurement = msgspec.structs.replace(PLAIN.measurement, peers=times)
        return kernels._speed(msgspec.structs.replace(PLAIN, measurement=measurement))

    assert speed(("sdpa-flash", 1.1), ("sdpa-cudnn", 1.25)) == "1.25 (sdpa-cudnn)"
    assert speed(("sdpa-flash", 1.5), ("sdpa-efficient", 1.1), ("unfused", 0.5)) == "1.10 (sdpa-efficient)"
    assert speed(("unfused", 2)) == speed() == ""


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
    # fp16 goes by its nearest shape at lengths between.
    expected = range(7, 15) if dtype == "bf16" else (9, 11, 13)
    assert lengths >= {(gqa, 2**power) for gqa in (False, True) for power in expected}
