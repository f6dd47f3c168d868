"""Tests of the verification of gradients with masks, biases, sinks and varlen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.core.kernel import Alignment
from flashtune.core.problem import Bias, Causal, Direction, Dtype, Problem
from flashtune.core.target import find_target
from flashtune.request.functions.tracing import trace
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import find_family
from flashtune.verification.cases import Case, Level, lengths_of
from flashtune.verification.gradients.cases import companions
from flashtune.verification.gradients.head_sampling import Pairs, sample_pairs
from flashtune.verification.gradients.inputs import make_dlse, make_dout, prepare
from flashtune.verification.gradients.reference import Chosen, expect_gradients
from flashtune.verification.gradients.scores import BackwardCase
from flashtune.verification.inputs.side_inputs import make_side
from flashtune.verification.probes import Probe, make_values
from flashtune.verification.tolerance import FLOAT32_ROUNDOFF
from tests.gpu.random.random_gradients import feature_sets, subjects, trials
from tests.problems.kernel_cases import PLAIN_MASKS as MASKS
from tests.problems.plain_masks import plain_attention
from tests.verification.gradients.checking import (
    a_problem,
    failures,
    found_at,
    of_gradient,
    of_problem,
    refused,
)
from tests.verification.gradients.plain_kernel import Hooks, Scores, TwoTiles


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_correct_gradients_pass(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # Types in turn: each mask meets one, and each type many masks.
    turn = list(MASKS).index(name)
    dtype = (Dtype.BF16, Dtype.FP16, Dtype.FP32)[turn % 3]
    assert refused(monkeypatch, a_problem(dtype=dtype, **MASKS[name]), dlse=turn % 2 == 0) == []


GATES = torch.rand(65)


def tolerances(score: Callable[..., Any], probe: Probe) -> dict[str, Any]:
    """The exact gradients and their tolerances for a causal mask and a score function of GATES."""
    functions = trace(score, lambda b, h, q, k: q >= k).functions.with_gradients([0])
    problem = a_problem(functions=functions, causal=Causal.NONE, seqlen_q=65, seqlen_kv=65)
    case = Case(problem=problem, probe=probe, block=16, scale=1.0)
    return prepare(case, Alignment.EIGHT, torch.device("cpu"), 7, False).expected.gradients


def test_saturated_derivatives_of_single_keys_have_a_tolerance() -> None:
    # The gradient of a gate is P * (dP - delta) * score * (1 - tanh^2). Query 0 sees one key, so that the
    # second factor is 0, and so is the last one. Kernels round both.
    gradients = tolerances(lambda s, b, h, q, k: torch.tanh(s * GATES[q]), Probe.FAR_BELOW)
    assert gradients["dtables"].exact[0].abs() < 1e-12
    assert gradients["dtables"].allowed[0] > FLOAT32_ROUNDOFF


INFINITE: dict[str, Callable[..., Any]] = {
    "quotient": lambda s, b, h, q, k: s + GATES[q] * (1.0 / (q - k).abs()).clamp(max=1.0),
    "logarithm": lambda s, b, h, q, k: s + GATES[q] * torch.log((q - k).abs()).clamp(min=-5.0),
    "exponential": lambda s, b, h, q, k: s + torch.exp(50.0 * s * GATES[q]).clamp(max=1.0),
}


@pytest.mark.parametrize("name", INFINITE)
def test_clamped_infinities_leave_tolerances_finite(name: str) -> None:
    for gradient in tolerances(INFINITE[name], Probe.RANDOM).values():
        assert gradient.allowed.isfinite().all()


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP32])
@pytest.mark.parametrize(("kv_heads", "rows", "bias"), [(1, 20, Bias.ADDITIVE), (4, 1, Bias.NONE)])
def test_subnormal_probabilities_may_be_flushed(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, rows: int, bias: Bias, dtype: Dtype
) -> None:
    # Under steep slopes weights pass through all magnitudes; what a single query gives a key is all it gets.
    shape = {"heads": 4, "kv_heads": kv_heads, "seqlen_q": rows, "seqlen_kv": 640}
    problem = a_problem(dtype=dtype, causal=Causal.NONE, alibi=True, bias=bias, **shape)
    case = Case(problem=problem, probe=Probe.RANDOM, block=16, scale=0.07)

    def found(least: float) -> list[str]:
        def lost(_: str, scores: Scores) -> Scores:
            return Scores(*(torch.where(scores.weights < least, 0.0, tensor) for tensor in scores))

        return failures(found_at(monkeypatch, case, Hooks(scores=lost)))

    assert found(2.0**-126) == []
    assert found(2.0**-110) != []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", *MASKS])
def test_reference_matches_autograd(name: str) -> None:
    fields = MASKS.get(name, {})
    if "packed" in fields:
        pytest.skip("autograd is asked of sequences side by side")
    cases = companions(a_problem(dtype=Dtype.FP32, **fields), TwoTiles(), Level.QUICK, reduced=True)
    for case in cases[1::4]:
        problem, generator = case.problem, torch.Generator().manual_seed(5)
        lengths = lengths_of(case)
        q, k, v = make_values(case.probe, problem, case.scale, 16, generator, lengths)
        side = make_side(case.probe, problem, lengths, 16, generator)
        if side.bias is not None:
            # Autograd makes NaN of rows that see nothing.
            open_bias = side.bias.clone()
            open_bias[..., 0] = 1
            side = side._replace(bias=open_bias)
        dout, dlse = make_dout(case.probe, problem, 16, generator), make_dlse(problem, generator)
        chosen = Chosen(sample_pairs(problem, generator), torch.arange(problem.seqlen_q))
        backward_case = BackwardCase(q, k, v, dout, dlse, side, case.scale, lengths)
        expected = expect_gradients(problem, backward_case, chosen)
        gradients = differentiated(problem, backward_case, chosen.pairs)
        assert gradients.keys() == expected.gradients.keys()
        for key, tensor in gradients.items():
            torch.testing.assert_close(tensor, expected.gradients[key].exact, rtol=1e-8, atol=1e-8)


def differentiated(problem: Problem, case: BackwardCase, pairs: Pairs) -> dict[str, Tensor]:
    """Gradients by torch's autograd, of attention as another hand wrote it, at some pairs."""
    side = case.side
    inputs = {"dq": case.q.double(), "dk": case.k.double(), "dv": case.v.double()}
    if problem.bias is Bias.ADDITIVE and side.bias is not None:
        inputs["dbias"] = side.bias.double()
        side = side._replace(bias=inputs["dbias"])
    if side.slopes is not None:
        inputs["dslopes"] = side.slopes.double()
        side = side._replace(slopes=inputs["dslopes"])
    if problem.kv_lengths:
        side = side._replace(seqlens_kv=torch.tensor(case.lengths.keys, dtype=torch.int32))
    if side.sinks is not None:
        side = side._replace(sinks=side.sinks.double().requires_grad_())
    for tensor in inputs.values():
        tensor.requires_grad_()
    out, lse = plain_attention(problem, inputs["dq"], inputs["dk"], inputs["dv"], side, case.scale)
    assert case.dlse is not None
    losses = [
        (of_lse * dlse)[~of_lse.isneginf()].sum() + (of_out * dout).sum()
        for of_lse, dlse, of_out, dout in zip(lse, case.dlse, out, case.dout, strict=True)
    ]
    if side.sinks is not None:
        inputs["dsinks"] = torch.zeros(len(losses), problem.heads, dtype=torch.float64)
        inputs["dsinks"].grad = torch.stack(
            [torch.autograd.grad(loss, side.sinks, retain_graph=True)[0] for loss in losses]
        )
    torch.stack(losses).sum().backward()
    batch, heads = pairs.batch[:, None], pairs.heads(problem)
    places: dict[str, tuple[Tensor, Tensor]] = dict.fromkeys(inputs, (batch, heads))
    places |= dict.fromkeys(("dk", "dv"), pairs)
    gradients = {}
    for name, tensor in inputs.items():
        assert tensor.grad is not None
        gradients[name] = tensor.grad[places[name]]
    return {
        name: gradient[..., None] if name in ("dbias", "dslopes", "dsinks") else gradient
        for name, gradient in gradients.items()
    }


