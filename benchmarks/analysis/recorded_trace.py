"""Use of caches by a recorded trace: conversations of the Azure LLM inference trace of 2023.

    python -m benchmarks.analysis.recorded_trace AzureLLMInferenceTrace_conv.csv --save FILE

The trace is at https://github.com/Azure/AzurePublicDataset (CC-BY; Patel et al., "Splitwise: Efficient
Generative LLM Inference Using Phase Splitting", ISCA 2024). Only the results are saved. `--jsonl FILE` writes
the trace in the format of `flashtune analyze paging --trace`.
"""

import argparse
import csv
import datetime
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.saved import save
from flashtune.tuner.analysis.cache_use import Request, cache_use

CACHE_TOKENS, STEP_SECONDS = 65_536, 0.03
PAGE_SIZES = (16, 32, 64, 128, 256)
TITLE = "Azure conversations"


def main() -> None:
    """Computes the use of caches, and writes it or the trace."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="the file of the data set")
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--jsonl", type=Path, metavar="FILE")
    options = parser.parse_args()
    requests = tuple(read_azure(options.trace))
    if options.jsonl:
        options.jsonl.write_bytes(b"".join(msgspec.json.encode(request) + b"\n" for request in requests))
    if options.save:
        save(options.save, cache_use(TITLE, requests, CACHE_TOKENS, PAGE_SIZES, STEP_SECONDS))


def read_azure(path: Path) -> Iterator[Request]:
    """Yields the requests of a file of the data set."""
    with path.open(encoding="utf-8", newline="") as file:
        start = None
        for row in csv.DictReader(file):
            # Python reads at most six digits of a second.
            arrival = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or arrival
            prompt, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            yield Request((arrival - start).total_seconds(), max(prompt, 1), max(generated, 1))


if __name__ == "__main__":
    main()
