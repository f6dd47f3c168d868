"""Tests of test inputs: alignment, poison and values."""

import itertools

import msgspec
import pytest
import torch

from flashtune import testing
from flashtune.core.config import Config
from flashtune.core.kernel import Alignment, specialization_of
from flashtune.core.layouts import DENSE_LAYOUTS, Layout
from flashtune.core.problem import Bias, Causal, Dtype, Problem
from flashtune.core.target import find_target
from flashtune.request.quantization import LARGEST, quantize
from flashtune.templates.registry import find_family
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.verification import probes
from flashtune.verification.cases import Case, Level, companions, far_cases, lengths_of, main_cases, tile_of
from flashtune.verification.inputs import guarded_tensors
from flashtune.verification.inputs.guarded_tensors import (
    Role,
    checksum,
    guarded,
    guarded_flat,
    poison,
    stray_writes,
)
from flashtune.verification.inputs.prepared import dense_values, prepare
from flashtune.verification.inputs.side_inputs import make_side
from flashtune.verification.lengths import equal_lengths
from flashtune.verification.probes import Probe, make_values
from tests.problems import hopper

CPU = torch.device("cpu")
FAMILY = find_family("forward_q_outer")


def make_problem(causal: Causal = Causal.BOTTOM_RIGHT, head_dim: int = 40) -> Problem:
    return testing.problem(
        "heads=4,kv_heads=2,seqlen=4096,head_dim=64,dtype=fp16", head_dim=head_dim, causal=causal
    )


def make_config(problem: Problem) -> Config:
    return FAMILY.default(problem, find_target("h200"))


@pytest.mark.parametrize("alignment", list(Alignment))
@pytest.mark.parametrize("layout", DENSE_LAYOUTS)
@pytest.mark.parametrize("dtype", list(Dtype))
def test_tensors_have_exactly_the_alignment_class(alignment: Alignment, layout: Layout, dtype: Dtype) -> None:
    for head_dim, spare, heads in itertools.product((1, 8, 40, 64), (0, 1, 4), (1, 3, 4)):
        tensor = guarded((2, heads, 5, head_dim), dtype, alignment, layout, CPU, Role.INPUT, spare=spare)
        assert tensor.view.stride(3) == 1
        assert specialization_of((tensor.view,), lse=False).alignment is alignment


def test_buffers_are_poisoned_and_stray_writes_are_counted() -> None:
    tensor = guarded((1, 2, 5, 8), Dtype.BF16, Alignment.EIGHT, Layout.BSHD, CPU, Role.OUTPUT)
    assert tensor.buffer.isnan().all()
    tensor.view.zero_()
    assert stray_writes(tensor) == 0
    assert tensor.buffer.isnan().all()
    tensor.buffer[3] = 0.0
    tensor.buffer[-1] = 0.0
    assert stray_writes(tensor) == 2
    poison(tensor)
    assert stray_writes(tensor) == 0


def test_large_tensors_are_scanned_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_tensors, "PART_ELEMENTS", 7)
    tensor = guarded_flat((4, 5), CPU, Role.OUTPUT)
    tensor.buffer[0] = tensor.buffer[-1] = 0.0
    assert stray_writes(tensor) == 2


