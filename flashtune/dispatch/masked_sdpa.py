"""Attention with an additive bias or a boolean mask by torch's SDPA, with the semantics of flashtune.

Rows without a visible key give zeros. In some versions of torch, SDPA's cuDNN backend adds a finite number
for keys that a boolean mask hides. A row without a visible key then attends to all keys. Boolean masks are
therefore converted to additive ones with -inf. A causal mask is merged into the mask, because SDPA accepts
only one of them.

A hidden key with NaN or infinity makes SDPA's result NaN. The host cannot detect this.
"""

import torch
from torch import Tensor

from flashtune.core.caches import keep
from flashtune.core.constant_tensors import constants
from flashtune.core.mask_sharing import MaskSharing, distinct_ways, nearest_way
from flashtune.core.problem import Causal, Feature, Problem
from flashtune.dispatch.sdpa import (
    SelectBackend,
    readable,
    scaled_dot_product_attention,
    shares_heads,
    unexpanded,
)
from flashtune.launch.compilation import first_line
from flashtune.launch.launch import MIN_SCALE
from flashtune.request.request import Prefer, Request

# SDPA computes other features no faster, or differently. Windows and chunks would need a mask in each call
# and would compute all hidden blocks. Slopes would be rounded to 16 bits, and dropout draws other weights.
FEATURES = frozenset({Feature.BIAS})
# Extents of the trial problem, which no tile size divides, and the largest error that is accepted.
PROBE_ROWS = 192
PROBE_KEYS = 200
PROBE_ERROR = 2.0**-5
# The numbers to add for visible and for hidden keys.
LEVELS = (0.0, -torch.inf)
# Every refused call has its own entry.
REFUSALS_LIMIT = 1024


def is_masked(problem: Problem) -> bool:
    """Whether SDPA can compute all features of a problem by its `attn_mask`."""
    return problem.features == FEATURES


def timed_ways(problem: Problem) -> tuple[MaskSharing, ...]:
    """Returns the ways of sharing a mask for which a search times kernels and SDPA."""
    if not is_masked(problem) or problem.is_backward or problem.dtype.is_quantized:
        return ()
    return tuple(distinct_ways(problem))


def sharing_of(problem: Problem, bias: Tensor) -> MaskSharing | None:
    """Returns the timed way of sharing that is nearest to that of a call's bias, or None."""
    shape = unexpanded(bias).shape
    return nearest_way(problem, (place for place in range(3) if shape[place] == 1))


def sdpa_allowed(request: Request) -> bool:
    """Whether SDPA may serve a request with features.

    SDPA returns no log-sum-exp. With a mask, gradients of its cuDNN backend are NaN at some lengths.
    """
    wanted = request.return_lse or request.needs_grad
    return is_masked(request.problem) and request.prefer is Prefer.FASTEST and not wanted


def masked_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, causal: Causal) -> Tensor:
    """Returns attention of [batch, heads, seqlen, head_dim] tensors by SDPA; differentiable.

    Args:
        q: Queries.
        k: Keys, with as many heads or fewer.
        v: Values.
        bias: Bias in q's type, or a boolean mask, True where a query sees a key. It broadcasts to
            [batch, heads, seqlen_q, seqlen_kv].
        scale: Factor of the scores, not negative.
        causal: The causal mask and its alignment.
    """
    return _masked(q, k, v, bias, scale, causal, shares_heads(q, k, v, bias))


def _masked(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, causal: Causal, shared: bool
) -> Tensor:
    mask = additive_mask(q, k, bias, causal)
    return scaled_dot_product_attention(
        *readable(q, k, v, shared),
        mask,
        # With a scale of 0, outputs are averages. 0 times the mask's -inf would be NaN.
        scale=scale or MIN_SCALE,
        enable_gqa=shared,
    )


def additive_mask(q: Tensor, k: Tensor, bias: Tensor, causal: Causal) -> Tensor:
    """Returns the additive mask for SDPA, as small as the bias and the causal mask allow.

    Returns:
        In q's type, [batch or 1, heads or 1, seqlen_q or 1, seqlen_kv].
    """
    bias = unexpanded(bias)
    seqlen_q, seqlen_kv = q.shape[2], k.shape[2]
    boolean = bias.dtype is torch.bool
    diagonal = seqlen_kv - seqlen_q if causal is Causal.BOTTOM_RIGHT else 0
    # A causal mask hides no key from a single query at the last key.
    hides = causal is not Causal.NONE and diagonal < seqlen_kv - 1
    if not hides and not boolean:
        return bias
    # Python numbers would be copied to the device in each call.
    zero, hidden = constants(LEVELS, 1, q.dtype, q.device)
    if not hides:
        return torch.where(bias, zero, hidden)
    if boolean:
        return torch.where(bias.expand(-1, -1, seqlen_q, -1).tril(diagonal), zero, hidden)
    seen = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool, device=q.device).tril_(diagonal)
    return torch.where(seen, bias, hidden)


