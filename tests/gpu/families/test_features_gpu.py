"""Tests of features on a GPU: random problems, and the full verification of defaults.

`FLASHTUNE_SAMPLES` says how many random problems (120), `FLASHTUNE_SEED` which ones (1).
"""

from __future__ import annotations

import os
import time
from typing import Any

import click
import msgspec
import pytest
import torch

from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Bias, BlockLists, Causal, Dtype, KvDtype, KvScale, Problem
from flashtune.core.target import Target, device_target
from flashtune.launch.binding import compile_binary
from flashtune.templates.family import unsupported_reason
from flashtune.templates.forward_hopper.space import HopperConfig
from flashtune.templates.registry import families, find_family
from flashtune.templates.rendering import render
from flashtune.verification.cases import Level
from flashtune.verification.check import check_rendered
from flashtune.verification.inputs import side_inputs
from flashtune.verification.inputs.prepared import prepare
from flashtune.verification.passes import planned_cases
from flashtune.verification.reference import masks
from tests.gpu.marks import ON_HOPPER
from tests.gpu.random.random_checks import check_all
from tests.gpu.random.random_problems import trials

pytestmark = pytest.mark.gpu

SAMPLES = int(os.environ.get("FLASHTUNE_SAMPLES", "120"))
SEED = int(os.environ.get("FLASHTUNE_SEED", "1"))
# What a self-check may take beyond compiling, with torch's own kernels loaded.
QUICK_SECONDS = 0.3
PACKED_PAGES: dict[str, Any] = {"packed": 4000, "page_size": 16, "batch": 12}
TUNED: dict[str, dict[str, Any]] = {
    "window": {"window_left": 1024},
    "window, cap, sinks": {"window_left": 127, "softcap": True, "sinks": True},
    "chunk": {"chunk": 1000},
    "alibi and prefix": {"alibi": True, "prefix": True},
    "additive": {"bias": Bias.ADDITIVE},
    "boolean": {"bias": Bias.BOOLEAN, "causal": Causal.NONE},
    "boolean, causal": {"bias": Bias.BOOLEAN},
    "boolean, d64, odd lengths": {
        "head_dim": 64,
        "value_head_dim": 64,
        "bias": Bias.BOOLEAN,
        "causal": Causal.NONE,
        "seqlen_q": 777,
        "seqlen_kv": 3001,
    },
    "boolean, window and cap": {"bias": Bias.BOOLEAN, "window_left": 1000, "softcap": True},
    "additive, odd lengths": {
        "bias": Bias.ADDITIVE,
        "causal": Causal.NONE,
        "seqlen_q": 777,
        "seqlen_kv": 3001,
    },
    "additive, d64 and window": {
        "head_dim": 64,
        "value_head_dim": 64,
        "bias": Bias.ADDITIVE,
        "window_left": 1000,
    },
    "blocks": {"block_mask": 128, "causal": Causal.NONE},
    "blocks, causal": {"block_mask": 128},
    "blocks of groups": {"block_mask": 128, "block_lists": BlockLists.GROUP},
    "blocks and lengths": {"block_mask": 128, "kv_lengths": True, "window_left": 1000},
    "small blocks": {"block_mask": 64},
    "small blocks of groups": {"block_mask": 64, "block_lists": BlockLists.GROUP, "causal": Causal.NONE},
    "small blocks of groups and lengths": {
        "head_dim": 64,
        "value_head_dim": 64,
        "block_mask": 64,
        "block_lists": BlockLists.GROUP,
        "kv_lengths": True,
    },
    "packed": {"packed": 9000, "batch": 12},
    "packed pages": {"packed": 4000, "page_size": 16, "batch": 12},
    "packed pages of 1": {"packed": 4000, "page_size": 1, "batch": 12},
    "packed pages of 4, padded": {
        "packed": 4000,
        "page_size": 4,
        "batch": 12,
        "head_dim": 96,
        "value_head_dim": 80,
    },
    "pages of 1 in int8": {"page_size": 1, "kv_dtype": KvDtype.INT8, "kv_scale": KvScale.HEAD},
    "packed pages scaled": {
        "packed": 4000,
        "page_size": 16,
        "batch": 12,
        "kv_dtype": KvDtype.INT8,
        "kv_scale": KvScale.PAGE,
    },
    "packed pages in e4m3, window": {**PACKED_PAGES, "kv_dtype": KvDtype.E4M3, "window_left": 1000},
    "packed pages in int8, cap": {
        **PACKED_PAGES,
        "head_dim": 64,
        "value_head_dim": 64,
        "page_size": 64,
        "kv_dtype": KvDtype.INT8,
        "kv_scale": KvScale.HEAD,
        "softcap": True,
    },
    "packed pages of 1 in e4m3, sinks": {
        **PACKED_PAGES,
        "page_size": 1,
        "kv_dtype": KvDtype.E4M3,
        "kv_scale": KvScale.HEAD,
        "sinks": True,
    },
    "packed pages scaled, window, cap, sinks": {
        **PACKED_PAGES,
        "kv_dtype": KvDtype.E4M3,
        "kv_scale": KvScale.PAGE,
        "window_left": 127,
        "softcap": True,
        "sinks": True,
    },
    "pages in int8": {"page_size": 64, "kv_dtype": KvDtype.INT8, "kv_scale": KvScale.HEAD},
    "pages in int8, fp16": {
        "dtype": Dtype.FP16,
        "page_size": 128,
        "kv_dtype": KvDtype.INT8,
        "kv_scale": KvScale.TENSOR,
    },
    "pages scaled, d64": {
        "head_dim": 64,
        "value_head_dim": 64,
        "page_size": 8,
        "kv_dtype": KvDtype.E4M3,
        "kv_scale": KvScale.PAGE,
        "window_left": 1000,
        "sink_tokens": 4,
    },
    "decode": {"seqlen_q": 1, "seqlen_kv": 4096, "batch": 9},
    "decode pages": {"seqlen_q": 1, "seqlen_kv": 8192, "page_size": 64, "batch": 9},
    "decode scaled": {
        "seqlen_q": 2,
        "seqlen_kv": 4096,
        "page_size": 16,
        "kv_dtype": KvDtype.E4M3,
        "kv_scale": KvScale.PAGE,
    },
    "decode window": {
        "seqlen_q": 1,
        "seqlen_kv": 8192,
        "page_size": 16,
        "batch": 16,
        "head_dim": 256,
        "value_head_dim": 256,
        "window_left": 4095,
        "softcap": True,
    },
    "latent": {
        "seqlen_q": 1,
        "seqlen_kv": 4096,
        "page_size": 64,
        "mla": True,
        "head_dim": 576,
        "value_head_dim": 512,
        "heads": 16,
        "kv_heads": 1,
    },
}