@pytest.mark.parametrize("probe", [Probe.NEEDLE, Probe.FIRST, Probe.LAST])
def test_large_tensors_have_the_values_of_small_ones(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem()
    small = make_values(probe, problem, 0.1, 64, torch.Generator().manual_seed(5))
    monkeypatch.setattr(probes, "FEW_ELEMENTS", 0)
    large = make_values(probe, problem, 0.1, 64, torch.Generator().manual_seed(5))
    for left, right in zip(small, large, strict=True):
        assert torch.equal(left, right)


def test_input_nan_differs_from_output_poison() -> None:
    inside = guarded_flat((4, 5), CPU, Role.INPUT)
    outside = guarded_flat((4, 5), CPU, Role.OUTPUT)
    outside.buffer[0] = inside.buffer[0]
    assert stray_writes(outside) == 1


def test_seeds_determine_all_values() -> None:
    problem = make_problem()
    case = companions(problem, make_config(problem), Level.QUICK, reduced=True)[0]
    first, same, other = (prepare(case, Alignment.ANY, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(first.memory.k.view, same.memory.k.view)
    assert not torch.equal(first.memory.k.view, other.memory.k.view)
    assert torch.equal(first.checksum, same.checksum)


@pytest.mark.parametrize("causal", list(Causal))
def test_full_level_covers_tile_bounds(causal: Causal) -> None:
    problem = make_problem(causal)
    config = make_config(problem)
    cases = companions(problem, config, Level.FULL, reduced=False)
    block_m, block_n = tile_of(config)
    keys, queries = ({case.problem.seqlen_kv for case in cases}, {case.problem.seqlen_q for case in cases})
    for multiple, step in itertools.product((1, 2, 3), (-1, 0, 1)):
        assert multiple * block_n + step in keys
    assert {1, block_m - 1, block_m, block_m + 1, 2 * block_m + 1} <= queries
    assert any(case.problem.seqlen_q > case.problem.seqlen_kv for case in cases)
    assert any(case.problem.seqlen_q < case.problem.seqlen_kv for case in cases)
    assert {case.problem.group_size for case in cases} >= {1, 2, 3}
    absent = {Probe.FAINT, Probe.EDGE, Probe.SINK, *(() if causal is not Causal.NONE else (Probe.DIAGONAL,))}
    assert {case.probe for case in cases} == set(Probe) - absent
    quantized = msgspec.structs.replace(problem, dtype=Dtype.E4M3)
    assert Probe.FAINT in {case.probe for case in companions(quantized, config, Level.QUICK, reduced=False)}
    assert any(case.repeats > 1 for case in cases)


@pytest.mark.parametrize("level", [Level.QUICK, Level.FULL])
def test_cases_give_programs_several_tiles_for_any_tuned_shape(level: Level) -> None:
    problem = msgspec.structs.replace(make_problem(), seqlen_q=16, seqlen_kv=16)
    config = make_config(problem)
    block_m, _ = tile_of(config)
    cases = companions(problem, config, level, reduced=False)
    counts = {
        -(-case.problem.seqlen_q // block_m) * case.problem.heads * case.problem.batch for case in cases
    }
    for multiprocessors in (108, 114, 132, 148):
        rounds = {tiles / multiprocessors for tiles in counts}
        assert any(1 < count < 2 for count in rounds)
        assert any(2 < count < 3 for count in rounds)


def test_cases_have_full_and_partial_head_packs() -> None:
    problem = hopper.a_problem(kv_heads=1, seqlen_q=16)
    config = hopper.a_config(problem, pack_gqa=4)
    groups = {case.problem.group_size for case in companions(problem, config, Level.FULL, reduced=False)}
    assert any(group < 4 for group in groups)
    assert any(group > 4 and group % 4 for group in groups)


def test_steep_rows_are_isolated_and_have_small_or_large_slopes() -> None:
    problem = msgspec.structs.replace(make_problem(head_dim=64), seqlen_q=4096, seqlen_kv=512)
    values = make_values(Probe.STEEP, problem, 0.125, 64, torch.Generator().manual_seed(3))
    scores = 0.125 * values.q[:, :2] @ values.k[:, :1].mT
    climb = scores[..., -64:].mean(-1) - scores[..., :64].mean(-1)
    steep = climb.abs() > 3.0
    assert 0.02 < steep.float().mean() < 0.12
    # Of the sixteen rows of a warp's tile it is often one, above or below the eighth.
    tiles = steep.reshape(1, 2, -1, 2, 8)
    alone = tiles.any((3, 4)) & ~tiles.any(4).all(3)
    assert alone.float().mean() > 0.3
    assert climb.max() > 100.0
    assert climb.min() < -100.0
    assert ((climb.abs() > 3.0) & (climb.abs() < 10.0)).any()


@pytest.mark.parametrize("seed", range(3))
def test_few_rows_include_both_signs_of_slope(seed: int) -> None:
    problem = msgspec.structs.replace(make_problem(head_dim=64), batch=1, heads=5, kv_heads=1, seqlen_q=2)
    problem = msgspec.structs.replace(problem, seqlen_kv=192)
    values = make_values(Probe.STEEP, problem, 0.125, 64, torch.Generator().manual_seed(seed))
    scores = 0.125 * values.q @ values.k.mT
    climb = scores[..., -64:].mean(-1) - scores[..., :64].mean(-1)
    assert climb.max() > 88.0
    assert climb.min() < -88.0


def test_tuned_shape_is_repeated_and_reduced_only_for_memory() -> None:
    problem = make_problem()
    random, needle = main_cases(problem)
    assert random.problem == needle.problem == problem
    assert random.repeats > 1
    huge = testing.problem("heads=64,kv_heads=8,seqlen=8192,head_dim=128,dtype=bf16,batch=512")
    thinned = main_cases(huge)[0].problem
    assert thinned.minimal_bytes() <= 2**31
    assert thinned.group_size == huge.group_size
    assert (thinned.seqlen_q, thinned.seqlen_kv) == (8192, 8192)


def test_far_cases_span_each_tensor() -> None:
    problem = make_problem()
    assert [case.far for case in far_cases(problem, make_config(problem))] == [0, 1, 2, 3]


def test_quantized_cases_have_scales_in_the_checksum() -> None:
    problem = msgspec.structs.replace(make_problem(head_dim=64), dtype=Dtype.E4M3)
    case = companions(problem, make_config(make_problem()), Level.QUICK, reduced=True)[0]
    prepared = prepare(case, Alignment.SIXTEEN, CPU, 3)
    types = [tensor.view.dtype for tensor in prepared.memory[:4]]
    assert types == [torch.float8_e4m3fn] * 3 + [torch.bfloat16]
    serving_cases = case.problem
    assert [tuple(factor.view.shape) for factor in prepared.memory.extra_inputs] == [
        (serving_cases.batch, serving_cases.heads),
        (serving_cases.batch, serving_cases.kv_heads),
        (serving_cases.batch, serving_cases.kv_heads),
    ]
    assert all(scale is not None and (scale > 0).all() for scale in prepared.side.scales)
    before = checksum(prepared.read)
    prepared.memory.extra_inputs[1].buffer[0] = 0.0
    assert (checksum(prepared.read) != before).tolist() == [False] * 4 + [True, False]


def test_8_bit_workspaces_are_poisoned() -> None:
    workspace = guarded_flat((64,), CPU, Role.WORKSPACE)
    assert workspace.view.isnan().all()
    assert workspace.view.view(torch.float8_e4m3fn).isnan().all()
    workspace.view.zero_()
    assert stray_writes(workspace) == 0


def test_quantized_inputs_are_normal_with_outliers_in_some_heads() -> None:
    problem = msgspec.structs.replace(make_problem(), dtype=Dtype.E4M3, heads=8, kv_heads=8, seqlen_kv=2048)
    values = make_values(Probe.RANDOM, problem, 0.1, 64, torch.Generator().manual_seed(1))
    spread = values.v.std((2, 3))
    assert spread.max() > 3 * spread.min()
    normalised = values.v / values.v.abs().median()
    assert (normalised.abs() > 10 * spread.min()).any()
    scores = (values.q[:, :, :64] @ values.k.mT).std((2, 3))
    assert scores.max() < 3 * scores.min(), "what keys gain, queries lose"


@pytest.mark.parametrize("probe", [Probe.RANDOM, Probe.FAINT])
def test_quantized_inputs_use_the_full_range(probe: Probe) -> None:
    problem = msgspec.structs.replace(make_problem(), dtype=Dtype.E4M3, seqlen_q=50, seqlen_kv=60)
    case = Case(problem=problem, probe=probe, block=64, scale=0.1)
    dense = dense_values(case, lengths_of(case), torch.Generator().manual_seed(5))
    values = make_values(probe, problem, 0.1, 64, torch.Generator().manual_seed(5))
    for stored, scale, value in zip(dense[:3], dense.side.scales, values, strict=True):
        assert scale is not None
        assert (stored.float().abs().amax((2, 3)) == LARGEST).all()
        exact, _ = quantize(value)
        assert (stored.float() != exact.float()).float().mean() < 1e-3
        torch.testing.assert_close(scale * LARGEST, value.abs().amax((2, 3)))


ROWS, KEYS = 128, 64


def tiles(problem: Problem) -> torch.Tensor:
    """Returns, for each tile, the elements that change nothing and those that hide keys."""
    generator = torch.Generator().manual_seed(0)
    bias = make_side(Probe.RANDOM, problem, equal_lengths(problem), KEYS, generator).bias
    assert bias is not None
    is_boolean = problem.bias is Bias.BOOLEAN
    both = torch.stack((bias, ~bias) if is_boolean else (bias == 0, bias == -torch.inf))
    split: torch.Tensor = both.unflatten(4, (-1, KEYS)).unflatten(3, (-1, ROWS))
    return split.transpose(4, 5).flatten(5)


@pytest.mark.parametrize("bias", ["boolean", "additive"])
def test_some_tiles_of_a_mask_are_empty_and_some_full_in_a_row(bias: str) -> None:
    (problem,) = parse_shape(f"heads=4,seqlen=1024,head_dim=128,batch=2,bias={bias}")
    is_full, is_empty = tiles(problem).all(-1)
    assert is_full.float().mean() > 0.1
    assert is_empty.float().mean() > 0.1
    assert (~is_full & ~is_empty).float().mean() > 0.4
    # The first tiles of each head are partial, so that no head is hidden or plain as a whole.
    assert not (is_full | is_empty)[:, :, :2, 0].all(-1).any()
    for kind in (is_full, is_empty):
        assert (kind[..., 1:] & kind[..., :-1]).any(), "several tiles in a row"
        assert (kind[..., 1:] & ~kind[..., :-1]).any(), "after a partial one"


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["boolean", "additive"])
def test_some_rows_of_a_long_mask_have_no_keys(bias: str) -> None:
    (problem,) = parse_shape(f"heads=4,seqlen=2048,head_dim=128,batch=1,bias={bias}")
    _, is_hidden = tiles(problem)
    rows = is_hidden.unflatten(-1, (ROWS, KEYS)).all(-1).all(-2)
    assert 0.01 < rows.float().mean() < 0.1
