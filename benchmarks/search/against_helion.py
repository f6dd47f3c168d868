"""Compares `flashtune search` with Helion on plain attention: time to a result, and its speed.

    python -m benchmarks.search.against_helion  # Helion's quick autotuning
    python -m benchmarks.search.against_helion --effort full --seconds 300 --save helion.json

Helion (PyTorch project, 2025) compiles a kernel in torch syntax to Triton. It searches block sizes, loop
orders, loads, warps and stages itself. Both begin with empty caches. The two results are then timed in one
interleaved run, after a comparison of Helion's with the reference. Helion's kernel has no mask here, so the
shape has none. Needs a GPU and `pip install helion`. Version 1.5.1 imports names that torch 2.11 does not
have yet; 1.5.0 works.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from benchmarks.exhaustive.fitting import NOTHING
from flashtune.core.errors import FlashtuneError, UsageError
from flashtune.core.problem import Causal, Problem
from flashtune.core.target import Target, device_target
from flashtune.db.store import open_store
from flashtune.runtime.unfused import unfused_attention
from flashtune.tuner.candidates import Candidate, contiguous_specialization
from flashtune.tuner.execution.inputs import make_tensors
from flashtune.tuner.execution.timed_runs import kernel_run
from flashtune.tuner.execution.timing import measure_interleaved
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.request import SearchRequest, WarmStart
from flashtune.tuner.search.selection import candidate_of
from flashtune.tuner.workloads.shapes import parse_shape

try:
    import helion
    import helion.language as hl
except ImportError as error:
    sys.exit(f"Helion cannot be imported ({error}): pip install helion, or helion==1.5.0 under torch 2.11")

SHAPE = "heads=16,seqlen=2048,head_dim=128,tokens=16384"
ROUNDS = 61
# Of elements about one in size, in 16 bits.
TOLERANCE = 2e-2


class Comparison(msgspec.Struct, frozen=True):
    """One shape by both.

    Attributes:
        problem: The problem's key.
        effort: Helion's effort level.
        budget: Its time limit in seconds; None for no limit.
        helion: Its version.
        search_seconds, helion_seconds: Wall clock until the result.
        search_ms, helion_ms: Interleaved times of the results.
    """

    problem: str
    effort: str
    budget: int | None
    helion: str
    search_seconds: float
    search_ms: float
    helion_seconds: float
    helion_ms: float


def attend(q: Tensor, k: Tensor, v: Tensor, scale_log2: float) -> Tensor:
    """Attention without a mask of q, k and v [heads, length, width], as Helion compiles it."""
    width = hl.specialize(q.size(-1))
    out = torch.empty_like(q)
    columns = k.transpose(1, 2)
    for head, row in hl.tile([q.size(0), q.size(1)]):
        largest = hl.full([head, row], float("-inf"), dtype=torch.float32)
        total = hl.zeros([head, row], dtype=torch.float32)
        sums = hl.zeros([head, row, width], dtype=torch.float32)
        queries = q[head, row, :]
        for key in hl.tile(v.size(1)):
            scores = hl.dot(queries, columns[head, :, key], out_dtype=torch.float32) * scale_log2
            risen = torch.maximum(largest, torch.amax(scores, -1))
            weights = torch.exp2(scores - risen[:, :, None])
            kept = torch.exp2(largest - risen)
            total = total * kept + torch.sum(weights, -1)
            sums = hl.dot(weights.to(v.dtype), v[head, key, :], acc=sums * kept[:, :, None])
            largest = risen
        out[head, row, :] = (sums / total[:, :, None]).to(out.dtype)
    return out


def tuned(effort: str, budget: int | None) -> Callable[..., Tensor]:
    """The kernel, which tunes itself at its first call."""
    # Read from the environment they would be those of the moment of the import.
    limit = {} if budget is None else {"autotune_budget_seconds": budget}
    kernel: Callable[..., Tensor] = helion.kernel(attend, static_shapes=True, autotune_effort=effort, **limit)
    return kernel


def by_helion(kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Its output for tensors [batch, heads, length, width]."""
    flat = (tensor.flatten(0, 1) for tensor in (q, k, v))
    return kernel(*flat, math.log2(math.e) / math.sqrt(q.shape[-1])).view_as(q)


