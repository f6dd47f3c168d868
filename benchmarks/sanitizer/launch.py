"""Launches kernels on tensors that end where their allocations end, so that a sanitizer sees accesses beyond.

`benchmarks/sanitizer/runner.py` runs this program under a tool:

    python -m benchmarks.sanitizer.launch TOOL FILE UNTIL DIGEST ...
"""

import contextlib
import faulthandler
import math
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.sanitizer.points import Subject, cases_of
from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Alignment, Kernel
from flashtune.core.target import Target, device_target
from flashtune.launch.binding import bind
from flashtune.launch.tensors import BackwardTensors, ForwardTensors
from flashtune.verification.cases import Case, lengths_of
from flashtune.verification.gradients import inputs as gradients
from flashtune.verification.inputs.memory import Dense, Memory, MemoryFrame, placed
from flashtune.verification.inputs.placement import aside
from flashtune.verification.inputs.prepared import dense_values

SEED = 20
# Pointers of which nothing may be assumed are off such borders.
BORDER_BYTES = 16
# A launch of a small problem takes less than a second even under a tool.
KERNEL_SECONDS = 60.0


def main(tool: str, file: str, until: str, *digests: str) -> None:
    """Launches some kernels of a file in order, and prints the number of launched kernels after each."""
    # Written by the process that started this one.
    kernels: dict[str, Subject] = pickle.loads(Path(file).read_bytes())  # noqa: S301
    target = device_target(0)
    for count, digest in enumerate(digests, 1):
        subject = kernels[digest]
        if time.time() > float(until):
            return
        # Ends the process even if the driver hangs.
        faulthandler.dump_traceback_later(KERNEL_SECONDS, exit=True)
        for case in cases_of(subject, target, busy=tool == "memcheck"):
            launch_once(subject.kernel, case, target, torch.device("cuda", 0))
        faulthandler.cancel_dump_traceback_later()
        print(f"launched {count}", flush=True)


def launch_once(kernel: Kernel, case: Case, target: Target, device: torch.device) -> None:
    """Launches a kernel on a case, each tensor in an allocation of its own, and waits for its end.

    Unused entries of block tables are invalid page numbers.
    """
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        launch = _backward if case.problem.is_backward else _forward
        launch(kernel, case, target, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _forward(kernel: Kernel, case: Case, target: Target, device: torch.device) -> None:
    problem, lengths = case.problem, lengths_of(case)
    generator = torch.Generator().manual_seed(SEED)
    dense = dense_values(case, lengths, generator)
    memory = placed(problem, dense, lengths, _frame(case, kernel.specialization.alignment), aside(generator))
    own = _owner(device)
    q, k, v = _inputs(case, memory, own)
    out = own(memory.out.view)
    lse = own(memory.lse.view) if kernel.specialization.lse else None
    side = _side(memory.side, own)
    launch = bind(kernel, target, ForwardTensors(q, k, v, out), side, allocate=_workspace)
    launch((q, k, v, out, lse), case.scale, side)


def _backward(kernel: Kernel, case: Case, target: Target, device: torch.device) -> None:
    problem, lengths = case.problem, lengths_of(case)
    generator = torch.Generator().manual_seed(SEED)
    values = gradients.given_values(case, lengths, generator, kernel.specialization.lse)
    frame = _frame(case, kernel.specialization.alignment)
    memory = placed(problem, Dense(*values[:3], values.side), lengths, frame, aside(generator))
    results = gradients.about_right(problem, values)
    came = gradients.came_back(problem, values, results, memory, frame)
    own = _owner(device)
    others = {
        name: own(tensor.view)
        for name, tensor in (*came.items(), *gradients.written_to(problem, memory, frame).items())
    }
    tensors = BackwardTensors(*_inputs(case, memory, own), **others)
    side = _side(memory.side, own)
    bind(kernel, target, tensors, side, allocate=_workspace)(tensors, case.scale, side)


def _frame(case: Case, alignment: Alignment) -> MemoryFrame:
    return MemoryFrame(alignment, case.layout, faulty=True)


def _owner(device: torch.device) -> Callable[[Tensor], Tensor]:
    return lambda tensor: allocated(tensor, device)


def allocated(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of the same strides in memory of its own, which ends where the last element ends.

    It begins with the first element, or up to 15 bytes before where that is on no border of 16 bytes.
    """
    lead = tensor.data_ptr() % BORDER_BYTES // tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    # An empty tensor has an address too.
    memory = torch.empty(lead + max(1, reach), dtype=tensor.dtype, device=device)
    memory[lead : lead + reach].copy_(tensor.as_strided((reach,), (1,)))
    return memory.as_strided(tensor.shape, tensor.stride(), lead)


def _inputs(case: Case, memory: Memory, own: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q, k = own(memory.q.view), own(memory.k.view)
    # Latent values are columns of the keys.
    latent = case.problem.mla
    return q, k, k[..., : case.problem.value_head_dim] if latent else own(memory.v.view)


def _side(side: ExtraInputs, own: Callable[[Tensor], Tensor]) -> ExtraInputs:
    tensors = [None if tensor is None else own(tensor) for tensor in side.optional_tensors]
    return ExtraInputs(*tensors, *side.numbers)  # type: ignore[arg-type]  # numbers come last


def _workspace(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """An allocation for each of them, where a launch has one for all."""
    return torch.empty(math.prod(shape), dtype=torch.float32, device=device).view(shape)


if __name__ == "__main__":
    main(*sys.argv[1:])
