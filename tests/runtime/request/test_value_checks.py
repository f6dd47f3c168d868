"""Tests that lengths, offsets, block tables and slots out of bounds are refused."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.errors import ProblemError
from flashtune.dispatch.platform import Platform
from flashtune.kv_cache.cache import PagedKVCache
from flashtune.request.call import Call, dense_call, paged_call, varlen_call
from flashtune.request.read_call import read_call
from flashtune.runtime.call_cache import run_call
from flashtune.runtime.value_checks import values_are_checked, with_checks
from tests.problems.features import KEYS, QUERIES, paged, starts
from tests.runtime.request.arguments import paged_arguments, varlen_arguments

INT = torch.int32
HEADS, WIDTH = 4, 32
DOUBLE = torch.float64


def with_value(tensor: Tensor, index: int | tuple[int, int], value: int) -> Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


def varlen(**changes: Any) -> Call:
    return varlen_call(return_lse=False, **varlen_arguments(**changes))


def pages(**changes: Any) -> Call:
    return paged_call(return_lse=False, **paged_arguments(**changes))


def dense(**changes: Any) -> Call:
    q = torch.randn(2, HEADS, 5, WIDTH, dtype=DOUBLE)
    return dense_call(q, q, q, return_lse=False, **changes)


TABLE, LENGTHS = paged()[2:]
REFUSED: list[tuple[Callable[[], Call], str]] = [
    (
        lambda: varlen(cu_seqlens_q=starts(QUERIES) + 1),
        r"^cu_seqlens_q\[0\] is 1: pass 0, where the first sequence begins$",
    ),
    (
        lambda: varlen(cu_seqlens_q=with_value(starts(QUERIES), 2, 9)),
        r"^cu_seqlens_q\[3\] is 6 and less than the entry before it",
    ),
    (
        lambda: varlen(cu_seqlens_k=with_value(starts(KEYS), -1, 102)),
        r"^cu_seqlens_k ends at 102 and k has 101 tokens",
    ),
    (
        lambda: varlen(cu_seqlens_k=with_value(with_value(starts(KEYS), -2, 2**31 - 1), -1, -(2**31))),
        r"^cu_seqlens_k\[5\] is -2147483648 and less than",
    ),
    (
        lambda: varlen(max_seqlen_q=8),
        r"^sequence 3 has 16 tokens by cu_seqlens_q and max_seqlen_q is at most 8",
    ),
    (lambda: varlen(prefix_lengths=torch.arange(5, dtype=INT) - 1), r"^prefix_lengths\[0\] is -1: pass 0"),
    (
        lambda: pages(kv_lengths=LENGTHS + 9),
        r"^kv_lengths\[0\] is 49 and a row of block_table has room for 48 keys: pass lengths from 0 to 48$",
    ),
    (
        lambda: pages(kv_lengths=with_value(LENGTHS, 2, -1)),
        r"^kv_lengths\[2\] is -1 and a row of block_table",
    ),
    (
        lambda: pages(block_table=with_value(TABLE, (1, 0), -1)),
        r"^block_table\[1, 0\] is -1 and the cache has 9 pages: pass the pages of sequence 1$",
    ),
    (
        lambda: pages(block_table=with_value(TABLE, (3, 1), 9)),
        r"^block_table\[3, 1\] is 9 and the cache has 9",
    ),
    (
        lambda: dense(kv_lengths=torch.tensor([5, 6], dtype=INT)),
        r"^kv_lengths\[1\] is 6 and k has room for 5 keys",
    ),
    (lambda: dense(kv_lengths=torch.tensor([-1, 5], dtype=INT)), r"^kv_lengths\[0\] is -1 and k has room"),
]


@pytest.mark.parametrize(("make", "sentence"), REFUSED, ids=[sentence[1:34] for _, sentence in REFUSED])
def test_values_beyond_the_tensors_are_refused_on_the_cpu(make: Callable[[], Call], sentence: str) -> None:
    call = make()
    with pytest.raises(ProblemError, match=sentence):
        serve(call)


@pytest.mark.parametrize("make", [varlen, pages, dense])
def test_valid_values_are_accepted(make: Callable[[], Call]) -> None:
    assert serve(make()).isfinite().all()


def server(*_: object) -> Tensor:
    return torch.zeros(())


def serve(call: Call) -> Tensor:
    result = run_call(call)
    assert isinstance(result, Tensor)
    return result


def test_a_plan_checks_the_values_of_each_call() -> None:
    cache = paged()
    q = torch.randn(len(KEYS), HEADS, WIDTH, dtype=DOUBLE)
    tensors = q, cache.k_cache.double(), cache.v_cache.double()
    plan = flashtune.plan_paged(*tensors, TABLE, LENGTHS)
    assert plan(*tensors, TABLE, LENGTHS).shape == q.shape
    with pytest.raises(ProblemError, match=r"kv_lengths\[0\] is 1040"):
        plan(*tensors, TABLE, LENGTHS + 1000)


def test_entries_after_the_last_page_are_not_checked() -> None:
    table = torch.cat([TABLE, torch.full((len(KEYS), 3), -7, dtype=INT)], 1)
    assert torch.equal(serve(pages(block_table=table, q=QUERY)), serve(pages(q=QUERY)))


QUERY = torch.randn(len(KEYS), HEADS, WIDTH, dtype=DOUBLE)


def test_values_on_a_gpu_are_checked_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for value, expected in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("FLASHTUNE_CHECK", value)
        assert values_are_checked(gpu) is expected
        assert values_are_checked(torch.device("cpu"))
    monkeypatch.delenv("FLASHTUNE_CHECK")
    assert not values_are_checked(gpu)


def test_executor_is_not_wrapped_without_value_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    request = read_call(pages())
    on_gpu = msgspec.structs.replace(request, device=torch.device("cuda", 0))
    monkeypatch.delenv("FLASHTUNE_CHECK", raising=False)
    assert with_checks(server, on_gpu) is server
    monkeypatch.setenv("FLASHTUNE_CHECK", "1")
    checked = with_checks(server, on_gpu)
    assert checked is not server
    call = pages(kv_lengths=LENGTHS + 9)
    with pytest.raises(ProblemError, match=r"kv_lengths\[0\] is 49"):
        checked(call.q, call.k, call.v, None, call.side)
    plain = read_call(dense(window=(2, 0)))
    assert with_checks(server, plain) is server, "there is no value to check"


class Capturing(Platform):
    def is_capturing(self, device: torch.device) -> bool:
        return True


def test_values_are_not_read_during_graph_capture() -> None:
    call = pages(kv_lengths=LENGTHS + 9)
    checked = with_checks(server, read_call(call), Capturing())
    assert torch.equal(checked(call.q, call.k, call.v, None, call.side), torch.zeros(()))  # type: ignore[arg-type]


def test_slots_beyond_the_pages_are_refused() -> None:
    cache = PagedKVCache(2, 16, 1, 8, dtype=torch.float32, device="cpu")
    rows = torch.ones(3, 1, 8)
    for slots, sentence in (
        ([0, 32, 1], r"^slots\[1\] is 32 and the cache has 32 rows: pass slots as"),
        ([7, 5, 7], r"^slots\[0\] and slots\[2\] are both 7: pass each slot once$"),
    ):
        with pytest.raises(ProblemError, match=sentence):
            cache.append(rows, rows, torch.tensor(slots))
    assert not cache.keys.any()
    cache.append(rows, rows, torch.tensor([-1, -1, 31]))
    assert cache.keys.sum() == 8


def test_a_cache_without_pages_is_refused() -> None:
    empty = torch.zeros(0, 16, 2, WIDTH, dtype=DOUBLE)
    with pytest.raises(ProblemError, match="k_cache has no pages and block_table names some: pass the whole"):
        serve(pages(k_cache=empty, v_cache=empty))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_queries_with_swapped_dimensions_are_refused(dtype: torch.dtype) -> None:
    q = torch.randn(HEADS, sum(QUERIES) - 1, WIDTH, dtype=dtype)
    k = torch.randn(sum(KEYS), 2, WIDTH, dtype=dtype)
    sentence = r"max_seqlen_q is 16 and q has 4 tokens: pass q as \[tokens, heads, head_dim\]"
    lengths = starts(QUERIES), starts(KEYS), max(QUERIES), max(KEYS)
    with pytest.raises(ProblemError, match=sentence):
        flashtune.attention_varlen(q, k, k, *lengths)
    cache = paged()
    with pytest.raises(ProblemError, match=sentence):
        flashtune.attention_paged(q, *cache, cu_seqlens_q=starts(QUERIES), max_seqlen_q=16)


def test_plan_repr_describes_the_problem() -> None:
    q = torch.randn(2, HEADS, 5, WIDTH, dtype=DOUBLE)
    assert repr(flashtune.plan(q, q, q, causal=True, scale=0.5)) == (
        "flashtune.plan('heads=4,kv_heads=4,seqlen=5,head_dim=32,dtype=fp32,causal,batch=2', layout='bhsd', "
        "device='cpu', prefer='fastest', scale=0.5)"
    )
    window = flashtune.plan(q, q, q, window=(2, 0), return_lse=True)
    assert "window=2" in repr(window)
    assert repr(window).endswith("return_lse=True)")
    k, v, table, lengths = paged()
    plan = flashtune.plan_paged(QUERY, k.double(), v.double(), table, lengths, shared_prefix=0)
    assert repr(plan).startswith("flashtune.plan_paged('heads=4,kv_heads=2,seqlen_q=1,seqlen_kv=64,")
    assert "page_size=16" in repr(plan)
