"""Host time of flashtune: a call, the import, and the first call of a process.

    python -m benchmarks.host.host_time  # prints a JSON document
    python -m benchmarks.host.host_time --heads 16 --seqlen 512 --batch 32 --head-dim 128 --causal

Every figure is a median. Calls are timed while their launches only queue, so GPU time has no effect. Without
a GPU, the launch does nothing, and first calls are left out. The whole takes half a minute, most of it the
start of processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.dispatch.versions import driver_version
from flashtune.launch.compilation import kernel_folder
from flashtune.request.call import dense_call
from flashtune.request.read_call import read_call
from flashtune.runtime import call_cache, executors

# Fewer calls than a launch queue holds.
CALLS = 200
ROUNDS = 31
PROCESSES = 3

IMPORT = """
import time, torch, triton
start = time.process_time()
import flashtune
flashtune.attention, flashtune.plan, flashtune.explain
print((time.process_time() - start) * 1e3)
"""

TENSORS = """
import time, torch, triton
q = torch.randn({batch}, {heads}, {seqlen}, {head_dim}, dtype=torch.{dtype}, device="cuda")
k = torch.randn({batch}, {kv_heads}, {seqlen}, {head_dim}, dtype=torch.{dtype}, device="cuda")
v = torch.randn_like(k)
torch.cuda.synchronize()
start = time.perf_counter()
"""
FINISH = """
torch.cuda.synchronize()
print((time.perf_counter() - start) * 1e3)
"""
FIRST_CALL = "import flashtune\nflashtune.attention(q, k, v, causal={causal}, prefer='generated')"
BY_HAND = """
import importlib.util
spec = importlib.util.spec_from_file_location("by_hand", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.attention(q, k, v)
"""


def main() -> None:
    """Measures and prints."""
    options = _options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    figures: dict[str, object] = {
        "versions": {
            "flashtune": flashtune.__version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": sys.version.split()[0],
            "driver": driver_version(),
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        },
        "shape": vars(options),
        "import_cpu_ms": _processes(IMPORT),
    }
    q, k, v = _tensors(options, device)
    figures |= _gpu_figures(options, q, k, v) if device == "cuda" else _cpu_figures(options, q, k, v)
    print(json.dumps(figures, indent=2))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("batch", 32), ("heads", 32), ("kv-heads", 0), ("seqlen", 512), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--causal", action="store_true")
    options = parser.parse_args()
    options.kv_heads = options.kv_heads or options.heads
    return options


def _tensors(options: argparse.Namespace, device: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = getattr(torch, options.dtype)

    def make(heads: int) -> Tensor:
        return torch.randn(options.batch, heads, options.seqlen, options.head_dim, dtype=dtype, device=device)

    return make(options.heads), make(options.kv_heads), make(options.kv_heads)


def _gpu_figures(options: argparse.Namespace, q: Tensor, k: Tensor, v: Tensor) -> dict[str, object]:
    causal, gqa = options.causal, options.heads != options.kv_heads
    planned = flashtune.plan(q, k, v, causal=causal, prefer="generated")
    moved = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    host = _host_times(
        {
            "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa),
            "generated": lambda: flashtune.attention(q, k, v, causal=causal, prefer="generated"),
            "generated_bshd": lambda: flashtune.attention(
                moved[0], moved[1], moved[2], causal=causal, layout="bshd", prefer="generated"
            ),
            "fastest": lambda: flashtune.attention(q, k, v, causal=causal),
            "plan": lambda: planned(q, k, v),
        }
    )
    told = flashtune.explain(q, k, v, causal=causal, prefer="generated")
    assert told.selection is not None
    path = str(kernel_folder() / f"{told.selection.record.family}_{told.kernel}.py")
    setup = TENSORS.format(**vars(options))
    first = _processes(setup + FIRST_CALL.format(causal=causal) + FINISH)
    by_hand = _processes(setup + BY_HAND.format(path=path) + FINISH)
    return {
        "explanation": str(told).splitlines(),
        "host_us": host,
        "generated_over_sdpa": host["generated"] / host["sdpa"],
        "first_call_ms": first,
        "first_call_by_hand_ms": by_hand,
        "first_call_over_by_hand_ms": first - by_hand,
    }


def _cpu_figures(options: argparse.Namespace, q: Tensor, k: Tensor, v: Tensor) -> dict[str, object]:
    """Key, lookup and allocation alone."""
    call = dense_call(q, k, v, causal=options.causal, prefer="generated")
    request = read_call(call)

    def nothing(
        tensors: tuple[Tensor | None, ...], scale: float, side: ExtraInputs = NO_EXTRA_INPUTS
    ) -> None:
        """Replaces the launch."""

    call_cache._executors[call_cache.call_key(call)] = executors.launcher(nothing, request, q)
    timed = {
        "generated_without_launch": lambda: flashtune.attention(
            q, k, v, causal=options.causal, prefer="generated"
        )
    }
    return {"host_us": _host_times(timed)}


def _host_times(calls_by_name: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds per call, the calls interleaved round by round."""
    samples: dict[str, list[float]] = {name: [] for name in calls_by_name}
    for _ in range(ROUNDS):
        for name, call in calls_by_name.items():
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            samples[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: round(statistics.median(values), 2) for name, values in samples.items()}


def _processes(program: str) -> float:
    """The median output of a program over new processes; this one has filled all caches on disk."""
    times: list[float] = []
    for _ in range(PROCESSES):
        answer = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
        times.append(float(answer.stdout))
    return round(statistics.median(times), 2)


if __name__ == "__main__":
    main()
