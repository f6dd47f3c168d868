"""Saves a database of the present schema under tests/data/schemas/, for all later versions to open.

Run once for each new migration: python tests/db/files/keep_schema.py
"""

from __future__ import annotations

from pathlib import Path

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.record import Measurement, Outcome, PeerTime, Provenance, Record, Verdict, Versions
from flashtune.db.codec import Check
from flashtune.db.light.bootstrap import HEAD
from flashtune.db.store import open_store

FOLDER = Path(__file__).parents[2] / "data" / "schemas"

VERSIONS = Versions("0.1.0", "none", "2.13.0", "3.7.1", "13.0", "580.1")

# Baselines alone: a family's config may lose a field, and its old records are then skipped.
MEASURED = Record(
    problem=Problem(
        dtype=Dtype.BF16,
        head_dim=128,
        value_head_dim=64,
        heads=32,
        kv_heads=8,
        batch=2,
        seqlen_q=1024,
        seqlen_kv=4096,
        causal=Causal.BOTTOM_RIGHT,
    ),
    target="nvidia-h200",
    family="unfused",
    config=None,
    specialization=Specialization(),
    kernel=None,
    outcome=Outcome.OK,
    provenance=Provenance.MEASURED,
    versions=VERSIONS,
    verdict=Verdict(passed=True, worst_ratio=0.25, checks=7, failed="", device="NVIDIA H200"),
    measurement=Measurement(ms=1.5, p20=1.25, p80=1.75, samples=11, peers=(PeerTime("sdpa-cudnn", 1.0),)),
)
FAILED = Record(
    problem=MEASURED.problem,
    target="nvidia-h200",
    family="sdpa",
    config=None,
    specialization=Specialization(),
    kernel=None,
    outcome=Outcome.LAUNCH_ERROR,
    provenance=Provenance.MEASURED,
    versions=VERSIONS,
    message="out of memory",
)
CHECK = Check(
    digest="0123456789abcdef" * 2,
    target="nvidia-h200",
    versions=VERSIONS,
    verdict=Verdict(passed=True, worst_ratio=0.5, checks=3, failed="", device="NVIDIA H200"),
)


def main() -> None:
    """Writes the database of the present schema, unless it exists already."""
    path = FOLDER / f"{HEAD}.sqlite"
    if path.exists():
        raise SystemExit(f"{path} is kept already, and a past schema does not change")
    with open_store(str(path)) as store:
        store.pin(store.add(MEASURED))
        store.add(FAILED)
        store.remember_check(CHECK)
    path.with_name(path.name + ".lock").unlink()


if __name__ == "__main__":
    main()
