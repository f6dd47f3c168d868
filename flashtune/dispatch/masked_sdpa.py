"""Attention with an additive bias or a boolean mask by torch's SDPA, with the semantics of flashtune.

Rows without a visible key give zeros. In some versions of torch, SDPA's cuDNN backend adds a finite number
for keys that a boolean mask hides. A row without a visible key then attends to all keys. Boolean masks are
therefore converted to additive ones with -inf. A causal mask is merged into the mask, because SDPA accepts
only one of them.

A hidden key with NaN or infinity makes SDPA's result NaN. The host cannot detect this.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from flashtune.core.caches import keep
from flashtune.core.mask_sharing import MaskSharing, distinct_ways, nearest_way
from flashtune.core.problem import Bias, Causal, Dtype, Feature, Problem
from flashtune.core.target import find_target
from flashtune.dispatch.sdpa_times import MATH, unfused_leads
from flashtune.launch.compilation import first_line
from flashtune.launch.launch import MIN_SCALE
from flashtune.request.request import Prefer, Request

SelectBackend = Callable[..., str | None]
# Programs replace the name in `torch.nn.functional` by functions that call flashtune.
scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention
# SDPA computes other features no faster, or differently. Windows and chunks would need a mask in each call
# and would compute all hidden blocks. Slopes would be rounded to 16 bits, and dropout draws other weights.
FEATURES = frozenset({Feature.BIAS})
# Names of SDPA's backends in records, by their numbers in `torch._fused_sdp_choice`.
PEERS = {0: MATH, 1: "sdpa-flash", 2: "sdpa-efficient", 3: "sdpa-cudnn"}
# Extents of the trial problem, which no tile size divides, and the largest error that is accepted.
PROBE_ROWS = 192
PROBE_KEYS = 200
PROBE_ERROR = 2.0**-5
# Backends load this many bytes at once.
ADDRESS_ALIGNMENT = 16
# Largest number of float32 scores of calls with shared heads and gradients that SDPA's unfused path serves.
# Measured at 10 shapes on an H200.
FEW_GRADIENT_SCORES = 2**24
# The GPU for which times of SDPA's backends in float32 are compared.
MEASURED_TARGET = "nvidia-h200"
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


def shares_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether SDPA gets fewer heads of keys than of queries. The mask is additive or boolean.

    In float32 no fused backend takes them. The unfused path may still be faster than copies of heads and a
    fused backend.
    """
    if q.shape[1] == k.shape[1]:
        return False
    if q.dtype is not torch.float32:
        return True
    if not torch.backends.cuda.math_sdp_enabled():
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= FEW_GRADIENT_SCORES
    sizes = (*q.shape, *k.shape[1:3])
    # A compiled program must not be limited to the sizes that it was traced with.
    if any(isinstance(size, torch.SymInt) for size in sizes):
        return False
    return _unfused_leads(*sizes, mask is not None, 0 if mask is None else _padded_bytes(mask))


@functools.lru_cache(maxsize=8192)
def _unfused_leads(
    batch: int,
    heads: int,
    seqlen_q: int,
    head_dim: int,
    kv_heads: int,
    seqlen_kv: int,
    masked: bool,
    padded_bytes: int,
) -> bool:
    problem = Problem(
        dtype=Dtype.FP32,
        head_dim=head_dim,
        value_head_dim=head_dim,
        heads=heads,
        kv_heads=kv_heads,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        causal=Causal.NONE,
        bias=Bias.ADDITIVE if masked else Bias.NONE,
    )
    return unfused_leads(problem, padded_bytes, find_target(MEASURED_TARGET))


def _padded_bytes(mask: Tensor) -> int:
    """Returns the bytes of an additive mask that SDPA's memory-efficient backend copies to align its rows."""
    if mask.dtype is torch.bool or mask.shape[-1] * mask.element_size() % ADDRESS_ALIGNMENT == 0:
        return 0
    whole = unexpanded(mask)
    return whole.numel() * whole.element_size()


def readable(q: Tensor, k: Tensor, v: Tensor, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tensors that SDPA's backends can read: copies if unaligned, and of heads unless shared."""
    if q.shape[1] != k.shape[1] and not shared:
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    q, k, v = (
        tensor.clone(memory_format=torch.contiguous_format) if is_unaligned(tensor) else tensor
        for tensor in (q, k, v)
    )
    return q, k, v


def is_unaligned(tensor: Tensor) -> bool:
    """Whether the address or a stride of [batch, heads, seqlen, head_dim] is no multiple of 16 bytes.

    Some backends need such addresses and strides and do not check them. With other strides, the outputs of
    the cuDNN backend were wrong.
    """
    size = tensor.element_size()
    if start(tensor) % ADDRESS_ALIGNMENT:
        return True
    steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return any(extent > 1 and step * size % ADDRESS_ALIGNMENT for extent, step in steps)


def start(tensor: Tensor) -> int:
    """Returns the address of a tensor, or the offset of a tensor subclass, which may have no address."""
    if type(tensor) is Tensor:
        # Memory of other libraries may start at any address with an offset of 0.
        return tensor.data_ptr()
    # torch allocates at multiples of 256 bytes.
    return int(tensor.storage_offset()) * tensor.element_size()


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
    zero, hidden = _levels(q.dtype, q.device)
    if not hides:
        return torch.where(bias, zero, hidden)
    if boolean:
        return torch.where(bias.expand(-1, -1, seqlen_q, -1).tril(diagonal), zero, hidden)
    seen = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool, device=q.device).tril_(diagonal)
    return torch.where(seen, bias, hidden)


def unexpanded(bias: Tensor) -> Tensor:
    """Returns a bias in four dimensions. Expanded dimensions have size 1."""
    bias = bias[(None,) * (4 - bias.dim())]
    for dimension in range(3):
        if bias.stride(dimension) == 0 and bias.shape[dimension] > 1:
            bias = bias.narrow(dimension, 0, 1)
    return bias


@functools.lru_cache(maxsize=64)
def _levels(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the numbers to add for visible and for hidden keys.

    Python numbers would be copied to the device in each call.
    """
    with torch.inference_mode(False):
        zero = torch.zeros((), dtype=dtype, device=device)
        return zero, torch.full_like(zero, -torch.inf)


def chosen_backend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, shared: bool | None = None
) -> str | None:
    """Returns the name of the backend that SDPA selects for a call, or None if it has none.

    `shared` is the result of `shares_heads`, by default for this call.
    """
    if q.shape[1] != k.shape[1] and not (shares_heads(q, k, v, mask) if shared is None else shared):
        k, v = (tensor[:, :1].expand(-1, q.shape[1], -1, -1) for tensor in (k, v))
    # torch has no public function for this.
    choice = torch._fused_sdp_choice(  # pyright: ignore[reportPrivateImportUsage]
        q, k, v, mask, 0.0, causal, scale=None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return PEERS.get(int(choice))


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
