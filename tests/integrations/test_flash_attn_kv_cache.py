"""Tests of `flash_attn_with_kvcache` of versions 2 and 3, against loops in float64."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flashtune import ProblemError
from flashtune.integrations.flash_attn import UnsupportedError, flash_attn_3, flash_attn_with_kvcache
from flashtune.integrations.flash_attn.cache import Cache, append, kernel_pages
from tests.integrations.test_flash_attn_2 import close, numbers, starts, with_infinity
from tests.support.flash_attn_reference import Rule, one_sequence, rotated_by_pairs

pytestmark = pytest.mark.slow

version_3: Any = flash_attn_3
HEADS, KV_HEADS, WIDTH = 4, 2, 16
LENGTHS = [5, 0, 11]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Stored:
    """A cache of three sequences with space for 32 tokens, and the tokens that it holds."""

    def __init__(self, page: int | None, has_index: bool) -> None:
        generator = torch.Generator().manual_seed(3)
        self.index = torch.tensor([4, 1, 2], dtype=torch.int32) if has_index else None
        rows = 5 if has_index else 3
        self.page = 32 if page is None else page
        columns = 32 // self.page
        order = torch.randperm(rows * columns, generator=generator) if page else torch.arange(rows)
        table = order.view(rows, columns)
        self.k = numbers(rows * columns, self.page, KV_HEADS, WIDTH)
        self.v = numbers(rows * columns, self.page, KV_HEADS, WIDTH, seed=1)
        self.table = table.int() if page else None
        self.pages = table if self.index is None else table[self.index.long()]

    def tokens(self, stored: Tensor, sequence: int) -> Tensor:
        """Returns the tokens of a sequence, [32, heads, width]."""
        return stored[self.pages[sequence]].flatten(0, 1)


class Angles(NamedTuple):
    """A rotary embedding: in which order pairs are, and the position of each sequence's first new token."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    first: list[int]


