"""Tests of the final measurement without a GPU (see search/test_gpu.py for times)."""

import functools
from typing import Any

import msgspec
import pytest
import torch
from torch.nn.attention import SDPBackend

from flashtune import testing
from flashtune.core.kernel import Specialization
from flashtune.core.mask_sharing import MaskSharing
from flashtune.core.problem import Bias, Dtype, Problem, score_bytes
from flashtune.core.record import Measurement, PeerTime, SharedTime
from flashtune.core.target import find_target
from flashtune.dispatch.masked_sdpa import masked_attention, sharing_of
from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution import sdpa, timed_runs
from flashtune.tuner.execution.inputs import make_tensors
from tests.support.fakes import install
from tests.tuner.bench.bench_problems import CPU, FEATURES, PACKED, PAGES, a_problem
from tests.tuner.conftest import GpuMemory
from tests.tuner.execution.conftest import Binder

PROBLEM = testing.problem("heads=2,seqlen=64,head_dim=16,dtype=fp32")
pytestmark = pytest.mark.usefixtures("gpu_memory", "backends")


@pytest.mark.parametrize(("scores", "takes_part"), [(8, True), (4, False)])
def test_unfused_attention_is_timed_if_scores_fit_half_of_free_memory(
    gpu_memory: GpuMemory, backends: dict[str, SDPBackend], scores: int, takes_part: bool
) -> None:
    gpu_memory.free = scores * score_bytes(PROBLEM)
    backends.clear()
    tensors = make_tensors(PROBLEM, torch.device("cpu"))
    names = [name for name, _ in timed_runs.peer_runs(PROBLEM, tensors)]
    assert names == (["unfused"] if takes_part else [])


def test_quantized_problems_have_scales_and_no_baselines() -> None:
    problem = msgspec.structs.replace(PROBLEM, dtype=Dtype.E4M3, heads=4)
    tensors = make_tensors(problem, torch.device("cpu"))
    assert tensors.q.dtype == tensors.k.dtype == tensors.v.dtype == torch.float8_e4m3fn
    assert tensors.out.dtype is torch.bfloat16
    q_scale, k_scale, v_scale = tensors.side.scales
    assert q_scale is not None
    assert k_scale is not None
    assert v_scale is not None
    assert (q_scale.shape, k_scale.shape, v_scale.shape) == ((1, 4), (1, 2), (1, 2))
    assert list(timed_runs.peer_runs(problem, tensors)) == []
    wide = tensors.q.float() * q_scale[..., None, None]
    assert abs(float(wide.std()) - 1) < 0.1


def test_launches_of_the_final_measurement_receive_scales(binder: Binder) -> None:
    problem = msgspec.structs.replace(PROBLEM, dtype=Dtype.E4M3)
    tensors = make_tensors(problem, torch.device("cpu"))
    family = find_family("forward_q_outer")
    target = find_target("h200")
    candidate = Candidate(family.name, family.default(PROBLEM, target))
    timed_runs.kernel_run(problem, candidate, Specialization(), target, tensors)()
    assert binder.launches[0][0].q is tensors.q
    assert binder.launches[0][-1] is tensors.side


SUSTAINED_SAMPLES = 7


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_runs, "on_gpu", lambda measured, device: list(measured))


class Finals:
    """A final measurement with given times, by the position of its run."""

    def __init__(self, first: list[float], again: list[float], throttled: bool, alone: bool) -> None:
        self.first, self.again, self.throttled, self.alone = first, again, throttled, alone
        self.asked: list[tuple[int, int]] = []

    def kernel_run(self, *_: object) -> None:
        return None

    def peer_runs(self, *_: object) -> list[tuple[str, None]]:
        return [("peer", None)]

    def measure_interleaved(self, runs: list[Any], _: object, *, rounds: int) -> tuple[Measurement, ...]:
        times = self.again if self.asked else [*self.first, 9.0]
        self.asked.append((len(runs), rounds))
        held_down = self.throttled and len(self.asked) == 1
        return tuple(Measurement(ms, ms, ms, rounds, held_down) for ms in times)

    def measure_sustained(self, runs: list[Any], _: object, *, seconds: float) -> tuple[Measurement, ...]:
        assert self.throttled or self.alone
        assert seconds == min(0.6, timed_runs.CLOSEST_SECONDS / (2 * len(runs)))
        self.asked.append((len(runs), SUSTAINED_SAMPLES))
        return tuple(Measurement(ms, ms, ms, SUSTAINED_SAMPLES) for ms in self.again)


