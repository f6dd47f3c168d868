"""GPU jobs of separate processes for the Hopper family: a hang ends only its process."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from flashtune.core.config import Config
from flashtune.core.errors import KernelError
from flashtune.core.kernel import Alignment, Kernel
from flashtune.core.problem import Causal, Problem
from flashtune.core.target import Target, device_target
from flashtune.launch.binding import Binary, bind, compile_binary
from flashtune.launch.tensors import ForwardTensors
from flashtune.request.quantization import given_scales
from flashtune.templates.forward_hopper.space import HopperConfig
from flashtune.verification.cases import SCALES, Case, tile_of
from flashtune.verification.inputs.guarded_tensors import (
    Guarded,
    Layout,
    Role,
    checksum,
    guarded_flat,
    poison,
    stray_writes,
)
from flashtune.verification.inputs.prepared import Prepared, prepare
from flashtune.verification.probes import Probe
from flashtune.verification.tolerance import worst_ratio

DEVICE = torch.device("cuda", 0)
# The exit code of a process whose GPU context is lost.
BROKEN_CONTEXT = 70
LONGEST = 1300
PROBES = (Probe.RANDOM, Probe.RANDOM, Probe.RANDOM, Probe.FAR_BELOW, Probe.NEEDLE, Probe.RISING)


class Trial(NamedTuple):
    """A random problem, and how its tensors lie.

    Attributes:
        case: Shape, probe and layout, with as many KV heads as there are in memory.
        alignment: Of the tensors' strides.
        shown: KV heads that the kernel is shown: more than there are where one is expanded to several.
    """

    case: Case
    alignment: Alignment
    shown: int

    def __str__(self) -> str:
        problem = self.case.problem
        lies = f"strides {self.alignment:d}, {self.shown} KV heads shown"
        return f"{problem.key}: {self.case.label}, scale {self.case.scale:.3g}, {lies}"


def compile_one(kernel: Kernel, target: Target) -> str:
    """Compiles a kernel into Triton's cache; returns its error or an empty string."""
    try:
        compile_binary(kernel, target)
    except KernelError as error:
        return str(error)
    return ""


def check_random(kernel: Kernel, problem: Problem, config: HopperConfig, count: int, seed: int) -> str:
    """Holds a kernel against the reference on random problems; the first thing that is wrong, or nothing."""
    chance = random.Random(seed)
    with context_lost_ends_the_process():
        binary = compile_binary(kernel, device_target(0))
        for number in range(count):
            trial = random_trial(chance, problem, config)
            wrong = faults(kernel, binary, trial, 1000 * seed + number)
            if wrong:
                return f"{trial}: {wrong}"
    return ""


def check_far(kernel: Kernel, case: Case) -> str:
    """Holds a kernel against the reference where a tensor spans more than 2^31 elements."""
    with context_lost_ends_the_process():
        binary = compile_binary(kernel, device_target(0))
        trial = Trial(case, Alignment.SIXTEEN, case.problem.kv_heads)
        wrong = faults(kernel, binary, trial, 1)
        return f"{trial}: {wrong}" if wrong else ""


def repeat(kernel: Kernel, case: Case, repeats: int) -> str:
    """Launches a kernel repeatedly on the same inputs; returns its error or an empty string."""
    with context_lost_ends_the_process():
        target = device_target(0)
        binary = compile_binary(kernel, target)
        trial = Trial(case, Alignment.SIXTEEN, case.problem.kv_heads)
        wrong = faults(kernel, binary, trial, 2)
        if wrong:
            return f"{trial}: {wrong}"
        prepared = prepare(case, trial.alignment, DEVICE, 3)
        q, k, v, out = (tensor.view for tensor in (prepared.q, prepared.k, prepared.v, prepared.out))
        lse = prepared.lse.view if kernel.specialization.lse else None
        launch = bind(kernel, target, ForwardTensors(q, k, v, out), compiled=binary)
        launch((q, k, v, out, lse), case.scale, prepared.side)
        first = bits(prepared, lse)
        differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(repeats):
            poison(prepared.out)
            poison(prepared.lse)
            launch((q, k, v, out, lse), case.scale, prepared.side)
            differing += sum(
                (one != other).sum() for one, other in zip(first, bits(prepared, lse), strict=True)
            )
        return (
            f"{trial}: {int(differing)} elements in all differ from the first launch's" if differing else ""
        )


