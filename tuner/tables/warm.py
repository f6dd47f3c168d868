"""`flashtune warm`: compiles, loads and verifies kernels before the first calls."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import torch

from flashtune.core.canonical import normal_form, rounded_extents
from flashtune.core.errors import FlashtuneError, KernelError, MachineError, VerificationError
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Bias, Direction, Problem
from flashtune.core.record import Outcome, Selection
from flashtune.core.target import Target
from flashtune.db.eligibility import by_problem
from flashtune.db.table import TunedTable
from flashtune.dispatch.bound_request import KernelKey
from flashtune.dispatch.lookup import select
from flashtune.dispatch.tables import Tables, tuned_records
from flashtune.launch.bundles import Bundles, bundled_kernel
from flashtune.launch.kernel_cache import kernel_of
from flashtune.request.request import Prefer
from flashtune.runtime.kernel_loader import KernelLoader
from flashtune.tuner.candidates import Candidate, SearchTask, contiguous_specialization
from flashtune.tuner.execution.compile_pool import Compiled, CompilePool
from flashtune.tuner.execution.cpus import available_cpus
from flashtune.tuner.execution.device_jobs import run_on_devices
from flashtune.tuner.workloads.models import saving_lse

# Time limit to load and verify a kernel in a process of a GPU.
LOAD_SECONDS = 300.0

# Called with a phase, the number of finished kernels, and the number of all kernels.
Watch = Callable[[str, int, int], None]
# A problem, and the specialization for the tensors of the call.
Call = tuple[Problem, Specialization]


class Need(NamedTuple):
    """A kernel, and the first problem that it serves."""

    problem: Problem
    selection: Selection
    kernel: Kernel
    bundle: str = ""  # The bundle that has it.


class Needs(NamedTuple):
    """Distinct kernels by digest, and for each call without a kernel a sentence with the reason."""

    kernels: dict[str, Need]
    left_out: tuple[str, ...]


class Warmed(msgspec.Struct, frozen=True):
    """A kernel that was compiled before its first call."""

    problem: str  # Key of the first problem that it serves.
    target: str
    family: str
    config: str  # Label of its config.
    kernel: str  # Its digest.
    lse: bool  # Whether it returns the log-sum-exp, or takes the gradient of it.
    bundle: str  # The bundle that has its machine code; empty if it was compiled.
    seconds: float  # Compile time; near 0 for a hit in Triton's cache.
    loaded: bool  # Whether it was loaded on this machine's GPU, and verified if it has no receipt.
    failed: str = ""  # Why it cannot be used; empty if it can.


def calls_of(problems: Iterable[Problem]) -> tuple[Call, ...]:
    """Returns the calls of problems with contiguous tensors.

    If a problem's backward pass is among the problems, its forward pass is also called with the log-sum-exp.
    A backward pass with an additive bias is called with and without the gradient of the bias.
    """
    listed = tuple(problems)
    plain = [(problem, contiguous_specialization(problem)) for problem in listed]
    trained = [(problem, contiguous_specialization(problem, lse=True)) for problem in saving_lse(listed)]
    constant = [
        (problem, msgspec.structs.replace(assumed, constant_bias=True))
        for problem, assumed in plain
        if problem.is_backward and problem.bias is Bias.ADDITIVE
    ]
    return tuple(dict.fromkeys((*plain, *trained, *constant)))


def tables_with(target: Target, tables: Iterable[TunedTable]) -> Tables:
    """Returns the tables of dispatch for a target as if some tables were imported."""
    tuned = tuned_records(target.name)
    added = by_problem(record for table in tables for record in table.records)
    return Tables(database={**tuned.database, **added}, shipped=tuned.shipped)


def needs_of(calls: Iterable[Call], target: Target, tables: Tables, bundles: Bundles | None = None) -> Needs:
    """Returns the kernels that dispatch would choose for calls, each once.

    Kernels of `bundles` have no source.
    """
    kernels: dict[str, Need] = {}
    left_out: list[str] = []
    for problem, specialization in calls:
        try:
            selection = select(problem, target, tables, specialization, generated=True, bundles=bundles)
            record = selection.record
            located = bundles and bundles.find(record, specialization, target)
            if located:
                kernel, where = bundled_kernel(located.entry, record, specialization), located.bundle.where
            else:
                kernel, where = kernel_of(record, specialization), ""
        except MachineError:
            raise
        except FlashtuneError as error:
            left_out.append(str(error))
            continue
        kernels.setdefault(kernel.digest, Need(problem, selection, kernel, where))
    return Needs(kernels, tuple(left_out))


def with_buckets(
    needs: Needs, calls: Iterable[Call], target: Target, tables: Tables, bundles: Bundles | None = None
) -> Needs:
    """Returns needs with the kernels that the integrations for torch and transformers choose for calls.

    These prepare the kernels of rounded batches and lengths, unless exactly the forward problem is tuned.
    """
    rounded = [
        (rounded_extents(problem), specialization)
        for problem, specialization in calls
        if not _is_tuned(problem, tables)
    ]
    return Needs({**needs_of(rounded, target, tables, bundles).kernels, **needs.kernels}, needs.left_out)


def _is_tuned(problem: Problem, tables: Tables) -> bool:
    forward = normal_form(msgspec.structs.replace(problem, direction=Direction.FORWARD))
    return tables.find(forward) is not None


def compile_needs(
    needs: Needs, target: Target, watch: Watch = lambda phase, done, total: None
) -> dict[str, Compiled]:
    """Compiles kernels that no bundle has, on all cores, and returns the results by digest."""
    missing = {digest: need for digest, need in needs.kernels.items() if not need.bundle}
    total = len(missing)
    if not total:
        return {}
    compiled: dict[str, Compiled] = {}
    with CompilePool(min(total, available_cpus())) as pool:
        jobs = {digest: pool.submit(*_job(need, target)) for digest, need in missing.items()}
        for digest, job in jobs.items():
            watch("compiling", len(compiled), total)
            compiled[digest] = job.result()
    watch("compiling", total, total)
    return compiled


def _job(need: Need, target: Target) -> tuple[SearchTask, Candidate]:
    record, specialization = need.selection.record, need.kernel.specialization
    assert record.config is not None
    return SearchTask(record.problem, target, specialization, ()), Candidate(record.family, record.config)


def warm(
    needs: Needs, target: Target, devices: Sequence[int], watch: Watch = lambda phase, done, total: None
) -> tuple[Warmed, ...]:
    """Compiles the kernels that no bundle has, and with GPUs also loads and verifies each on one of them.

    Binaries are stored in Triton's cache and verdicts in the database. Later processes neither compile nor
    verify these kernels. Without devices, they are only compiled.
    """
    compiled = compile_needs(needs, target, watch)
    jobs = [(need, target, compiled.get(digest)) for digest, need in needs.kernels.items()]
    device = next(iter(devices), None)
    results: list[Warmed] = []
    for result in (
        run_on_devices(_warmed, jobs, devices, LOAD_SECONDS)
        if len(devices) > 1
        else (_warmed(*job, device) for job in jobs)
    ):
        results.append(result)
        if device is not None:
            watch("loading", len(results), len(jobs))
    return tuple(results)


def _warmed(need: Need, target: Target, compiled: Compiled | None, device: int | None) -> Warmed:
    record = need.selection.record
    assert record.config is not None
    failed = ""
    if compiled is not None and compiled.outcome is not Outcome.OK:
        failed = f"{compiled.outcome.value}: {compiled.message}"
    if not failed and device is not None:
        failed = _why_not_loaded(need, target, device)
    return Warmed(
        problem=need.problem.key,
        target=target.name,
        family=record.family,
        config=record.config.label(),
        kernel=need.kernel.digest,
        lse=need.kernel.specialization.lse,
        bundle=need.bundle,
        seconds=compiled.resources.compile_seconds if compiled and compiled.resources else 0.0,
        loaded=device is not None and not failed,
        failed=failed,
    )


def _why_not_loaded(need: Need, target: Target, device: int) -> str:
    """Loads a kernel as its first call would, and returns why that fails; empty on success."""
    gpu = torch.device("cuda", device)
    key = KernelKey(need.problem, need.kernel.specialization, Prefer.GENERATED, gpu)
    try:
        _loader().load(need.selection, target, key)
    except (KernelError, VerificationError) as error:
        return str(error)
    return ""


@functools.cache
def _loader() -> KernelLoader:
    return KernelLoader()
