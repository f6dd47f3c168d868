"""Times the functions of docs/flex-gallery.md against torch's compiled `flex_attention`. Needs a GPU.

    python -m benchmarks.kernels.gallery --save benchmarks/results/nvidia-h200-flex-gallery.json.gz

The code of the page runs with other sizes. Each case is one interleaved run with a cold L2, in random order.
Results must agree with torch's. `python -m benchmarks.documents --write` puts the table into the page.
"""

import argparse
import functools
import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from benchmarks.saved import RESULTS, load, run_of, save
from flashtune.core.errors import KernelError, UsageError
from flashtune.tuner.cli.output import table
from flashtune.tuner.execution.timing import measure_interleaved
from scripts.code_blocks import ROOT, code_blocks

SCRIPT = "benchmarks/kernels/gallery.py"
PAGE = ROOT / "docs/flex-gallery.md"
SAVED = RESULTS / "nvidia-h200-flex-gallery.json.gz"
NOT_MEASURED = "Not measured."
LENGTHS, HEAD_DIMS, HEADS = (4096, 16384), (64, 128), ((16, 16), (32, 8))
ROUNDS, SEED = 11, 0
# Largest difference from torch's result, which is rounded to bf16 too.
TOLERANCE = 2.0**-5


class Row(msgspec.Struct, frozen=True):
    """The times of a function at a shape."""

    name: str
    heads: int
    kv_heads: int
    seqlen: int
    head_dim: int
    flashtune_ms: float
    torch_ms: float
    difference: float  # The largest difference of the results.

    @property
    def speedup(self) -> float:
        """How many times faster flashtune is."""
        return self.torch_ms / self.flashtune_ms


class Sizes(NamedTuple):
    """The sizes of a case."""

    heads: tuple[int, int]
    length: int
    head_dim: int


def functions(sizes: Sizes, device: torch.device) -> dict[str, tuple[Any, Any]]:
    """Returns the score function and the mask function of each section of the page."""
    found: dict[str, tuple[Any, Any]] = {}
    lines = PAGE.read_text(encoding="utf-8").splitlines()

    def attend(score_mod: Any = None, mask_mod: Any = None) -> None:
        found[title] = score_mod, mask_mod

    names: dict[str, Any] = {}
    for number, block in enumerate(code_blocks(PAGE)):
        titles = [line[3:] for line in lines[: block.line] if line.startswith("## ")]
        title = titles[-1] if titles else ""
        exec(compile(block.text, block.place, "exec"), names)  # noqa: S102 - code of this repository
        if not number:
            names |= {"heads": sizes.heads[0], "length": sizes.length, "device": device, "attend": attend}
            names["head_dim"] = sizes.head_dim
    return found


def measured(name: str, functions: tuple[Any, Any], sizes: Sizes, device: torch.device) -> Row:
    """Returns the times of a function.

    Raises:
        KernelError: The results differ.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    import flashtune

    torch.compiler.reset()
    torch.manual_seed(SEED)
    score_mod, mask_mod = functions
    (heads, kv_heads), length, head_dim = sizes
    q, k, v = (
        torch.randn(1, count, length, head_dim, device=device, dtype=torch.bfloat16)
        for count in (heads, kv_heads, kv_heads)
    )
    mask = None
    if mask_mod is not None:
        mask = create_block_mask(mask_mod, None, None, length, length, device=str(device))
    runs: list[Callable[[], Any]] = [
        functools.partial(function, q, k, v, score_mod, mask, enable_gqa=heads > kv_heads)
        for function in (flashtune.flex_attention, torch.compile(flex_attention, dynamic=False))
    ]
    out, torchs = (run() for run in runs)
    difference = float((out.float() - torchs.float()).abs().max())
    if not difference <= TOLERANCE:
        raise KernelError(f"{name} at {sizes} differs from torch by {difference}")
    own, other = measure_interleaved(runs, device, rounds=ROUNDS)
    return Row(name, heads, kv_heads, length, head_dim, own.ms, other.ms, difference)


def texts(path: Path = SAVED) -> dict[str, str]:
    """Returns the table of the page."""
    return {"flex-gallery": "\n".join(_lines(path)) if path.exists() else NOT_MEASURED}


def _lines(path: Path) -> Iterator[str]:
    saved = load(path, list[Row])
    yield f"{run_of(saved.source)}, speed over torch's compiled function, in bf16, geometric mean and worst:"
    yield ""
    by_name: dict[str, list[Row]] = {}
    for row in saved.rows:
        by_name.setdefault(row.name, []).append(row)
    cells = (
        (
            name,
            *(
                f"{statistics.geometric_mean(row.speedup for row in rows if row.seqlen == length):.2f}"
                for length in LENGTHS
            ),
            f"{min(row.speedup for row in rows):.2f}",
        )
        for name, rows in sorted(by_name.items())
    )
    yield from table(("function", *(f"{length} tokens" for length in LENGTHS), "worst"), cells)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="run the functions with this text in their titles")
    parser.add_argument("--save", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise UsageError("there is no GPU: run this on one")
    device = torch.device("cuda", torch.cuda.current_device())
    cases = []
    for sizes in itertools.starmap(Sizes, itertools.product(HEADS, LENGTHS, HEAD_DIMS)):
        cases += [
            (name, own, sizes) for name, own in functions(sizes, device).items() if options.only in name
        ]
    random.Random(SEED).shuffle(cases)  # noqa: S311 - an order needs no secret
    rows = []
    with torch.no_grad():
        for name, own, sizes in cases:
            rows.append(measured(name, own, sizes, device))
            print(f"{rows[-1].speedup:.2f} {name} {sizes}", flush=True)
    if options.save is not None:
        save(options.save, sorted(rows, key=lambda row: (row.name, row.seqlen, row.head_dim, row.heads)))


if __name__ == "__main__":
    main()
