"""The gate is tested by kernels that are broken on purpose: each must be refused, right ones never."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import pytest
import torch

from flashtune.compilation import interpreting
from flashtune.config import Config
from flashtune.kernel import Alignment, Kernel, Specialization
from flashtune.problem import Causal, Dtype, Problem
from flashtune.proof.cases import Level
from flashtune.proof.check import check_kernel, check_rendered
from flashtune.record import Verdict
from flashtune.target import find_target
from flashtune.templates.family import Family
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render

pytestmark = pytest.mark.skipif(not interpreting(), reason="runs kernels under TRITON_INTERPRET=1")

TARGET = find_target("h200")
CPU = torch.device("cpu")
SEED = 7

TAIL_MASK = r"logits = tl\.where\(.*(seqlen_kv|key_exists.*), logits, float\(\"-inf\"\)\)"
CAUSAL_MASK = r"logits = tl\.where\(.*visible_end\[:, None\], logits, float\(\"-inf\"\)\)"
ADD_WEIGHTS_AGAIN = r"\1running_sum = running_sum * rescale + tl.sum(weights, 1)"
ADD_WEIGHTS = r"( +)running_sum = running_sum \* rescale \+ tl\.sum\(weights, 1\)"


class Mutant(NamedTuple):
    """A kernel, and what is broken in it.

    Attributes:
        name: What is wrong, in words.
        old: What to replace, a regular expression; every occurrence is.
        new: What stands there instead.
        config: Fields of the config, over those of the test.
        causal: Mask of the kernel.
    """

    name: str
    old: str
    new: str
    config: Mapping[str, object] = MappingProxyType({})
    causal: Causal = Causal.BOTTOM_RIGHT


AHEAD = MappingProxyType({"loads": "descriptor", "qk_ahead": True})
ONE_PHASE = MappingProxyType({"two_phases": False})
FORGET = "\\1weights = tl.where((queries % 8 == 3)[:, None] & {}, 0.0, weights)\n" + ADD_WEIGHTS_AGAIN

ANY_LOOP_ORDER = (
    Mutant("diagonal one key too far", r"queries \+ diagonal \+ 1", "queries + diagonal + 2"),
    Mutant("diagonal one key too short", r"queries \+ diagonal \+ 1", "queries + diagonal"),
    Mutant("diagonal aligned to the other corner", r"diagonal = seqlen_kv - seqlen_q", "diagonal = 0"),
    Mutant("diagonal off", CAUSAL_MASK, "pass"),
    Mutant("accumulator not rescaled", r"accumulator \* rescale\[:, None\]", "accumulator"),
    Mutant("sum not rescaled", r"running_sum \* rescale", "running_sum"),
    Mutant("maximum not kept", r"running_max = new_max", "running_max = tl.minimum(running_max, new_max)"),
    Mutant("wrong KV head", r"head // group_size", "head % (heads // group_size)"),
    Mutant("keys of the wrong batch", r"batch \* stride_kb", "batch * stride_vb"),
    Mutant("strides of K used for V", r"\* stride_vs", "* stride_ks"),
    Mutant("padding columns read", r" & \(columns_32 < HEAD_DIM\)\[None, :\]", ""),
    Mutant("padding columns written", r" & \(columns_32 < VALUE_HEAD_DIM\)\[None, :\]", ""),
    Mutant("scale applied twice", r"scale_log2 = scale \* LOG2_E", "scale_log2 = scale * scale * LOG2_E"),
    Mutant("natural exponentials", r"scale_log2 = scale \* LOG2_E", "scale_log2 = scale"),
    Mutant("lse in base 2", r"\) \* LN_2", ")"),
    Mutant("lse without the maximum", r"running_max \+ tl\.log2", "tl.log2"),
    Mutant("lse of another head", r"tl\.store\(lse \+ ", "tl.store(lse + seqlen_q + "),
    Mutant(
        "empty rows divided by zero", r"tl\.where\(running_sum == 0\.0, 1\.0, running_sum\)", "running_sum"
    ),
    Mutant(
        "empty rows shifted by -inf", r"tl\.where\(new_max == float\(\"-inf\"\), 0\.0, new_max\)", "new_max"
    ),
    Mutant("weights rounded to 8 bits", r"low_weights = weights", "low_weights = weights.to(tl.bfloat16)"),
    Mutant("tail of K unmasked", TAIL_MASK, "pass", causal=Causal.NONE),
    Mutant(
        "one key in some rows forgotten",
        ADD_WEIGHTS,
        r"\1weights = tl.where((queries % 8 == 3)[:, None] & (key_offsets == 5)[None, :], 0.0, weights)"
        "\n"
        r"\1running_sum = running_sum * rescale + tl.sum(weights, 1)",
    ),
    Mutant(
        "a block forgotten in some rows",
        ADD_WEIGHTS,
        r"\1weights = tl.where((queries % 8 == 3)[:, None] & (start == BLOCK_N), 0.0, weights)"
        "\n"
        r"\1running_sum = running_sum * rescale + tl.sum(weights, 1)",
        causal=Causal.NONE,
    ),
)

QUERIES_OUTER = (
    *ANY_LOOP_ORDER,
    Mutant("last block skipped", r"tl\.range\(open_end, last_key", "tl.range(open_end, last_key - BLOCK_N"),
    Mutant("first block skipped", r"tl\.range\(0, open_end", "tl.range(BLOCK_N, open_end"),
    Mutant(
        "open blocks one too many",
        r"open_end = open_keys // BLOCK_N",
        "open_end = tl.cdiv(open_keys, BLOCK_N)",
    ),
    Mutant(
        "a tile of queries not written",
        r"query_exists = queries < seqlen_q",
        "query_exists = queries < seqlen_q - BLOCK_M",
    ),
    Mutant(
        "rows beyond the last written",
        r"query_exists = queries < seqlen_q",
        "query_exists = queries >= 0",
    ),
    Mutant("tail of V read", r"mask=\(keys < seqlen_kv\)", "mask=(keys < seqlen_kv + 3)"),
    Mutant("heads swapped in the grid", r"// tiles", "% (all_heads // 2 + 1)"),
    Mutant("stale scores", r"    logits = next_logits", "    pass", AHEAD, Causal.NONE),
    Mutant("scores of this block again", r"start \+ BLOCK_N, 0", "start, 0", AHEAD, Causal.NONE),
    Mutant("padding of descriptors unmasked", TAIL_MASK, "pass", AHEAD, Causal.NONE),
    Mutant("first block without mask", CAUSAL_MASK, "pass", ONE_PHASE),
    Mutant(
        "one phase, last block skipped",
        r"tl\.range\(0, last_key",
        "tl.range(0, last_key - 1",
        ONE_PHASE,
    ),
)

KEYS_OUTER = (
    *ANY_LOOP_ORDER,
    Mutant("last block skipped", r"tl\.range\(0, last_key", "tl.range(0, last_key - BLOCK_N"),
    Mutant(
        "a tile that sees these keys skipped", r"tl\.range\(first_seer,", "tl.range(first_seer + BLOCK_M,"
    ),
    Mutant("state never made", r"float\(\"-inf\"\), tl\.float32\)", "0.0, tl.float32)"),
    Mutant(
        "maximum not carried",
        r"tl\.store\(max_base \+ queries, running_max",
        "tl.store(max_base + queries, running_sum",
    ),
    Mutant(
        "state of the next head overwritten",
        r"tl\.store\(sum_base \+ queries, running_sum, mask=query_exists\)",
        "tl.store(sum_base + queries, running_sum)",
    ),
    Mutant(
        "a tile of queries not written",
        r"query_exists = queries < seqlen_q",
        "query_exists = queries < seqlen_q - 1",
    ),
)


def _problem(causal: Causal) -> Problem:
    return Problem(
        dtype=Dtype.FP32,
        head_dim=24,
        value_head_dim=20,
        heads=4,
        kv_heads=2,
        batch=2,
        seqlen_q=64,
        seqlen_kv=64,
        causal=causal,
    )


def _config(family: Family, fields: Mapping[str, object]) -> Config:
    small = {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 2}
    return msgspec.convert({**small, **fields}, family.config_type)


def _broken(mutant: Mutant, kernel: Kernel) -> Kernel:
    source, replaced = re.subn(mutant.old, mutant.new, kernel.source)
    assert replaced, f"the template no longer holds {mutant.old!r}"
    return msgspec.structs.replace(kernel, source=source)


def _quick_verdict(mutant: Mutant, family: Family) -> Verdict:
    problem, config = _problem(mutant.causal), _config(family, mutant.config)
    kernel = _broken(mutant, render(family, problem, config, Specialization(lse=True)))
    return check_rendered(kernel, problem, config, TARGET, CPU, Level.QUICK, seed=SEED)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mutant", QUERIES_OUTER, ids=lambda mutant: mutant.name)
def test_broken_queries_outer_is_refused(mutant: Mutant) -> None:
    verdict = _quick_verdict(mutant, find_family("forward_q_outer"))
    assert not verdict.passed
    assert verdict.failed


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mutant", KEYS_OUTER, ids=lambda mutant: mutant.name)
def test_broken_keys_outer_is_refused(mutant: Mutant) -> None:
    verdict = _quick_verdict(mutant, find_family("forward_kv_outer"))
    assert not verdict.passed
    assert verdict.failed


def _right_kernels(count: int) -> list[tuple[str, Problem, Config, Specialization]]:
    """A fixed draw over families, problems, small tiles and specialisations."""
    draw = random.Random(20)
    drawn = []
    for index in range(count):
        family = find_family(("forward_q_outer", "forward_kv_outer")[index % 2])
        problem = Problem(
            dtype=draw.choice([Dtype.BF16, Dtype.FP16, Dtype.FP32]),
            head_dim=draw.choice([1, 8, 16, 40, 64, 96]),
            value_head_dim=draw.choice([8, 16, 33, 64]),
            heads=2,
            kv_heads=1,
            batch=1,
            seqlen_q=100,
            seqlen_kv=100,
            causal=draw.choice(list(Causal)),
        )
        fields: dict[str, object] = {
            "block_m": draw.choice([16, 32, 64]),
            "block_n": draw.choice([16, 32]),
            "num_stages": draw.choice([1, 2, 3]),
            "decomposed": draw.random() < 0.5,
        }
        if family.name == "forward_q_outer":
            fields |= {
                "loads": draw.choice(["pointer", "descriptor"]),
                "qk_ahead": draw.random() < 0.5,
                "two_phases": draw.random() < 0.5,
                "long_first": draw.random() < 0.5,
                "heads_inner": draw.random() < 0.5,
            }
        specialization = Specialization(
            draw.choice(list(Alignment)), draw.choice([32, 64]), draw.random() < 0.5
        )
        drawn.append((family.name, problem, _config(family, fields), specialization))
    return drawn


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "problem", "config", "specialization"), _right_kernels(10))
def test_right_kernels_are_not_refused(
    name: str, problem: Problem, config: Config, specialization: Specialization
) -> None:
    verdict = check_kernel(find_family(name), problem, config, specialization, TARGET, CPU, Level.QUICK)
    assert verdict.passed, verdict.failed
    assert verdict.device == "interpreter"
    assert 0 < verdict.worst_ratio <= 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_full_level_accepts_and_checks_more() -> None:
    family = find_family("forward_q_outer")
    problem, config = _problem(Causal.BOTTOM_RIGHT), _config(family, {})
    quick, full = (
        check_kernel(family, problem, config, Specialization(lse=True), TARGET, CPU, level)
        for level in (Level.QUICK, Level.FULL)
    )
    assert quick.passed, quick.failed
    assert full.passed, full.failed
    assert full.checks > 3 * quick.checks
