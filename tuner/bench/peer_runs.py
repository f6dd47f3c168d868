"""The baselines of `flashtune bench`, bound to one problem's inputs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashtune.core.errors import UsageError
from flashtune.core.problem import Causal, Dtype, Problem, score_bytes
from flashtune.dispatch.masked_sdpa import is_masked
from flashtune.tuner.execution.inputs import Tensors
from flashtune.tuner.execution.sdpa import BACKENDS, sdpa_call, sdpa_run
from flashtune.tuner.execution.timed_runs import (
    GRADIENT_SCORE_COPIES,
    MEMORY_SHARE,
    SCORE_COPIES,
    standard_run,
)

Call = Callable[[], object]

UNFUSED = "unfused"
FLEX = "flex"
FLASH_ATTN_4 = "flash-attn-4"
CUDNN = "sdpa-cudnn"
PEERS = (*BACKENDS, FLEX, FLASH_ATTN_4, UNFUSED)
# The types that the baselines compute without conversion.
PEER_DTYPES = {
    **dict.fromkeys((*BACKENDS, FLEX, UNFUSED), (Dtype.BF16, Dtype.FP16, Dtype.FP32)),
    FLASH_ATTN_4: (Dtype.BF16, Dtype.FP16),
}


class Contestant(msgspec.Struct, frozen=True):
    """One implementation bound to the inputs.

    Attributes:
        name: `flashtune`, or the baseline's name.
        detail: Description for the report.
        run: The function that is captured and replayed, with all choices resolved. Returns the output [batch,
            heads, seqlen_q, value_head_dim], or a tuple that starts with it.
        call: The call as in a program, for the host time.
        setting: Context that a program would set up around its calls.
    """

    name: str
    detail: str
    run: Call
    call: Call
    setting: Callable[[], AbstractContextManager[object]] = nullcontext


class RefusalError(Exception):
    """A baseline does not compute this problem, with the reason."""


def installed_peers() -> tuple[str, ...]:
    """Returns the baselines that are installed."""
    return tuple(name for name in PEERS if name != FLASH_ATTN_4 or flash_attn_4_version())


def check_peers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the named baselines without duplicates.

    Raises:
        UsageError: One is not installed.
    """
    for name in names:
        if name not in installed_peers():
            raise UsageError(f"{name} is not installed: run pip install {name}, or leave --peer {name} out")
    return tuple(dict.fromkeys(names))


def flash_attn_4_version() -> str:
    """Returns the installed flash-attn-4's version, empty if it is not installed."""
    try:
        return metadata.version(FLASH_ATTN_4)
    except metadata.PackageNotFoundError:
        return ""


def cudnn_version() -> str:
    """Returns the version of torch's cuDNN, such as `9.19.0`; empty if there is none."""
    number = torch.backends.cudnn.version()
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}" if number else ""


def bind_peer(name: str, problem: Problem, tensors: Tensors) -> Contestant:
    """Binds a baseline to these tensors. Its first call may still fail.

    Raises:
        RefusalError: The baseline does not compute this problem.
    """
    if problem.features and not (is_masked(problem) and name in (*BACKENDS, UNFUSED)):
        raise RefusalError(f"it is not timed with {', '.join(sorted(problem.features))}")
    if problem.dtype not in PEER_DTYPES[name]:
        raise RefusalError(f"it does not take {problem.dtype}")
    if name in BACKENDS:
        return _sdpa(name, problem, tensors)
    return {FLEX: _flex, FLASH_ATTN_4: _flash_attn_4, UNFUSED: _standard}[name](problem, tensors)


def _sdpa(name: str, problem: Problem, tensors: Tensors) -> Contestant:
    backend = BACKENDS[name]
    run, call = sdpa_run(problem, tensors, backend), sdpa_call(problem, tensors)
    if run is None or call is None:
        raise RefusalError("it would need an explicit mask, which is too large")
    detail = f"cuDNN {cudnn_version()}" if name == CUDNN else ""
    # Setting the backend costs more than the call, and programs set it once.
    return Contestant(name, detail, run, call, functools.partial(sdpa_kernel, backend))


def _flex(problem: Problem, tensors: Tensors) -> Contestant:
    """Binds FlexAttention as its users call it: compiled for this shape, with a mask made once.

    Compilations of earlier shapes are dropped first: torch counts all of them against one limit, and does not
    compile beyond it.
    """
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = None
    if problem.causal is not Causal.NONE:
        diagonal = problem.diagonal

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            del batch, head  # all sequences and heads have one mask
            return query + diagonal >= key

        mask = create_block_mask(
            sees, None, None, problem.seqlen_q, problem.seqlen_kv, device=tensors.q.device
        )
    run = functools.partial(
        compiled,
        tensors.q,
        tensors.k,
        tensors.v,
        block_mask=mask,
        scale=tensors.scale,
        enable_gqa=problem.group_size > 1,
    )
    return Contestant(FLEX, "", run, run)


def _flash_attn_4(problem: Problem, tensors: Tensors) -> Contestant:
    """Binds flash-attn-4 to contiguous inputs of its own layout, [batch, seqlen, heads, head_dim]."""
    if problem.causal is Causal.TOP_LEFT and problem.seqlen_q != problem.seqlen_kv:
        raise RefusalError("it aligns its causal mask bottom-right")
    attend: Callable[..., Any] = importlib.import_module("flash_attn.cute").flash_attn_func
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (tensors.q, tensors.k, tensors.v))
    causal = problem.causal is not Causal.NONE
    call = functools.partial(attend, q, k, v, softmax_scale=tensors.scale, causal=causal)

    def run() -> Tensor:
        result = call()
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2)

    return Contestant(FLASH_ATTN_4, f"flash-attn-4 {flash_attn_4_version()}", run, call)


def _standard(problem: Problem, tensors: Tensors) -> Contestant:
    free, _ = torch.cuda.mem_get_info(tensors.q.device)
    copies = GRADIENT_SCORE_COPIES if tensors.q.requires_grad else SCORE_COPIES
    if copies * score_bytes(problem) >= MEMORY_SHARE * free:
        raise RefusalError("its scores would take more than half of the free memory")
    run = standard_run(problem, tensors)
    return Contestant(UNFUSED, "", run, run)
