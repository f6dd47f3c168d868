"""GPU time of one launch: CUDA events, cold L2, medians.

A pause is queued before each batch of samples, so that the host is always ahead of the device. No
sample then includes time in which the GPU waited for a launch.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch

from flashtune.core.record import Measurement
from flashtune.core.target import device_uuid

Run = Callable[[], object]

MIB = 1024 * 1024
# Writing this many times the L2 size evicts all inputs.
FLUSH_FACTOR = 2
MIN_FLUSH_BYTES = 64 * MIB
# Clock cycles of the pause for each launch of a batch: 0.1 ms, enough time for the host to queue it.
PAUSE_CYCLES = 200_000
FIRST_SAMPLES = 3
BATCH = 8
# Launches before the first sample.
WARMUPS = 2
# The number of samples is between these. Within them, samples may take BUDGET_MS of GPU time.
MIN_SAMPLES, MAX_SAMPLES = 9, 25
BUDGET_MS = 60.0
# The GPU is throttled if the reference workload takes this many times its best time.
THROTTLED_DRIFT = 1.05
REFERENCE_SIDE = 4096
# Cycles of one clock measurement: about a millisecond. Long enough for events, short for clock control.
CLOCK_CYCLES = 2_000_000
# A launch repeats for this time, in seconds. Under a power limit its clock settles in the first half.
SUSTAINED_SECONDS = 0.6


def measure(
    run: Run,
    device: torch.device,
    *,
    drop_above_ms: float | None = None,
    throttled: bool = False,
) -> Measurement:
    """Times one launch with a cold L2.

    Sampling stops early if the median of a few samples is above `drop_above_ms`.
    """
    with torch.cuda.device(device):
        for _ in range(WARMUPS):
            run()
        samples = _batch([run] * FIRST_SAMPLES, device)
        middle = statistics.median(samples)
        if drop_above_ms is None or middle <= drop_above_ms:
            left = sample_count(middle) - len(samples)
            while left > 0:
                samples += _batch([run] * min(BATCH, left), device)
                left -= BATCH
    return summarize(samples, throttled=throttled)


def sample_count(estimate_ms: float) -> int:
    """Returns the number of samples for a launch of about `estimate_ms`."""
    affordable = MAX_SAMPLES if estimate_ms <= 0 else int(BUDGET_MS / estimate_ms)
    return max(MIN_SAMPLES, min(MAX_SAMPLES, affordable))


def once(run: Run, device: torch.device) -> float:
    """Returns the time of a second launch, in ms. It is precise enough to detect much slower kernels."""
    with torch.cuda.device(device):
        return _batch([run, run], device)[-1]


def measure_interleaved(runs: Sequence[Run], device: torch.device, *, rounds: int) -> tuple[Measurement, ...]:
    """Times several launches interleaved, so that drift of the clock affects all of them equally.

    The first launch after a pause takes up to 3% longer than later ones. Each round therefore starts with
    a launch that is not timed.

    Returns:
        One measurement for each of `runs`, each of `rounds` samples. `throttled` is true if a fixed
        workload, timed every few rounds, became slower.
    """
    clock = clock_probe(device.index or 0)
    with torch.cuda.device(device):
        for run in runs:
            for _ in range(WARMUPS):
                run()
        samples: list[list[float]] = [[] for _ in runs]
        throttled = False
        for number in range(rounds):
            # Every second round is in reverse order, so that no launch always follows the same one.
            order = range(len(runs)) if number % 2 == 0 else range(len(runs) - 1, -1, -1)
            times = _batch([runs[index] for index in (order[-1], *order)], device)[1:]
            for index, sample in zip(order, times, strict=True):
                samples[index].append(sample)
            if number % BATCH == 0:
                throttled |= clock.is_throttled()
    return tuple(summarize(times, throttled=throttled) for times in samples)


def measure_sustained(
    runs: Sequence[Run], device: torch.device, *, seconds: float = SUSTAINED_SECONDS
) -> tuple[Measurement, ...]:
    """Times each launch while it repeats alone, for two periods of `seconds`.

    Interleaved launches have a common clock. Under a power limit, a launch that takes less energy, for
    example because it moves fewer bytes, has a higher clock of its own.

    Returns:
        One measurement for each of `runs`, of the second half of both periods.
    """
    samples: list[list[float]] = [[] for _ in runs]
    with torch.cuda.device(device):
        for number in (*range(len(runs)), *reversed(range(len(runs)))):
            period: list[float] = []
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                period += _batch([runs[number]] * BATCH, device)
            samples[number] += period[len(period) // 2 :]
    return tuple(map(summarize, samples))


def _batch(runs: Sequence[Run], device: torch.device) -> list[float]:
    """Returns one sample of each launch with a cold L2, in ms, in order."""
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
    """Returns the buffer to write before each sample. Cached: its allocation costs more than the write."""
    cache = getattr(torch.cuda.get_device_properties(index), "L2_cache_size", 0)
    size = max(FLUSH_FACTOR * cache, MIN_FLUSH_BYTES)
    return torch.empty(size // 4, dtype=torch.int32, device=f"cuda:{index}")


class ClockProbe:
    """Detects throttling by timing a fixed workload."""

    def __init__(self, index: int) -> None:
        side = REFERENCE_SIDE
        self._device = torch.device("cuda", index)
        self._left = torch.randn(side, side, device=self._device, dtype=torch.float16)
        self._out = torch.empty_like(self._left)
        self._best = math.inf
        self.is_throttled()

    def is_throttled(self) -> bool:
        """Returns whether the workload takes longer than `THROTTLED_DRIFT` times its best time so far."""
        with torch.cuda.device(self._device):
            run = functools.partial(torch.mm, self._left, self._left, out=self._out)
            run()
            now = statistics.median(_batch([run] * FIRST_SAMPLES, self._device))
        self._best = min(self._best, now)
        return now > THROTTLED_DRIFT * self._best


@functools.lru_cache(maxsize=1)
def clock_probe(index: int) -> ClockProbe:
    """Returns the probe of a GPU. Cached, because it compares with its earlier times."""
    return ClockProbe(index)


def clock_mhz(device: torch.device) -> float:
    """Returns the current clock of the SMs, from the duration of a fixed number of cycles.

    After other work in the same queue, this is the clock that the work reached.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        start.record()
        torch.cuda._sleep(CLOCK_CYCLES)
        end.record()
        torch.cuda.synchronize(device)
    milliseconds: float = start.elapsed_time(end)
    return CLOCK_CYCLES / milliseconds / 1e3


def on_gpu(measured: Iterable[Measurement], device: torch.device) -> list[Measurement]:
    """Returns measurements with the physical GPU and its present clock."""
    uuid, clock = device_uuid(device.index), round(clock_mhz(device))
    return [msgspec.structs.replace(each, gpu_uuid=uuid, clock_mhz=clock) for each in measured]


def summarize(samples: Sequence[float], *, throttled: bool = False) -> Measurement:
    """Returns the median and the 20th and 80th percentiles (without interpolation) of samples in ms."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Measurement(
        ms=statistics.median(ordered),
        p20=ordered[round(0.2 * last)],
        p80=ordered[round(0.8 * last)],
        samples=len(ordered),
        throttled=throttled,
    )
