"""The facts of shapes and their kernels, from which the pages of a report are made."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from flashtune.core.record import Measurement, Outcome, Provenance, Record, Versions
from flashtune.core.target import Target
from flashtune.dispatch.platform import PLATFORM
from flashtune.templates.config_text import config_text
from flashtune.templates.registry import find_family
from flashtune.tuner.analysis.explain import roofline
from flashtune.tuner.cli.html_report.stored_shapes import Shape, Source
from flashtune.tuner.search.selection import finalists
from flashtune.tuner.tables.listing import standing, tflops
from flashtune.tuner.workloads.short_shape import short_shape
from flashtune.tuner.workloads.work import is_decode, rate

# Candidates of a search in the figure and the table of times.
RUNNERS_UP = 12

Json = dict[str, Any]
# Positions of texts, so that a report has each one once: many kernels have equal versions and probes.
Texts = defaultdict[str, int]


def shape_facts(shape: Shape, source: Source, texts: Texts) -> Json:
    """Returns the facts of a shape. Texts are positions in `texts`, times are in ms and sizes in bytes."""
    problem, least = shape.problem, roofline(shape.problem, shape.target)
    return {
        "title": short_shape(problem),
        "gpu": shape.target.name,
        "pass": "backward" if problem.is_backward else "decode" if is_decode(problem) else "forward",
        "dtype": problem.dtype.value,
        "keys": problem.seqlen_kv,
        "capacity": shape.target.sram_per_block,
        "bound": [short(least.bound_ms), least.bound_by],
        "limits": [short(ms) for ms in (least.matrix_ms, least.softmax_ms, least.memory_ms)],
        "kernels": [_kernel(record, shape.target, source.receipts, texts) for record in shape.kernels],
        "rivals": _runners_up(shape),
    }


def _kernel(
    record: Record, target: Target, receipts: Mapping[str, tuple[Versions, ...]], texts: Texts
) -> Json:
    time, verdict, resources = record.measurement, record.verdict, record.resources
    located = PLATFORM.bundles.find(record, record.specialization, target) if record.config else None
    versions = (record.versions, *receipts.get(record.kernel or "", ()))
    return {
        "family": texts[record.family],
        "config": texts[record.config.label() if record.config else ""],
        "time": _times(time) if time else None,
        "samples": [time.samples, int(time.throttled), target.clock_mhz] if time else None,
        "predicted": int(record.provenance is Provenance.PREDICTED),
        "tflops": short(tflops(record) or 0),
        "gbps": short(rate(record.problem, time.ms)) if time and is_decode(record.problem) else None,
        "peers": [[texts[peer.name], short(peer.ms)] for peer in (time.peers if time else ())],
        "sram": [[texts[name], size] for name, size in _sram_items(record, target)],
        "compiled": [resources.sram_bytes, resources.registers, resources.spill_bytes] if resources else None,
        "standing": standing(record).value,
        "verdict": [verdict.checks, short(verdict.worst_ratio), texts[verdict.device], texts[verdict.failed]]
        if verdict
        else None,
        "probes": texts[", ".join(verdict.probes or ()) if verdict else ""],
        "versions": list(dict.fromkeys(texts[_versions(entry)] for entry in versions)),
        "bundle": texts[located.bundle.where] if located else None,
        "digest": record.kernel,
    }


def _times(time: Measurement) -> list[float]:
    """Returns the median, 20th and 80th percentile in ms."""
    return [short(time.ms), short(time.p20), short(time.p80)]


def short(number: float) -> float:
    """Returns a number with five significant digits, so that pages stay small."""
    return float(f"{number:.5g}")


def _sram_items(record: Record, target: Target) -> list[tuple[str, int]]:
    """Returns the parts of a block's SRAM by the model of the family, in bytes."""
    if record.config is None:
        return []
    family = find_family(record.family)
    items = family.sram_items(record.problem, record.config, target, record.specialization)
    return [(item.name, item.bytes) for item in items]


def candidate_facts(record: Record, target: Target) -> list[Any]:
    """Returns the family, the outcome, the bytes of SRAM, the time and the axes of a candidate."""
    modelled = sum(size for _, size in _sram_items(record, target))
    size = record.resources.sram_bytes if record.resources else modelled
    ms = short(record.ms) if record.outcome is Outcome.OK and record.ms else None
    return [record.family, record.outcome.value, size, ms, config_text(record, target)]


def _versions(versions: Versions) -> str:
    return (
        f"Triton {versions.triton}, ptxas {versions.ptxas}, driver {versions.driver}, torch "
        f"{versions.torch}, flashtune {versions.flashtune}, template {versions.template[:8]}"
    )


def _runners_up(shape: Shape) -> list[list[Any]]:
    """Returns the fastest candidates that are not selected: family, axes, whether predicted, and times."""
    selected = {(record.family, record.config) for record in shape.kernels}
    others = (row.record for row in shape.tried() if (row.record.family, row.record.config) not in selected)
    return [
        [record.family, config_text(record, shape.target), record.provenance is Provenance.PREDICTED, *times]
        for record in finalists(others, RUNNERS_UP, math.inf)
        if record.measurement and (times := _times(record.measurement))
    ]
