"""GPU time of one launch: CUDA events, cold L2, medians.

A pause is queued before each batch of samples, so that the host is always ahead of the device and
no sample holds time in which the GPU waited for a launch.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence

import msgspec
import torch

from flashtune.core.record import Measurement

Run = Callable[[], object]

MIB = 1024 * 1024
# Writing this many times the last-level cache leaves nothing of the inputs in it.
FLUSH_FACTOR = 2
LEAST_FLUSH_BYTES = 64 * MIB
# Clock cycles of the pause for each launch of a batch: 0.1 ms, in which the host queues it.
PAUSE_CYCLES = 200_000
FIRST_SAMPLES = 3
BATCH = 8
# The reference workload is this much slower when the clock is held down.
THROTTLED_DRIFT = 1.05
REFERENCE_SIDE = 4096


class Sampling(msgspec.Struct, frozen=True):
    """How long to sample.

    Attributes:
        warmups: Launches before the first sample.
        least: Fewest samples.
        most: Most samples.
        budget_ms: GPU time to spend between the two.
    """

    warmups: int = 2
    least: int = 9
    most: int = 25
    budget_ms: float = 60.0

    def count(self, estimate_ms: float) -> int:
        """Samples of a launch that takes about `estimate_ms`."""
        affordable = self.most if estimate_ms <= 0 else int(self.budget_ms / estimate_ms)
        return max(self.least, min(self.most, affordable))


DEFAULT_SAMPLING = Sampling()


def measure(
    run: Run,
    device: torch.device,
    *,
    sampling: Sampling = DEFAULT_SAMPLING,
    drop_above_ms: float | None = None,
    throttled: bool = False,
) -> Measurement:
    """Times one launch with a cold L2.

    Args:
        run: Queues the launch on the current stream.
        device: The GPU.
        sampling: How long to sample.
        drop_above_ms: Stop after a few samples if their median is above this.
        throttled: What to note about the clock.

    Raises:
        RuntimeError: The launch failed on the device.
    """
    with torch.cuda.device(device):
        for _ in range(sampling.warmups):
            run()
        samples = _batch([run] * FIRST_SAMPLES, device)
        middle = statistics.median(samples)
        if drop_above_ms is None or middle <= drop_above_ms:
            left = sampling.count(middle) - len(samples)
            while left > 0:
                samples += _batch([run] * min(BATCH, left), device)
                left -= BATCH
    return summarize(samples, throttled=throttled)


def once(run: Run, device: torch.device) -> float:
    """Time of one launch that is not the first, in ms: good enough to tell a kernel that is far off."""
    with torch.cuda.device(device):
        return _batch([run, run], device)[-1]


def measure_interleaved(
    runs: Sequence[Run], device: torch.device, *, rounds: int, warmups: int = 2
) -> tuple[Measurement, ...]:
    """Times several launches in turn, so that drift of the clock falls on all of them alike.

    The first launch after a pause takes up to 3% longer than later ones. Each round starts with a launch
    that is not timed.

    Returns:
        One measurement for each of `runs`, each of `rounds` samples; `throttled` says whether a
        fixed workload, timed every few rounds, slowed down on the way.
    """
    clock = clock_probe(device.index or 0)
    with torch.cuda.device(device):
        for run in runs:
            for _ in range(warmups):
                run()
        samples: list[list[float]] = [[] for _ in runs]
        throttled = False
        for number in range(rounds):
            # Every other round runs backwards, so that nobody always follows the same neighbour.
            order = range(len(runs)) if number % 2 == 0 else range(len(runs) - 1, -1, -1)
            times = _batch([runs[index] for index in (order[-1], *order)], device)[1:]
            for index, time in zip(order, times, strict=True):
                samples[index].append(time)
            if number % BATCH == 0:
                throttled |= clock.is_throttled()
    return tuple(summarize(times, throttled=throttled) for times in samples)


def _batch(runs: Sequence[Run], device: torch.device) -> list[float]:
    """One cold sample of each launch, in ms, in order."""
    flush = _flush_buffer(device.index or 0)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in runs]
    torch.cuda._sleep(PAUSE_CYCLES * len(runs))
    for run, (start, end) in zip(runs, events, strict=True):
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


@functools.lru_cache(maxsize=1)
def _flush_buffer(index: int) -> torch.Tensor:
    """What is written before each sample. Kept: making it costs more than writing it."""
    cache = getattr(torch.cuda.get_device_properties(index), "L2_cache_size", 0)
    size = max(FLUSH_FACTOR * cache, LEAST_FLUSH_BYTES)
    return torch.empty(size // 4, dtype=torch.int32, device=f"cuda:{index}")


class ClockProbe:
    """Times a fixed workload now and then; it takes longer while the clock is held down."""

    def __init__(self, index: int) -> None:
        side = REFERENCE_SIDE
        self._device = torch.device("cuda", index)
        self._left = torch.randn(side, side, device=self._device, dtype=torch.float16)
        self._out = torch.empty_like(self._left)
        self._best = math.inf
        self.is_throttled()

    def is_throttled(self) -> bool:
        """Whether the workload takes notably longer than its best in this process so far."""
        with torch.cuda.device(self._device):
            run = functools.partial(torch.mm, self._left, self._left, out=self._out)
            run()
            now = statistics.median(_batch([run] * FIRST_SAMPLES, self._device))
        self._best = min(self._best, now)
        return now > THROTTLED_DRIFT * self._best


@functools.lru_cache(maxsize=1)
def clock_probe(index: int) -> ClockProbe:
    """The probe of a GPU. Kept, since it compares with what it saw before."""
    return ClockProbe(index)


def summarize(samples: Sequence[float], *, throttled: bool = False) -> Measurement:
    """Median and 20th and 80th percentiles of samples in ms; percentiles are samples themselves."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Measurement(
        ms=statistics.median(ordered),
        p20=ordered[round(0.2 * last)],
        p80=ordered[round(0.8 * last)],
        samples=len(ordered),
        throttled=throttled,
    )
