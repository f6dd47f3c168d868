"""The baselines of `flashtune bench`, bound to one problem's inputs."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata

import msgspec
import torch
from torch.nn.attention import sdpa_kernel

from flashtune.core.errors import UsageError
from flashtune.core.problem import Causal, Dtype, Feature, Problem
from flashtune.tuner.bench import flash_attn_4, flashinfer, flex
from flashtune.tuner.bench.flash_attn_4 import FLASH_ATTN_4, flash_attn_4_call
from flashtune.tuner.bench.flashinfer import FLASHINFER, flashinfer_run
from flashtune.tuner.bench.flex import flex_run, mask_pairs
from flashtune.tuner.execution.inputs import Tensors
from flashtune.tuner.execution.sdpa import BACKENDS, MASKED, OTHER_LAYOUTS, sdpa_call, sdpa_run
from flashtune.tuner.execution.timed_runs import has_room_for_scores, standard_run

Call = Callable[[], object]

UNFUSED = "unfused"
FLEX = "flex"
CUDNN = "sdpa-cudnn"
# FlexAttention takes about 12 bytes of memory for each pair.
MAX_MASK_PAIRS = 2**31
PEERS = (*BACKENDS, FLEX, FLASH_ATTN_4, FLASHINFER, UNFUSED)
# The packages of baselines that need not be installed.
PACKAGES = {FLASH_ATTN_4: "flash-attn-4", FLASHINFER: "flashinfer-python"}
# The types that the baselines compute without conversion.
PEER_DTYPES = {
    **dict.fromkeys((*BACKENDS, FLEX, UNFUSED), (Dtype.BF16, Dtype.FP16, Dtype.FP32, Dtype.TF32)),
    **dict.fromkeys((FLASH_ATTN_4, FLASHINFER), (Dtype.BF16, Dtype.FP16)),
}
# The features that they compute. SDPA computes masks of features by its `attn_mask`.
PEER_FEATURES = {
    **dict.fromkeys(BACKENDS, MASKED - {Feature.DROPOUT}),
    FLEX: frozenset(Feature) - flex.REFUSED,
    FLASH_ATTN_4: flash_attn_4.COMPUTED,
    FLASHINFER: flashinfer.COMPUTED,
    UNFUSED: frozenset(Feature) - OTHER_LAYOUTS - {Feature.DROPOUT},
}


class Contestant(msgspec.Struct, frozen=True):
    """One implementation bound to the inputs."""

    name: str  # `flashtune`, or the baseline's name.
    detail: str  # Description for the report.
    # The function that is captured and replayed, with all choices resolved. Returns the output [batch, heads,
    # seqlen_q, value_head_dim], of packed sequences [1, heads, total_q, value_head_dim], or a tuple that
    # starts with it.
    run: Call
    call: Call  # The call as in a program, for the host time.
    # Context that a program would set up around its calls.
    setting: Callable[[], AbstractContextManager[object]] = nullcontext


class RefusalError(Exception):
    """A baseline does not compute this problem, with the reason."""


def installed_peers() -> tuple[str, ...]:
    """Returns the baselines that are installed."""
    return tuple(name for name in PEERS if name not in PACKAGES or version_of(name))


def check_peers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the named baselines without duplicates."""
    for name in names:
        if name not in installed_peers():
            raise UsageError(
                f"{name} is not installed: run pip install {PACKAGES[name]}, or leave --peer {name} out"
            )
    return tuple(dict.fromkeys(names))


def version_of(name: str) -> str:
    """Returns the version of a baseline in `PACKAGES`, empty if it is not installed."""
    try:
        return metadata.version(PACKAGES[name])
    except metadata.PackageNotFoundError:
        return ""


def cudnn_version() -> str:
    """Returns the version of torch's cuDNN, such as `9.19.0`; empty if there is none."""
    number = torch.backends.cudnn.version()
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}" if number else ""


def bind_peer(name: str, problem: Problem, tensors: Tensors) -> Contestant:
    """Binds a baseline to these tensors. Its first call may still fail."""
    refused = problem.features - PEER_FEATURES[name]
    if refused:
        raise RefusalError(f"it is not timed with {', '.join(sorted(refused))}")
    if problem.dtype not in PEER_DTYPES[name]:
        raise RefusalError(f"it does not take {problem.dtype}")
    if name in BACKENDS:
        return _sdpa(name, problem, tensors)
    binders = {FLEX: _flex, FLASH_ATTN_4: _flash_attn_4, FLASHINFER: _flashinfer, UNFUSED: _standard}
    return binders[name](problem, tensors)


def _sdpa(name: str, problem: Problem, tensors: Tensors) -> Contestant:
    backend = BACKENDS[name]
    run, call = sdpa_run(problem, tensors, backend), sdpa_call(problem, tensors)
    if run is None or call is None:
        raise RefusalError("it would need an explicit mask, which is too large")
    detail = f"cuDNN {cudnn_version()}" if name == CUDNN else ""
    # Setting the backend costs more than the call, and programs set it once.
    return Contestant(name, detail, run, call, functools.partial(sdpa_kernel, backend))


def _flex(problem: Problem, tensors: Tensors) -> Contestant:
    if mask_pairs(problem, tensors) > MAX_MASK_PAIRS:
        raise RefusalError("its mask would be evaluated for too many pairs of queries and keys")
    run = flex_run(problem, tensors)
    return Contestant(FLEX, "", run, run)


def _flash_attn_4(problem: Problem, tensors: Tensors) -> Contestant:
    if problem.causal is Causal.TOP_LEFT and problem.seqlen_q != problem.seqlen_kv:
        raise RefusalError("it aligns its causal mask bottom-right")
    call, run = flash_attn_4_call(problem, tensors)
    return Contestant(FLASH_ATTN_4, f"flash-attn-4 {version_of(FLASH_ATTN_4)}", run, call)


def _flashinfer(problem: Problem, tensors: Tensors) -> Contestant:
    if not (problem.packed or problem.page_size):
        raise RefusalError("it is timed with packed sequences and pages")
    if problem.causal is Causal.TOP_LEFT and (problem.page_size or problem.seqlen_q != problem.seqlen_kv):
        raise RefusalError("it aligns its causal mask bottom-right")
    if problem.value_head_dim != problem.head_dim and problem.seqlen_q == 1:
        raise RefusalError("it decodes with values as wide as the keys")
    if problem.window_right is not None and not problem.is_causal:
        raise RefusalError("its windows have no bound on the right")
    run = flashinfer_run(problem, tensors)
    return Contestant(FLASHINFER, f"flashinfer {version_of(FLASHINFER)}", run, run)


def _standard(problem: Problem, tensors: Tensors) -> Contestant:
    # Memory that torch caches counts as used.
    torch.cuda.empty_cache()
    if not has_room_for_scores(problem, tensors):
        raise RefusalError("its scores would take more than half of the free memory")
    run = standard_run(problem, tensors)
    return Contestant(UNFUSED, "", run, run)
