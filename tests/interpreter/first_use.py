"""One of many processes that concurrently use an unverified kernel for the first time."""

import time
from pathlib import Path

import torch

from flashtune import testing
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal
from flashtune.core.record import Verdict
from flashtune.core.target import find_target
from flashtune.launch.binding import bind
from flashtune.launch.compilation import kernel_folder
from flashtune.launch.tensors import ForwardTensors
from flashtune.runtime.self_check import CheckTask, SelfChecks
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.verification import check
from tests.support.unfused import unfused

TARGET = find_target("nvidia-l4")
CPU = torch.device("cpu")
PROBLEM = testing.problem("heads=2,kv_heads=1,seqlen_q=40,seqlen_kv=50,head_dim=16,dtype=fp32,causal")


def use_first(start: float, checks: Path) -> float:
    """Waits for a moment, checks the kernel like a first call and launches it.

    Args:
        start: When, by `time.time`.
        checks: A file to which each check that is made adds a byte.

    Returns:
        The largest error against float64.
    """
    torch.set_num_threads(1)
    made = check.check_rendered

    def counted(*args: object, **options: object) -> Verdict:
        with checks.open("ab") as file:
            file.write(b".")
        return made(*args, **options)  # type: ignore[arg-type]

    family = find_family("forward_q_outer")
    config = family.default(PROBLEM, TARGET)
    kernel = render(family, PROBLEM, config, Specialization(lse=True))
    time.sleep(max(0.0, start - time.time()))
    assert SelfChecks(counted).passes(CheckTask(kernel, PROBLEM, config, TARGET, CPU))
    assert (kernel_folder() / f"{kernel.family}_{kernel.digest}.py").read_text() == kernel.source
    torch.manual_seed(3)
    q, out = torch.randn(1, 2, 40, 16), torch.empty(1, 2, 40, 16)
    k, v = torch.randn(2, 1, 1, 50, 16)
    lse = torch.empty(1, 2, 40)
    bind(kernel, TARGET, ForwardTensors(q, k, v, out))((q, k, v, out, lse), 0.25)
    truth, _ = unfused(q.double(), k.double(), v.double(), scale=0.25, causal=Causal.BOTTOM_RIGHT)
    return float((out - truth).abs().max())
