"""Tests of kernel packages in a new process with only torch and triton, against float64."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flashtune import FlashtuneError, testing
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.record import Record
from flashtune.core.target import find_target
from flashtune.templates.registry import find_family
from flashtune.tuner.tables.hub_package import is_served, package_files
from tests.support.models.hub_generation import LENGTHS, NEW_TOKENS, PAGED, Settings, generation_of
from tests.support.records import make_record

SHAPE = "heads=4,kv_heads=2,head_dim=32,dtype=fp32,causal"
SHAPES = [
    ("forward_q_outer", f"{SHAPE},seqlen=48,batch=2"),
    ("forward_q_outer", f"{SHAPE},seqlen=512,batch=2"),
    ("forward_masked", f"{SHAPE},seqlen=64,batch=2,window=15:0,softcap,sinks"),
    ("forward_masked", f"{SHAPE},seqlen=64,batch=3,packed=128"),
    ("forward_masked", f"{SHAPE},seqlen=64,batch=3,packed=128,alibi"),
    ("decode_split_kv", f"{SHAPE},seqlen_q=1,seqlen_kv=128,batch=3,page_size=16"),
]
# Arguments that transformers passes besides the query, the scale and the mask.
GIVEN = {
    "flash_attn_func": {"k", "v", "dropout_p", "deterministic"},
    "flash_attn_varlen_func": {
        "k",
        "v",
        "dropout_p",
        "deterministic",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
    },
    "flash_attn_with_kvcache": {"k", "v", "k_cache", "v_cache", "cache_seqlens", "block_table"},
}
LOADING = """
import importlib.util, json, sys, warnings
import torch

class Forbidden:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("flashtune", "jinja2", "msgspec"):
            raise ImportError(name)

sys.meta_path.insert(0, Forbidden())
torch.manual_seed(0)
warnings.simplefilter("error")

def attention(q, k, v, window=None, softcap=None, sinks=None, slopes=None, causal=True):
    "In float64, of tensors [seqlen, heads, head_dim]."
    q, k, v = q.double(), k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 32**0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(len(k)) - torch.arange(len(k) - len(q), len(k))[:, None]
    if slopes is not None:
        scores -= slopes.double()[:, None, None] * ahead.abs()
    hidden = (ahead > 0) & causal
    if window is not None:
        hidden |= ahead < -window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)

def close(found, expected):
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)

def draw(*shape):
    return torch.randn(*shape)

