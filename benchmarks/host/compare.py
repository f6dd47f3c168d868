"""Host time of calls in two checkouts of flashtune, interleaved in one run on a GPU.

    python benchmarks/host/compare.py --old ../before --new . --save out/host-compare.json

Each checkout has a process, which prepares all calls first. The processes then measure in turn. Every figure
is the minimum of the rounds, because other processes of the machine only add time. Calls are timed while
their launches only queue, so GPU time has no effect. Prints ratios, and writes all figures in JSON. Takes
about a minute, most of it `torch.compile`.

The module imports no other module of this folder, because it also runs with the modules of the old checkout.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROUNDS = 9
# A launch queue holds 1024 kernels.
CALLS = 200
TRAINING_CALLS = 40
# A process's line with the figures of a round begins so. Compilers may print other lines.
MARK = "figures: "

Times = Mapping[str, float]

# Names of a ratio, its call and what the call is compared with in the same process.
RATIOS = (
    ("decode over SDPA", "decode", "sdpa_decode"),
    ("forward over SDPA", "forward", "sdpa_forward"),
    ("forward and backward over SDPA", "training", "sdpa_training"),
    ("compiled over compiled SDPA", "compiled", "sdpa_compiled"),
)


def main() -> None:
    """Measures, prints and saves; or serves rounds as the process of one checkout."""
    parser = argparse.ArgumentParser(description="Host time of calls in two checkouts.")
    parser.add_argument("--old", type=Path, help="the earlier checkout")
    parser.add_argument("--new", type=Path, default=Path(), help="the later checkout (here if not given)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures to FILE, in JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve()
        return
    if options.old is None:
        parser.error("pass --old, the checkout to compare with")
    rounds = _rounds({"old": options.old, "new": options.new})
    document = {name: _minima(times) for name, times in rounds.items()}
    print(*_lines(document["old"], document["new"]), sep="\n")
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps({"us": document, "rounds": rounds}, indent=2) + "\n")


def _rounds(checkouts: Mapping[str, Path]) -> dict[str, list[Times]]:
    """Returns the times of each round in microseconds, by checkout."""
    running = {name: _start(path.resolve()) for name, path in checkouts.items()}
    times: dict[str, list[Times]] = {name: [] for name in checkouts}
    try:
        # Both prepare their calls before either measures.
        for process in running.values():
            _answer(process)
        for number in range(ROUNDS):
            names = [*running] if number % 2 == 0 else [*running][::-1]
            for name in names:
                process = running[name]
                assert process.stdin is not None
                print(file=process.stdin, flush=True)
                times[name].append(_answer(process))
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return times


def _start(checkout: Path) -> subprocess.Popen[str]:
    paths = filter(None, (str(checkout), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=checkout, stdin=pipe, stdout=pipe, text=True)


def _answer(process: subprocess.Popen[str]) -> Times:
    """Returns the next figures of a process."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            times: Times = json.loads(line.removeprefix(MARK))
            return times
    sys.exit("the process of a checkout ended before it answered")


def _minima(rounds: Sequence[Times]) -> dict[str, float]:
    return {name: min(times[name] for times in rounds) for name in rounds[0]}


def _lines(old: Times, new: Times) -> list[str]:
    """Returns the tables: each call in both checkouts, and the ratios to other implementations."""
    lines = [f"{'call':<32}{'old us':>9}{'new us':>9}{'new/old':>9}"]
    lines += [f"{name:<32}{old[name]:9.2f}{new[name]:9.2f}{new[name] / old[name]:9.3f}" for name in old]
    lines += ["", f"{'ratio':<32}{'old':>9}{'new':>9}"]
    for name, call, other in RATIOS:
        lines.append(f"{name:<32}{old[call] / old[other]:9.3f}{new[call] / new[other]:9.3f}")
    second = [times["two_empty_launches"] - times["empty_launch"] for times in (old, new)]
    lines.append(f"{'an empty second launch (us)':<32}{second[0]:9.2f}{second[1]:9.2f}")
    return lines