def expected_results(
    stored: Stored,
    q: list[Tensor],
    new: list[tuple[Tensor, Tensor]],
    rule: Rule,
    skipped: list[int],
    angles: Angles | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns packed outputs and log-sum-exps, and the keys of each sequence after the call."""
    outs, sums, caches = [], [], []
    for b, length in enumerate(LENGTHS):
        own_q, (own_k, own_v) = q[b].double(), new[b]
        if angles is not None:
            cos, sin, interleaved, first = angles
            turned = [
                rotated_by_pairs(row, cos, sin, first[b] + i, interleaved) for i, row in enumerate(own_k)
            ]
            own_k = torch.stack(turned) if turned else own_k
            is_positional = rule.causal or rule.left is not None or rule.right is not None
            own_q = torch.stack(
                [
                    rotated_by_pairs(row, cos, sin, first[b] + (i if is_positional else 0), interleaved)
                    for i, row in enumerate(own_q)
                ]
            )
        k, v = stored.tokens(stored.k, b).clone(), stored.tokens(stored.v, b).clone()
        end = length + len(own_k)
        k[length:end], v[length:end] = own_k, own_v
        out, lse = one_sequence(own_q, k[skipped[b] : end], v[skipped[b] : end], rule)
        outs.append(out)
        sums.append(lse)
        caches.append(k)
    return torch.cat(outs), torch.cat(sums, 1), caches


def call(
    stored: Stored,
    q: Tensor,
    new: tuple[Tensor, Tensor],
    skipped: list[int] | None,
    angles: Angles | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Returns the output and the log-sum-exp of a call that appends to a cache."""
    if angles is not None:
        options |= {
            "rotary_cos": angles.cos,
            "rotary_sin": angles.sin,
            "rotary_interleaved": angles.interleaved,
        }
    out, lse = version_3.flash_attn_with_kvcache(
        *(q, stored.k, stored.v, *new),
        cache_seqlens=int32(LENGTHS),
        cache_batch_idx=stored.index,
        cache_leftpad=None if skipped is None else int32(skipped),
        page_table=stored.table,
        return_softmax_lse=True,
        **options,
    )
    return out, lse


RULES: list[tuple[dict[str, Any], Rule]] = [
    ({}, Rule()),
    ({"causal": True}, Rule(causal=True)),
    ({"window_size": (4, 1), "softcap": 3.0}, Rule(left=4, right=1, softcap=3.0)),
]


@pytest.mark.parametrize(("options", "rule"), RULES)
@pytest.mark.parametrize("page", [None, 1, 32])
@pytest.mark.parametrize(("has_index", "skipped"), [(False, None), (True, [2, 0, 7])])
@pytest.mark.parametrize("rotary", [None, "pairs", "halves"])
def test_appended_tokens_and_outputs_equal_the_reference(
    options: dict[str, Any],
    rule: Rule,
    page: int | None,
    has_index: bool,
    skipped: list[int] | None,
    rotary: str | None,
) -> None:
    stored = Stored(page, has_index)
    q, angle = numbers(3, 2, HEADS, WIDTH), numbers(40, 4)
    new = numbers(3, 3, KV_HEADS, WIDTH), numbers(3, 3, KV_HEADS, WIDTH, seed=1)
    angles = None if rotary is None else Angles(angle.cos(), angle.sin(), rotary == "pairs", LENGTHS)
    expected, expected_lse, caches = expected_results(
        stored, list(q), list(zip(*new, strict=True)), rule, skipped or [0, 0, 0], angles
    )
    out, lse = call(stored, q, new, skipped, angles, num_splits=3, **options)
    assert close(out.flatten(0, 1), expected)
    assert close(lse.transpose(0, 1).flatten(1), expected_lse)
    for b, keys in enumerate(caches):
        assert close(stored.tokens(stored.k, b), keys)


@pytest.mark.parametrize("page", [None, 4, 16])
@pytest.mark.parametrize("skipped", [None, [2, 0, 7]])
@pytest.mark.parametrize("has_rotary_lengths", [False, True])
def test_packed_queries_and_packed_new_tokens(
    page: int | None, skipped: list[int] | None, has_rotary_lengths: bool
) -> None:
    stored = Stored(page, has_index=True)
    lengths_q, lengths_new = (2, 4, 1), (3, 0, 2)
    q, angle = numbers(7, HEADS, WIDTH), numbers(40, 8)
    new = numbers(5, KV_HEADS, WIDTH), numbers(5, KV_HEADS, WIDTH, seed=1)
    angles = Angles(angle.cos(), angle.sin(), False, [1, 2, 3] if has_rotary_lengths else LENGTHS)
    parts = list(zip(*(tensor.split(lengths_new) for tensor in new), strict=True))
    expected, expected_lse, caches = expected_results(
        stored, list(q.split(lengths_q)), parts, Rule(causal=True), skipped or [0, 0, 0], angles
    )
    out, lse = call(
        *(stored, q, new, skipped, angles),
        rotary_seqlens=int32(angles.first) if has_rotary_lengths else None,
        cu_seqlens_q=starts(lengths_q),
        cu_seqlens_k_new=starts(lengths_new),
        max_seqlen_q=4,
        causal=True,
    )
    assert close(out, expected)
    assert close(lse, expected_lse)
    for b, keys in enumerate(caches):
        assert close(stored.tokens(stored.k, b), keys)


def test_version_2_has_infinity_for_rows_without_keys_and_takes_numbers_as_lengths() -> None:
    stored = Stored(None, has_index=False)
    q = numbers(3, 2, HEADS, WIDTH)
    out, lse = flash_attn_with_kvcache(
        q, stored.k, stored.v, cache_seqlens=1, causal=True, return_softmax_lse=True
    )
    assert not out[:, 0].any()
    assert torch.equal(lse[:, :, 0], torch.full((3, HEADS), torch.inf, dtype=torch.float64))
    parts = [one_sequence(q[b], stored.k[b, :1], stored.v[b, :1], Rule(causal=True)) for b in range(3)]
    assert close(out, torch.stack([out for out, _ in parts]))
    assert close(lse, with_infinity(torch.stack([lse for _, lse in parts])))


def test_a_cache_without_lengths_is_full_and_may_have_more_sequences() -> None:
    stored = Stored(None, has_index=False)
    q = numbers(2, 2, HEADS, WIDTH)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0])
    out = flash_attn_with_kvcache(q, stored.k, stored.v, alibi_slopes=slopes)
    parts = [one_sequence(q[b], stored.k[b], stored.v[b], Rule(slopes=slopes)) for b in range(2)]
    assert close(out, torch.stack([out for out, _ in parts]))


def test_new_tokens_are_written_through_the_strides_of_a_view() -> None:
    whole = torch.zeros(2, KV_HEADS, 8, 2, WIDTH, dtype=torch.float64)
    k_cache, v_cache = (part.transpose(1, 2) for part in whole.unbind(3))
    k, v = numbers(2, 1, KV_HEADS, WIDTH), numbers(2, 1, KV_HEADS, WIDTH, seed=1)
    lengths = torch.tensor([2, 7], dtype=torch.int32)
    flash_attn_with_kvcache(numbers(2, 1, HEADS, WIDTH), k_cache, v_cache, k, v, cache_seqlens=lengths)
    assert torch.equal(whole[0, :, 2, 0], k[0, 0])
    assert torch.equal(whole[1, :, 7, 1], v[1, 0])
    assert int((whole != 0).sum()) == 2 * 2 * KV_HEADS * WIDTH