BLOCKS = [name for name, changes in TUNED.items() if "block_mask" in changes]
# Changes of the default Hopper config. Programs take tiles in a fixed order, or as they finish. In the last
# one, a tile has queries of several blocks, and each group of the tile has its own list.
SCHEDULES: dict[str, dict[str, Any]] = {
    "static": {"dynamic_schedule": False},
    "dynamic": {"dynamic_schedule": True},
    "own lists": {
        "dynamic_schedule": False,
        "num_consumer_groups": 3,
        "num_stages": 2,
        "block_n": 64,
        "pack_gqa": 1,
    },
}


def tuned(name: str) -> Problem:
    plain: dict[str, Any] = {
        "dtype": Dtype.BF16,
        "head_dim": 128,
        "value_head_dim": 128,
        "heads": 8,
        "kv_heads": 2,
        "batch": 2,
        "seqlen_q": 2048,
        "seqlen_kv": 2048,
        "causal": Causal.BOTTOM_RIGHT,
    }
    return Problem(**{**plain, **TUNED[name]})


def scheduled(problem: Problem, target: Target, schedule: str) -> HopperConfig:
    """The default Hopper config of a problem with a block mask under one of `SCHEDULES`."""
    default = find_family("forward_hopper").default(problem, target)
    assert isinstance(default, HopperConfig)
    return msgspec.structs.replace(default, **SCHEDULES[schedule])


