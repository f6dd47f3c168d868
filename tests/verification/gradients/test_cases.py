"""Tests of the test cases of backward kernels, and of sliced references."""

import pytest
import torch
from torch import Tensor

from flashtune import testing
from flashtune.core.features.records import NO_EXTRA_INPUTS
from flashtune.core.problem import Causal, Dtype
from flashtune.verification.cases import Level
from flashtune.verification.gradients.cases import RACE_REPEATS, companions, main_cases, tiles_of
from flashtune.verification.gradients.head_sampling import Pairs, pieces, sample_pairs
from flashtune.verification.gradients.inputs import make_dout
from flashtune.verification.gradients.reference import Chosen, expect_gradients
from flashtune.verification.gradients.scores import BackwardCase
from flashtune.verification.lengths import equal_lengths
from flashtune.verification.probes import Probe
from flashtune.verification.reference import scores
from flashtune.verification.shapes import ROUNDS
from tests.verification.gradients.checking import a_problem
from tests.verification.gradients.plain_kernel import TwoTiles


def test_problems_cover_tile_bounds_of_both_kernels() -> None:
    config = TwoTiles(block_m=32, block_n=64, dq_block_m=128, dq_block_n=16, num_stages=2)
    tiles = tiles_of(config, reduced=False)
    assert (tiles.queries, tiles.keys, tiles.depth, tiles.least) == ((32, 128), (16, 64), 2, 16)
    cases = companions(a_problem(), config, Level.FULL, reduced=False)
    queries, keys = {case.problem.seqlen_q for case in cases}, {case.problem.seqlen_kv for case in cases}
    for sides, lengths in ((tiles.queries, queries), (tiles.keys, keys)):
        around = {multiple * side + step for side in sides for multiple in range(1, 5) for step in (-1, 0, 1)}
        assert around <= lengths
    assert {case.problem.group_size for case in cases} >= {1, 2, 3, 13}
    assert {case.problem.causal for case in cases} == {Causal.BOTTOM_RIGHT}
    quick = companions(a_problem(), config, Level.QUICK, reduced=False)
    assert len(quick) < 20
    assert {case.probe for case in quick} == {case.probe for case in cases} - {Probe.FIRST}


@pytest.mark.parametrize("alibi", [False, True])
def test_problems_of_many_tiles_are_repeated_except_in_self_checks(alibi: bool) -> None:
    config = TwoTiles(block_m=32, block_n=64, dq_block_m=128, dq_block_n=16, num_stages=2)
    full, quick = (
        companions(a_problem(alibi=alibi), config, level, reduced=False)
        for level in (Level.FULL, Level.QUICK)
    )
    often = [case for case in full if case.repeats == RACE_REPEATS]
    assert len(often) == 2 * len(ROUNDS)
    assert all(case.problem.batch * case.problem.heads >= 65 for case in often)
    assert max(case.repeats for case in quick) < RACE_REPEATS


@pytest.mark.parametrize("probe", [Probe.NEEDLE, Probe.FIRST, Probe.LAST])
def test_each_query_block_has_one_row_of_large_gradients(probe: Probe) -> None:
    problem, block = a_problem(seqlen_q=70), 16
    dout = make_dout(probe, problem, block, torch.Generator().manual_seed(1))
    for start in range(0, 70, block):
        hot = (dout[:, :, start : start + block].abs() == 8.0).sum((2, 3))
        assert (hot == 1).all()


def test_large_problems_have_fewer_kv_heads() -> None:
    small = a_problem(heads=16, kv_heads=2, seqlen_q=2048, seqlen_kv=2048)
    assert [case.problem for case in main_cases(small)] == [small, small]
    for case in main_cases(a_problem(heads=16, kv_heads=2, seqlen_q=16384, seqlen_kv=16384)):
        assert (case.problem.heads, case.problem.kv_heads) == (8, 2)


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.TOP_LEFT])
def test_sliced_reference_has_the_same_gradients(monkeypatch: pytest.MonkeyPatch, causal: Causal) -> None:
    problem = a_problem(dtype=Dtype.FP16, causal=causal, batch=2, alibi=True)
    generator = torch.Generator().manual_seed(2)

    def drawn(heads: int, rows: int, width: int) -> Tensor:
        return torch.randn(2, heads, rows, width, generator=generator).half()

    q, k, v, dout = drawn(4, 100, 32), drawn(2, 100, 32), drawn(2, 100, 24), drawn(4, 100, 24)
    side = NO_EXTRA_INPUTS._replace(slopes=torch.rand(2, 4, generator=generator))
    case = BackwardCase(q, k, v, dout, None, side, 0.2, equal_lengths(problem))
    chosen = Chosen(sample_pairs(problem, generator), torch.arange(100))
    whole = expect_gradients(problem, case, chosen)
    monkeypatch.setitem(scores.CHUNK_SCORES, "cpu", 3000)
    assert [len(piece.rows) for piece in pieces(problem, chosen.pairs, "cpu")] == [7] * 4
    sliced = expect_gradients(problem, case, chosen)
    torch.testing.assert_close(sliced.lse, whole.lse)
    for name, gradient in whole.gradients.items():
        for part, other in zip(gradient, sliced.gradients[name], strict=True):
            torch.testing.assert_close(part, other, rtol=1e-9, atol=1e-12)


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
        one = pairs_of(EVERY[number : number + 1])
        assert not one.are_all(PROBLEM)
        sequence, head = divmod(number, 2)
        shared = queries[sequence, 3 * head : 3 * head + 3]
        assert torch.equal(every.of_queries(PROBLEM, queries)[number], shared)
        assert torch.equal(one.of_queries(PROBLEM, queries)[0], shared)
        assert torch.equal(every.of_keys(PROBLEM, keys)[number], keys[sequence, head])
        assert torch.equal(one.of_keys(PROBLEM, keys)[0], keys[sequence, head])


@pytest.mark.parametrize("numbers", [(2, 3, 4), (0, 1), (0, 5), (1, 3, 4), (4, 3)], ids=str)
def test_some_pairs_match_single_lookups(numbers: tuple[int, ...]) -> None:
    some = pairs_of(torch.tensor(numbers))
    assert not some.are_all(PROBLEM)
    queries, keys = torch.randn(3, 6, 4, 7), torch.randn(3, 2, 5, 7)
    heads = some.numbers(PROBLEM)
    assert torch.equal(some.of_queries(PROBLEM, queries), queries.flatten(0, 1)[heads])
    assert torch.equal(some.of_queries(PROBLEM, queries, EVERY[1:3]), queries.flatten(0, 1)[heads][:, :, 1:3])
    assert torch.equal(some.of_keys(PROBLEM, keys), keys.flatten(0, 1)[list(numbers)])
