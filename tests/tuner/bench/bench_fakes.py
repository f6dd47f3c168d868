"""Constructed results of `flashtune bench`."""

from flashtune.core.problem import Dtype, Problem
from flashtune.core.record import Versions
from flashtune.tuner.bench.results import OURS, Bench, BenchRun, Ceiling, Copy, Environment, LeftOut, Row
from flashtune.tuner.workloads.work import kv_bytes

VERSIONS = Versions("0.1.0", "0" * 32, "2.13.0", "3.7.1", "13.0", "580.1")
DETAIL = "forward_q_outer block_m=128 (database)"
SPEEDS = {OURS: 600.0, "sdpa-cudnn": 500.0, "sdpa-flash": 300.0, "flash-attn-4": 750.0}
REFUSED = LeftOut("unfused", None, "its scores would take more than half of the free memory")


def a_row(problem: Problem, name: str, tflops: float) -> Row:
    """A row of a given speed."""
    ms = problem.nominal_flops() / tflops / 1e9
    return Row(name, DETAIL if name == OURS else "", ms, ms * 0.99, ms * 1.02, tflops, 12.5, 0.4)


def a_bench(
    problem: Problem,
    speeds: dict[str, float] = SPEEDS,
    left_out: tuple[LeftOut, ...] = (),
    throttled: bool = False,
) -> Bench:
    """Rows of given speeds in TFLOP/s."""
    rows = tuple(a_row(problem, name, tflops) for name, tflops in speeds.items())
    return Bench(problem, "nvidia-h200", rows, left_out, 21, throttled, 1700.0, 2.5, VERSIONS)


def a_run(*benches: Bench) -> BenchRun:
    """A run with ceilings of 800 TFLOP/s and of 4000 GB/s."""
    environment = Environment("NVIDIA H200", "13.0", "9.19.0", "4.0.0b36")
    ceiling = Ceiling(Dtype.BF16, 8192, 2 * 8192**3 / 800 / 1e9, 800.0, 1650.0)
    copy = Copy(2**30, 2**30 / 4000 / 1e6, 4000.0)
    return BenchRun("flashtune bench --grid paper", environment, (ceiling,), benches, copy)


def a_reading_bench(problem: Problem, rates: dict[str, float]) -> Bench:
    """Rows of given rates in GB/s of keys and values."""
    tflops = problem.nominal_flops() / kv_bytes(problem) / 1e3
    return a_bench(problem, {name: rate * tflops for name, rate in rates.items()})
