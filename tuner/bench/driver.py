"""Runs `flashtune bench` over several problems, after it compiles their kernels in parallel."""

import functools
from collections.abc import Callable, Sequence

import msgspec
import torch

from flashtune.core.errors import UsageError
from flashtune.core.problem import Problem
from flashtune.core.target import Target, device_target
from flashtune.dispatch.platform import PLATFORM
from flashtune.dispatch.tables import tuned_records
from flashtune.tuner.bench.bench import require_gpu, require_work, run_bench
from flashtune.tuner.bench.ceiling import measure_ceiling, measure_copy
from flashtune.tuner.bench.flash_attn_4 import FLASH_ATTN_4
from flashtune.tuner.bench.grids import PeerFile
from flashtune.tuner.bench.peer_runs import cudnn_version, version_of
from flashtune.tuner.bench.results import BenchRun, Environment
from flashtune.tuner.bench.summary import Against, OfCopy, Ratios, against, of_copy, ratios
from flashtune.tuner.candidates import contiguous_specialization
from flashtune.tuner.execution.compile_pool import Compiled
from flashtune.tuner.execution.device_jobs import run_on_devices
from flashtune.tuner.tables.warm import compile_needs, needs_of

# Starting compiler processes takes seconds, which pays off only for more than a few kernels.
COMPILED_HERE = 3
# Time limit of a problem in a process: some peers are compiled for minutes.
BENCH_SECONDS = 900.0


class BenchRequest(msgspec.Struct, frozen=True):
    """The problems and options of a run."""

    problems: tuple[Problem, ...]  # At least one, none empty.
    devices: tuple[int, ...]  # Indexes of the GPUs, which are of one model.
    peers: tuple[str, ...]  # Baselines of the selected kernels.
    rounds: int  # Samples of each contestant.
    command: str  # The command line, for the report.
    # Whether each contestant is timed alone, under sustained load, as often as it can be in a fixed time.
    # `rounds` then counts for the ceilings alone.
    sustained: bool = False


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run and its summaries."""

    run: BenchRun  # The measurements.
    ratios: tuple[Ratios, ...]  # Our speed over each baseline's.
    against: Against | None = None  # Comparison with figures measured elsewhere, if any were given.
    # Read speed in decoding, compared with a plain copy of device memory.
    of_copy: tuple[OfCopy, ...] = ()


def report_of(run: BenchRun, file: PeerFile | None) -> Report:
    """Returns the summaries of a run, with figures measured elsewhere if given."""
    standing = against(run.benches, file) if file else None
    return Report(run, ratios(run.benches), standing, of_copy(run))


def read_report(data: bytes, name: str) -> BenchRun:
    """Returns the run of a saved report. Its summaries are computed again."""
    try:
        run = msgspec.json.decode(data, type=Report).run
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{name} is no report that this version of flashtune bench saves: {error}; make it anew by --save"
        ) from error
    if not run.benches:
        raise UsageError(f"{name} contains no results: write it again with --save")
    return run


def run_benches(request: BenchRequest, watch: Callable[[BenchRun], None]) -> BenchRun:
    """Times all problems in order, or on several GPUs each in a process of its GPU.

    `watch` is called after each problem with the results so far.
    """
    require_gpu()
    for problem in request.problems:
        require_work(problem)
    target = device_target(request.devices[0])
    if len(request.problems) > COMPILED_HERE:
        compile_ahead(request.problems, target)
    device = torch.device("cuda", request.devices[0])
    dtypes = dict.fromkeys(problem.dtype for problem in request.problems)
    ceilings = tuple(measure_ceiling(dtype, device, rounds=request.rounds) for dtype in dtypes)
    copy = measure_copy(device, rounds=request.rounds)
    run = BenchRun(request.command, environment(device), ceilings, (), copy)
    timed = functools.partial(
        run_bench, peers=request.peers, rounds=request.rounds, sustained=request.sustained
    )
    jobs = [(problem,) for problem in request.problems]
    for bench in (
        run_on_devices(timed, jobs, request.devices, BENCH_SECONDS)
        if len(request.devices) > 1
        else (timed(problem, request.devices[0]) for problem in request.problems)
    ):
        run = msgspec.structs.replace(run, benches=(*run.benches, bench))
        watch(run)
    return run


def environment(device: torch.device) -> Environment:
    """Returns the versions of the baselines on this machine."""
    return Environment(
        gpu=torch.cuda.get_device_name(device),
        cuda=torch.version.cuda or "",
        cudnn=cudnn_version(),
        flash_attn_4=version_of(FLASH_ATTN_4),
    )


def compile_ahead(problems: Sequence[Problem], target: Target) -> tuple[Compiled, ...]:
    """Compiles the kernels that dispatch would select and no bundle has on all cores, into Triton's cache.

    Errors here are reported again at the kernel's call.

    Returns:
        The result of compiling each distinct kernel.
    """
    calls = [(problem, contiguous_specialization(problem)) for problem in problems]
    needs = needs_of(calls, target, tuned_records(target.name), PLATFORM.bundles)
    return tuple(compile_needs(needs, target).values())