def _serve() -> None:
    """Prepares all calls, then measures them for each line of the input."""
    import torch

    import flashtune

    if not torch.cuda.is_available():
        sys.exit("host times of launches need a GPU and none is visible: run it on a machine with one")
    print("checkout", flashtune.__file__, file=sys.stderr)
    calls = _calls()
    for call, _ in calls.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    print(f"{MARK}{{}}", flush=True)
    for _ in sys.stdin:
        times = {name: _time(call, count) for name, (call, count) in calls.items()}
        print(MARK + json.dumps(times), flush=True)


def _time(call: Callable[[], object], count: int) -> float:
    """Returns the time of a call in microseconds, over as many calls as a launch queue holds."""
    import torch

    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / count * 1e6


def _calls() -> dict[str, tuple[Callable[[], object], int]]:
    """Returns the calls by name, and the number of calls of a sample."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import flashtune

    tuned: Any = flashtune
    sdpa: Any = scaled_dot_product_attention

    def random(*shape: int, grad: bool = False) -> Any:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=grad)

    def generated(*tensors: Any, **options: Any) -> Any:
        return tuned.attention(*tensors, **options, prefer="generated")

    query, kept = random(1, 32, 1, 128), [random(1, 8, 8192, 128) for _ in range(2)]
    q, k, v = (random(4, 16, 1024, 128) for _ in range(3))
    leaves = [random(2, 8, 512, 64, grad=True) for _ in range(3)]
    dout = random(2, 8, 512, 64)
    packed = [random(2048, 16, 128) for _ in range(3)]
    starts = torch.tensor([0, 1024, 2048], dtype=torch.int32, device="cuda")
    pages = [random(1024, 16, 8, 128) for _ in range(2)]
    table = torch.arange(1024, dtype=torch.int32, device="cuda").view(16, 64)
    lengths = torch.full((16,), 1000, dtype=torch.int32, device="cuda")
    rows = random(16, 32, 128)
    compiled = torch.compile(lambda q, k, v: generated(q, k, v, causal=True))
    compiled_sdpa = torch.compile(lambda q, k, v: sdpa(q, k, v, is_causal=True))
    empty = _empty_launch()

    def train(attention: Callable[..., Any]) -> None:
        torch.autograd.grad(attention(*leaves), leaves, dout)

    calls: dict[str, Callable[[], object]] = {
        "sdpa_decode": lambda: sdpa(query, *kept, enable_gqa=True),
        "decode": lambda: generated(query, *kept),
        "sdpa_forward": lambda: sdpa(q, k, v, is_causal=True),
        "forward": lambda: generated(q, k, v, causal=True),
        "varlen": lambda: tuned.attention_varlen(*packed, starts, starts, 1024, 1024, causal=True),
        "paged": lambda: tuned.attention_paged(rows, *pages, table, lengths),
        "sdpa_compiled": lambda: compiled_sdpa(q, k, v),
        "compiled": lambda: compiled(q, k, v),
        "empty_launch": empty,
        "two_empty_launches": lambda: (empty(), empty()),
    }
    training: dict[str, Callable[[], object]] = {
        "sdpa_training": lambda: train(lambda *tensors: sdpa(*tensors, is_causal=True)),
        "training": lambda: train(lambda *tensors: generated(*tensors, causal=True)),
    }
    return {
        **{name: (call, CALLS) for name, call in calls.items()},
        **{name: (call, TRAINING_CALLS) for name, call in training.items()},
    }


def _empty_launch() -> Callable[[], object]:
    """Returns a launch of a kernel that does nothing, by Triton's launcher without its specialisation."""
    import torch
    import triton
    from triton.runtime import driver

    kernel: Any = triton.jit(_nothing).warmup(grid=(1,))
    run, head = kernel.run, (kernel.function, kernel.packed_metadata, None, None, None)
    device = torch.cuda.current_device()
    stream: Callable[[int], int] = driver.active.get_current_stream  # pyright: ignore[reportAttributeAccessIssue]
    return lambda: run(1, 1, 1, stream(device), *head)


def _nothing() -> None:
    pass


if __name__ == "__main__":
    main()
