"""Tests of a kernel package of shipped selections on a GPU, against float64."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtune.core.problem import Feature
from flashtune.core.record import Record
from flashtune.core.target import device_target
from flashtune.tuner.tables import bundles
from flashtune.tuner.tables.export_bundle import verified_bundles
from flashtune.tuner.tables.hub_package import NO_BUNDLES, is_served, package_files
from flashtune.tuner.tables.lookup import shipped_selections
from tests.gpu.marks import ON_HOPPER
from tests.problems.serving_batches import Batch, Case, expected, fill_earlier, make_batch
from tests.support.bundle_checks import Passes
from tests.support.models.hub_generation import LENGTHS, NEW_TOKENS, PAGED, Settings, generation_of
from tests.support.records import make_record

pytestmark = [pytest.mark.gpu, ON_HOPPER]

BF16 = torch.bfloat16


def chosen() -> list[Record]:
    """A plain causal selection in Gluon, one in Triton, and one of decoding with pages; head dim 128."""
    records: dict[str, Record] = {}
    for selection in shipped_selections():
        record = selection.record
        problem = record.problem
        features = {Feature.PAGES} if record.family == "decode_split_kv" else set()
        fits = problem.head_dim == problem.value_head_dim == 128 and problem.causal == "bottom_right"
        if is_served(record) and fits and problem.dtype == "bf16" and problem.features == features:
            records.setdefault(record.family, record)
    return [*records.values()]


def batched() -> list[Record]:
    """Causal selections of packed sequences, and of decoding with pages of 16 keys; head dim 128."""
    records = []
    for selection in shipped_selections():
        record = selection.record
        problem = record.problem
        decodes = record.family == "decode_split_kv"
        features, page = ({Feature.PAGES}, 16) if decodes else ({Feature.PACKED}, 0)
        fits = problem.head_dim == problem.value_head_dim == 128 and problem.causal == "bottom_right"
        fits = fits and problem.features == features and problem.page_size == page
        if is_served(record) and fits and problem.dtype == "bf16":
            records.append(record)
    return records


def write(folder: Path, records: list[Record], bundles: Mapping[str, bytes] = NO_BUNDLES) -> None:
    for name, content in package_files(records, bundles=bundles).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def load(folder: Path) -> Any:
    path: Path = folder / "build/torch-cuda/__init__.py"
    spec = importlib.util.spec_from_file_location("flashtune_hub_package", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(name="package", scope="module")
def loaded_package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("package")
    write(folder, chosen())
    return load(folder)


@pytest.mark.filterwarnings("error")
def test_machine_code_gives_the_bits_of_a_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "load_receipts", Passes)
    records = [
        make_record(
            f"heads=4,kv_heads=2,seqlen={seqlen},head_dim=128,causal,{features}",
            family=family,
            target=device_target(0).name,
        )
        for family, seqlen, features in (("forward_hopper", 512, ""), ("forward_masked", 512, "softcap"))
    ]
    write(tmp_path / "code", records, verified_bundles(records, lambda phase, done, total: None))
    write(tmp_path / "source", records)
    q, k, v = (torch.randn(2, 700, heads, 128, device="cuda", dtype=BF16) for heads in (4, 2, 2))
    code, source = load(tmp_path / "code"), load(tmp_path / "source")
    for softcap in (0.0, 20.0):
        outs = [package.flash_attn_func(q, k, v, causal=True, softcap=softcap) for package in (code, source)]
        assert torch.equal(*outs)
        assert outs[0].count_nonzero()
    for package, launchers in ((code, 1), (source, 0)):
        for (entry,) in package.entries().values():
            own = vars(package.kernel(entry.file, entry.kernel, 0))
            assert sum(type(value).__name__ == "Launcher" for value in own.values()) == launchers


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
    cached = (batch.seqlens - 1).cuda()
    on_gpu = [cache.cuda() for cache in caches]
    out = package.flash_attn_with_kvcache(
        q, *on_gpu, k, v, cache_seqlens=cached, block_table=batch.table.cuda()
    )
    close(out[:, 0], batch)


@pytest.mark.filterwarnings("ignore:no kernel of this package")
def test_torch_computes_packed_sequences(package: Any) -> None:
    batch = make_batch([(300, 300), (45, 45), (1, 1)], BF16, width=128)
    q, k, v, starts = (tensor.cuda() for tensor in (batch.q, batch.k, batch.v, batch.starts))
    out = package.flash_attn_varlen_func(q, k, v, starts, starts, 300, 300, causal=True)
    close(out, batch)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("page", [16, 32])
def test_transformers_batches_continuously_through_a_package(tmp_path: Path, page: int, graphs: bool) -> None:
    """Kernels serve pages of 16 keys. Torch decodes from pages of 32, in CUDA graphs too."""
    pytest.importorskip("transformers", minversion="5.17")
    pytest.importorskip("kernels", minversion="0.17")
    write(tmp_path, batched())
    generation = generation_of(tmp_path, Settings(PAGED, "cuda", "bfloat16", 128, page, graphs))
    assert {*generation.origins} == {str(tmp_path / "build/torch-cuda/__init__.py")}
    assert {*generation.calls} == {"flash_attn_varlen_func", "flash_attn_with_kvcache"}
    assert generation.lengths == [NEW_TOKENS] * len(LENGTHS)
    assert generation.served
    assert (generation.by_torch == 0) == (page == 16)
    # Rounding to bf16 alone gives 0.01; a key less gives 1.6.
    assert generation.slack < 0.1


def replayed(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Returns the output of a replayed CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    torch.cuda.synchronize()
    return out


@pytest.mark.filterwarnings("ignore:no kernel of this package")
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_torch_decodes_in_a_cuda_graph(package: Any, softcap: float) -> None:
    """With pages of 32 keys, which no kernel of the package takes. The last sequence fills up the batch."""
    q, k, v = (torch.randn(4, 1, heads, 128, device="cuda", dtype=BF16) for heads in (4, 2, 2))
    before = [torch.full((13, 32, 2, 128), torch.nan, device="cuda", dtype=BF16) for _ in "kv"]
    for cache in before:
        # A sequence has three pages. Rows without a key stay NaN.
        for pages, length in zip(cache[:9].view(3, 96, 2, 128), (40, 0, 95), strict=True):
            pages[:length].normal_()
    table = torch.arange(12, dtype=torch.int32, device="cuda").view(4, 3)
    table[-1] = -1
    cached = torch.tensor([40, 0, 95, -1], dtype=torch.int32, device="cuda")

    def run(caches: list[torch.Tensor]) -> torch.Tensor:
        options = {"cache_seqlens": cached, "block_table": table, "causal": True, "softcap": softcap}
        out: torch.Tensor = package.flash_attn_with_kvcache(q, *caches, k, v, **options)
        return out

    eager = [cache.clone() for cache in before]
    wanted = run(eager)
    captured = [cache.clone() for cache in before]
    out = replayed(lambda: run(captured))
    torch.testing.assert_close(out, wanted, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(captured, eager, atol=0, rtol=0, equal_nan=True)
    assert not out[-1].any()


@pytest.mark.filterwarnings("ignore:no kernel of this package")
@pytest.mark.parametrize("cached", [None, 70])
def test_a_cuda_graph_captures_lengths_from_the_host(package: Any, cached: int | None) -> None:
    q, *caches = (torch.randn(6, 32, heads, 128, device="cuda", dtype=BF16) for heads in (4, 2, 2))
    table = torch.arange(6, dtype=torch.int32, device="cuda").view(2, 3)

    def run() -> torch.Tensor:
        out: torch.Tensor = package.flash_attn_with_kvcache(
            q[:2, :1], *caches, cache_seqlens=cached, block_table=table, causal=True
        )
        return out

    wanted = run()
    torch.testing.assert_close(replayed(run), wanted, atol=1e-2, rtol=1e-2)
