"""Writes kernels_generated/: rendered kernels that show how each family computes, and an index.

    python -m scripts.kernels

`EXAMPLES` lists the files. Of the kernels that the shipped tables select for matching problems, a file has
the one that most GPUs select. Ties go to the problem with the most work, then to the last key.
"""

import itertools
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from flashtune.core.errors import FlashtuneError
from flashtune.core.record import Record
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.cli.output import table
from flashtune.tuner.tables.lookup import shipped_tables
from flashtune.tuner.tables.table_files import write_file

FOLDER = Path(__file__).resolve().parent.parent / "kernels_generated"
INDEX = "README.md"
# Family and name of a file: the pattern of the problems' keys, and the features that the kernel shows.
EXAMPLES = {
    "backward_fused/bf16_d128_causal": ("*_bf16_d128_*_bottom_right", "gradients in one pass"),
    "backward_hopper/bf16_d128_causal": (
        "*_bf16_d128_*_bottom_right",
        "gradients with asynchronous products",
    ),
    "backward_split/bf16_d128_causal": ("*_bf16_d128_*_bottom_right", "gradients in two passes"),
    "decode_latent_hopper/bf16_pages": (
        "*_bf16_*_page64_latent",
        "multi-head latent attention, keys in pages",
    ),
    "decode_split_kv/bf16_d128_full": ("*_bf16_d128_*_none", "few queries, keys in parts"),
    "decode_split_kv/bf16_d128_pages": ("*_bf16_d128_*_bottom_right_page16", "few queries, keys in pages"),
    "forward_hopper/bf16_d128_causal": ("*_bf16_d128_*_bottom_right", "asynchronous products, a causal mask"),
    "forward_hopper/bf16_d128_full": ("*_bf16_d128_*_none", "asynchronous products without a mask"),
    "forward_hopper/bf16_d256_causal": ("*_bf16_d256_*_bottom_right", "a large head dim"),
    "forward_hopper/bf16_d64_full": ("*_bf16_d64_*_none", "three consumer groups"),
    "forward_hopper/e4m3_d128_full": ("*_e4m3_d128_*_none", "8-bit products"),
    "forward_masked/bf16_d128_bias": ("*_bf16_d128_*_none_bias-boolean", "a mask as a tensor"),
    "forward_masked/bf16_d128_window": ("*_bf16_d128_*_bottom_right_window*[0-9]:", "a sliding window"),
    "forward_q_outer/bf16_d128_causal": ("*_bf16_d128_*_bottom_right", "a causal mask"),
    "forward_q_outer/bf16_d128_full": ("*_bf16_d128_*_none", "the shortest kernel"),
    "forward_q_outer/fp32_d64_causal": ("*_fp32_d64_*_bottom_right", "products in float32"),
}
TITLE = """\
# Rendered kernels

Some of the selected kernels, as the templates render them. Each file is a program of its own: it needs torch
and triton alone. Nothing imports this folder, and packages do not contain it.

The numbers count the problems for which a GPU's shipped table selects the kernel. `make kernels` writes this
folder; `scripts/kernels.py` lists its files.
`flashtune export --format python --shipped --out FOLDER` writes the kernels of all selections.
"""


def shipped_records() -> tuple[Record, ...]:
    """Returns every record of the shipped tables."""
    return tuple(record for shipped in shipped_tables() for record in shipped.records)


def files(records: Iterable[Record]) -> dict[str, str]:
    """Returns the text of every file of the folder by its path."""
    kernels: dict[str, list[Record]] = {}
    for record in records:
        if record.kernel is not None:
            kernels.setdefault(record.kernel, []).append(record)
    selections = {name: choose(name, kernels.values()) for name in EXAMPLES}
    texts = {f"{name}.py": _text(selections[name]) for name in EXAMPLES}
    return {INDEX: "\n".join(_index(selections)) + "\n", **texts}


def choose(name: str, kernels: Iterable[Sequence[Record]]) -> Sequence[Record]:
    """Returns the selections of an example's kernel, from those of all kernels."""
    family, pattern = name.partition("/")[0], EXAMPLES[name][0]
    ranks: list[tuple[tuple[int, int, str], Sequence[Record]]] = []
    for selections in kernels:
        problems = [record.problem for record in selections if record.family == family]
        work = [
            (problem.nominal_flops(), problem.key)
            for problem in problems
            if fnmatchcase(problem.key, pattern)
        ]
        if work:
            ranks.append(((len(_gpus(selections)), *max(work)), selections))
    if not ranks:
        raise FlashtuneError(
            f"the tables select no kernel of {family} for {pattern}: change EXAMPLES[{name!r}]"
        )
    return max(ranks, key=lambda ranked: ranked[0])[1]


def _gpus(selections: Iterable[Record]) -> dict[str, int]:
    """Returns the number of selections on each GPU."""
    return dict(sorted(Counter(record.target for record in selections).items()))


def _text(selections: Sequence[Record]) -> str:
    record = selections[0]
    assert record.config is not None
    source = render(find_family(record.family), record.problem, record.config, record.specialization).source
    entry = "attention_backward" if record.problem.is_backward else "attention"
    header = (
        "# A stand-alone kernel by flashtune; it needs torch and triton alone.\n"
        f"# `{entry}` runs it. Selected on {' and '.join(_gpus(selections))}.\n\n"
    )
    return header + source


def _index(selections: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    yield TITLE
    gpus = [*_gpus(itertools.chain(*selections.values()))]
    rows = []
    for name, records in selections.items():
        counts = _gpus(records)
        rows.append((f"[{name}]({name}.py)", EXAMPLES[name][1], *(str(counts.get(gpu, "")) for gpu in gpus)))
    yield from table(("kernel", "shows", *gpus), rows)


def main() -> None:
    """Writes every file and deletes all others."""
    texts = files(shipped_records())
    if FOLDER.exists():
        shutil.rmtree(FOLDER)
    for path, text in texts.items():
        write_file(FOLDER / path, text.encode())


if __name__ == "__main__":
    main()