served = []
spec = importlib.util.spec_from_file_location("package", sys.argv[1] + "/build/torch-cuda/__init__.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
CHECKS = """
run = module.kernel
module.kernel = lambda file, *key: served.append(file) or run(file, *key)

q, k, v = draw(2, 40, 4, 32), draw(2, 40, 2, 32), draw(2, 40, 2, 32)
out = module.flash_attn_func(q, k, v, causal=True)
assert out.shape == q.shape
for i in range(2):
    close(out[i], attention(q[i], k[i], v[i]))
# The kernel of the nearest shape.
entries = json.load(open(module.HERE / "kernels.json"))
assert [one["sizes"] for one in entries if one["file"] == served[-1]][0][1:] == [48, 48]

sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
out = module.flash_attn_func(q, k, v, causal=True, window_size=(15, 0), softcap=2.0, s_aux=sinks.bfloat16())
for i in range(2):
    close(out[i], attention(q[i], k[i], v[i], 15, 2.0, sinks))
# A window of all keys is none.
module.flash_attn_func(q, k, v, causal=True, window_size=(39, 0))

lengths = [7, 30, 1]
starts = torch.tensor([0, 7, 37, 38], dtype=torch.int32)
q, k, v = draw(40, 4, 32), draw(40, 2, 32), draw(40, 2, 32)
slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
for more in (None, slopes):
    out = module.flash_attn_varlen_func(q, k, v, starts, starts, 30, 30, causal=True, alibi_slopes=more)
    for first, last in zip(starts, starts[1:]):
        part = slice(first, last)
        close(out[part], attention(q[part], k[part], v[part], slopes=more))

table = torch.randperm(12).view(3, 4).int()
caches = [draw(12, 16, 2, 32) for _ in "kv"]
rows = [[cache[pages.long()].flatten(0, 1) for pages in table] for cache in caches]
# The last sequence has no keys and no pages, as transformers fills up batches of CUDA graphs.
new = [draw(4, 1, 2, 32) for _ in "kv"]
known = torch.tensor([20, 47, 0, -1], dtype=torch.int32)
filled = torch.cat([table, torch.full((1, 4), -1).int()])
q = draw(4, 1, 4, 32)
before = [cache.clone() for cache in caches]
out = module.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=known, block_table=filled, causal=True)
for i in range(3):
    keys, values = (torch.cat([all[i][: known[i]], one[i]]) for all, one in zip(rows, new))
    close(out[i], attention(q[i], keys, values))
    # The new rows are in the pages.
    for cache, old, one in zip(caches, before, new):
        old[table[i, known[i] // 16], known[i] % 16] = one[i, 0]
assert all(map(torch.equal, caches, before))
assert out[3].isfinite().all()
q, known, new = q[:3], known[:3], [one[:3] for one in new]
# One query needs no causal mask.
module.flash_attn_with_kvcache(q, *caches, cache_seqlens=known + 1, block_table=table)
assert len(served) == 7 and len({*served}) == 5

# Torch computes the others, and a warning names them once.
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as seen:
    for _ in range(2):
        more = {"cache_seqlens": known + 1, "block_table": table, "softcap": 3.0}
        out = module.flash_attn_with_kvcache(q, *caches, **more)
    assert len(seen) == 1 and "torch computes it" in str(seen[0].message), seen
for i in range(3):
    keys, values = (torch.cat([all[i][: known[i]], one[i]]) for all, one in zip(rows, new))
    close(out[i], attention(q[i], keys, values, softcap=3.0, causal=False))
q, k, v = draw(2, 5, 4, 32), draw(2, 40, 2, 32), draw(2, 40, 2, 32)
more = {"cache_seqlens": torch.tensor([40, 6]).int(), "causal": True, "window_size": (3, -1)}
out = module.flash_attn_with_kvcache(q, k, v, **more)
close(out[0], attention(q[0], k[0], v[0], 3))
close(out[1], attention(q[1], k[1][:6], v[1][:6], 3))
q, k, v = draw(40, 4, 32), draw(40, 2, 32), draw(40, 2, 32)
more = {"causal": True, "s_aux": sinks, "alibi_slopes": slopes}
out = module.flash_attn_varlen_func(q, k, v, starts, starts, 30, 30, **more)
for first, last in zip(starts, starts[1:]):
    part = slice(first, last)
    close(out[part], attention(q[part], k[part], v[part], sinks=sinks, slopes=slopes))
# Five queries and two keys: three rows see no key.
q, k, v = draw(1, 5, 4, 32), draw(1, 2, 2, 32), draw(1, 2, 2, 32)
out = module.flash_attn_func(q, k, v, causal=True, window_size=(9, 0), softcap=1.0)
assert not out[0, :3].any() and out.isfinite().all()
assert not module.flash_attn_func(q, k, v, causal=True, window_size=(0, 0))[0, :3].any()

q.requires_grad_()
module.flash_attn_func(q, k, v, causal=True).sum().backward()
assert q.grad.isfinite().all() and len(served) == 7
for options in ({"rotary_cos": q}, {"return_softmax_lse": True}):
    try:
        module.flash_attn_with_kvcache(q, k, v, **options)
    except NotImplementedError as error:
        assert "this package" in str(error)
    else:
        raise AssertionError(options)
"""


def record_of(family: str, shape: str) -> Record:
    problem = testing.problem(shape)
    assert find_family(family).supports(problem, find_target("h200")) is None
    return make_record(problem, family=family, specialization=Specialization(alignment=Alignment.SIXTEEN))


@pytest.fixture(name="package", scope="module")
def written_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    for name, content in package_files([record_of(*shape) for shape in SHAPES]).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def sources(folder: Path) -> list[Path]:
    """The files of a package. Other tests may have imported it, which leaves bytecode."""
    return [path for path in folder.rglob("*.*") if path.suffix != ".pyc"]


def test_a_package_computes_attention_without_flashtune(package: Path) -> None:
    command = [sys.executable, "-c", LOADING + CHECKS, str(package)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr


def test_transformers_generates_through_a_package(package: Path) -> None:
    generation = generation_of(package, Settings(PAGED, "cpu", "float32", 32, 16, generates=True))
    assert {*generation.origins} == {str(package / "build/torch-cuda/__init__.py")}
    assert {*generation.calls} == {*GIVEN}
    for function, arguments in generation.calls.items():
        assert {*arguments} == {"q", "softmax_scale", "causal"} | GIVEN[function]
    assert generation.lengths == [NEW_TOKENS] * 2 * len(LENGTHS)
    assert generation.served
    assert not generation.by_torch
    assert generation.slack < 1e-4


def test_metadata_hashes_all_other_files(package: Path) -> None:
    built = package / "build/torch-cuda"
    metadata = json.loads((built / "metadata.json").read_text("utf-8"))
    files = {path.relative_to(built).as_posix() for path in sources(built)}
    assert {*metadata["digest"]["files"]} == files - {"metadata.json"}
    assert metadata["id"].startswith("flashtune_cuda_")
    assert metadata["id"].isidentifier()


def test_selections_without_a_function_are_not_served() -> None:
    (plain, masked) = (
        record_of(*shape) for shape in (SHAPES[0], ("forward_masked", f"{SHAPE},seqlen=64,bias=additive"))
    )
    assert is_served(plain)
    assert not is_served(masked)
    with pytest.raises(FlashtuneError, match="no selection here"):
        package_files([])