class MaskTrials:
    """Trials of SDPA with masks. Their results stay the same in a process."""

    def __init__(self, select: SelectBackend) -> None:
        """Makes trials with the backend that `select` returns, as `chosen_backend`."""
        self._select = select
        # The defects of backends at small problems, or None, and the reasons of refused calls.
        self._defects: dict[tuple[object, ...], str | None] = {}
        self._refusals: dict[tuple[object, ...], str] = {}

    def known_refusal(
        self, request: Request, backend: str | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor
    ) -> str | None:
        """Returns the reason why a backend cannot serve such a call, as found by this process, or None.

        The arguments are those of `refusal`.
        """
        defect = self._defects.get(_kind(request, backend))
        return defect or self._refusals.get(_call(request, backend, q, k, v, bias))

    def refusal(
        self, request: Request, backend: str | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor
    ) -> str | None:
        """Returns the reason why SDPA cannot serve a call with a mask, or None. It runs SDPA.

        For each type, head dims and backend, a small problem is computed once and compared with a reference.
        Then the call itself is computed. Tensors are [batch, heads, seqlen, head_dim].
        """
        kind, shared = _kind(request, backend), shares_heads(q, k, v, bias)
        try:
            with torch.no_grad():
                if kind not in self._defects:
                    keep(self._defects, kind, _defect(self._select, backend, q, k, v, shared))
                if self._defects[kind] is None:
                    _masked(q, k, v, bias, request.default_scale, request.problem.causal, shared)
        except torch.OutOfMemoryError as failure:
            # Memory may suffice for a later call, so the failure is not cached.
            return f"has no memory for its mask ({first_line(failure)})"
        except RuntimeError as failure:
            key = _call(request, backend, q, k, v, bias)
            keep(self._refusals, key, f"refuses its mask ({first_line(failure)})", REFUSALS_LIMIT)
        return self.known_refusal(request, backend, q, k, v, bias)


def _kind(request: Request, backend: str | None) -> tuple[object, ...]:
    """Returns the key of a trial with a small problem."""
    problem = request.problem
    widths = problem.head_dim, problem.value_head_dim
    return (request.device, problem.dtype, *widths, problem.group_size > 1, problem.seqlen_q > 1, backend)


def _call(request: Request, backend: str | None, *tensors: Tensor) -> tuple[object, ...]:
    """Returns the key of a refused call. SDPA's backends refuse some strides."""
    layouts = ((tensor.shape, tensor.stride()) for tensor in tensors)
    return (request.device, request.problem, backend, *layouts)


def _defect(
    select: SelectBackend, backend: str | None, q: Tensor, k: Tensor, v: Tensor, shared: bool
) -> str | None:
    """Returns the defect of SDPA's result at a small problem of the same type and head dims, or None.

    `shared` means that SDPA gets fewer heads of keys than of queries.
    """
    generator = torch.Generator().manual_seed(0)
    batch, rows = (1, PROBE_ROWS) if q.shape[2] > 1 else (PROBE_ROWS, 1)
    heads = 2
    kv_heads = 1 if q.shape[1] != k.shape[1] else heads

    def random(heads: int, rows: int, width: int) -> Tensor:
        return torch.randn(batch, heads, rows, width, generator=generator).to(q.dtype)

    queries = random(heads, rows, q.shape[3])
    keys, values = random(kv_heads, PROBE_KEYS, k.shape[3]), random(kv_heads, PROBE_KEYS, v.shape[3])
    seen = torch.rand(PROBE_ROWS, PROBE_KEYS, generator=generator) < 0.5
    # Some rows see no key: single ones and a whole tile. Two rows see only the first or the last key.
    seen[:3] = seen[128:] = False
    seen[1, 0] = seen[2, -1] = True
    mask = seen.view(batch, 1, rows, PROBE_KEYS)
    scale = q.shape[3] ** -0.5
    device = q.device
    given = queries.to(device), keys.to(device), values.to(device), mask.to(device)
    try:
        tried = select(*given, False, shared)
        if tried != backend:
            return f"picks {tried or 'no backend'} for the trial of a mask in place of {backend}"
        out = _masked(*given, scale, Causal.NONE, shared)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as failure:
        return f"refuses masks ({first_line(failure)})"
    error = (out.cpu().double() - _by_definition(queries, keys, values, mask, scale)).abs().amax(-1)
    blind = ~mask.any(-1)
    if not bool((error.masked_select(blind) == 0).all()):
        return "gives no zeros for rows that see no key"
    return None if bool((error <= PROBE_ERROR).all()) else "does not add the mask to the scores"


def _by_definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns masked attention in float64 on the CPU, with zeros in rows without a visible key."""
    scores = scale * (q.double() @ k.double().mT)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return weights @ v.double()