def of_side(name: str, change: Callable[[Any], Any]) -> Hooks:
    return Hooks(side=lambda side: side._replace(**{name: change(getattr(side, name))}))


def without_the_cap_s_slope(_: str, right: Scores) -> Scores:
    return right._replace(slopes=right.biased)


def capped_bias(name: str, right: Scores) -> Scores:
    return right._replace(biased=right.slopes) if name == "dbias" else right


MISTAKES: list[tuple[str, str, Hooks]] = [
    ("window", "one key too far", of_problem(window_left=25)),
    ("window", "one key too short", of_problem(window_left=23)),
    ("window", "none", of_problem(window_left=None)),
    ("window of both sides", "right one too far", of_problem(window_right=13)),
    ("window of both sides", "left one too short", of_problem(window_left=6)),
    ("window aligned top-left", "aligned bottom-right", of_problem(causal=Causal.BOTTOM_RIGHT)),
    ("first tokens", "one too many", of_problem(sink_tokens=4)),
    ("first tokens", "forgotten", of_problem(sink_tokens=0)),
    ("chunk", "of one key more", of_problem(chunk=33)),
    ("prefix", "one key more", of_side("prefix", lambda prefix: prefix + 1)),
    ("prefix and window", "window forgotten", of_problem(window_left=None)),
    ("softcap", "forgotten", of_side("softcap", lambda _: None)),
    ("softcap", "slope forgotten", Hooks(scores=without_the_cap_s_slope)),
    ("alibi", "of another head", of_side("slopes", lambda slopes: slopes.roll(1, 1))),
    ("alibi", "gradient of another sign", of_gradient("dslopes", lambda dslopes: -dslopes)),
    ("alibi", "gradient of another head", of_gradient("dslopes", lambda dslopes: dslopes.roll(1, 0))),
    ("bias", "forgotten", of_side("bias", lambda _: None)),
    ("bias", "of the next key", of_side("bias", lambda bias: bias.roll(-1, 3))),
    ("bias", "gradient scaled", of_gradient("dbias", lambda dbias: 1.02 * dbias)),
    ("bias", "gradient not cleared", of_gradient("dbias", lambda dbias: dbias + 1e-3)),
    ("bias under a cap", "gradient capped", Hooks(scores=capped_bias)),
    ("mask", "of the next key", of_side("bias", lambda bias: bias.roll(1, 3))),
    ("sinks", "gradient of another sign", of_gradient("dsinks", lambda dsinks: -dsinks)),
    ("sinks", "gradient of another head", of_gradient("dsinks", lambda dsinks: dsinks.roll(1, 0))),
    ("sinks", "not in the weights", Hooks(log=lambda lse: lse + 0.03)),
    ("packed both ways", "a key too few", of_side("cu_seqlens_kv", lambda first: first - (first > 3).int())),
    ("packed", "queries shifted", of_side("cu_seqlens_q", lambda first: (first - 1).clamp_min(0))),
    ("lengths", "one key less", of_side("seqlens_kv", lambda keys: (keys - 1).clamp_min(0))),
    ("lengths", "of another sequence", of_side("seqlens_kv", lambda keys: keys.roll(1))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "hooks"),
    [(name, hooks) for name, _, hooks in MISTAKES],
    ids=[f"{name}: {words}" for name, words, _ in MISTAKES],
)
def test_single_error_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, hooks: Hooks) -> None:
    assert refused(monkeypatch, a_problem(**MASKS[name]), hooks)


