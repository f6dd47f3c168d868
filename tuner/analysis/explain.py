"""Explains a kernel's speed: SRAM budget, roofline, traffic, occupancy and other candidates."""

from collections import Counter

import msgspec

from flashtune.core.config import Config
from flashtune.core.errors import KernelError, MachineError
from flashtune.core.problem import Dtype, Problem, product_widths
from flashtune.core.record import Outcome, Provenance, Record, Resources
from flashtune.core.target import Target
from flashtune.runtime.unfused import standard_hbm_items
from flashtune.templates.family import BytesItem, NumericOrder, unsupported_reason
from flashtune.templates.registry import families
from flashtune.templates.rendering import render
from flashtune.tuner.binary.resources import Occupancy, occupancy, read_resources
from flashtune.tuner.tables.kernel_choice import Chosen
from flashtune.tuner.workloads.work import operations
from flashtune.verification.lengths import is_ragged

# Exponentials that one SM computes per clock, on its special function units.
EXPONENTIALS_PER_CLOCK = 16
# fp32 instructions around each exponential: scale, subtract, maximum, sum, conversion, rescale.
VECTOR_FLOPS_PER_PAIR = 8


class SramBudget(msgspec.Struct, frozen=True):
    """Shared memory of one block: the model's items, the compiler's figure and the capacity, in bytes."""

    items: tuple[BytesItem, ...]
    modelled: int
    compiled: int | None
    capacity: int
    tensor_memory_columns: int
    tensor_memory_capacity: int


class Roofline(msgspec.Struct, frozen=True):
    """The minimum time of a problem on a target, in ms, and the resource that limits it."""

    flops: int  # Operations of all products over the pairs that the mask keeps.
    minimal_bytes: int  # Each input read once, each output written once.
    intensity: float  # Operations per byte.
    ridge: float  # The intensity above which the Tensor Cores, not the memory, limit the time.
    matrix_ms: float  # The products at the Tensor Cores' peak.
    softmax_ms: float  # Exponentials and the arithmetic around them, at their units' peak.
    memory_ms: float  # The minimal bytes at the datasheet's bandwidth.
    bound_ms: float  # The longest of the three.
    bound_by: str  # `matrix units`, `softmax` or `memory`.


class Traffic(msgspec.Struct, frozen=True):
    """HBM bytes of one computation, item by item."""

    name: str
    items: tuple[BytesItem, ...]
    bytes: int


class Rival(msgspec.Struct, frozen=True):
    """A stored candidate that ended well, or a baseline from the same run."""

    family: str
    config: str
    ms: float
    provenance: Provenance


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `flashtune explain` for one problem on one target.

    `order` is that of a batch-invariant kernel. `tuned_for` names the shape of the tuned config, if there is
    one. `ms` is the stored time of the selected kernel, if there is one. `compile_error` is the reason if
    there are no `resources`. `occupancy` follows from them. `candidates` are ranked by time. `failures`
    counts the other stored candidates by outcome.
    """

    problem: Problem
    target: str
    family: str
    config: Config
    order: NumericOrder | None
    source: str
    tuned_for: str | None
    ms: float | None
    provenance: Provenance | None
    sram: SramBudget
    roofline: Roofline
    traffic: tuple[Traffic, ...]
    resources: Resources | None
    compile_error: str
    occupancy: Occupancy | None
    candidates: tuple[Rival, ...]
    failures: dict[Outcome, int]


def explain(chosen: Chosen, records: tuple[Record, ...]) -> Explanation:
    """Explains a selected kernel among the stored records of its problem; needs no GPU.

    Compiles the kernel if no record has its resources.
    """
    problem, target = chosen.problem, chosen.target
    resources, refusal = _resources(chosen)
    options = chosen.family.options(chosen.config)
    return Explanation(
        problem=problem,
        target=target.name,
        family=chosen.family.name,
        config=chosen.config,
        order=chosen.family.numeric_order(problem, chosen.config) if problem.batch_invariant else None,
        source=chosen.source,
        tuned_for=chosen.tuned_for.key if chosen.tuned_for else None,
        ms=chosen.record.ms if chosen.record else None,
        provenance=chosen.record.provenance if chosen.record else None,
        sram=sram_budget(chosen, resources),
        roofline=roofline(problem, target),
        traffic=compare_traffic(chosen),
        resources=resources,
        compile_error=refusal,
        occupancy=occupancy(resources, options, target) if resources else None,
        candidates=rank(records),
        failures=dict(Counter(record.outcome for record in records if record.outcome is not Outcome.OK)),
    )


def _resources(chosen: Chosen) -> tuple[Resources | None, str]:
    """Returns the compiler's report, or the reason of its failure."""
    if chosen.record and chosen.record.resources:
        return chosen.record.resources, ""
    kernel = render(chosen.family, chosen.problem, chosen.config, chosen.specialization)
    try:
        return read_resources(kernel, chosen.target), ""
    except MachineError:
        raise
    except KernelError as error:
        return None, str(error)


