"""Conditions for records. Import, export and verification reject records that do not meet them.

- The GPU is known.
- The family computes the problem on this GPU.
- The config is in the family's space, and fits the GPU.
- The time is possible.
- The config renders the kernel that the record names, if the installed template has the same version.

A receipt is the verdict of a GPU, stored with a record and valid for one kernel digest.
"""

import functools
from collections import Counter
from collections.abc import Iterable

import msgspec

from flashtune.core.canonical import rounded_up
from flashtune.core.config import Config
from flashtune.core.errors import KernelError, TableError, TargetError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, Problem
from flashtune.core.record import (
    Measurement,
    Outcome,
    Provenance,
    Record,
    Resources,
    SharedTime,
    Verdict,
)
from flashtune.core.target import TARGETS, Target, canonical_name, device_target, names_gpu
from flashtune.db.codec import BASELINES
from flashtune.db.table import TunedTable
from flashtune.templates.family import Family, unsupported_reason
from flashtune.templates.registry import families, find_family, template_hash
from flashtune.templates.rendering import render
from flashtune.tuner.binary.resources import overflow
from flashtune.verification.lengths import is_ragged, usual_lengths
from flashtune.verification.probes import EVERY_LEVEL, INVARIANCE

# More sequences than in any tuned shape. Sampling their lengths takes 5 ms.
MAX_SEQUENCES = 2**13
MAX_THREADS = 1024
# Size of the cache of digests. A key takes about 1 KiB.
MAX_CACHED_DIGESTS = 2**14

# An empty kernel takes longer, in ms.
LEAST_LAUNCH_MS = 0.001

# The device of verdicts by the interpreter, which are not receipts.
INTERPRETER = "interpreter"


def require_admissible(records: Iterable[Record], where: str) -> None:
    """Raises if verification would reject one of the records.

    `where` is their source in the error, such as a file's name.
    """
    for position, record in enumerate(records, start=1):
        reason = why_refused(record)
        if reason:
            raise TableError(f"{where}, record {position} cannot be used: {reason}")


def require_sound_evidence(table: TunedTable, where: str) -> None:
    """Raises if a receipt of an installed template lacks probes."""
    if not table.receipts:
        return
    templates = {template_hash(family.name) for family in families()}
    # Receipts are of kernels with and without the log-sum-exp.
    digests = {
        _digest(
            record.family,
            record.problem.computation,
            record.config,
            msgspec.structs.replace(record.specialization, lse=lse),
        )
        for record in table.records
        if record.problem.batch_invariant and record.config is not None
        for lse in (False, True)
    }
    for position, receipt in enumerate(table.receipts, start=1):
        flaw = _probe_flaw(receipt.verdict, batch_invariant=receipt.digest in digests)
        if flaw and receipt.versions.template in templates:
            raise TableError(f"{where}, receipt {position} cannot be used: it {flaw}")


def why_refused(record: Record) -> str:
    """Returns why a record must not be used, as a clause; empty if it can be used.

    Kernels of another template version are not compared. Dispatch treats such records as unproven.
    """
    target = facts_of(record)
    if target is None:
        return f"there is no target {record.target!r} here: use it on a machine with that GPU"
    problem = record.problem
    # Problems of calls have their number of tokens rounded up to a power of two.
    most = rounded_up(problem.batch * problem.seqlen_q)
    if problem.packed and not problem.seqlen_q <= problem.packed <= most:
        return f"its {problem.packed} packed tokens are not those of {problem.batch} sequences"
    if problem.batch > MAX_SEQUENCES and (problem.kv_lengths or problem.page_size):
        return f"{problem.batch} sequences are too many to be timed with lengths of their own"
    of_family = _unfit_baseline if record.family in BASELINES else _unfit
    return of_family(record, target) or _impossible_time(record, target)


def facts_of(record: Record) -> Target | None:
    """Returns the target of a record's GPU, None for an unknown GPU.

    The sources, in order: the list of GPUs, this machine's GPU, the record, and the listed GPU with the
    same canonical name, for example of a MIG slice.
    """
    name = record.target
    listed = {target.name: target for target in TARGETS}
    if name in listed:
        return listed[name]
    try:
        here = device_target(0)
    except TargetError:
        here = None
    if here is not None and here.name == name:
        return here
    return record.gpu or listed.get(canonical_name(name))


def digest_of(record: Record) -> str:
    """Returns the digest of the kernel that a record's config renders. Each kernel is rendered once."""
    assert record.config is not None
    return _digest(record.family, record.problem.computation, record.config, record.specialization)


