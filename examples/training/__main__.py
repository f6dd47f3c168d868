"""Trains a GPT-2-sized decoder with torch's SDPA and with flashtune, and compares loss, time and memory.

    python -m examples.training --save training.json --plot training.html     # on a GPU: 124 million weights
    TRITON_INTERPRET=1 python -m examples.training --tiny                     # without one, in fp32

Run it from the root of the repository. The data is random and can be learned (`examples.training.data`).
Weights, data and their order are the same in all runs. Only the attention differs. On a GPU, products are in
bfloat16 by autocast. Weights and AdamW's moments are in float32.

A third run uses another SDPA backend. It measures the difference in loss between two correct runs, which
round in different orders. flashtune's losses may differ from SDPA's by three times as much. They may always
differ by 2^-8 of the first loss, one spacing of bfloat16 (1e-4 in float32). Otherwise the program exits with
1. With dropout, each implementation drops other weights.
"""

import argparse
import os
import sys
from pathlib import Path

import msgspec
import torch
import triton
from rich.console import Console

from examples.training.attention_impls import ours, ways
from examples.training.data import floor, sequences
from examples.training.model import TINY, Decoder, Shape
from examples.training.report import Document, difference, figure, table, tolerance
from examples.training.trainer import Setting, train


def main() -> None:
    """Trains, compares and writes the requested files."""
    options = _options()
    on_gpu = torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET")
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    document = compare(_setting(options, on_gpu), device)
    Console().print(table(document.runs))
    print(
        f"losses of one step differ by {document.difference:.3g} at most; {document.tolerance:.3g} may be, "
        f"and SDPA's backends differ by {document.noise:.3g}"
    )
    if options.save:
        options.save.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    if options.plot:
        options.plot.write_text(figure(document).to_html(include_plotlyjs=True), encoding="utf-8")
    # A difference of NaN fails too.
    sys.exit(0 if document.difference <= document.tolerance else 1)


def compare(setting: Setting, device: torch.device) -> Document:
    """Trains with each implementation and compares the losses."""
    shape = setting.shape
    print(f"{setting.steps} steps of {setting.batch} x {shape.context} random tokens on {device}", flush=True)
    tokens = sequences(setting.steps * setting.batch, shape.context + 1, shape.vocabulary, setting.seed)
    tokens = tokens.unflatten(0, (setting.steps, setting.batch)).to(device)
    runs = tuple(train(way, setting, tokens, device) for way in ways(device))
    noise = difference(runs[0], runs[2])
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Decoder(shape, ours).parameters())
    return Document(
        torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU",
        str(torch.__version__),
        triton.__version__,
        setting,
        parameters,
        floor(shape.vocabulary),
        difference(runs[0], runs[1]),
        noise,
        tolerance(runs[0], noise, in_bf16=device.type == "cuda"),
        runs,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, help="300 on a GPU, 6 without")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU can train")
    parser.add_argument("--layers", type=int, help="12, or 2 of the tiny model")
    parser.add_argument("--context", type=int, help="tokens of a sequence: 1024, or 32")
    parser.add_argument("--batch", type=int, help="sequences of a step: 16, or 2")
    parser.add_argument("--dropout", type=float, default=0.0, help="share that is dropped, as in GPT-2 0.1")
    parser.add_argument("--checkpoint", action="store_true", help="compute blocks again, to save memory")
    parser.add_argument("--compile", action="store_true", help="train through torch.compile")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write all figures there as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses there; needs plotly")
    return parser.parse_args()


def _setting(options: argparse.Namespace, on_gpu: bool) -> Setting:
    shape = TINY if options.tiny else Shape()
    shape = msgspec.structs.replace(
        shape,
        layers=options.layers or shape.layers,
        context=options.context or shape.context,
        dropout=options.dropout,
    )
    return Setting(
        shape,
        steps=options.steps or (300 if on_gpu else 6),
        batch=options.batch or (2 if options.tiny else 16),
        rate=1e-2 if options.tiny else 6e-4,
        checkpointing=options.checkpoint,
        compiled=options.compile,
    )


if __name__ == "__main__":
    main()