def random_trial(chance: random.Random, problem: Problem, config: Config) -> Trial:
    """Ragged lengths, any sharing of heads, either layout, strides of whole or half cache sectors."""

    def length(side: int) -> int:
        near = side * chance.randint(1, 4) + chance.choice((-1, 0, 1))
        return min(LONGEST, max(1, chance.choice((1, near, near, chance.randint(1, 3 * side)))))

    block_m, block_n = tile_of(config)
    queries, keys = length(block_m // getattr(config, "pack_gqa", 1)), length(block_n)
    kv_heads, shown = chance.choice(((1, 1), (2, 2), (3, 3), (1, 2), (1, 3)))
    causal = problem.causal is not Causal.NONE
    case = Case(
        problem=msgspec.structs.replace(
            problem,
            heads=shown * chance.choice((1, 2, 3, 4, 5, 8)),
            kv_heads=kv_heads,
            batch=chance.choice((1, 1, 2, 3)),
            seqlen_q=queries,
            seqlen_kv=queries if chance.random() < 0.2 else keys,
        ),
        probe=chance.choice((*PROBES, Probe.DIAGONAL) if causal else PROBES),
        block=block_n,
        scale=chance.choice(SCALES) * problem.head_dim**-0.5,
        layout=chance.choice(tuple(Layout)),
    )
    least = Alignment.SIXTEEN if problem.dtype.is_quantized else Alignment.EIGHT
    return Trial(case, chance.choice((Alignment.SIXTEEN, least)), shown)


def faults(kernel: Kernel, binary: Binary, trial: Trial, seed: int) -> str:
    """The errors of a kernel at a trial, in two launches; empty if it is correct."""
    case, shown = trial.case, trial.shown
    prepared = prepare(case, trial.alignment, DEVICE, seed)
    q, out = prepared.q.view, prepared.out.view
    k, v = (as_shown(tensor.view, shown) for tensor in (prepared.k, prepared.v))
    of_q, of_k, of_v = prepared.side.scales
    scales = given_scales(
        of_q, *(one if one is None else as_shown(one, shown).contiguous() for one in (of_k, of_v))
    )
    lse = prepared.lse.view if kernel.specialization.lse else None
    workspaces: list[Guarded] = []

    def allocate(shape: tuple[int, ...], on: torch.device) -> Tensor:
        workspaces.append(guarded_flat(shape, on, Role.WORKSPACE))
        return workspaces[-1].view

    launch = bind(kernel, device_target(0), ForwardTensors(q, k, v, out), compiled=binary, allocate=allocate)
    launches = []
    for _ in range(2):
        poison(prepared.out)
        poison(prepared.lse)
        launch((q, k, v, out, lse), case.scale, scales)
        launches.append(bits(prepared, lse))
    chosen, expected = prepared.chosen, prepared.expected
    heads = chosen.heads // case.problem.heads, chosen.heads % case.problem.heads
    ratio = float(worst_ratio(out[heads][:, chosen.rows], expected.out, expected.allowed))
    if not ratio <= 1:
        return f"errors of {ratio:.3g} times what is allowed"
    if lse is not None:
        rows = lse[heads][:, chosen.rows, None]
        ratio = float(worst_ratio(rows, expected.lse[..., None], expected.lse_allowed))
        if not ratio <= 1:
            return f"errors of the log-sum-exp of {ratio:.3g} times what is allowed"
    if not out.isfinite().all():
        return "elements that are not written or not finite"
    if not all(torch.equal(*pair) for pair in zip(*launches, strict=True)):
        return "two launches that differ"
    if not torch.equal(checksum(prepared.read), prepared.checksum):
        return "inputs that were overwritten"
    stray = sum(int(stray_writes(tensor)) for tensor in (prepared.out, prepared.lse, *workspaces))
    return f"{stray} writes outside of what is its own" if stray else ""


def as_shown(tensor: Tensor, heads: int) -> Tensor:
    """A tensor [batch, 1, ...] as if it had several heads, with a stride of zero; others as they are."""
    return tensor.expand(-1, heads, *tensor.shape[2:]) if tensor.shape[1] == 1 else tensor


def bits(prepared: Prepared, lse: Tensor | None) -> list[Tensor]:
    """Copies of the written tensors, as integers."""
    written = [prepared.out.view] if lse is None else [prepared.out.view, lse]
    return [tensor.clone().view(torch.int16) for tensor in written]


@contextlib.contextmanager
def context_lost_ends_the_process() -> Iterator[None]:
    """After an error the process ends where its GPU context is lost: the next job gets another."""
    try:
        yield
    except Exception:
        try:
            torch.cuda.synchronize(DEVICE)
        except RuntimeError:
            os._exit(BROKEN_CONTEXT)
        raise
