"""Digests of the kernels in the measurements of the front page.

    python -m benchmarks.headline               # says which kernels render differently now, or do not ship
    python -m benchmarks.headline --write       # right after these runs were measured: writes the digests

A digest covers everything that decides the launched code; comments do not count. If a kernel changed, its run
must be measured again. No GPU is needed.
"""

import argparse
import functools
import sys
from pathlib import Path

import msgspec

from benchmarks.saved import KERNELS, RESULTS, content
from flashtune.core.errors import FlashtuneError, TableError
from flashtune.core.kernel import Kernel, Specialization
from flashtune.db.eligibility import by_problem
from flashtune.db.table import shipped_table
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.bench.driver import read_report
from flashtune.tuner.bench.grids import case_of
from flashtune.tuner.bench.results import OURS, Bench

# Sources of the table and the sentences of README.md.
MEASURED = ("nvidia-h200-bench.json.gz", "nvidia-h200-backward.json.gz")


def main() -> None:
    """Compares or writes; exits with 1 where a kernel changed."""
    parser = argparse.ArgumentParser(description="Kernels that the front page was measured with.")
    parser.add_argument("--write", action="store_true", help="these runs were measured just now")
    options = parser.parse_args()
    try:
        if options.write:
            KERNELS.write_bytes(msgspec.json.format(msgspec.json.encode(rendered()), indent=1) + b"\n")
        differing = changed()
        for case in not_shipped():
            print(f"{case}: the shipped table has another kernel now")
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    if differing:
        sys.exit("measure again: " + ", ".join(differing))


def changed(path: Path = KERNELS) -> list[str]:
    """The cases whose kernel renders differently than when it was measured."""
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError) as error:
        raise TableError(f"{path} holds no digests of kernels: {error}") from error
    now = rendered()
    return sorted(case for case in saved.keys() | now.keys() if saved.get(case) != now.get(case))


def rendered() -> dict[str, str]:
    """The digest of each measured kernel, as it renders now, by its case."""
    return {case_of(bench.problem): kernel_of(bench).digest for name in MEASURED for bench in _benches(name)}


def not_shipped() -> list[str]:
    """The cases of the first run whose kernel is not the one that the shipped table selects."""
    benches = _benches(MEASURED[0])
    table = shipped_table(benches[0].target)
    assert table is not None
    selected = {key: records[0] for key, records in by_problem(table.records).items()}
    cases = []
    for bench in benches:
        record = selected.get(bench.problem.key)
        if record is None or record.config is None:
            cases.append(case_of(bench.problem))
            continue
        family = find_family(record.family)
        shipped = render(family, bench.problem.computation, record.config, Specialization())
        if shipped.digest != kernel_of(bench).digest:
            cases.append(case_of(bench.problem))
    return cases


def _benches(name: str) -> tuple[Bench, ...]:
    return tuple(read_report(content(RESULTS / name), name).benches)


@functools.cache
def kernel_of(bench: Bench) -> Kernel:
    """The kernel of a row of ours, from its config in words."""
    row = bench.row(OURS)
    assert row is not None
    family_name, *words = row.detail.split()
    values = dict(word.split("=", 1) for word in words if "=" in word)
    family = find_family(family_name)
    try:
        config = msgspec.convert(values, family.config_type, strict=False)
    except msgspec.ValidationError as error:
        case = case_of(bench.problem)
        raise TableError(f"{case} was measured with no config of {family_name}: {error}") from error
    return render(family, bench.problem.computation, config, Specialization())


if __name__ == "__main__":
    main()
