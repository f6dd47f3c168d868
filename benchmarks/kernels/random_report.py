"""Tables of random problems that compare generated kernels with the reference.

    python -m tests.gpu.random.random_problems 2000 --save FILE
    python -m tests.gpu.random.random_gradients 580 --save FILE

These commands write the files for this module. `python -m benchmarks.documents --write` puts the tables into
the pages.
"""

from collections.abc import Iterator

from benchmarks.saved import RESULTS, Saved, load
from flashtune.tuner.cli.output import table
from tests.gpu.random.random_checks import Summary

SCRIPT = "benchmarks/kernels/random_report.py"
KEPT = ("random-problems", "random-gradients")


def texts() -> dict[str, str]:
    """Returns the tables of the saved runs, by name."""
    paths = {name: sorted(RESULTS.glob(f"*-{name}.json.gz")) for name in KEPT}
    return {
        name: "\n\n".join("\n".join(_lines(load(path, Summary))) for path in saved)
        for name, saved in paths.items()
        if saved
    }


def _lines(saved: Saved[Summary]) -> Iterator[str]:
    """A line for each family, and a sentence for all."""
    source, summary = saved.source, saved.rows
    yield (
        f"On an {source.gpu} (torch {source.torch}, Triton {source.triton}): {summary.problems} problems of "
        f"{summary.kernels} kernels, {len(summary.wrong)} wrong; {len(summary.refused)} kernels refused by "
        f"their self-check, {len(summary.unfit)} did not compile or did not fit."
    )
    yield ""
    rows = (
        (f"`{family}`", str(count), f"{summary.worst_by_family[family]:.2f}")
        for family, count in sorted(summary.by_family.items())
    )
    yield from table(("family", "problems", "largest error over the allowed one"), rows)
