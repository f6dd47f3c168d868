"""Tables of shipped times, of random problems against the reference, and of audits of the SRAM models.

Searches measured the shipped times together with SDPA's backends:

    flashtune search --shapes-file benchmarks/kernels/plain_shapes.txt --seconds 6
    flashtune search --shapes-file benchmarks/kernels/feature_shapes.txt --seconds 4
    flashtune search --shapes-file benchmarks/kernels/masked_shapes.txt --seconds 4

`tests.gpu.random.random_problems` and `random_gradients` compare random problems. `flashtune sram-audit`
writes audits. `python -m benchmarks.documents --write` puts the tables into the pages.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.saved import RESULTS, Saved, decoded, load, run_of
from benchmarks.tables import short_title
from flashtune.core.errors import TableError
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.db.table import shipped_table
from flashtune.tuner.bench.grids import grid_problems
from flashtune.tuner.bench.peer_runs import CUDNN
from flashtune.tuner.cli.commands.sram_audit import markdown_parts
from flashtune.tuner.cli.output import table
from flashtune.tuner.cli.report.bench_terminal import lengths_of, title_of
from flashtune.tuner.sram_audit.audit import Audit
from flashtune.tuner.tables.listing import best_sdpa_ms, tflops
from flashtune.tuner.workloads.shapes_file import read_shapes_file
from tests.gpu.random.random_checks import Summary

SCRIPT = "benchmarks/kernels/report.py"
AUDIT, H100_AUDIT = RESULTS / "sram-audit.json.gz", RESULTS / "h100-sram-audit.json.gz"
RANDOM = ("random-problems", "random-gradients")
PLAIN = "nvidia-h100"
FEATURES = "nvidia-h200"
# Files of shapes, and the names of their tables.
PLAIN_SHAPES = "plain_shapes.txt"
SHAPES = {"feature_shapes.txt": "shipped-features", "masked_shapes.txt": "shipped-masks"}


def texts() -> dict[str, str]:
    """Returns the tables by name."""
    return {**shipped_texts(), **random_texts(), **audit_texts(AUDIT)}


def audit_texts(path: Path) -> dict[str, str]:
    """Returns the tables of an audit: the sums, each GPU that misses the bar, and the rows."""
    audit = decoded(path, Audit)
    missed = [f"- {failure}" for failure in (*audit.failures(), *audit.unjudged())] or ["- none"]
    *sums, rows = markdown_parts(audit)
    missing = "\n".join(missed)
    return {
        "sram-audit": "\n\n".join((*sums, "GPUs that miss the bar, or cannot be judged:", missing)),
        "sram-audit-rows": rows,
        "sram-audit-h100": "\n\n".join(markdown_parts(decoded(H100_AUDIT, Audit))[:2]),
    }


def random_texts() -> dict[str, str]:
    """Returns the tables of random problems."""
    paths = {name: sorted(RESULTS.glob(f"*-{name}.json.gz")) for name in RANDOM}
    return {
        name: "\n\n".join("\n".join(_random(load(path, Summary))) for path in saved)
        for name, saved in paths.items()
    }


def _random(saved: Saved[Summary]) -> Iterator[str]:
    """Yields a sentence for all problems, and a line for each family."""
    summary = saved.rows
    yield (
        f"{run_of(saved.source)}: {summary.problems} problems of {summary.kernels} kernels, "
        f"{len(summary.wrong)} wrong; {len(summary.refused)} kernels refused by their self-check, "
        f"{len(summary.unfit)} did not compile or did not fit."
    )
    yield ""
    rows = (
        (f"`{family}`", str(count), f"{summary.worst_by_family[family]:.2f}")
        for family, count in sorted(summary.by_family.items())
    )
    yield from table(("family", "problems", "largest error over the allowed one"), rows)


def shipped_texts() -> dict[str, str]:
    """Returns the tables of shipped times."""
    by_name = {PLAIN: "\n".join(_grids(PLAIN, _selected(PLAIN))), f"{PLAIN}-lacks": _lacking(PLAIN)}
    for file, name in SHAPES.items():
        problems = read_shapes_file(Path(__file__).with_name(file))
        by_name[name] = "\n".join(_shapes(FEATURES, problems, _selected(FEATURES)))
    return by_name


def _lacking(target: str) -> str:
    """Returns the shapes of the files that have no record in a shipped table, as a sentence or a list."""
    selected = _selected(target)
    files = (Path(__file__).with_name(name) for name in (PLAIN_SHAPES, *SHAPES))
    missing = [problem for file in files for problem in read_shapes_file(file) if problem not in selected]
    if not missing:
        return "Every shape of these files has a record."
    lines = [f"- {title_of(problem)}, {lengths_of(problem)}" for problem in missing]
    return "\n".join(("These shapes have no record:", "", *lines))


def _selected(target: str) -> dict[Problem, Record]:
    """Returns the selection of each problem of a shipped table."""
    shipped = shipped_table(target)
    assert shipped is not None
    # The first record of a problem is its selection. Others serve tensors with other strides.
    selected: dict[Problem, Record] = {}
    for record in shipped.records:
        selected.setdefault(record.problem, record)
    return selected


def _shapes(target: str, problems: Sequence[Problem], selected: dict[Problem, Record]) -> Iterator[str]:
    """Yields the lines of a table: the speed of each shape, and that over SDPA's fastest backend."""
    yield _headline(target, selected, "SDPA's fastest backend")
    yield ""
    rows = []
    for problem in problems:
        record = selected.get(problem)
        if record is None or record.ms is None:
            raise TableError(f"the table of {target} has no time of {problem.key}: search it")
        peer_ms = best_sdpa_ms(record)
        ratio = f" ({peer_ms / record.ms:.2f})" if peer_ms else ""
        speed = f"{tflops(record):.0f}{ratio}"
        rows.append((f"{title_of(problem)}, {lengths_of(problem)}", record.family, speed))
    yield from table(("shape", "family", "speed"), rows)


def _headline(target: str, selected: dict[Problem, Record], peer: str) -> str:
    gpu = target.removeprefix("nvidia-").upper()
    versions = next(iter(selected.values())).versions
    return (
        f"TFLOP/s on an NVIDIA {gpu}, and in brackets the speed over {peer} in the same run "
        f"(torch {versions.torch}, Triton {versions.triton}, driver {versions.driver}):"
    )


def _grids(target: str, selected: dict[Problem, Record]) -> Iterator[str]:
    """Yields the lines of a table: the speed of each shape of two grids, and that over cuDNN's."""
    problems = [
        problem for grid in ("paper", "backward") for problem in grid_problems(grid) if problem in selected
    ]
    lines: dict[str, dict[int, str]] = {}
    for problem in problems:
        lines.setdefault(_title(problem), {})[problem.seqlen_kv] = _cell(selected[problem])
    lengths = sorted({problem.seqlen_kv for problem in problems})
    yield _headline(target, selected, "cuDNN")
    yield ""
    rows = ((title, *(cells.get(length, "") for length in lengths)) for title, cells in lines.items())
    yield from table(("16k tokens", *map(str, lengths)), rows)


def _title(problem: Problem) -> str:
    return short_title(problem) + (", gradients" if problem.is_backward else "")


def _cell(record: Record) -> str:
    assert record.measurement is not None
    ms = record.measurement.ms
    peers = {peer.name: peer.ms for peer in record.measurement.peers}
    return f"{tflops(record):.0f} ({peers[CUDNN] / ms:.2f})"
