"""Tests of alternating dq groups in Hopper backward kernels: search space and compiled code."""

import pytest

from flashtune.launch.compilation import compile_kernel
from flashtune.templates.backward_hopper.space import HopperBackwardConfig
from flashtune.tuner.binary.resources import read_parts
from tests.problems.hopper_backward import FAMILY, H200, a_problem, config_of, kernel_of


@pytest.mark.parametrize(
    ("head_dim", "dropout", "turns"),
    [
        (64, False, True),
        (64, True, False),
        (72, False, True),
        (128, True, True),
        (136, False, False),
        (256, False, False),
    ],
)
def test_alternate_dq_requires_deferred_dq(head_dim: int, dropout: bool, turns: bool) -> None:
    problem = a_problem(head_dim, dropout=dropout)
    assert config_of(problem).alternate_dq is turns
    configs = list(FAMILY.space(problem, H200).configs())
    pairs = {
        (config.defer_dq, config.alternate_dq)
        for config in configs
        if isinstance(config, HopperBackwardConfig)
    }
    late = {(True, False)}
    assert pairs == (late if head_dim > 128 else late | {(False, False), (True, True)})


@pytest.mark.parametrize("dropout", [False, True])
def test_dropout_excludes_early_dv(dropout: bool) -> None:
    problem = a_problem(dropout=dropout)
    configs = FAMILY.space(problem, H200).configs()
    values = {
        config.early_dv
        for config in configs
        if isinstance(config, HopperBackwardConfig) and config.alternate_dq
    }
    assert values == ({False} if dropout else {False, True})
    assert config_of(problem).early_dv is not dropout


def test_alternate_dq_has_a_shorter_predicted_time() -> None:
    problem = a_problem(batch=16, seqlen_q=2048, seqlen_kv=2048)
    halves, wholes = (
        FAMILY.makespan_ms(problem, config_of(problem, alternate_dq=turns), H200) for turns in (False, True)
    )
    assert 0.88 < wholes / halves < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_alternating_group_computes_a_whole_dq_block(head_dim: int, deterministic: bool) -> None:
    problem = a_problem(head_dim, deterministic=deterministic)
    kernel = kernel_of(problem, defer_dq=True, alternate_dq=True, early_dv=head_dim == 128)
    main = read_parts(kernel, H200)[0].resources
    assert not main.serialized_wgmma
    assert main.spill_bytes <= (16 if head_dim == 64 else 0)
    ptx = str(compile_kernel(kernel, H200).asm["ptx"])
    # 64 registers of each of two groups, in the loop and behind it.
    assert ptx.count("red.relaxed.gpu.global.add.v4.f32") == 64
    halves = ptx.count("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16")
    wholes = ptx.count("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16")
    if head_dim == 64:
        # dv and dk of 128 queries; scores, before the loop and in it, dp, and dq, in it and behind it.
        assert (halves, wholes) == (32, 2 * (4 * 3 + 8 * 2))
    else:
        # Scores, before the loop and in it, and dp; dv and dk of 64 queries, and dq, in it and behind it.
        assert (halves, wholes) == (2 * 8 * 3, 2 * (4 * 2 + 8 * 2))
