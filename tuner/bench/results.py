"""What `flashtune bench` finds, as it is shown, saved and loaded again."""

from __future__ import annotations

from typing import Annotated

import msgspec

from flashtune.core.problem import Dtype, Problem
from flashtune.core.record import Milliseconds, NonNegative, ShortText, Versions

OURS = "flashtune"

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One contestant's figures.

    Attributes:
        name: `flashtune`, or the peer's name.
        detail: Which kernel, for ours; which release, for a peer that comes by itself.
        ms: Median GPU time of a CUDA-graph replay with a cold L2.
        p20: 20th percentile, in ms.
        p80: 80th percentile, in ms.
        tflops: TFLOP/s by `Problem.nominal_flops`.
        host_us: Median host time of queueing one call, in microseconds.
        error: Largest row error over what the gate allows (1.0 is the limit).
    """

    name: ShortText
    detail: ShortText
    ms: Positive
    p20: Milliseconds
    p80: Milliseconds
    tflops: Positive
    host_us: float
    error: float


class LeftOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A contestant without a row.

    Attributes:
        name: As in `Row`.
        error: As in `Row`, where its output is wrong; None where it is not finite, or there is none.
        message: Why there is no output, or no graph of it; empty where the output is wrong.
    """

    name: ShortText
    error: float | None
    message: ShortText = ""


class Bench(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All contestants at one problem on one GPU, timed in turn.

    Attributes:
        problem: What they compute.
        target: The GPU.
        rows: Those whose outputs are right.
        left_out: The others.
        rounds: Samples of each.
        throttled: Whether the clock was held down while sampling.
        clock_mhz: The multiprocessors' clock right after the last sample.
        seconds: Wall clock of this problem, compiling and proving included.
        versions: What made our row.
    """

    problem: Problem
    target: ShortText
    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...]
    rounds: NonNegative
    throttled: bool
    clock_mhz: float
    seconds: float
    versions: Versions

    def row(self, name: str) -> Row | None:
        """A contestant's row, where it has one."""
        return next((row for row in self.rows if row.name == name), None)


class Ceiling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a large matrix product reaches on this GPU.

    Attributes:
        dtype: Element type of its factors.
        side: Rows and columns of its square factors.
        ms: Median time with a cold L2.
        tflops: Its TFLOP/s.
        clock_mhz: The multiprocessors' clock right after it.
    """

    dtype: Dtype
    side: NonNegative
    ms: Positive
    tflops: Positive
    clock_mhz: float


class Copy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a plain copy of device memory reaches on this GPU: the ceiling of what reads memory alone.

    Attributes:
        bytes: What is read and written.
        ms: Median time.
        gbps: Its GB/s, reads and writes together.
    """

    bytes: NonNegative
    ms: Positive
    gbps: Positive


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the peers are, beside what `Versions` says; empty where there is none."""

    gpu: ShortText
    cuda: ShortText
    cudnn: ShortText
    flash_attn_4: ShortText


class BenchRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of the command.

    Attributes:
        command: The command line.
        environment: Where it ran.
        ceilings: One for each element type.
        benches: One for each problem, in the order in which they ran.
        copy: What a copy of device memory reaches; None in reports that were saved without it.
    """

    command: Annotated[str, msgspec.Meta(max_length=10_000)]
    environment: Environment
    ceilings: tuple[Ceiling, ...]
    benches: tuple[Bench, ...]
    copy: Copy | None = None
