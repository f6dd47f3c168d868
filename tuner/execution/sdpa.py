"""Calls of torch's SDPA on a problem's tensors, for searches and benchmarks."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashtune.core.features.masks import seen_pairs
from flashtune.core.problem import Bias, Causal, Dtype, Feature, Problem
from flashtune.dispatch.masked_sdpa import is_masked, masked_attention
from flashtune.tuner.execution.inputs import Tensors
from flashtune.tuner.execution.timing import Run
from flashtune.verification.lengths import usual_lengths
from flashtune.verification.reference.masks import places, visible_keys

BACKENDS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
MAX_MASK_ELEMENTS = 2**28
# Layouts and storage formats that no baseline supports.
OTHER_LAYOUTS = frozenset({Feature.PACKED, Feature.PAGES, Feature.QUANTIZED_KV, Feature.MLA})
# Features that SDPA computes, most of them by a mask.
MASKED = frozenset(
    {
        *(Feature.WINDOW, Feature.SINK_TOKENS, Feature.CHUNK, Feature.PREFIX, Feature.ALIBI),
        *(Feature.BIAS, Feature.BLOCK_MASK, Feature.KV_LENGTHS, Feature.DROPOUT, Feature.DETERMINISTIC),
    }
)


@contextlib.contextmanager
def precision_of(dtype: Dtype) -> Iterator[None]:
    """Sets torch's precision of float32 products to that of an element type."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32" if dtype is Dtype.TF32 else "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before


def sdpa_run(problem: Problem, tensors: Tensors, backend: SDPBackend) -> Run | None:
    """Returns a run of one SDPA backend; None if SDPA cannot compute the problem or the mask is too large."""
    attend = sdpa_call(problem, tensors)
    if attend is None:
        return None

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return attend()

    return run


def sdpa_call(problem: Problem, tensors: Tensors) -> Callable[[], Tensor] | None:
    """Returns a call of SDPA by any enabled backend; None if it is unsupported or its mask is too large.

    SDPA's `is_causal` is aligned top-left, which equals bottom-right for equal lengths. All other masks and
    biases are passed as a mask. Each call adds a causal mask to a bias; other masks are made once, here.
    SDPA uses the same dropout rate with its own random numbers.
    """
    if problem.features - MASKED:
        return None
    if is_masked(problem):
        # The same call as dispatch makes: its time includes the preparation of the mask.
        assert tensors.side.bias is not None
        inputs = (tensors.q, tensors.k, tensors.v, tensors.side.bias)
        return functools.partial(masked_attention, *inputs, tensors.scale, problem.causal)
    top_left = problem.causal is Causal.TOP_LEFT or problem.seqlen_q == problem.seqlen_kv
    causal = problem.causal is not Causal.NONE
    masked = bool(problem.features - {Feature.DROPOUT}) or (causal and not top_left)
    if masked and _mask_elements(problem) > MAX_MASK_ELEMENTS:
        return None
    return functools.partial(
        scaled_dot_product_attention,
        tensors.q,
        tensors.k,
        tensors.v,
        attn_mask=_mask(problem, tensors) if masked else None,
        dropout_p=tensors.side.dropout or 0.0,
        is_causal=causal and not masked,
        scale=tensors.scale,
        enable_gqa=problem.group_size > 1,
    )


def _mask_elements(problem: Problem) -> int:
    """Returns the number of elements of SDPA's mask."""
    own = {Feature.ALIBI, Feature.BIAS, Feature.BLOCK_MASK}
    heads = problem.heads if problem.features & own else 1
    batch = problem.batch if problem.features - {Feature.WINDOW, Feature.CHUNK, Feature.SINK_TOKENS} else 1
    return batch * heads * problem.seqlen_q * problem.seqlen_kv


def _mask(problem: Problem, tensors: Tensors) -> Tensor:
    """Returns a boolean or additive mask, [batch | 1, heads | 1, seqlen_q, seqlen_kv]."""
    device, side = tensors.q.device, tensors.side
    lengths, rows = usual_lengths(problem), torch.arange(problem.seqlen_q)
    batch = torch.arange(problem.batch)
    seen = visible_keys(problem, lengths, batch, rows, side, device)[:, None]
    if problem.bias is Bias.BOOLEAN:
        assert side.bias is not None
        seen = seen & side.bias
    if problem.block_mask:
        seen = seen & seen_pairs(problem, side, rows.to(device), problem.seqlen_kv)
    if not problem.alibi and problem.bias is not Bias.ADDITIVE:
        return seen
    added = (
        torch.zeros((), device=device) if side.bias is None or side.bias.dtype is torch.bool else side.bias
    )
    if side.slopes is not None:
        positions = places(problem, lengths, batch, rows, device)[:, None]
        distance = (positions - torch.arange(problem.seqlen_kv, device=device)).abs()
        added = added - side.slopes[:, :, None, None] * distance
    return torch.where(seen, added, float("-inf")).to(tensors.q.dtype)
