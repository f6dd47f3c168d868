"""Time of calls of `flex_attention` that hide keys without a block mask, when a length or a number is new.

    python -m benchmarks.host.flex_lengths

Prints the time of the first call, which compiles, and medians of later calls until the GPU ends: with a new
length, with a new captured number, and with the same arguments. The GPU time of one call is printed too.
Needs a GPU.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import flashtune

HEADS, WIDTH, LENGTH, CALLS, STEP = 16, 128, 8192, 20, 128


def timed(call: Callable[[], object]) -> float:
    """The time of a call until the GPU ends, in ms."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    """Prints a line for each mask."""
    documents = torch.arange(LENGTH, device="cuda") // 1000
    size = 1000

    masks: dict[str, Callable[..., Any]] = {
        "window": lambda q, k: (q >= k) & (q - k < size),
        "documents": lambda q, k: (q >= k) & (documents[q] == documents[k]) & (q - k < size),
    }
    q, k, v = (torch.randn(1, HEADS, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for name, mask in masks.items():

        def score(s: Any, *places: Any, mask: Callable[..., Any] = mask) -> Any:
            return torch.where(mask(*places[2:]), s, -float("inf"))

        def call(length: int = LENGTH, score: Callable[..., Any] = score) -> None:
            flashtune.flex_attention(q[:, :, :length], k[:, :, :length], v[:, :, :length], score)

        first = timed(call)
        lengths, numbers, same = [], [], []
        for number in range(1, CALLS):
            lengths.append(timed(lambda number=number: call(LENGTH - STEP * number)))  # type: ignore[misc]
            size += 1
            numbers.append(timed(call))
            same.append(timed(call))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        medians = [statistics.median(times) for times in (lengths, numbers, same)]
        print(
            f"{name}: first {first:.0f} ms, new length {medians[0]:.3f} ms, new number {medians[1]:.3f} ms, "
            f"same {medians[2]:.3f} ms, {begin.elapsed_time(end) / CALLS:.3f} ms of the GPU"
        )


if __name__ == "__main__":
    main()
