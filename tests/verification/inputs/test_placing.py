"""Tests of the placement of values, their surroundings, and the lengths of tuned shapes."""

import functools
from typing import Any

import pytest
import torch

from flashtune import testing
from flashtune.core.kernel import Alignment, specialization_of
from flashtune.core.layouts import DENSE_LAYOUTS, Layout
from flashtune.core.problem import KvDtype, KvScale
from flashtune.verification.cases import Case
from flashtune.verification.inputs.guarded_tensors import stray_writes
from flashtune.verification.inputs.memory import Memory
from flashtune.verification.inputs.placement import FAULTY_ENTRIES, excused, starts
from flashtune.verification.inputs.prepared import ROWS_AFTER, prepare
from flashtune.verification.lengths import Lengths, usual_lengths
from flashtune.verification.probes import Probe
from flashtune.verification.tolerance import worst_ratio

CPU = torch.device("cpu")
a_problem = functools.partial(
    testing.problem,
    "heads=4,kv_heads=2,seqlen_q=7,seqlen_kv=48,head_dim=24,value_head_dim=16,dtype=bf16,causal,batch=3",
)


def ready(alignment: Alignment = Alignment.EIGHT, layout: Layout = Layout.BSHD, **fields: Any) -> Memory:
    faulty = fields.pop("faulty", False)
    lengths = Lengths((7, 0, 3) if "packed" in fields else (7, 7, 7), (33, 0, 16))
    problem = a_problem(**fields)
    case = Case(
        problem=problem,
        probe=Probe.RANDOM,
        block=16,
        scale=0.2,
        layout=layout,
        lengths=lengths,
        faulty=faulty,
    )
    return prepare(case, alignment, CPU, 1).memory


@pytest.mark.parametrize("layout", DENSE_LAYOUTS)
@pytest.mark.parametrize("kv_dtype", [None, KvDtype.E4M3, KvDtype.INT8])
def test_unused_pages_are_poisoned(layout: Layout, kv_dtype: KvDtype | None) -> None:
    prepared = ready(layout=layout, page_size=16, kv_dtype=kv_dtype, kv_scale=KvScale.PAGE)
    table, pool = prepared.side.block_table, prepared.k.view
    assert table is not None
    used = {int(page): rows for page, rows in zip([*table[0, :3], table[2, 0]], (16, 16, 1, 16), strict=True)}
    for page in range(len(pool)):
        rest = pool[page, :, used.get(page, 0) :]
        if kv_dtype is KvDtype.INT8:
            assert (rest == 127).all()
        else:
            assert rest.float().isnan().all()
        assert pool[page, :, : used.get(page, 0)].float().isfinite().all()
    if prepared.side.k_scale is not None:
        unused = [page for page in range(len(pool)) if page not in used]
        assert prepared.side.k_scale[unused].isnan().all()
        assert (prepared.side.k_scale[list(used)] > 0).all()


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("kv_scale", [KvScale.HEAD, KvScale.PAGE])
def test_scales_of_keys_and_values_have_different_strides(page_size: int, kv_scale: KvScale) -> None:
    side = ready(kv_dtype=KvDtype.INT8, kv_scale=kv_scale, page_size=page_size).side
    assert side.k_scale is not None
    assert side.v_scale is not None
    assert side.k_scale.shape == side.v_scale.shape
    rows = kv_scale is KvScale.PAGE
    strides = zip(side.k_scale.stride(), side.v_scale.stride(), strict=True)
    assert [stride != other for stride, other in strides] == [rows, True]


def test_unused_table_entries_are_poisoned_or_invalid_pages() -> None:
    table = ready(page_size=16).side.block_table
    pool = ready(page_size=16).k
    assert table is not None
    beyond = {*table[1].tolist(), *table[2, 1:].tolist()}
    assert -1 in beyond
    assert len(pool.view) in beyond
    before = pool.view.storage_offset() - pool.view.stride(0)
    page = pool.view.as_strided(pool.view.shape[1:], pool.view.stride()[1:], before)
    assert page.isnan().all()
    faulty = ready(page_size=16, faulty=True).side.block_table
    assert faulty is not None
    assert set(faulty[1].tolist()) <= set(FAULTY_ENTRIES)


