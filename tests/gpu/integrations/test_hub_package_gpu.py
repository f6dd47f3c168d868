"""Tests of a kernel package of shipped selections on a GPU, against float64."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtune.core.problem import Feature
from flashtune.core.record import Record
from flashtune.tuner.tables.hub_package import is_served, package_files
from flashtune.tuner.tables.lookup import shipped_selections
from tests.gpu.marks import ON_HOPPER
from tests.problems.serving_batches import Batch, Case, expected, fill_earlier, make_batch

pytestmark = [pytest.mark.gpu, ON_HOPPER]

BF16 = torch.bfloat16


def chosen() -> list[Record]:
    """A plain causal selection in Gluon, one in Triton, and one of decoding with pages; head dim 128."""
    found: dict[str, Record] = {}
    for selection in shipped_selections():
        record = selection.record
        problem = record.problem
        features = {Feature.PAGES} if record.family == "decode_split_kv" else set()
        fits = problem.head_dim == problem.value_head_dim == 128 and problem.causal == "bottom_right"
        if is_served(record) and fits and problem.dtype == "bf16" and problem.features == features:
            found.setdefault(record.family, record)
    return [*found.values()]


@pytest.fixture(name="package", scope="module")
def loaded_package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("package")
    for name, text in package_files(chosen()).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    path: Path = folder / "build/torch-cuda/__init__.py"
    spec = importlib.util.spec_from_file_location("flashtune_hub_package", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def close(out: torch.Tensor, batch: Batch) -> None:
    wanted = expected(batch, Case())
    torch.testing.assert_close(out.cpu().double(), wanted, atol=1e-2, rtol=1e-2)


@pytest.mark.filterwarnings("error")
def test_dense_calls_are_served(package: Any) -> None:
    batch = make_batch([(700, 700)], BF16, width=128)
    q, k, v = (tensor.cuda()[None] for tensor in (batch.q, batch.k, batch.v))
    close(package.flash_attn_func(q, k, v, causal=True)[0], batch)


@pytest.mark.filterwarnings("error")
def test_pages_are_served(package: Any) -> None:
    batch = make_batch([(300, 1), (45, 1), (17, 1)], BF16, width=128)
    caches = [torch.zeros(int(batch.table.max()) + 1, 16, 2, 128, dtype=BF16) for _ in "kv"]
    keys, values = (cache.transpose(1, 2) for cache in caches)
    fill_earlier(batch, keys, values)
    q, k, v = (tensor.cuda()[:, None] for tensor in (batch.q, batch.k, batch.v))
    known = (batch.seqlens - 1).cuda()
    on_gpu = [cache.cuda() for cache in caches]
    out = package.flash_attn_with_kvcache(
        q, *on_gpu, k, v, cache_seqlens=known, block_table=batch.table.cuda()
    )
    close(out[:, 0], batch)


@pytest.mark.filterwarnings("ignore:no kernel of this package")
def test_torch_computes_packed_sequences(package: Any) -> None:
    batch = make_batch([(300, 300), (45, 45), (1, 1)], BF16, width=128)
    q, k, v, starts = (tensor.cuda() for tensor in (batch.q, batch.k, batch.v, batch.starts))
    out = package.flash_attn_varlen_func(q, k, v, starts, starts, 300, 300, causal=True)
    close(out, batch)
