"""Launches of kernels from a bundle, compared with Triton's launcher: results bit for bit, and host time.

    python -m benchmarks.host.bundle_launch [--save FILE]

needs a GPU. It compiles some kernels of both passes, and writes each to a bundle in memory. It launches
each by Triton, and from the bundle by the driver.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from flashtune.bundle.bundle_file import bundle_of, dump_bundle
from flashtune.bundle.driver import Driver
from flashtune.core.kernel import Kernel, specialization_of
from flashtune.core.problem import Problem
from flashtune.core.target import device_target
from flashtune.dispatch.lookup import select
from flashtune.dispatch.tables import Tables
from flashtune.dispatch.versions import current_versions
from flashtune.launch.binding import bind, compile_binary
from flashtune.launch.bundle_binding import BundledBinary, bind_entry, load_entry
from flashtune.launch.bundle_entries import entry_of
from flashtune.launch.kernel_cache import kernel_of
from flashtune.launch.tensors import BackwardTensors, ForwardTensors
from flashtune.tuner.execution.inputs import make_tensors
from flashtune.tuner.tables.warm import tables_with
from flashtune.tuner.workloads.shapes import parse_shape

SHAPES = {
    "plain": "heads=8,kv_heads=2,seqlen=1024,head_dim=128,batch=2,causal",
    "full, fp32": "heads=8,seqlen=300,head_dim=64,dtype=fp32",
    "e4m3": "heads=8,seqlen=512,head_dim=128,dtype=e4m3",
    "bias": "heads=8,seqlen=512,head_dim=128,bias=additive",
    "mask": "heads=8,seqlen=512,head_dim=64,bias=boolean",
    "block mask": "heads=8,seqlen=1024,head_dim=128,block_mask=128",
    "packed": "heads=8,kv_heads=2,seqlen=512,head_dim=128,batch=4,packed=1500,causal",
    "window, softcap, sinks": "heads=8,seqlen=1024,head_dim=64,window=127,softcap,sinks,causal",
    "dropout": "heads=8,seqlen=512,head_dim=128,dropout,causal",
    "decode": "heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=4096,head_dim=128,batch=8",
    "decode, pages": "heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=4096,head_dim=128,batch=8,page_size=16",
    "decode, latent": "heads=128,kv_heads=1,seqlen_q=1,seqlen_kv=2048,head_dim=576,value_head_dim=512,"
    "batch=4,page_size=64,mla,causal",
    "gradients": "heads=8,kv_heads=2,seqlen=1024,head_dim=128,batch=2,causal,backward",
    "gradients, deterministic": "heads=8,seqlen=1024,head_dim=64,deterministic,causal,backward",
    "gradients, bias": "heads=8,seqlen=512,head_dim=64,bias=additive,backward",
    "gradients, packed": "heads=8,seqlen=512,head_dim=128,batch=4,packed=1500,causal,backward",
}
LAUNCHES, ROUNDS = 100, 30
NO_TABLES = Tables({}, {})


class Comparison(msgspec.Struct, frozen=True):
    """Both launches of one kernel."""

    shape: str
    family: str
    # Whether the results are equal bit for bit. None if two runs of Triton's differ too.
    equal: bool | None
    largest_difference: float
    triton_us: float  # Host time of a launch, in microseconds: the median of rounds.
    bundle_us: float
    compile_ms: float  # Triton's compilation, or the look-up in its cache.
    load_ms: float  # From the open bundle to the loaded functions.
    bind_ms: float


class Case(NamedTuple):
    """A kernel, its tensors, and both launches."""

    kernel: Kernel
    tensors: ForwardTensors | BackwardTensors
    triton: Callable[[], None]
    bundle: Callable[[], None]
    compile_ms: float
    load_ms: float
    bind_ms: float

    def results(self, launch: Callable[[], None]) -> list[Tensor]:
        """Runs a launch on cleared outputs, and returns copies of them."""
        names = {"out", "lse"} if isinstance(self.tensors, ForwardTensors) else {
            "dq", "dk", "dv", "dbias", "dslopes", "dsinks",
        }  # fmt: skip
        outputs = [
            value for name, value in self.tensors._asdict().items() if name in names and value is not None
        ]
        for output in outputs:
            output.zero_()
        launch()
        torch.cuda.synchronize()
        return [output.float() for output in outputs]


def make_case(problem: Problem, device: torch.device, *, lse: bool = True, tuned: bool = True) -> Case:
    """Returns the case of a problem with the kernel that dispatch chooses."""
    target = device_target(device.index)
    made = make_tensors(problem, device, lse=lse)
    tensors: Any = made.backward or ForwardTensors(made.q, made.k, made.v, made.out, made.lse)
    assumed = specialization_of(tensors.planned[:4], lse=lse and not problem.is_backward, bias=made.side.bias)
    tables = tables_with(target, ()) if tuned else NO_TABLES
    record = select(problem, target, tables, assumed, generated=True).record
    kernel = kernel_of(record, assumed)
    started = time.perf_counter()
    binary = compile_binary(kernel, target)
    compiled = time.perf_counter()
    side = made.side._replace(
        softcap=20.0 if problem.softcap else None, dropout=0.25 if problem.dropout else None
    )
    by_triton = bind(kernel, target, tensors, side, compiled=binary)
    entry, codes = entry_of(kernel, problem, binary, current_versions(kernel.family).ptxas)
    bundle = bundle_of(dump_bundle(target.arch, "smoke", [entry], codes), "the bundle")
    driver = Driver()
    loading = time.perf_counter()
    stored = bundle.entry(kernel.digest)
    assert stored == entry
    functions = load_entry(stored, bundle.code, driver, device)
    loaded = time.perf_counter()
    by_driver = bind_entry(BundledBinary(stored, functions, driver), tensors, side)
    bound = time.perf_counter()
    arguments = (tuple(tensors), made.scale, side)
    return Case(
        kernel, tensors, lambda: by_triton(*arguments), lambda: by_driver(*arguments),
        1e3 * (compiled - started), 1e3 * (loaded - loading), 1e3 * (bound - loaded),
    )  # fmt: skip


def compare(name: str, case: Case) -> Comparison:
    """Returns the comparison of a case's launches."""
    first, again, other = (case.results(launch) for launch in (case.triton, case.triton, case.bundle))
    repeats = all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    same = all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    gaps = [(one - two).abs().nan_to_num(0.0).max().item() for one, two in zip(first, other, strict=True)]
    times: dict[str, list[float]] = {"triton": [], "bundle": []}
    for _ in range(ROUNDS):
        for kind, launch in (("triton", case.triton), ("bundle", case.bundle)):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(LAUNCHES):
                launch()
            times[kind].append(1e6 * (time.perf_counter() - started) / LAUNCHES)
    torch.cuda.synchronize()
    return Comparison(
        shape=name,
        family=case.kernel.family,
        equal=same if repeats or same else None,
        largest_difference=max(gaps),
        triton_us=statistics.median(times["triton"]),
        bundle_us=statistics.median(times["bundle"]),
        compile_ms=case.compile_ms,
        load_ms=case.load_ms,
        bind_ms=case.bind_ms,
    )


def main() -> int:
    """Compares all shapes, and returns 1 if a result differs or a launch failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", type=Path, help="a file for the results as JSON")
    parser.add_argument("--only", help="the part of a shape's name")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    rows, failed = [], 0
    for name, text in SHAPES.items():
        if options.only and options.only not in name:
            continue
        try:
            row = compare(name, make_case(parse_shape(text)[0], device))
        except Exception as error:  # noqa: BLE001 - the next shape may work
            failed += 1
            print(f"{name:26} FAILED {type(error).__name__}: {error}")
            continue
        rows.append(row)
        failed += row.equal is False
        print(
            f"{name:26} {row.family:20} equal {row.equal!s:5} diff {row.largest_difference:.1e} "
            f"host {row.triton_us:5.1f} -> {row.bundle_us:5.1f} us, compile {row.compile_ms:6.0f} ms, "
            f"load {row.load_ms:.1f} ms, bind {row.bind_ms:.1f} ms",
            flush=True,
        )
    if options.save:
        options.save.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
