"""A process that writes records and prints the stored ones to its standard output.

    python writer.py URL FIRST COUNT

Its records' times are FIRST, FIRST + 1, ... ms. After each it pins its fastest so far and prints
the record's time: a printed record must never be lost.
"""

import sys

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Dtype, Problem
from flashtune.core.record import Measurement, Outcome, Provenance, Record, Versions
from flashtune.db.store import open_store

PROBLEM = Problem(
    dtype=Dtype.FP16, head_dim=64, value_head_dim=64, heads=1, kv_heads=1, batch=1, seqlen_q=1, seqlen_kv=1
)


def main(url: str, first: int, count: int) -> None:
    """Writes `count` records, or until it is killed."""
    with open_store(url) as store:
        for ms in range(first + 1, first + count + 1):
            record_id = store.add(
                Record(
                    problem=PROBLEM,
                    target="nvidia-h200",
                    family="unfused",
                    config=None,
                    specialization=Specialization(),
                    kernel=None,
                    outcome=Outcome.OK,
                    provenance=Provenance.MEASURED,
                    versions=Versions("0", "0", "0", "0", "0", "0"),
                    measurement=Measurement(ms=ms, p20=ms, p80=ms, samples=1),
                )
            )
            store.pin(record_id)
            sys.stdout.write(f"{ms}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