@pytest.mark.parametrize("fields", [{"packed": 10}, {"page_size": 16}, {"kv_lengths": True}, {}])
@pytest.mark.parametrize("alignment", list(Alignment))
def test_tensors_have_the_requested_alignment(alignment: Alignment, fields: dict[str, Any]) -> None:
    prepared = ready(alignment, **fields)
    views = tuple(tensor.view for tensor in (prepared.q, prepared.k, prepared.v, prepared.out))
    assert specialization_of(views, lse=True).alignment is alignment


def test_packed_rows_are_contiguous() -> None:
    prepared = ready(packed=10)
    assert prepared.q.view.shape == (1, 4, 10, 24)
    assert prepared.k.view.shape == (1, 2, 49, 24)
    assert prepared.lse.view.shape == (1, 4, 10)
    assert prepared.side.cu_seqlens_q is not None
    assert prepared.side.cu_seqlens_q.tolist() == starts((7, 0, 3)).tolist() == [0, 7, 7, 10]
    around = prepared.side.cu_seqlens_q.as_strided(
        (6,), (1,), prepared.side.cu_seqlens_q.storage_offset() - 1
    )
    assert around[0] == around[-1] > 10


def test_keys_after_a_length_are_poisoned() -> None:
    prepared = ready(kv_lengths=True)
    assert prepared.v.view[0, :, 33:].isnan().all()
    assert prepared.v.view[1].isnan().all()
    assert prepared.v.view[2, :, :16].isfinite().all()


def test_latent_values_are_the_first_key_columns() -> None:
    prepared = ready(page_size=16, mla=True, kv_heads=1)
    assert prepared.v.view.data_ptr() == prepared.k.view.data_ptr()
    assert prepared.v.view.stride() == prepared.k.view.stride()


def test_lengths_of_tuned_shapes_have_the_total_and_maximum() -> None:
    packed = a_problem(batch=64, seqlen_q=16384, seqlen_kv=16384, packed=2**18)
    lengths = usual_lengths(packed)
    assert lengths == usual_lengths(packed)
    assert lengths.total_q == 2**18
    assert max(lengths.queries) == 16384
    assert lengths.keys == lengths.queries
    assert min(lengths.queries) < 16384 / 8
    decoding = usual_lengths(a_problem(batch=8, seqlen_q=1, seqlen_kv=4096, page_size=16))
    assert decoding.queries == (1,) * 8
    assert max(decoding.keys) == 4096
    assert min(decoding.keys) >= 2048
    crowded = usual_lengths(a_problem(batch=4, seqlen_q=8, packed=3))
    assert crowded.queries == (8, 1, 1, 1), "a sequence has a token at least, and the longest all of its own"


def test_packed_rows_after_the_last_sequence_are_guarded() -> None:
    prepared = ready(packed=10)
    assert prepared.q.view.shape[2] == prepared.out.view.shape[2] == prepared.lse.view.shape[2] == 10
    for tensor in (prepared.q, prepared.out, prepared.lse):
        assert tensor.given.shape[2] == 10 + ROWS_AFTER
        assert tensor.given.stride() == tensor.view.stride()
        assert (tensor.given[:, :, 10:].view(tensor.bits.dtype) == tensor.poison).all()
    assert prepared.lse.given.is_contiguous()
    assert int(stray_writes(prepared.out)) == 0
    prepared.out.given[0, 0, 10, 0] = 1.0
    assert int(stray_writes(prepared.out)) == 1


def test_missing_rows_accept_any_finite_value() -> None:
    exact = torch.zeros(1, 4, 2, dtype=torch.float64)
    absent = torch.tensor([[False, True, True, False]])
    allowed = excused(torch.full((1, 4), 0.5, dtype=torch.float64), absent)
    written = exact.clone()
    written[0, 1], written[0, 2] = 1e30, float("-inf")
    assert worst_ratio(written, exact, allowed) < 1e-9
    written[0, 3, 1] = 1.0
    assert worst_ratio(written, exact, allowed) == pytest.approx(2.0)
    written[0, 1, 0] = float("nan")
    assert worst_ratio(written, exact, allowed).isnan()


def test_tolerances_are_unchanged_without_missing_rows() -> None:
    allowed = torch.full((1, 4), 0.5)
    assert excused(allowed, None) is allowed
