"""Makes tables of results of `flashtune bench --save`.

Reports may hold parts of the benchmark's grids, in any order. `python -m benchmarks.documents --write` puts
the tables of benchmarks/results into the pages.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.saved import content
from flashtune.core.problem import Causal, Problem
from flashtune.tuner.bench.driver import read_report
from flashtune.tuner.bench.grids import GRIDS, case_of, grid_problems, read_figures
from flashtune.tuner.bench.peer_runs import CUDNN
from flashtune.tuner.bench.results import OURS, Bench, Row, speed_of
from flashtune.tuner.bench.summary import AgainstPoint, against
from flashtune.tuner.cli.output import table
from flashtune.tuner.cli.report.bench_terminal import lengths_of, title_of

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "benchmarks/tables.py"
PARTS = ("bench", "gqa-fp8", "fp8", "backward", "paged", "split-grid")
RESULTS = (
    *(ROOT / f"benchmarks/results/nvidia-h200-{part}.json.gz" for part in PARTS),
    ROOT / "benchmarks/results/nvidia-h100-features.json.gz",
)
PEERS = {"paper": "nvidia-h200.json", "fp8": "nvidia-h200-fp8.json"}
FLASH = "sdpa-flash"
SHORTEST, USUAL, USUAL_WIDTHS, WIDE = 512, 8192, (64, 128), (256,)

Results = dict[str, list[Bench]]


def texts(paths: Iterable[Path]) -> dict[str, str]:
    """The tables of saved reports, by name; one for which nothing was measured is left out."""
    results = by_grid(bench for path in paths for bench in read_report(content(path), path.name).benches)
    return {name: text for name, lines in TABLES.items() if (text := "\n".join(lines(results)))}


def by_grid(benches: Iterable[Bench]) -> Results:
    """Returns the benches with a row of flashtune, by grid and in the grid's order.

    Grids share problems. All benches of a grid are of the GPU with most of its problems.
    """
    by_problem: dict[str, dict[Problem, Bench]] = {}
    for bench in benches:
        if bench.row(OURS) is not None:
            by_problem.setdefault(bench.target, {})[bench.problem] = bench
    by_gpu = {
        name: [
            [of_gpu[problem] for problem in grid_problems(name) if problem in of_gpu]
            for of_gpu in by_problem.values()
        ]
        for name in GRIDS
    }
    return {name: max(each, key=len, default=[]) for name, each in by_gpu.items()}


def paper_table(results: Results) -> Iterator[str]:
    """TFLOP/s at each point, our speed over cuDNN's in the same run, and over the best peer's."""
    points = _standing(results, "paper")

    def ratios(bench: Bench) -> str:
        point = points.get(case_of(bench.problem))
        return f" ({point.ours:.2f}, **{point.ratio:.2f}**)" if point else ""

    intro = "TFLOP/s (over cuDNN in the same run, **and that over the best peer's own ratio to cuDNN**):"
    yield from _by_length(results["paper"], intro, ratios)
    if points:
        worst = min(points.values(), key=lambda point: point.ratio)
        mean = statistics.geometric_mean([point.ratio for point in points.values()])
        longer = (point.ratio for point in points.values() if point.seqlen > SHORTEST)
        yield ""
        yield f"Over the best peer at {len(points)} points: geometric mean {mean:.3f},"
        yield f"worst {worst.ratio:.3f} ({worst.case}); beyond S={SHORTEST} the worst is"
        yield f"{min(longer, default=worst.ratio):.3f}."


def behind_table(results: Results) -> Iterator[str]:
    """The points where a peer is faster."""
    points = _standing(results, "paper").values()
    lost = sorted((point for point in points if point.ratio < 1), key=lambda point: point.ratio)
    if lost:
        yield f"A peer is faster at {len(lost)} of these {len(points)} points:"
        yield ""
        rows = ((point.case, point.best, f"{point.ratio:.3f}") for point in lost)
        yield from table(("point", "peer", "flashtune over it"), rows)
    elif points:
        yield "No peer is faster at any of these points."


def gqa_table(results: Results) -> Iterator[str]:
    """TFLOP/s, and our speed over cuDNN's in the same run."""
    yield from _by_length(results["gqa"], "TFLOP/s (over cuDNN in the same run):", _over_cudnn)


