"""Tests of the dispatcher of kernel packages, without kernels."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.core.errors import UsageError
from flashtune.tuner.tables import hub_dispatcher
from flashtune.tuner.tables.hub_dispatcher import Call, Entry
from flashtune.tuner.tables.hub_package import require_no_others

NO_WINDOW = (None, None)


def test_packed_sequences_with_groups_of_heads_use_no_new_parameter_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def varlen_attn(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts_q: Tensor,
        starts_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
    ) -> Tensor:
        assert window_size == (-1, 0)
        assert q.shape == k.shape == v.shape
        # Head 3 of the queries has the keys and values of head 1.
        assert torch.equal(k[:, 3], keys[:, 1])
        assert torch.equal(v[:, 3], values[:, 1])
        return v

    monkeypatch.setattr(hub_dispatcher, "varlen_attn", varlen_attn)
    q, keys, values = torch.randn(10, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)
    starts = torch.tensor([0, 10], dtype=torch.int32)
    inputs = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    first, two, three = (tensor.transpose(0, 1)[None] for tensor in (q, keys, values))
    call = Call(first, two, three, 1.0, True, NO_WINDOW, inputs, longest=(10, 10))
    out = hub_dispatcher._packed(call)
    assert out.shape == (1, 4, 10, 8)


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of the package serves a call."""
    monkeypatch.setattr(hub_dispatcher, "find", lambda _: None)


