"""Records as a search stores them."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from flashtune import testing
from flashtune.core.config import Config
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Measurement, Outcome, PeerTime, Provenance, Record, Verdict, Versions
from flashtune.core.target import find_target
from flashtune.db.codec import Check
from flashtune.db.table import TunedTable, dump_table, shipped_table
from flashtune.dispatch.versions import current_versions
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.tables.kernel_choice import change_config
from flashtune.verification.probes import EVERY_LEVEL

PROBLEM = testing.problem("heads=8,kv_heads=4,seqlen=512,head_dim=64,dtype=bf16,batch=2")
VERSIONS = Versions("0.1.0", "t" * 32, "2.13.0", "3.7.1", "13.0", "580.1")
VERDICT = Verdict(True, 0.4, 100, "", "NVIDIA H200", probes=tuple(sorted(EVERY_LEVEL)))
# The digest of no kernel, where rendering one would only take time.
DIGEST = "0123456789abcdef" * 2
CONTIGUOUS = Specialization()

# A fixture that makes records.
MakeRecord = Callable[..., Record]


def shipped_table_of(target: str) -> TunedTable:
    """Returns the shipped table of a target that has one."""
    table = shipped_table(target)
    assert table is not None
    return table


def measured(ms: float, peers: dict[str, float] | None = None) -> Measurement:
    """Returns a measurement of this median, with the times of peers by their names."""
    times = tuple(PeerTime(name, time) for name, time in (peers or {}).items())
    return Measurement(ms, ms * 0.99, ms * 1.01, 11, peers=times)


@functools.cache
def digest_of_kernel(family: str, problem: Problem, config: Config, specialization: Specialization) -> str:
    return render(find_family(family), problem, config, specialization).digest


def make_record(
    problem: Problem | str = PROBLEM,
    ms: float | None = 1.0,
    *,
    family: str = "forward_q_outer",
    config: str | Config = "",
    target: str = "nvidia-h200",
    peers: dict[str, float] | None = None,
    specialization: Specialization = CONTIGUOUS,
    **changes: Any,
) -> Record:
    """Returns a measured and verified record of the current versions.

    Args:
        problem: The problem, or the text of a shape.
        ms: The median time, or None for a record without a measurement.
        family: The kernel family, `unfused` or `sdpa`.
        config: A config, or its differences from the default one, such as `block_m=64,num_warps=4`.
        target: The name of the GPU.
        peers: The times of peers by their names.
        specialization: What the kernel assumes of its tensors.
        changes: Further fields of `Record`. Without `kernel`, the kernel is rendered for its digest.
    """
    if isinstance(problem, str):
        problem = testing.problem(problem)
    generated = family not in ("unfused", "sdpa")
    if generated and not isinstance(config, Config):
        config = change_config(find_family(family).default(problem, find_target(target)), config)
    if isinstance(config, Config) and "kernel" not in changes:
        changes["kernel"] = digest_of_kernel(family, problem, config, specialization)
    record = Record(
        problem=problem,
        target=target,
        family=family,
        config=config if isinstance(config, Config) else None,
        specialization=specialization,
        kernel=None,
        outcome=Outcome.OK,
        provenance=Provenance.MEASURED,
        versions=current_versions(family if generated else "forward_q_outer"),
        verdict=msgspec.structs.replace(VERDICT, device=target.replace("-", " ").upper()),
        measurement=None if ms is None else measured(ms, peers),
    )
    return msgspec.structs.replace(record, **changes)


def write_table(path: Path, *records: Record, receipts: tuple[Check, ...] = ()) -> Path:
    """Writes a table of records of one GPU, and returns its path."""
    table = TunedTable(target=records[0].target, records=records, receipts=receipts)
    path.write_bytes(dump_table(table))
    return path