@pytest.mark.alone
def test_random_problems_are_correct() -> None:
    target = device_target()
    summary = check_all(list(trials(SAMPLES, SEED, target)), target, SEED, click.echo)
    assert not summary.wrong, summary.wrong
    assert summary.problems >= 0.9 * SAMPLES, (summary.refused, summary.unfit)


@pytest.mark.parametrize("name", TUNED)
def test_defaults_pass_full_level(name: str) -> None:
    problem, target, device = tuned(name), device_target(), torch.device("cuda", 0)
    specialization = Specialization(lse=True)
    able = [one for one in families() if unsupported_reason(one, problem, target, specialization) is None]
    assert able
    for family in able:
        config = family.default(problem, target)
        kernel = render(family, problem, config, specialization)
        verdict = check_rendered(kernel, problem, config, target, device, Level.FULL)
        assert verdict.passed, f"{family.name}: {verdict.failed}"


@ON_HOPPER
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", BLOCKS)
def test_schedules_of_block_masks_pass_full_level(name: str, schedule: str) -> None:
    problem, target, device = tuned(name), device_target(), torch.device("cuda", 0)
    config = scheduled(problem, target, schedule)
    kernel = render(find_family("forward_hopper"), problem, config, Specialization(lse=True))
    verdict = check_rendered(kernel, problem, config, target, device, Level.FULL)
    assert verdict.passed, verdict.failed


@ON_HOPPER
@pytest.mark.parametrize("share", [0.9, 1.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", BLOCKS)
def test_block_masks_with_empty_lists_are_correct(
    name: str, schedule: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The quick level draws new inputs in each check, of which this share of the lists is empty.
    monkeypatch.setattr(side_inputs, "EMPTY_LISTS", share)
    problem, target, device = tuned(name), device_target(), torch.device("cuda", 0)
    config = scheduled(problem, target, schedule)
    kernel = render(find_family("forward_hopper"), problem, config, Specialization(lse=True))
    verdict = check_rendered(kernel, problem, config, target, device, Level.QUICK)
    assert verdict.passed, verdict.failed


@pytest.mark.parametrize("name", TUNED)
def test_masks_are_equal_on_cpu_and_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, target, device = tuned(name), device_target(), torch.device("cuda", 0)
    family = next(
        one for one in families() if unsupported_reason(one, problem, target, Specialization()) is None
    )
    config = family.default(problem, target)
    kernel = render(family, problem, config, Specialization())
    for case, seed in planned_cases(kernel, problem, config, Level.QUICK, 1):
        made = []
        for most in (0, 2**40):
            monkeypatch.setattr(masks, "FEW_COMPARISONS", most)
            made.append(prepare(case, Alignment.SIXTEEN, device, seed))
        one, other = made
        assert torch.equal(one.q.bits, other.q.bits), case.label
        assert torch.equal(one.k.bits, other.k.bits), case.label
        assert torch.equal(one.expected.out, other.expected.out), case.label
        assert torch.equal(one.expected.allowed, other.expected.allowed), case.label


@pytest.mark.alone
@pytest.mark.parametrize("name", TUNED)
def test_self_checks_are_short(name: str) -> None:
    problem, target, device = tuned(name), device_target(), torch.device("cuda", 0)
    specialization = Specialization(lse=True)
    able = [one for one in families() if unsupported_reason(one, problem, target, specialization) is None]
    assert able
    for family in able:
        config = family.default(problem, target)
        kernel = render(family, problem, config, specialization)
        binary = compile_binary(kernel, target)
        given = (kernel, problem, config, target, device)
        check_rendered(*given, Level.QUICK, compiled=binary)
        start = time.perf_counter()
        assert check_rendered(*given, Level.QUICK, compiled=binary).passed
        seconds = time.perf_counter() - start
        assert seconds < QUICK_SECONDS, f"{family.name}: its self-check took {seconds:.2f} s"
