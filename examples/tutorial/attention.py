"""Runs generated kernels with tiles that are small enough to follow, and records their accesses."""

from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from examples.tutorial.traffic import Traffic, recorded
from flashtune import testing
from flashtune.core.config import Config
from flashtune.core.kernel import Alignment, Kernel, Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import find_target
from flashtune.launch.compilation import load_module
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render

# The orders of loops, by the families that generate them.
FLASH_ATTENTION_1 = "forward_kv_outer"
FLASH_ATTENTION_2 = "forward_q_outer"
# Changes of a float32 kernel's source that make it compute in float64.
IN_DOUBLE = {
    'input_precision="bf16x6"': "out_dtype=tl.float64",
    "scale * LOG2_E": "scale * tl.full((), LOG2_E, tl.float64)",
    "torch.float32": "torch.float64",
    "tl.float32": "tl.float64",
}


class Step(NamedTuple):
    """The state of the online softmax after one score."""

    score: float
    running_max: float
    running_sum: float  # The sum of exp(score - running_max).
    rescale: float  # The factor of the earlier sum: exp(old running_max - running_max).


def run(
    family: str, q: Tensor, k: Tensor, v: Tensor, *, scale: float, block: int, causal: bool = False
) -> tuple[Tensor, Traffic]:
    """Returns the attention of a generated kernel, and its accesses to global memory.

    Args:
        family: The order of loops.
        q: Queries [seqlen, head_dim], in float32 or float64.
        k: Keys [seqlen, head_dim].
        v: Values [seqlen, value_head_dim].
        scale: Factor of the scores.
        block: Number of queries of a tile, and of keys.
        causal: Whether a query sees only keys up to its own position.
    """
    kernel = tiny_kernel(family, q, k, v, block=block, causal=causal)
    if q.dtype == torch.float64:
        source = kernel.source
        for old, new in IN_DOUBLE.items():
            source = source.replace(old, new)
        kernel = msgspec.structs.replace(kernel, source=source)
    module = load_module(kernel)
    with recorded() as traffic:
        out, _ = module.attention(q[None, None], k[None, None], v[None, None], scale)
    traffic.tensors = {"q": q, "k": k, "v": v, "out": out}
    return out[0, 0], traffic


def tiny_kernel(family: str, q: Tensor, k: Tensor, v: Tensor, *, block: int, causal: bool) -> Kernel:
    """Renders a kernel with tiles that no GPU has: they are smaller than its matrix units."""
    problem = problem_of(q, k, v, causal=causal)
    config = tiny_config(family, problem, block)
    return render(find_family(family), problem, config, Specialization(alignment=Alignment.ANY))


def problem_of(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Problem:
    """Returns the problem of one head in float32."""
    return testing.problem(
        f"heads=1,seqlen_q={len(q)},seqlen_kv={len(k)},dtype=fp32{',causal' if causal else ''},"
        f"head_dim={q.shape[1]},value_head_dim={v.shape[1]}"
    )


def tiny_config(family: str, problem: Problem, block: int) -> Config:
    """Returns the default config of a family with other tiles."""
    default = find_family(family).default(problem, find_target("h100"))
    return msgspec.structs.replace(default, block_m=block, block_n=block, num_stages=1)


def modelled_elements(family: str, q: Tensor, k: Tensor, v: Tensor, *, block: int) -> int:
    """Returns the elements that a kernel reads and writes, by the model of its family."""
    problem = problem_of(q, k, v)
    items = find_family(family).hbm_items(problem, tiny_config(family, problem, block))
    return sum(item.bytes for item in items) // q.element_size()


def online_softmax(scores: list[float]) -> list[Step]:
    """Returns the steps of the online softmax, as a kernel with one query and one key per tile stores them.

    The query is 1 and the keys are the scores. The kernel stores the maximum, the sum and the output after
    each key.
    """
    keys = torch.tensor(scores, dtype=torch.float32)[:, None]
    _, traffic = run(FLASH_ATTENTION_1, torch.ones(1, 1), keys, keys, scale=1.0, block=1)
    # The first three values are the state before the first key, and the last one is the output.
    stored = [float(access.values[0]) for access in traffic if access.kind == "write"][3:-1]
    steps: list[Step] = []
    before = -torch.inf
    for score, running_max, running_sum in zip(scores, stored[::3], stored[1::3], strict=True):
        rescale = float(torch.tensor(before - running_max).exp())
        steps.append(Step(score, running_max, running_sum, rescale))
        before = running_max
    return steps