def by_search(problem: Problem, target: Target, device: int) -> tuple[Candidate, float]:
    """The result of a search without other shapes' winners, and its wall clock."""
    request = SearchRequest(problem=problem, target=target, device=device, experience=WarmStart((), NOTHING))
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        with open_store(str(Path(folder, "records.sqlite"))) as store:
            best = run_search(request, store).best
        if best is None:
            raise FlashtuneError(f"a search of {problem.key} found nothing that works")
        return candidate_of(best), time.monotonic() - started


def compare(problem: Problem, device: torch.device, effort: str, budget: int | None) -> Comparison:
    """Both on one shape.

    Raises:
        FlashtuneError: A search found nothing, or Helion's kernel is wrong.
    """
    target = device_target(device.index or 0)
    found, search_seconds = by_search(problem, target, device.index or 0)
    tensors, kernel = make_tensors(problem, device), tuned(effort, budget)
    started = time.monotonic()
    output = by_helion(kernel, tensors.q, tensors.k, tensors.v)
    torch.cuda.synchronize(device)
    helion_seconds = time.monotonic() - started
    expected, _ = unfused_attention(problem, tensors.q, tensors.k, tensors.v, scale=tensors.scale)
    if not torch.allclose(output.float(), expected.float(), atol=TOLERANCE):
        raise FlashtuneError("Helion's kernel is wrong: there is nothing to time")
    ours = kernel_run(problem, found, contiguous_specialization(problem), target, tensors)
    theirs = functools.partial(by_helion, kernel, tensors.q, tensors.k, tensors.v)
    own, other = measure_interleaved((ours, theirs), device, rounds=ROUNDS)
    return Comparison(
        problem=problem.key,
        effort=effort,
        budget=budget,
        helion=importlib.metadata.version("helion"),
        search_seconds=round(search_seconds, 1),
        search_ms=round(own.ms, 5),
        helion_seconds=round(helion_seconds, 1),
        helion_ms=round(other.ms, 5),
    )


def main() -> None:
    """Compares one shape and prints a row."""
    parser = argparse.ArgumentParser(description="flashtune search against Helion.")
    parser.add_argument("--shape", default=SHAPE, help="as for flashtune search, without a mask")
    parser.add_argument("--effort", default="quick", choices=("quick", "full"), help="of Helion's autotuning")
    parser.add_argument("--seconds", type=int, help="Helion answers with the best that it has by then")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the figures, in JSON")
    options = parser.parse_args()
    try:
        (problem,) = parse_shape(options.shape)
        if problem.causal is not Causal.NONE or problem.features or problem.heads != problem.kv_heads:
            raise UsageError(
                "Helion's kernel here supports neither masks nor shared KV heads: leave them out"
            )
        with tempfile.TemporaryDirectory() as folder:
            # Neither finds what an earlier run has compiled.
            os.environ["TRITON_CACHE_DIR"] = os.environ["HELION_CACHE_DIR"] = folder
            found = compare(problem, torch.device("cuda", 0), options.effort, options.seconds)
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    if options.save is not None:
        options.save.write_bytes(msgspec.json.encode(found))
    limit = "" if found.budget is None else f", at most {found.budget} s"
    print("| shape | effort | Helion | search | time over its | speed over its |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    time_over, speed_over = found.search_seconds / found.helion_seconds, found.helion_ms / found.search_ms
    print(
        f"| {found.problem} | {found.effort}{limit} | {found.helion_seconds:.0f} s, {found.helion_ms:.4f} ms "
        f"| {found.search_seconds:.0f} s, {found.search_ms:.4f} ms | {time_over:.2f} | {speed_over:.2f} |"
    )


if __name__ == "__main__":
    main()
