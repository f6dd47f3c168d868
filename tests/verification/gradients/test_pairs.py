"""Tests of pairs of sequences and KV heads: selected tensors with and without lookup."""

import pytest
import torch

from flashtune import testing
from flashtune.verification.gradients.head_sampling import Pairs

PROBLEM = testing.problem("heads=6,kv_heads=2,seqlen_q=4,seqlen_kv=5,head_dim=8,dtype=bf16,batch=3")
EVERY = torch.arange(6)


def pairs_of(number: torch.Tensor) -> Pairs:
    return Pairs(number // 2, number % 2)


@pytest.mark.parametrize("rows", [(), (4,), (4, 7)], ids=str)
def test_all_pairs_match_single_lookups(rows: tuple[int, ...]) -> None:
    every = pairs_of(EVERY)
    assert every.are_all(PROBLEM)
    queries, keys = torch.randn(3, 6, *rows), torch.randn(3, 2, *rows)
    for number in range(6):
        pair = pairs_of(EVERY[number : number + 1])
        assert not pair.are_all(PROBLEM)
        sequence, head = divmod(number, 2)
        shared = queries[sequence, 3 * head : 3 * head + 3]
        assert torch.equal(every.of_queries(PROBLEM, queries)[number], shared)
        assert torch.equal(pair.of_queries(PROBLEM, queries)[0], shared)
        assert torch.equal(every.of_keys(PROBLEM, keys)[number], keys[sequence, head])
        assert torch.equal(pair.of_keys(PROBLEM, keys)[0], keys[sequence, head])


@pytest.mark.parametrize("numbers", [(2, 3, 4), (0, 1), (0, 5), (1, 3, 4), (4, 3)], ids=str)
def test_some_pairs_match_single_lookups(numbers: tuple[int, ...]) -> None:
    some = pairs_of(torch.tensor(numbers))
    assert not some.are_all(PROBLEM)
    queries, keys = torch.randn(3, 6, 4, 7), torch.randn(3, 2, 5, 7)
    heads = some.numbers(PROBLEM)
    assert torch.equal(some.of_queries(PROBLEM, queries), queries.flatten(0, 1)[heads])
    assert torch.equal(some.of_queries(PROBLEM, queries, EVERY[1:3]), queries.flatten(0, 1)[heads][:, :, 1:3])
    assert torch.equal(some.of_keys(PROBLEM, keys), keys.flatten(0, 1)[list(numbers)])


def test_pairs_in_another_order_are_looked_up() -> None:
    turned = pairs_of(EVERY.flip(0))
    assert not turned.are_all(PROBLEM)
    keys = torch.randn(3, 2, 4)
    assert torch.equal(turned.of_keys(PROBLEM, keys), keys.flatten(0, 1).flip(0))


def test_heads_are_numbered_through_all_sequences() -> None:
    assert torch.equal(pairs_of(EVERY).numbers(PROBLEM).flatten(), torch.arange(18))