def timed(
    monkeypatch: pytest.MonkeyPatch,
    first: list[float],
    again: list[float],
    *,
    throttled: bool = False,
    alone: bool = False,
) -> list[Measurement]:
    """Returns the finals of candidates: `first` has their times next to a peer, `again` those of later runs.

    `throttled` is whether the clock was held down in the common run. Later runs are then sustained ones, and
    also if `alone`.
    """
    fake = Finals(first, again, throttled, alone)
    install(monkeypatch, fake, timed_runs)
    family, target, cpu = find_family("forward_q_outer"), find_target("h200"), torch.device("cpu")
    candidates = (Candidate(family.name, family.default(PROBLEM, target)),) * len(first)
    finals = timed_runs.run_finals(PROBLEM, candidates, Specialization(), target, cpu)
    rounds = SUSTAINED_SAMPLES if throttled or alone else finals[0].samples
    assert fake.asked[1:] == ([(len(again), rounds)] if again else [])
    assert all([(peer.name, peer.ms) for peer in final.peers] == [("peer", 9.0)] for final in finals)
    return list(finals)


def test_ties_get_more_samples_scaled_to_the_common_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second and the first change places, at half the clock; the third was too far behind.
    first, other, third = timed(monkeypatch, [0.5, 0.51, 0.525], [1.02, 1.0])
    assert (first.ms, other.ms, third.ms) == pytest.approx((0.51, 0.5, 0.525))
    assert (first.p20, other.p80) == pytest.approx((0.51, 0.5))
    assert (first.samples, other.samples, third.samples) == (105, 105, 21)


def test_ties_are_timed_alone_if_the_clock_is_held_down(monkeypatch: pytest.MonkeyPatch) -> None:
    # Alone, the second has a higher clock than the first, and keeps its time in the common run.
    first, other, third = timed(monkeypatch, [1.0, 1.02, 1.05], [2.08, 2.0], throttled=True)
    assert (first.ms, other.ms, third.ms) == pytest.approx((1.04 * 1.02, 1.02, 1.05))
    assert all(final.throttled for final in (first, other, third))
    assert (first.samples, other.samples, third.samples) == (SUSTAINED_SAMPLES, SUSTAINED_SAMPLES, 21)


def test_many_ties_share_the_time_of_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, [1.0] * 20, [1.0] * 20, throttled=True)


def test_long_kernels_are_timed_alone_at_any_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = timed(monkeypatch, [3.0, 3.06], [3.3, 3.0], alone=True)
    assert (first.ms, other.ms) == pytest.approx((1.1 * 3.06, 3.06))


def test_slow_kernels_are_not_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [final.samples for final in timed(monkeypatch, [80.0, 80.0], [], throttled=True)] == [21, 21]


def test_clear_winners_and_slow_kernels_get_no_more_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [final.samples for final in timed(monkeypatch, [1.0, 1.05], [])] == [21, 21]
    assert [final.samples for final in timed(monkeypatch, [100.0, 101.0], [])] == [21, 21]
    assert [final.samples for final in timed(monkeypatch, [60.0, 60.0], [60.0, 60.0])] == [25, 25]


MASKED = msgspec.structs.replace(
    PROBLEM, batch=3, heads=4, kv_heads=2, seqlen_q=8, seqlen_kv=16, bias=Bias.BOOLEAN
)


class SharedFinals:
    """A final measurement of candidates with given times, which notes the masks of each run.

    Each candidate takes half of its time with a shared mask.
    """

    def __init__(self, own: list[float]) -> None:
        self.own = own
        self.masks: list[list[torch.Tensor]] = []

    def kernel_run(self, *arguments: Any) -> Any:
        *_, candidate, _, _, tensors = arguments
        return candidate, tensors.side.bias

    def measure_interleaved(self, runs: list[Any], _: object, *, rounds: int) -> tuple[Measurement, ...]:
        kernels = [run for run in runs if isinstance(run, tuple)]
        first = not self.masks
        self.masks.append([bias for _, bias in kernels])
        times = [self.own[candidate.config] * (1.0 if first else 0.5) for candidate, _ in kernels]
        times += [9.0 if first else 2.0 + len(self.masks)] * (len(runs) - len(kernels))
        return tuple(Measurement(ms, ms, ms, rounds) for ms in times)


