"""Results of `flashtune bench`, as they are shown, saved and loaded, and their units."""

from typing import Annotated

import msgspec

from flashtune.core.problem import Dtype, Problem
from flashtune.core.record import Milliseconds, NonNegative, ShortText, Versions
from flashtune.tuner.workloads.work import Unit, is_decode, rate

OURS = "flashtune"

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One contestant's figures."""

    name: ShortText  # `flashtune`, or the baseline's name.
    detail: ShortText  # Our kernel's name, or the release of a baseline with its own package.
    ms: Positive  # Median GPU time of a CUDA-graph replay with a cold L2.
    p20: Milliseconds  # 20th percentile, in ms.
    p80: Milliseconds  # 80th percentile, in ms.
    tflops: Positive  # TFLOP/s by `work.operations`.
    host_us: float  # Median host time of queueing one call, in microseconds.
    error: float  # Largest row error as a multiple of the tolerance (1.0 is the limit).


class LeftOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A contestant without a row."""

    name: ShortText  # As in `Row`.
    # As in `Row`, if its output is wrong. None if the output is not finite or missing.
    error: float | None
    message: ShortText = ""  # Why there is no output or no graph. Empty if the output is wrong.


class Bench(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The times of all contestants at one problem on one GPU."""

    problem: Problem
    target: ShortText
    rows: tuple[Row, ...]  # Contestants with correct outputs.
    left_out: tuple[LeftOut, ...]  # The others.
    rounds: NonNegative  # Least number of samples of one.
    throttled: bool  # Whether the clock was throttled during sampling.
    clock_mhz: float  # The SMs' clock right after the last sample.
    seconds: float  # Wall clock time of this problem, with compilation and verification.
    versions: Versions  # Versions of our row.
    # Whether each was timed alone, under sustained load, and not interleaved.
    sustained: bool = False

    def row(self, name: str) -> Row | None:
        """Returns a contestant's row, None if it has none."""
        return next((row for row in self.rows if row.name == name), None)


class Ceiling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speed of a large matrix product on this GPU."""

    dtype: Dtype  # Element type of its factors.
    side: NonNegative  # Rows and columns of its square factors.
    ms: Positive  # Median time with a cold L2.
    tflops: Positive  # Its TFLOP/s.
    clock_mhz: float  # The SMs' clock right after it.


class Copy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speed of a plain copy of device memory on this GPU: the upper bound for reading memory."""

    bytes: NonNegative  # Bytes read and written.
    ms: Positive  # Median time.
    gbps: Positive  # Its GB/s, reads and writes together.


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Versions of the baselines in addition to `Versions`; empty if not installed."""

    gpu: ShortText
    cuda: ShortText
    cudnn: ShortText
    flash_attn_4: ShortText


class BenchRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of the command."""

    command: Annotated[str, msgspec.Meta(max_length=10_000)]
    environment: Environment  # Versions of the baselines.
    ceilings: tuple[Ceiling, ...]  # One for each element type.
    benches: tuple[Bench, ...]  # One for each problem, in the order in which they ran.
    # Speed of a copy of device memory. None in reports that were saved without it.
    copy: Copy | None = None

    def times(self, peer: str) -> dict[Problem, tuple[float | None, float | None]]:
        """Returns the times of a baseline and of flashtune at each problem, in ms; None without a row."""
        pairs = {bench.problem: (bench.row(peer), bench.row(OURS)) for bench in self.benches}
        return {
            problem: (theirs.ms if theirs else None, ours.ms if ours else None)
            for problem, (theirs, ours) in pairs.items()
        }


def speed_of(problem: Problem, row: Row) -> float:
    """Returns a row's speed in the problem's unit."""
    return rate(problem, row.ms)


def decode_case(problem: Problem) -> str | None:
    """Returns the name of plain decoding in files of figures, None for other problems.

    An example is `decode b16 hq32 hkv8 s8192 d128 [GB/s]`.
    """
    is_plain = problem.dtype is Dtype.BF16 and problem.head_dim == problem.value_head_dim
    if not is_decode(problem) or not is_plain or problem.features:
        return None
    heads = f"hq{problem.heads} hkv{problem.kv_heads}"
    return f"decode b{problem.batch} {heads} s{problem.seqlen_kv} d{problem.head_dim} [{Unit.GBPS}]"