def backward_table(results: Results) -> Iterator[str]:
    """TFLOP/s of the gradients alone, and our speed over cuDNN's in the same run."""
    intro = "TFLOP/s (over cuDNN's gradients in the same run):"
    yield from _by_length(results["backward"], intro, _over_cudnn)
    for title, dims in (("D64 and D128", USUAL_WIDTHS), ("D256", WIDE)):
        benches = [bench for bench in results["backward"] if bench.problem.head_dim in dims]
        speedups = {case_of(bench.problem): over for bench in benches if (over := _over(bench, CUDNN))}
        if speedups:
            worst = min(speedups, key=lambda case: speedups[case])
            yield ""
            mean = statistics.geometric_mean(speedups.values())
            yield f"{title}: {mean:.3f} of cuDNN's speed in the geometric"
            yield f"mean of {len(speedups)}, {speedups[worst]:.3f} at worst ({worst})."


def fp8_table(results: Results) -> Iterator[str]:
    """TFLOP/s, and our speed over figures that were published."""
    points = _standing(results, "fp8")

    def ratio(bench: Bench) -> str:
        point = points.get(case_of(bench.problem))
        return f" ({point.ratio:.2f})" if point else ""

    intro = "TFLOP/s, V's transposition included (over what cudnn-frontend publishes for an H200):"
    yield from _by_length(results["fp8"], intro, ratio)


def features_table(results: Results) -> Iterator[str]:
    """Our speed and each peer's at each point of the grid; nothing if no point has features."""
    if any(bench.problem.features for bench in results["features"]):
        yield from _peers_table(results["features"])


def paged_table(results: Results) -> Iterator[str]:
    """Our speed and each peer's at each point of the grid."""
    if results["paged"]:
        yield from _peers_table(results["paged"])


def splits_table(results: Results) -> Iterator[str]:
    """Our times at each point of the grid, and our speed over the best peer's."""
    lengths = sorted({bench.problem.seqlen_kv for bench in results["splits"]})
    cells: dict[tuple[str, ...], dict[int, str]] = {}
    ratios = []
    for bench in results["splits"]:
        problem, own = bench.problem, _ours(bench).ms
        ratio = min(row.ms for row in bench.rows if row.name != OURS) / own
        ratios.append(ratio)
        heads, layout = f"{problem.heads}/{problem.kv_heads}", "pages" if problem.page_size else "dense"
        line = cells.setdefault((heads, str(problem.batch), str(problem.seqlen_q), layout), {})
        line[problem.seqlen_kv] = f"{own:.3f} ({ratio:.2f})"
    if ratios:
        yield "Milliseconds by number of keys (in brackets: speed over the best peer):"
        yield ""
        rows = ((*line, *(of.get(length, "–") for length in lengths)) for line, of in cells.items())
        titles = "heads", "batch", "queries", "keys and values"
        yield from table((*titles, *(f"{length:,}" for length in lengths)), rows)
        yield ""
        mean = statistics.geometric_mean(ratios)
        yield f"Geometric mean of {len(ratios)}: {mean:.2f}, worst {min(ratios):.2f}."


def _peers_table(benches: Sequence[Bench]) -> Iterator[str]:
    peers = dict.fromkeys(row.name for bench in benches for row in bench.rows if row.name != OURS)
    gpu = benches[0].target.removeprefix("nvidia-").upper()
    yield f"TFLOP/s on an NVIDIA {gpu}, or GB/s in decoding (last column: over the best peer):"
    yield ""
    rows = []
    for bench in benches:
        times = {row.name: row.ms for row in bench.rows if row.name != OURS}
        speeds = (
            f"{speed_of(bench.problem, row):.0f}" if row else "–" for row in map(bench.row, (OURS, *peers))
        )
        ratio = f"{min(times.values()) / _ours(bench).ms:.2f}" if times else "–"
        rows.append((f"{title_of(bench.problem)}, {lengths_of(bench.problem)}", *speeds, ratio))
    yield from table(("shape", OURS, *peers, "over the best"), rows)


def winners_table(benches: Sequence[Bench], family: str) -> Iterator[str]:
    """Each axis's values at the selected configs of a family, and where another family was selected."""
    lines = {title: [_config(bench, family) for bench in line] for title, line in lines_of(benches).items()}
    axes = dict.fromkeys(axis for line in lines.values() for config in line for axis in config)
    rows = [(f"`{axis}`", *(_values(line, axis) for line in lines.values())) for axis in axes]
    if rows:
        yield "Values at each length, from the shortest to the longest. One value is the same at all lengths."
        yield ""
        yield from table(("axis", *lines), (row for row in rows if len(set(row[1:])) > 1))
        yield ""
        same = (f"{row[0]} {row[1]}" for row in rows if len(set(row[1:])) == 1)
        yield f"The same everywhere: {', '.join(same)}."
    others = [case_of(bench.problem) for bench in benches if not _config(bench, family)]
    if others:
        yield f"Another family was selected for {', '.join(others)}."