def sram_budget(chosen: Chosen, resources: Resources | None) -> SramBudget:
    """Returns the SRAM of a kernel, item by item, and its target's capacity."""
    target = chosen.target
    items = chosen.family.sram_items(chosen.problem, chosen.config, target, chosen.specialization)
    columns = (
        resources.tensor_memory_columns
        if resources
        else chosen.family.tensor_memory_columns(chosen.problem, chosen.config, target)
    )
    return SramBudget(
        items,
        sum(item.bytes for item in items),
        resources.sram_bytes if resources else None,
        target.sram_per_block,
        columns,
        target.tensor_memory_columns,
    )


def roofline(problem: Problem, target: Target) -> Roofline:
    """Returns the minimum time of a problem on a target, from peak rates alone."""
    peak = _peak(problem.dtype, target) * 1e12
    bandwidth = target.hbm_bandwidth * 1e9
    # Most sequences of a problem with several lengths are shorter than the longest.
    flops = operations(problem) if is_ragged(problem) else problem.flops()
    pairs = flops // (2 * product_widths(problem))
    times = {
        "matrix units": 1e3 * flops / peak,
        "softmax": 1e3 * _softmax_seconds(pairs, target),
        "memory": 1e3 * problem.minimal_bytes() / bandwidth,
    }
    bound_by = max(times, key=lambda name: times[name])
    return Roofline(
        flops=flops,
        minimal_bytes=problem.minimal_bytes(),
        intensity=flops / max(problem.minimal_bytes(), 1),
        ridge=peak / bandwidth,
        matrix_ms=times["matrix units"],
        softmax_ms=times["softmax"],
        memory_ms=times["memory"],
        bound_ms=times[bound_by],
        bound_by=bound_by,
    )


def _softmax_seconds(pairs: int, target: Target) -> float:
    """Returns the minimum time of the exponentials and of the fp32 work around them."""
    exponentials = pairs / (EXPONENTIALS_PER_CLOCK * target.sm_count * target.clock_mhz * 1e6)
    return max(exponentials, VECTOR_FLOPS_PER_PAIR * pairs / (target.peak.fp32 * 1e12))


def _peak(dtype: Dtype, target: Target) -> float:
    """Returns TFLOP/s of the units that multiply such elements."""
    if dtype.is_quantized:
        return target.peak.fp8
    if dtype.is_float32:
        # Six products of bf16 parts are as precise as one in float32.
        return max(target.peak.fp32, target.peak.half / (2 if dtype is Dtype.TF32 else 6))
    return target.peak.half


def compare_traffic(chosen: Chosen) -> tuple[Traffic, ...]:
    """Returns HBM bytes of the selected config, other families' defaults and unfused attention.

    Unfused attention supports no quantised inputs.
    """
    problem, target = chosen.problem, chosen.target
    ways = [_traffic(chosen.family.name, chosen.family.hbm_items(problem, chosen.config, target))]
    for family in families():
        refused = unsupported_reason(family, problem, target, chosen.specialization)
        if family.name != chosen.family.name and refused is None:
            items = family.hbm_items(problem, family.default(problem, target), target)
            ways.append(_traffic(family.name, items))
    if not problem.dtype.is_quantized:
        ways.append(_traffic("unfused", standard_hbm_items(problem)))
    return tuple(ways)


def _traffic(name: str, items: tuple[BytesItem, ...]) -> Traffic:
    return Traffic(name, items, sum(item.bytes for item in items))


def rank(records: tuple[Record, ...]) -> tuple[Rival, ...]:
    """Returns the successful candidates, each once at its best; measured before predicted, then by time.

    Baselines from the same runs take part with the median of their times.
    """
    best: dict[tuple[str, str], Rival] = {}
    peers: dict[str, list[float]] = {}
    for record in records:
        for peer in record.measurement.peers if record.measurement else ():
            peers.setdefault(peer.name, []).append(peer.ms)
        if record.outcome is not Outcome.OK or record.ms is None:
            continue
        label = record.config.label() if record.config else ""
        rival = Rival(record.family, label, record.ms, record.provenance)
        earlier = best.get((record.family, label))
        if earlier is None or _order(rival) < _order(earlier):
            best[record.family, label] = rival
    others = (
        Rival(name, "", sorted(times)[len(times) // 2], Provenance.MEASURED) for name, times in peers.items()
    )
    return tuple(sorted((*best.values(), *others), key=_order))


def _order(rival: Rival) -> tuple[bool, float]:
    return rival.provenance is Provenance.PREDICTED, rival.ms