def shared_finals(
    monkeypatch: pytest.MonkeyPatch, own: list[float], problem: Problem
) -> tuple[tuple[Measurement, ...], list[list[torch.Tensor]]]:
    """Returns the finals of candidates with these times, and the masks of each run."""
    fake = SharedFinals(own)
    install(monkeypatch, fake, timed_runs)
    candidates = tuple(Candidate("forward_masked", number) for number in range(len(own)))  # type: ignore[arg-type]
    target, cpu = find_target("h200"), torch.device("cpu")
    return timed_runs.run_finals(problem, candidates, Specialization(), target, cpu), fake.masks


def test_eligible_kernels_and_sdpa_are_timed_with_shared_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_runs, "MORE_MS", 0.0)
    finals, masks = shared_finals(monkeypatch, [0.55, 0.5, 0.75, 0.5], MASKED)
    # Times of the first and the third differ from the fastest ones by more than noise.
    assert [bool(final.shared) for final in finals] == [False, True, False, True]
    for final in (finals[1], finals[3]):
        assert final.ms == 0.5
        assert [peer.name for peer in final.peers] == ["sdpa-math", "unfused"]
        # The peer's times are numbered by run.
        assert final.shared == tuple(
            SharedTime(way, 0.25, (PeerTime("sdpa-math", 4.0 + number),))
            for number, way in enumerate(MaskSharing)
        )
    assert [len(run) for run in masks] == [4, 2, 2, 2, 2]
    for run, way in zip(masks[1:], MaskSharing, strict=True):
        for mask in run:
            assert mask.shape == (3, 4, 8, 16), "as kernels are launched by dispatch"
            assert sharing_of(MASKED, mask) is way
            assert mask.untyped_storage().nbytes() <= 3 * 4 * 8 * 16


@pytest.mark.parametrize(
    ("changes", "ways"),
    [
        ({"batch": 1}, [MaskSharing.HEADS, MaskSharing.HEADS_AND_ROWS]),
        ({"alibi": True}, []),
        ({"bias": Bias.NONE}, []),
    ],
)
def test_equivalent_sharings_and_other_problems_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], ways: list[MaskSharing]
) -> None:
    (final,), masks = shared_finals(monkeypatch, [1.0], msgspec.structs.replace(MASKED, **changes))
    assert [time.sharing for time in final.shared or ()] == ways
    assert len(masks) == 1 + len(ways)


def test_backend_that_refuses_a_shared_mask_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, *_: Any) -> Any:
        if bias.stride(2) == 0:
            raise RuntimeError("no such mask")
        return q

    monkeypatch.setattr(sdpa, "masked_attention", refuses_rows)
    (final,), _ = shared_finals(monkeypatch, [1.0], MASKED)
    assert final.shared
    for time in final.shared:
        assert bool(time.peers) == (time.sharing is not MaskSharing.HEADS_AND_ROWS)


@pytest.mark.parametrize("name", ["additive bias", "boolean mask"])
def test_masked_problems_are_timed_as_dispatch_serves_them(name: str) -> None:
    problem = a_problem(**FEATURES[name], dtype=Dtype.FP32)
    call = sdpa.sdpa_call(problem, make_tensors(problem, CPU))
    assert isinstance(call, functools.partial)
    assert call.func is masked_attention


def test_varlen_tensors_have_the_tokens_of_the_problem() -> None:
    problem = a_problem(**PACKED)
    first, other = (make_tensors(problem, CPU) for _ in range(2))
    assert first.q.shape[2] == 110
    assert first.side.cu_seqlens_q is not None
    assert other.side.cu_seqlens_q is not None
    assert first.side.cu_seqlens_q.tolist() == other.side.cu_seqlens_q.tolist()
    assert first.side.cu_seqlens_q.diff().max() == problem.seqlen_q


def test_pages_are_shuffled_deterministically() -> None:
    problem = a_problem(**PAGES)
    first, other = (make_tensors(problem, CPU).side.block_table for _ in range(2))
    assert first is not None
    assert other is not None
    assert torch.equal(first, other)
    assert (first[0].diff() != 1).any()
