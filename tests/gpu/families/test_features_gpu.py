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

from flashtune import testing
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Problem
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
# The most seconds that a self-check may take without compilation, with torch's own kernels loaded.
QUICK_SECONDS = 0.3
HEADS = "heads=8,kv_heads=2"
D64, D128 = f"{HEADS},seqlen=2048,head_dim=64", f"{HEADS},seqlen=2048,head_dim=128"
ODD = f"{HEADS},seqlen_q=777,seqlen_kv=3001,batch=2"
LATENT = "heads=16,kv_heads=1,head_dim=576,value_head_dim=512,mla"
CAPPED = "window=127,softcap,sinks"
PACKED = "causal,batch=12,packed=4000"
D256 = f"{HEADS},head_dim=256,causal"
DECODE = f"{HEADS},head_dim=128,causal"
E4M3_PAGES, INT8_HEADS = "kv_dtype=e4m3,kv_scale=page", "kv_dtype=int8,kv_scale=head"
TUNED = {
    "window": f"{D128},causal,batch=2,window=1024",
    "window, cap, sinks": f"{D128},causal,batch=2,{CAPPED}",
    "chunk": f"{D128},causal,batch=2,chunk=1000",
    "alibi and prefix": f"{D128},causal,batch=2,prefix,alibi",
    "additive": f"{D128},causal,batch=2,bias=additive",
    "boolean": f"{D128},batch=2,bias=boolean",
    "boolean, causal": f"{D128},causal,batch=2,bias=boolean",
    "boolean, d64, odd lengths": f"{ODD},head_dim=64,bias=boolean",
    "boolean, window and cap": f"{D128},causal,batch=2,window=1000,softcap,bias=boolean",
    "additive, odd lengths": f"{ODD},head_dim=128,bias=additive",
    "additive, d64 and window": f"{D64},causal,batch=2,window=1000,bias=additive",
    "blocks": f"{D128},batch=2,block_mask=128",
    "blocks, causal": f"{D128},causal,batch=2,block_mask=128",
    "blocks of groups": f"{D128},causal,batch=2,block_mask=128,block_lists=group",
    "blocks and lengths": f"{D128},causal,batch=2,window=1000,block_mask=128,kv_lengths",
    "small blocks": f"{D128},causal,batch=2,block_mask=64",
    "small blocks of groups": f"{D128},batch=2,block_mask=64,block_lists=group",
    "small blocks of groups and lengths": f"{D64},causal,batch=2,block_mask=64,block_lists=group,kv_lengths",
    "packed": f"{D128},causal,batch=12,packed=9000",
    "packed pages": f"{D128},{PACKED},page_size=16",
    "packed pages of 1": f"{D128},{PACKED},page_size=1",
    "packed pages of 4, padded": f"{HEADS},seqlen=2048,head_dim=96,value_head_dim=80,{PACKED},page_size=4",
    "pages of 1 in int8": f"{D128},causal,batch=2,page_size=1,{INT8_HEADS}",
    "packed pages scaled": f"{D128},{PACKED},page_size=16,kv_dtype=int8,kv_scale=page",
    "packed pages in e4m3, window": f"{D128},{PACKED},window=1000,page_size=16,kv_dtype=e4m3",
    "packed pages in int8, cap": f"{D64},{PACKED},softcap,page_size=64,{INT8_HEADS}",
    "packed pages of 1 in e4m3, sinks": f"{D128},{PACKED},sinks,page_size=1,kv_dtype=e4m3,kv_scale=head",
    "packed pages scaled, window, cap, sinks": f"{D128},{PACKED},{CAPPED},page_size=16,{E4M3_PAGES}",
    "pages in int8": f"{D128},causal,batch=2,page_size=64,{INT8_HEADS}",
    "pages in int8, fp16": f"{D128},dtype=fp16,causal,batch=2,page_size=128,kv_dtype=int8",
    "pages scaled, d64": f"{D64},causal,batch=2,window=1000,sink_tokens=4,page_size=8,{E4M3_PAGES}",
    "decode": f"{DECODE},seqlen_q=1,seqlen_kv=4096,batch=9",
    "decode pages": f"{DECODE},seqlen_q=1,seqlen_kv=8192,batch=9,page_size=64",
    "decode scaled": f"{DECODE},seqlen_q=2,seqlen_kv=4096,batch=2,page_size=16,{E4M3_PAGES}",
    "decode window": f"{D256},seqlen_q=1,seqlen_kv=8192,batch=16,window=4095,softcap,page_size=16",
    "latent": f"{LATENT},seqlen_q=1,seqlen_kv=4096,causal,batch=2,page_size=64",
}
BLOCKS = [name for name, shape in TUNED.items() if "block_mask" in shape]
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
    return testing.problem(TUNED[name])


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
