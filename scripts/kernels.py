"""Writes kernels_generated/: a kernel for each class of problems of the shipped tables, and an index.

    python -m scripts.kernels

A class is a family, the width of an element type, the head dims and the causal mask, on one GPU. Its file is
the kernel of the selection with the most work. Ties go to the fewest features, then to the last key.
`flashtune export --format python` writes the kernels of all selections.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from flashtune.core.problem import Causal, Problem
from flashtune.core.record import Record
from flashtune.tuner.bench.peer_runs import CUDNN
from flashtune.tuner.cli.output import table
from flashtune.tuner.tables.lookup import shipped_tables
from flashtune.tuner.tables.table_files import kernel_files, write_file

FOLDER = Path(__file__).resolve().parent.parent / "kernels_generated"
INDEX = "README.md"
MASKS = {Causal.NONE: "full", Causal.BOTTOM_RIGHT: "causal", Causal.TOP_LEFT: "causal_top_left"}
HEADS = ("kernel", "selected for", "config", "ms", "speed over")
TITLE = """\
# Rendered kernels

Selected kernels as the templates render them, one for each class of problems on each GPU.
A class is a family, the width of an element type, the head dims and the causal mask.
bf16 and fp16 have the same width and share a class.
A class holds many selected shapes. The file is the kernel of the shape with the most work.

Each file is a program of its own: it needs torch and triton alone.
`flashtune export --format python --out FOLDER` writes the kernels of all selected shapes.

Times are those of the shipped table. Speeds are over cuDNN through SDPA where it was timed in the same run,
else over the fastest other backend of SDPA.

`make kernels` writes this folder.
"""


def shipped_records() -> tuple[Record, ...]:
    """Returns every record of the shipped tables."""
    return tuple(record for table in shipped_tables() for record in table.records)


def winners(records: Iterable[Record]) -> dict[str, Record]:
    """Returns the record of each class by the path of its file, in order."""
    classes: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        if record.config is not None:
            classes.setdefault((record.target, record.family, *_widths(record.problem)), []).append(record)
    chosen = (max(members, key=_rank) for members in classes.values())
    return dict(sorted((_path(record), record) for record in chosen))


def files(records: Iterable[Record]) -> dict[str, str]:
    """Returns the text of every file of the folder by its path, except `__init__.py`."""
    chosen = winners(records)
    texts = {path: file.text for path, record in chosen.items() for file in kernel_files((record,))}
    return {INDEX: "\n".join(_index(chosen)) + "\n", **texts}


def _widths(problem: Problem) -> tuple[int, int, int, Causal]:
    return problem.dtype.itemsize, problem.head_dim, problem.value_head_dim, problem.causal


def _rank(record: Record) -> tuple[int, int, str]:
    problem = record.problem
    return problem.nominal_flops(), -len(problem.features), problem.key


def _path(record: Record) -> str:
    return f"{record.target}/{record.family}/{_name(record.problem)}.py"


def _name(problem: Problem) -> str:
    values = "" if problem.value_head_dim == problem.head_dim else f"v{problem.value_head_dim}"
    return f"{problem.dtype}_d{problem.head_dim}{values}_{MASKS[problem.causal]}"


def _index(chosen: dict[str, Record]) -> Iterator[str]:
    yield TITLE.rstrip()
    for target, of_target in itertools.groupby(chosen.items(), key=lambda item: item[1].target):
        yield f"\n## {target}"
        for family, members in itertools.groupby(of_target, key=lambda item: item[1].family):
            yield f"\n### {family}\n"
            yield from table(HEADS, (_row(path, record) for path, record in members))


def _row(path: str, record: Record) -> tuple[str, ...]:
    assert record.config is not None
    ms = "" if record.ms is None else f"{record.ms:.4f}"
    link = f"[{_name(record.problem)}]({path})"
    return link, f"`{record.problem.key}`", f"`{record.config.label()}`", ms, _speed(record)


def _speed(record: Record) -> str:
    """Returns the speed relative to the fastest peer, and the peer."""
    if record.measurement is None:
        return ""
    peers = {peer.name: peer.ms for peer in record.measurement.peers if peer.name.startswith("sdpa-")}
    if not peers:
        return ""
    peer = CUDNN if CUDNN in peers else min(peers, key=lambda name: (peers[name], name))
    return f"{peers[peer] / record.measurement.ms:.2f} ({peer})"


def main() -> None:
    """Writes every file and deletes the others of each GPU's folder."""
    texts = files(shipped_records())
    for folder in FOLDER.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    for path, text in texts.items():
        write_file(FOLDER / path, text.encode())


if __name__ == "__main__":
    main()