H200 = find_target("h200")
SUBJECTS = list(subjects(1, H200))
SMALL = 2**18


def test_all_supported_features_and_pairs_are_drawn() -> None:
    drawn = {subject.problem.features for subject in SUBJECTS}
    absent = {asked for asked in feature_sets() if asked not in drawn}
    # No family lays a bias over packed sequences.
    refused = (("bias", "packed"), ("block_mask", "packed"), ("block_mask", "alibi"))
    assert absent <= set(map(frozenset, refused))
    assert "backward_split" in {subject.family for subject in SUBJECTS}


def test_drawn_problems_are_supported() -> None:
    drawn = list(trials(2 * len(SUBJECTS), 1, H200))
    assert drawn[:20] == list(trials(20, 1, H200))
    assert len({trial.subject for trial in trials(60, 1, H200, 12)}) == 12
    for subject, case in drawn:
        assert case.problem.direction is Direction.BACKWARD
        assert (
            unsupported_reason(find_family(subject.family), case.problem, H200, subject.specialization)
            is None
        )
        # The same source serves: nothing differs but extents.
        assert case.problem.computation == subject.problem.computation


@pytest.mark.slow
def test_correct_gradients_pass_on_random_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [
        case
        for _, case in trials(300, 2, H200)
        if case.problem.batch * case.problem.heads * case.problem.seqlen_q * case.problem.seqlen_kv < SMALL
    ]
    assert len(small) > 30
    for case in small[:60]:
        assert failures(found_at(monkeypatch, case)) == []