def summary_table(results: Results) -> Iterator[str]:
    """One length, for the front page."""
    columns = [bench for bench in results["paper"] if bench.problem.seqlen_kv == USUAL]

    def ratios(peer: str) -> tuple[str, ...]:
        return tuple(f"{ratio:.2f}" if (ratio := _over(bench, peer)) else "–" for bench in columns)

    if columns:
        peers = (("over SDPA's cuDNN backend", CUDNN), ("over SDPA's flash backend", FLASH))
        rows = [
            ("flashtune, TFLOP/s", *(f"{_ours(bench).tflops:.0f}" for bench in columns)),
            *(
                (title, *ratios(peer))
                for title, peer in peers
                if any(_over(bench, peer) for bench in columns)
            ),
        ]
        yield from table(("", *(short_title(bench.problem) for bench in columns)), rows)


TABLES: dict[str, Callable[[Results], Iterator[str]]] = {
    "summary": summary_table,
    "paper": paper_table,
    "behind": behind_table,
    "gqa": gqa_table,
    "fp8": fp8_table,
    "backward": backward_table,
    "features": features_table,
    "paged": paged_table,
    "splits-grid": splits_table,
    "winners": lambda results: winners_table(results["paper"], "forward_hopper"),
    "backward-winners": lambda results: winners_table(results["backward"], "backward_hopper"),
}


def _standing(results: Results, grid: str) -> dict[str, AgainstPoint]:
    """The benches of a grid with published figures, by case."""
    path = ROOT / "benchmarks/peers" / PEERS[grid]
    standing = against(results[grid], read_figures(path.read_bytes(), path.name))
    return {point.case: point for point in standing.points} if standing else {}


def lines_of(benches: Sequence[Bench]) -> dict[str, list[Bench]]:
    """The benches of each head dim and mask, shortest first."""
    grouped: dict[str, list[Bench]] = {}
    for bench in sorted(benches, key=lambda bench: bench.problem.seqlen_kv):
        grouped.setdefault(short_title(bench.problem), []).append(bench)
    # Titles in the order of the grid, whichever lengths are missing.
    return {title: grouped[title] for title in dict.fromkeys(short_title(bench.problem) for bench in benches)}


def _by_length(benches: Sequence[Bench], intro: str, ratio: Callable[[Bench], str]) -> Iterator[str]:
    """One line for each head dim and mask, one column for each length; nothing without benches."""
    if not benches:
        return
    yield intro
    yield ""
    lengths = sorted({bench.problem.seqlen_kv for bench in benches})
    rows = []
    for title, line in lines_of(benches).items():
        cells = {bench.problem.seqlen_kv: f"{_ours(bench).tflops:.0f}{ratio(bench)}" for bench in line}
        rows.append((title, *(cells.get(length, "–") for length in lengths)))
    yield from table(("", *(f"S={length}" for length in lengths)), rows)


def short_title(problem: Problem) -> str:
    """Returns the head dim and the mask, such as `D128 causal`."""
    return f"D{problem.head_dim} {'full' if problem.causal is Causal.NONE else 'causal'}"


def long_title(problem: Problem) -> str:
    """Returns the short title, the length, and grouped heads: `D128 full S=4096, 64 heads on 8`."""
    grouped = f", {problem.heads} heads on {problem.kv_heads}" if problem.group_size > 1 else ""
    return f"{short_title(problem)} S={problem.seqlen_kv}{grouped}"


def _ours(bench: Bench) -> Row:
    row = bench.row(OURS)
    assert row is not None  # by_grid keeps no other
    return row


def _over(bench: Bench, peer: str) -> float | None:
    """Our speed over a peer's; None where it has no row."""
    row = bench.row(peer)
    return row.ms / _ours(bench).ms if row else None


def _over_cudnn(bench: Bench) -> str:
    speedup = _over(bench, CUDNN)
    return f" ({speedup:.2f})" if speedup else ""


def _config(bench: Bench, family: str) -> dict[str, str]:
    """The selected config by axis; empty where another family won."""
    winner, *words = _ours(bench).detail.split()
    pairs = (word.partition("=") for word in words if winner == family)
    return {axis: value for axis, equals, value in pairs if equals}


def _values(line: Sequence[dict[str, str]], axis: str) -> str:
    """An axis's values along a line, a dash where another family was selected."""
    values = [config.get(axis, "–") for config in line]
    distinct = set(values) - {"–"}
    return distinct.pop() if len(distinct) == 1 else " ".join(values)