@functools.lru_cache(maxsize=MAX_CACHED_DIGESTS)
def _digest(family: str, computation: Problem, config: Config, specialization: Specialization) -> str:
    return render(find_family(family), computation, config, specialization).digest


def least_ms(problem: Problem, target: Target) -> float:
    """Returns the minimum time of a launch for a problem at the lengths of a tuned shape, in ms.

    It follows from peak rates, and is at least that of an empty kernel.

    Output of up to the size of the L2 is not counted: it may not be in HBM when a kernel ends.
    """
    peak = (target.peak.fp8 if problem.dtype.is_quantized else target.peak.half) * 1e9
    flops, moved, written = map(
        sum, zip(*(_costs(part, count) for part, count in _parts(problem)), strict=True)
    )
    left = min(written, target.l2_bytes)
    return max(flops / peak, (moved - left) / (target.hbm_bandwidth * 1e6), LEAST_LAUNCH_MS)


def _costs(problem: Problem, count: int) -> tuple[int, int, int]:
    """Returns FLOPs, bytes moved and bytes written of `count` equal problems."""
    return count * problem.flops(), count * problem.minimal_bytes(), count * problem.written_bytes()


def _parts(problem: Problem) -> Iterable[tuple[Problem, int]]:
    """Splits a problem into problems with sequences of equal length, each with its count."""
    equal = msgspec.structs.replace(problem, packed=0, page_size=0, kv_lengths=False)
    if problem.packed:
        # Equal lengths need the fewest FLOPs.
        queries = min(problem.packed // problem.batch, problem.seqlen_q)
        if problem.packed == rounded_up(problem.packed):
            # The number of tokens may be rounded up: at least half of them exist.
            queries = min(queries, max(1, problem.packed // 2 // problem.batch))
        keys = problem.seqlen_kv * queries // problem.seqlen_q
        yield msgspec.structs.replace(equal, seqlen_q=queries, seqlen_kv=keys), 1
    elif is_ragged(problem):
        for keys, count in Counter(usual_lengths(problem).keys).items():
            yield msgspec.structs.replace(equal, batch=1, seqlen_kv=keys), count
    else:
        yield equal, 1


def _impossible_time(record: Record, target: Target) -> str:
    """Returns a message if a time of a record or of its peers is below the minimum, else an empty text."""
    if record.measurement is None:
        return ""
    problem, measurement = record.problem, record.measurement
    fault = _too_short(measurement, least_ms(problem, target))
    if measurement.shared and not fault:
        from flashtune.dispatch.masked_sdpa import timed_ways

        if not {time.sharing for time in measurement.shared} <= set(timed_ways(problem)):
            return "it has times with a mask that its problem does not share"
        least = least_ms(msgspec.structs.replace(problem, bias=Bias.NONE), target)
        shorts = (_too_short(time, least, " with a shared mask") for time in measurement.shared)
        fault = next(filter(None, shorts), "")
    return fault and f"{fault}, the least that {target.name} can take"


def _too_short(measured: Measurement | SharedTime, least: float, condition: str = "") -> str:
    """Returns which time is below the minimum, or an empty text. Peers obey the same limit."""
    times = {"its time": measured.ms, **{f"the time of {peer.name}": peer.ms for peer in measured.peers}}
    return next(
        (
            f"{name} of {ms:.4g} ms{condition} is below {least:.4g} ms"
            for name, ms in times.items()
            if ms < least
        ),
        "",
    )


def _unfit_baseline(record: Record, target: Target) -> str:
    """Returns why a baseline's problem cannot have been searched on a GPU, or an empty text."""
    problem, reasons = record.problem, []
    for family in families():
        reason = unsupported_reason(family, problem, target, record.specialization)
        if reason is None:
            return ""
        if family.direction is problem.direction:
            reasons.append(reason)
    return f"no kernel family computes its problem: {'; '.join(reasons)}"


def _unfit(record: Record, target: Target) -> str:
    """Returns why a record does not agree with its family, GPU or kernel, or an empty text."""
    family, problem, config = find_family(record.family), record.problem, record.config
    assert config is not None
    reason = unsupported_reason(family, problem, target, record.specialization, config)
    if reason:
        return f"its family does not compute its problem: {reason}"
    reason = _misfit(record, family, config, target)
    if reason:
        return reason
    if not family.space(problem, target).contains(config):
        return f"its config ({config.label()}) is not in the space of {family.name} for its problem"
    flaw = receipt_flaw(record)
    return f"it {flaw}" if flaw else _other_kernel(record)


def _misfit(record: Record, family: Family, config: Config, target: Target) -> str:
    """Returns which capacity a kernel exceeds, by the model or by the resources in the record."""
    problem = record.problem
    items = family.sram_items(problem, config, target, record.specialization)
    columns = family.tensor_memory_columns(problem, config, target)
    modelled = Resources(sum(item.bytes for item in items), columns)
    for resources in filter(None, (modelled, record.resources)):
        reason = overflow(resources, target)
        if reason:
            return f"its kernel {reason}"
        warps = config.num_warps if resources.warps is msgspec.UNSET else resources.warps
        if warps * target.warp_size > MAX_THREADS:
            return f"its kernel has {warps * target.warp_size} threads, and a block has at most {MAX_THREADS}"
    return ""


def _other_kernel(record: Record) -> str:
    """Returns a message if the config renders another kernel under the record's template version."""
    if record.kernel is None or record.versions.template != template_hash(record.family):
        return ""
    try:
        digest = digest_of(record)
    except KernelError as error:
        return f"its kernel cannot be rendered: {error}"
    if digest == record.kernel:
        return ""
    return f"it has a stale receipt: it names the kernel {record.kernel}, and its config renders {digest}"


class Receipt(msgspec.Struct, frozen=True):
    """The stored result of a verification on a GPU."""

    device: str
    # Versions of that run.
    driver: str
    triton: str
    ptxas: str
    torch: str
    kernel: str  # Digest of the kernel: source and specialization.
    worst_ratio: float  # Largest ratio of a row's error to its tolerance.
    checks: int  # Number of compared problems and probes.
    probes: tuple[str, ...]  # The passed probes; empty in old receipts without a list.


def receipt_of(record: Record) -> Receipt:
    """Returns the receipt of a record that passes `receipt_fault`."""
    verdict, versions = record.verdict, record.versions
    assert verdict is not None
    assert record.kernel is not None
    return Receipt(
        device=verdict.device,
        driver=versions.driver,
        triton=versions.triton,
        ptxas=versions.ptxas,
        torch=versions.torch,
        kernel=record.kernel,
        worst_ratio=verdict.worst_ratio,
        checks=verdict.checks,
        probes=() if verdict.probes is msgspec.UNSET else verdict.probes,
    )


def never_verified(record: Record) -> bool:
    """Returns whether a record's kernel was never verified on a GPU."""
    return record.verdict is None or record.verdict.device == INTERPRETER


def receipt_flaw(record: Record) -> str:
    """Returns why a measured record cannot come from a search on its GPU; empty if it can.

    A search verifies the kernels that it selects, and stores the verdict with the name of its GPU.
    """
    if record.provenance is not Provenance.MEASURED or record.outcome is not Outcome.OK:
        return ""
    if record.verdict is None or never_verified(record):
        return "has no receipt: no GPU ever verified it"
    if not names_gpu(record.target, record.verdict.device):
        return f"has a receipt of another GPU: {record.verdict.device!r}"
    # Kernels of other template versions are verified again in any case.
    installed = record.versions.template == template_hash(record.family)
    return _probe_flaw(record.verdict, record.problem.batch_invariant) if installed else ""


def _probe_flaw(verdict: Verdict, batch_invariant: bool) -> str:
    """Returns which probes a passed verdict lacks that every level of verification has, or an empty text."""
    needed = EVERY_LEVEL | {INVARIANCE} if batch_invariant else EVERY_LEVEL
    missing = needed - set(verdict.probes or ())
    if not verdict.passed or not missing:
        return ""
    return f"has a receipt without the probes {', '.join(sorted(missing))}: verify its kernel again"


def is_stale(record: Record, digest: str) -> bool:
    """Returns whether a kernel passed verification on its GPU, and another one renders here."""
    verdict = record.verdict
    if verdict is None or not verdict.passed or not names_gpu(record.target, verdict.device):
        return False
    return record.kernel != digest or record.versions.template != template_hash(record.family)


def receipt_fault(record: Record, digest: str) -> str:
    """Returns why a record's receipt is invalid for a kernel; empty if it is valid.

    `digest` is that of the kernel that renders here.
    """
    if record.verdict is None or never_verified(record):
        return "has no receipt: no GPU ever verified it"
    if not names_gpu(record.target, record.verdict.device):
        return f"has a receipt of another GPU: {record.verdict.device!r}"
    if not record.verdict.passed:
        return f"has a receipt of failure: {record.verdict.failed}"
    if is_stale(record, digest):
        return "has a stale receipt: the kernel that renders here is another than the one that was verified"
    return ""