def test_packed_new_tokens_behind_the_last_sequence_are_not_written() -> None:
    stored = Stored(None, has_index=False)
    before = stored.k.clone()
    k = numbers(4, KV_HEADS, WIDTH)
    common: dict[str, Any] = {
        "cache_seqlens": int32(LENGTHS),
        "cu_seqlens_q": starts((1, 1, 1)),
        "max_seqlen_q": 1,
    }
    q = numbers(3, HEADS, WIDTH)
    empty = starts((0, 0, 0))
    version_3.flash_attn_with_kvcache(q, stored.k, stored.v, k, k, cu_seqlens_k_new=empty, **common)
    assert torch.equal(stored.k, before)
    version_3.flash_attn_with_kvcache(
        q, stored.k, stored.v, k, k, cu_seqlens_k_new=starts((0, 2, 0)), **common
    )
    before[1, :2] = k[:2]
    assert torch.equal(stored.k, before)


def test_more_keys_than_pages_raise_a_runtime_error_as_in_flash_attn() -> None:
    stored = Stored(16, has_index=False)
    lengths = torch.tensor([33, 1, 1], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="block_table"):
        flash_attn_with_kvcache(
            numbers(3, 1, HEADS, WIDTH), stored.k, stored.v, cache_seqlens=lengths, block_table=stored.table
        )


def test_incomplete_arguments_raise_one_sentence() -> None:
    stored = Stored(None, has_index=False)
    q, k = numbers(3, 1, HEADS, WIDTH), numbers(3, 1, KV_HEADS, WIDTH)
    with pytest.raises(ProblemError, match="only one of new keys and new values"):
        flash_attn_with_kvcache(q, stored.k, stored.v, k, cache_seqlens=1)
    with pytest.raises(ProblemError, match="without cache_seqlens"):
        flash_attn_with_kvcache(q, stored.k, stored.v, k, k)
    with pytest.raises(ProblemError, match="rotary_cos is given without new keys"):
        flash_attn_with_kvcache(q, stored.k, stored.v, rotary_cos=k, rotary_sin=k, cache_seqlens=1)
    out = flash_attn_with_kvcache(q.requires_grad_(), stored.k, stored.v, cache_seqlens=3)
    with pytest.raises(UnsupportedError, match="no backward pass for a KV cache"):
        out.sum().backward()


@pytest.mark.parametrize(("size", "pages"), [(16, 16), (24, 8), (4, 4), (5, 1), (512, 256), (0, None)])
def test_kernels_read_pages_of_any_size(size: int, pages: int | None) -> None:
    k = torch.zeros(3, size, 1, 8)
    cache = Cache(k, k, torch.zeros(2, 3, dtype=torch.int32))
    pool = kernel_pages(cache)
    assert (None if pool is None else pool.page_size) == pages
    assert pool is None or pool.capacity == cache.capacity


@pytest.mark.parametrize("length", [32, 28, -3])
def test_new_tokens_that_do_not_fit_are_refused_where_values_are_checked(length: int) -> None:
    memory = torch.full((2, 40, KV_HEADS, WIDTH), 7.0)
    k, v, new = memory[:, :32], torch.zeros(2, 32, KV_HEADS, WIDTH), numbers(2, 8, KV_HEADS, WIDTH)
    lengths = torch.tensor([3, length], dtype=torch.int32)
    for counts in (lengths, length):
        with pytest.raises(
            ProblemError, match=f"is {length}, with 8 new tokens, and the cache has room for 32"
        ):
            flash_attn_with_kvcache(
                numbers(2, 8, HEADS, WIDTH), k, v, new, new, cache_seqlens=counts, causal=True
            )
    more = numbers(2, 40, KV_HEADS, WIDTH)
    with pytest.raises(ProblemError, match="k has 40 new tokens"):
        flash_attn_with_kvcache(more, k, v, more, more, cache_seqlens=lengths)
    assert (memory == 7).all()


@pytest.mark.parametrize("is_packed", [False, True])
def test_new_tokens_that_do_not_fit_are_dropped_elsewhere(is_packed: bool) -> None:
    memory = torch.full((7, 4, KV_HEADS, WIDTH), 7.0)
    # The second sequence has a page that does not exist, the third and the fourth one have too little room.
    table = torch.tensor([[0, 1], [2, 9], [3, 4], [5, 0]], dtype=torch.int32)
    lengths, new = torch.tensor([2, 3, 7, -1], dtype=torch.int32), numbers(4, 3, KV_HEADS, WIDTH)
    cache = Cache(memory[:6], memory[:6].clone(), table)
    if is_packed:
        ends = torch.arange(5, dtype=torch.int32) * 3
        append(cache, new.flatten(0, 1), new.flatten(0, 1), lengths, ends)
    else:
        append(cache, new, new, lengths, None)
    right = torch.full_like(memory, 7.0)
    right[0, 2:], right[1, 0], right[2, 3], right[4, 3] = new[0, :2], new[0, 2], new[1, 0], new[2, 0]
    right[5, :2] = new[3, 1:]
    assert torch.equal(memory, right)