@pytest.fixture
def capture(no_kernel: None, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Whether a CUDA graph captures the calls."""
    fake = SimpleNamespace(is_active=False)
    monkeypatch.setattr(hub_dispatcher, "_is_captured", lambda _: fake.is_active)
    return fake


def found(q: Tensor, k: Tensor, monkeypatch: pytest.MonkeyPatch, **inputs: Any) -> Entry | None:
    call = Call(q, k, k, 1.0, False, NO_WINDOW, inputs)
    entry = Entry("kernel.py", "nvidia-h200", None, call.kind("none"), 1, [1, 1, 1])
    monkeypatch.setattr(hub_dispatcher, "entries", lambda: {entry.kind: [entry]})
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return hub_dispatcher.find(call)


def test_kernels_serve_only_strides_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, 2, 32, 16, device="meta")
    assert found(q, q, monkeypatch) is not None
    large = torch.empty(1, 2, 2**27, 16, device="meta")
    assert found(q, large, monkeypatch) is None
    assert found(q, q.mT.contiguous().mT, monkeypatch) is None


def test_sinks_that_require_grad_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 5, 2, 8)
    sinks = torch.zeros(2, requires_grad=True)
    monkeypatch.setattr(hub_dispatcher, "find", None)
    hub_dispatcher.flash_attn_func(q, q, q, s_aux=sinks).sum().backward()
    assert sinks.grad is not None
    assert sinks.grad.any()


PER_HEAD = torch.tensor([0.5, -1.0])
FEATURES: list[dict[str, Any]] = [{}, {"softcap": 2.0}, {"s_aux": PER_HEAD}, {"alibi_slopes": PER_HEAD.abs()}]


def cache_of(lengths: Tensor, table: Tensor | None) -> Tensor:
    """Returns a cache of 12 rows a sequence, or of 5 pages of 4. Rows after the lengths are NaN."""
    cache = torch.full((3, 12, 1, 8) if table is None else (5, 4, 1, 8), torch.nan)
    for sequence, length in enumerate(lengths.tolist()):
        for key in range(length):
            at = (sequence, key) if table is None else (int(table[sequence, key // 4]), key % 4)
            cache[at] = torch.randn(1, 8)
    return cache


@pytest.mark.filterwarnings("ignore:no kernel of this package")
@pytest.mark.parametrize("window", [(-1, -1), (5, 0)])
@pytest.mark.parametrize("features", FEATURES, ids=lambda features: "".join(features) or "plain")
@pytest.mark.parametrize("has_pages", [True, False])
def test_torch_computes_captured_calls_without_lengths_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
    capture: SimpleNamespace,
    window: tuple[int, int],
    features: dict[str, Any],
    has_pages: bool,
) -> None:
    q = torch.randn(3, 2, 2, 8)
    table = torch.tensor([[2, 0, 4], [1, -1, -1], [-1, -1, -1]], dtype=torch.int32) if has_pages else None
    lengths = torch.tensor([9, 1, 0], dtype=torch.int32)
    k, v = (cache_of(lengths, table) for _ in "kv")
    arguments: dict[str, Any] = {
        "cache_seqlens": lengths,
        "block_table": table,
        "causal": True,
        "window_size": window,
        **features,
    }
    expected = hub_dispatcher.flash_attn_with_kvcache(q, k, v, **arguments)
    capture.is_active = True
    monkeypatch.setattr(hub_dispatcher, "_rows", None)
    captured = hub_dispatcher.flash_attn_with_kvcache(q, k, v, **arguments)
    assert expected.isfinite().all()
    torch.testing.assert_close(captured, expected)


@pytest.mark.filterwarnings("ignore:no kernel of this package")
@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(("cache_seqlens", "lengths"), [(None, [8, 8]), (5, [5, 5])])
def test_all_sequences_may_have_one_length(cache_seqlens: int | None, lengths: list[int]) -> None:
    q, k, v = torch.randn(2, 1, 2, 8), torch.randn(4, 4, 1, 8), torch.randn(4, 4, 1, 8)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    out, expected = (
        hub_dispatcher.flash_attn_with_kvcache(q, k, v, cache_seqlens=argument, block_table=table)
        for argument in (cache_seqlens, torch.tensor(lengths, dtype=torch.int32))
    )
    assert torch.equal(out, expected)


@pytest.mark.filterwarnings("ignore:no kernel of this package")
@pytest.mark.parametrize("is_captured", [False, True])
def test_sequences_of_minus_one_keys_write_no_rows(capture: SimpleNamespace, is_captured: bool) -> None:
    capture.is_active = is_captured
    caches = [torch.zeros(5, 4, 1, 8) for _ in "kv"]
    q, k, v = (torch.randn(3, 1, heads, 8) for heads in (2, 1, 1))
    table = torch.tensor([[2, 0], [1, -1], [-1, -1]], dtype=torch.int32)
    lengths = torch.tensor([5, 3, -1], dtype=torch.int32)
    out = hub_dispatcher.flash_attn_with_kvcache(
        q, caches[0], caches[1], k, v, cache_seqlens=lengths, block_table=table, causal=True
    )
    for cache, rows in zip(caches, (k, v), strict=True):
        wanted = torch.zeros(5, 4, 1, 8)
        wanted[0, 1], wanted[1, 3] = rows[0, 0], rows[1, 0]
        assert torch.equal(cache, wanted)
    assert not out[2].any()


@pytest.mark.parametrize("has_pages", [False, True])
def test_rows_that_do_not_fit_a_cache_are_dropped(has_pages: bool) -> None:
    memory, rows = torch.zeros(4, 4, 1, 8), torch.randn(2, 3, 1, 8)
    table = torch.tensor([[2], [9]], dtype=torch.int32) if has_pages else None
    for lengths in ([2, 1], [4, 8]):
        hub_dispatcher._append((memory, memory), (rows, rows), torch.tensor(lengths), table)
    right = torch.zeros_like(memory)
    right[2 if has_pages else 0, 2:] = rows[0, :2]
    if not has_pages:
        right[1, 1:] = rows[1]
    assert torch.equal(memory, right)


@pytest.mark.filterwarnings("ignore:no kernel of this package")
def test_captured_packed_sequences_raise(capture: SimpleNamespace) -> None:
    capture.is_active = True
    q, starts = torch.randn(10, 2, 8), torch.tensor([0, 10], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="CUDA graph"):
        hub_dispatcher.flash_attn_varlen_func(q, q, q, starts, starts, 10, 10, softcap=1.0)


def test_folder_of_a_package_has_no_links_and_no_other_files(tmp_path: Path) -> None:
    paths = {"build/torch-cuda/kernels/one.py", "build/torch-cuda/__init__.py"}
    require_no_others(tmp_path, paths)
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "README.md").touch()
    require_no_others(tmp_path, paths)
    other = tmp_path / "build/torch-cuda/triton.py"
    other.touch()
    with pytest.raises(UsageError, match=r"triton\.py is not a file of this package"):
        require_no_others(tmp_path, paths)
    other.unlink()
    (tmp_path / "build/torch-cuda/__init__.py").unlink()
    (tmp_path / "build/torch-cuda/__init__.py").symlink_to(tmp_path / "README.md")
    with pytest.raises(UsageError, match=r"__init__\.py is not a file of this package"):
        require_no_others(tmp_path, paths)


def refused_calls() -> dict[str, Callable[[], object]]:
    q, cache, new = torch.rand(2, 1, 4, 16), torch.rand(2, 32, 2, 16), torch.rand(2, 1, 2, 16)
    packed, starts = torch.rand(64, 4, 16), torch.tensor([0, 10, 64], dtype=torch.int32)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    cached = functools.partial(hub_dispatcher.flash_attn_with_kvcache, q)
    full = torch.tensor([3, 32], dtype=torch.int32)
    exchanged = packed.transpose(0, 1)
    return {
        "divisor": lambda: hub_dispatcher.flash_attn_func(q, new[:, :, :1].expand(2, 1, 3, 16), q[:, :, :3]),
        "ends at 64": lambda: hub_dispatcher.flash_attn_varlen_func(
            exchanged, exchanged, exchanged, starts, starts, 54, 54
        ),
        "batch of 0": lambda: cached(cache[:0], cache[:0], cache_seqlens=3),
        "without pages": lambda: cached(cache[:0], cache[:0], cache_seqlens=3, block_table=table),
        "pass both": lambda: cached(cache, cache, new, cache_seqlens=3),
        "1 new keys do not fit": lambda: cached(cache, cache, new, new, cache_seqlens=full),
        "0 new keys do not fit": lambda: cached(cache, cache, cache_seqlens=33),
    }


@pytest.mark.parametrize("reason", refused_calls())
def test_sizes_that_do_not_fit_are_refused(reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        refused_calls()[reason]()


def test_the_warning_names_the_device_of_tensors_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = torch.randn(1, 4, 2, 16)
    hub_dispatcher._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="need a GPU of NVIDIA, and tensors are on cpu: torch computes it"):
        hub_dispatcher.flash_attn_func(q, q, q)
