"""Tests of the verification with features: correct results pass, and errors do not."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashtune import testing
from flashtune.core.config import Config
from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Causal, Dtype, KvDtype, KvScale, Problem
from flashtune.core.target import find_target
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.verification import comparison
from flashtune.verification.cases import Case, Level, companions
from flashtune.verification.inputs.placement import missing, pick
from flashtune.verification.inputs.prepared import prepare
from tests.problems.kernel_cases import PLAIN_MASKS
from tests.problems.plain_masks import plain_attention
from tests.verification.launches import launch_by
from tests.verification.plain_kernel import DecodingConfig, PlainConfig, attend, changed

CPU = torch.device("cpu")
H200 = find_target("h200")
FAMILY = find_family("forward_q_outer")
Mistake = Callable[[Problem, ExtraInputs], tuple[Problem, ExtraInputs]]


a_problem = functools.partial(testing.problem, "heads=4,kv_heads=2,seqlen=100,head_dim=32,dtype=bf16,causal")


KERNEL = render(
    FAMILY,
    a_problem(),
    FAMILY.default(a_problem(), H200),
    Specialization(alignment=Alignment.EIGHT, lse=True),
)


def right(problem: Problem, side: ExtraInputs) -> tuple[Problem, ExtraInputs]:
    return problem, side


def refused(monkeypatch: pytest.MonkeyPatch, problem: Problem, config: Config, mistake: Mistake) -> list[str]:
    """The errors at the first failing problem of a self-check."""
    cases = companions(problem, config, Level.QUICK, reduced=True)
    return next(filter(None, (found(monkeypatch, case, mistake) for case in cases)), [])


def found(monkeypatch: pytest.MonkeyPatch, case: Case, mistake: Mistake) -> list[str]:
    prepared = prepare(case, Alignment.EIGHT, CPU, 3)

    def launch(tensors: Any, scale: float, side: ExtraInputs, _: object) -> None:
        attend(*_seen_messages(mistake, case.problem, side, [*tensors, scale]))

    launch_by(monkeypatch, launch)
    pass_ = comparison.forward_pass(KERNEL, case, prepared)
    return [
        f"{finding.what} {finding.figure.item():.3g}"
        for finding in comparison.launch_findings(KERNEL, None, case, pass_, H200, 0)
        if not finding.holds()
    ]


def _seen_messages(
    mistake: Mistake, problem: Problem, side: ExtraInputs, arguments: list[Any]
) -> tuple[Any, ...]:
    mistaken, extra_inputs = mistake(problem, side)
    return (mistaken, *arguments, extra_inputs)


MASKS: dict[str, dict[str, Any]] = {
    **PLAIN_MASKS,
    "pages": {"page_size": 16},
    "packed pages": {"page_size": 32, "packed": 1000, "window_left": 20},
    "pages of heads' scales": {"page_size": 16, "kv_dtype": KvDtype.INT8, "kv_scale": KvScale.HEAD},
    "scales of pages": {"page_size": 16, "kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.PAGE},
    "one scale": {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.TENSOR},
    "scales of sequences": {"kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.PAGE, "kv_lengths": True},
}
DECODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lengths": {"kv_lengths": True, "causal": Causal.NONE},
    "pages": {"page_size": 64, "sinks": True, "window_left": 30},
    "latent": {"page_size": 64, "mla": True, "head_dim": 48, "value_head_dim": 32, "kv_heads": 1},
    "latent scaled": {
        "page_size": 16,
        "mla": True,
        "head_dim": 48,
        "value_head_dim": 32,
        "kv_heads": 1,
        "kv_dtype": KvDtype.E4M3,
        "kv_scale": KvScale.PAGE,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_correct_results_pass(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # Types in turn: each mask meets one, and each type many masks.
    dtype = (Dtype.BF16, Dtype.FP16, Dtype.FP32)[list(MASKS).index(name) % 3]
    assert refused(monkeypatch, a_problem(dtype=dtype, **MASKS[name]), PlainConfig(), right) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODES)
def test_correct_results_of_decoding_pass(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert refused(monkeypatch, a_problem(**DECODES[name]), DecodingConfig(), right) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MASKS, *(f"decoding {name}" for name in DECODES)])
def test_reference_matches_the_definition(name: str) -> None:
    decoding = name.removeprefix("decoding ")
    fields, config = (MASKS[name], PlainConfig()) if name in MASKS else (DECODES[decoding], DecodingConfig())
    for case in companions(a_problem(dtype=Dtype.FP32, **fields), config, Level.QUICK, reduced=True)[::2]:
        ready = prepare(case, Alignment.ANY, CPU, 5)
        tensors = (ready.memory.q.view, ready.memory.k.view, ready.memory.v.view)
        out, lse = plain_attention(case.problem, *tensors, ready.side, case.scale)
        heads, rows = ready.chosen
        absent = missing(case.problem, ready.lengths, heads, rows)
        exists = slice(None) if absent is None else ~absent
        for plain, expected in ((out, ready.expected.out), (lse, ready.expected.lse)):
            picked = pick(plain, case.problem, ready.lengths, heads, rows)
            torch.testing.assert_close(picked[exists], expected[exists], rtol=1e-9, atol=1e-9)


def of_problem(**fields: Any) -> Mistake:
    return lambda problem, side: (changed(problem, **fields), side)


def of_side(name: str, change: Callable[[Any], Any]) -> Mistake:
    return lambda problem, side: (problem, side._replace(**{name: change(getattr(side, name))}))


def pages_swapped(table: torch.Tensor) -> torch.Tensor:
    table = table.clone()
    if table.shape[1] > 1:
        table[:, :2] = table[:, :2].flip(1)
    return table


def taken_for_values(problem: Problem, side: ExtraInputs) -> tuple[Problem, ExtraInputs]:
    return problem, side._replace(v_scale=side.k_scale)


MISTAKES: list[tuple[str, str, Mistake]] = [
    ("window", "one key too far", of_problem(window_left=25)),
    ("window", "one key too short", of_problem(window_left=23)),
    ("window", "none", of_problem(window_left=None)),
    ("window of one key", "two keys", of_problem(window_left=1)),
    ("window of both sides", "right one too far", of_problem(window_right=13)),
    ("window of both sides", "right one too short", of_problem(window_right=11)),
    ("window of both sides", "left one too short", of_problem(window_left=6)),
    ("window aligned top-left", "aligned bottom-right", of_problem(causal=Causal.BOTTOM_RIGHT)),
    ("window aligned top-left", "one key too far", of_problem(window_left=41)),
    ("first tokens", "one too many", of_problem(sink_tokens=4)),
    ("first tokens", "one too few", of_problem(sink_tokens=2)),
    ("first tokens", "forgotten", of_problem(sink_tokens=0)),
    ("chunk", "of one key more", of_problem(chunk=33)),
    ("chunk", "forgotten", of_problem(chunk=0)),
    ("chunk both ways", "the past of other chunks", of_problem(chunk=48)),
    ("chunk and first tokens", "first tokens forgotten", of_problem(sink_tokens=0)),
    ("prefix", "one key more", of_side("prefix", lambda prefix: prefix + 1)),
    ("prefix", "one key less", of_side("prefix", lambda prefix: prefix - 1)),
    ("prefix", "of another sequence", of_side("prefix", lambda prefix: prefix.roll(1))),
    ("prefix and window", "window forgotten", of_problem(window_left=None)),
    ("softcap", "forgotten", of_side("softcap", lambda _: None)),
    ("softcap", "too wide", of_side("softcap", lambda cap: 1.02 * cap)),
    ("alibi", "of another head", of_side("slopes", lambda slopes: slopes.roll(1, 1))),
    ("alibi", "of another sequence", of_side("slopes", lambda slopes: slopes[:1].expand_as(slopes))),
    ("alibi both ways", "one way", of_problem(causal=Causal.TOP_LEFT)),
    ("bias", "forgotten", of_side("bias", lambda _: None)),
    ("bias", "of another head", of_side("bias", lambda bias: bias.roll(1, 1))),
    ("bias", "of the next query", of_side("bias", lambda bias: bias.roll(-1, 2))),
    ("bias", "of the next key", of_side("bias", lambda bias: bias.roll(-1, 3))),
    ("mask", "of another sequence or head", of_side("bias", lambda bias: bias.roll(1, 1))),
    ("mask", "of the next key", of_side("bias", lambda bias: bias.roll(1, 3))),
    ("sinks", "forgotten", of_side("sinks", lambda _: None)),
    ("sinks", "of another head", of_side("sinks", lambda sinks: sinks.roll(1))),
    ("sinks", "scaled", of_side("sinks", lambda sinks: 1.4427 * sinks)),
    ("packed", "a key of the next", of_side("cu_seqlens_kv", lambda first: first + (first > 0).int())),
    ("packed both ways", "a key too few", of_side("cu_seqlens_kv", lambda first: first - (first > 3).int())),
    ("packed", "queries shifted", of_side("cu_seqlens_q", lambda first: (first - 1).clamp_min(0))),
    ("lengths", "one key less", of_side("seqlens_kv", lambda keys: (keys - 1).clamp_min(0))),
    ("lengths", "one key more", of_side("seqlens_kv", lambda keys: keys + 1)),
    ("lengths", "of another sequence", of_side("seqlens_kv", lambda keys: keys.roll(1))),
    ("pages", "in another order", of_side("block_table", pages_swapped)),
    ("pages", "of another sequence", of_side("block_table", lambda table: table.roll(1, 0))),
    ("pages", "one key more", of_side("seqlens_kv", lambda keys: keys + 1)),
    ("pages of heads' scales", "keys' of another head", of_side("k_scale", lambda scale: scale.roll(1, 1))),
    ("pages of heads' scales", "values' of another head", of_side("v_scale", lambda scale: scale.roll(1, 1))),
    ("scales of pages", "keys' of the next page", of_side("k_scale", lambda scale: scale.roll(1, 0))),
    ("scales of pages", "values' of the next page", of_side("v_scale", lambda scale: scale.roll(1, 0))),
    ("scales of pages", "keys' for values", taken_for_values),
    ("one scale", "forgotten", of_side("k_scale", torch.ones_like)),
    ("scales of sequences", "of another sequence", of_side("v_scale", lambda scale: scale.roll(1, 0))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mistake"),
    [(name, mistake) for name, _, mistake in MISTAKES],
    ids=[f"{name}: {words}" for name, words, _ in MISTAKES],
)
def test_single_error_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, mistake: Mistake) -> None:
    assert refused(monkeypatch, a_problem(**MASKS[name]), PlainConfig(), mistake)
