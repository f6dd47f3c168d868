"""Attention by the kernels of this package, with the parameters of flash_attn; needs only torch and triton.

`kernels.json` lists the kernels. A call is served by the kernel of the same types, head dims, mask and inputs
whose tuned shape is nearest. Calls without a kernel, and calls with gradients, are computed by torch, and one
warning per kind of call says so.

`flashtune export --format hf-kernel` copies this module into packages, so it imports nothing of flashtune.
"""

import functools
import importlib.util
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

HERE = Path(__file__).parent
# Programs replace the name in `torch.nn.functional` by functions that call this package.
scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention
Window = tuple[int | None, int | None]


class Entry(NamedTuple):
    """One kernel of `kernels.json`."""

    file: str  # Its file in `kernels/`.
    gpu: str  # The GPU that it was tuned for.
    # The only compute capability that runs it; None if sm_80 and all newer ones do.
    capability: list[int] | None
    kind: str  # Its types, head dims, mask and inputs, as `_Call.kind`.
    alignment: int  # A number that divides all strides.
    sizes: list[int]  # Batch times heads, queries and keys of the tuned shape.
    kernel: str = ""  # The kernel's digest, which names its machine code in a bundle.


class Call(NamedTuple):
    """A call as kernels take it."""

    q: Tensor  # [batch, heads, queries, head_dim].
    k: Tensor  # [batch, kv_heads, keys, head_dim], or pages of keys.
    v: Tensor  # As k.
    scale: float  # Factor of the scores.
    causal: bool  # Whether queries see no later keys, aligned bottom-right.
    window: Window  # Visible keys before and after the query's own; None for all.
    inputs: dict[str, Any]  # Other arguments of kernels, by name.
    dropout: float = 0.0  # Probability of dropout.
    longest: tuple[int, int] = (0, 0)  # Queries and keys of the longest packed sequence.

    def kind(self, mask: str) -> str:
        """Returns the types, head dims, mask and inputs as one text."""
        page = self.k.shape[2] if "block_table" in self.inputs else 0
        widths = self.q.shape[3], self.v.shape[3]
        dtype = str(self.q.dtype).removeprefix("torch.")
        return kind_of(dtype, widths, mask, self.window, page, self.inputs)

    @property
    def masks(self) -> tuple[str, ...]:
        """Masks of kernels that compute this call."""
        queries, keys = self.q.shape[2], self.k.shape[2]
        if queries == 1 and self.window == (None, None) and "cu_seqlens_q" not in self.inputs:
            # One query, which is the last one, sees all keys.
            return "bottom_right", "none"
        if not self.causal:
            return ("none",)
        is_square = queries == keys and not {"cu_seqlens_q", "seqlens_kv"} & {*self.inputs}
        return ("bottom_right", "top_left") if is_square else ("bottom_right",)


def kind_of(dtype: str, widths: tuple[int, int], mask: str, window: Window, page: int, inputs: Any) -> str:
    """Returns the properties that a kernel has in its source, as one text."""
    return json.dumps([dtype, *widths, mask, *window, page, *sorted(inputs)])


@functools.cache
def entries() -> dict[str, list[Entry]]:
    """Returns the kernels by their kind."""
    by_kind: dict[str, list[Entry]] = {}
    for values in json.loads((HERE / "kernels.json").read_text(encoding="utf-8")):
        entry = Entry(**values)
        by_kind.setdefault(entry.kind, []).append(entry)
    return by_kind


@functools.cache
def kernel(file: str, digest: str, device: int | None) -> Any:
    """Returns the module of a kernel for a GPU. It launches verified machine code if the package has it."""
    module = _module(f"kernels/{file}")
    if device is not None:
        capability, name = _gpu(device)
        bundle = HERE / f"kernels.sm_{''.join(map(str, capability))}.bundle"
        if bundle.exists():
            try:
                loader = _module("bundle.py")
                loader.use(module, loader.Bundle(bundle), digest, name, _module("driver.py").Driver())
            except (OSError, RuntimeError) as error:
                warnings.warn(f"{error}: the kernel is compiled", stacklevel=3)
    return module


def _module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"{__name__}_{Path(path).stem}", HERE / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def _gpu(index: int) -> tuple[list[int], str]:
    name = torch.cuda.get_device_name(index).lower().replace(" ", "-")
    return [*torch.cuda.get_device_capability(index)], name


def find(call: Call) -> Entry | None:
    """Returns the kernel that serves a call: of this GPU if possible, with the nearest shape."""
    if call.q.is_cuda:
        capability, name = _gpu(call.q.device.index or 0)
    elif _interprets():
        capability, name = [8, 0], ""
    else:
        return None
    tensors = call.q, call.k, call.v
    sizes = [call.q.shape[0] * call.q.shape[1], call.q.shape[2], call.k.shape[2]]
    if "block_table" in call.inputs:
        sizes[2] *= call.inputs["block_table"].shape[1]

    def rank(entry: Entry) -> tuple[bool, float]:
        pairs = zip(sizes, entry.sizes, strict=True)
        apart = sum(abs(math.log(max(size, 1) / max(other, 1))) for size, other in pairs)
        return not name.startswith(entry.gpu), apart

    if any(tensor.stride(3) != 1 or _span(tensor) >= 2**31 for tensor in tensors):
        return None
    able = [
        entry
        for mask in call.masks
        for entry in entries().get(call.kind(mask), ())
        if (entry.capability == capability or (entry.capability is None and capability >= [8, 0]))
        and not any(stride % entry.alignment for tensor in tensors for stride in tensor.stride()[:3])
        and not any(tensor.data_ptr() % 16 for tensor in tensors)
    ]
    return min(able, key=rank, default=None)


def _span(tensor: Tensor) -> int:
    """Returns the largest offset in a tensor, or in a tile after its end."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1024 * tensor.stride(2) + sum((size - 1) * stride for size, stride in pairs)


def run(call: Call) -> Tensor:
    """Returns the output of a call, [batch, heads, queries, value_head_dim]."""
    tensors = call.q, call.k, call.v
    inputs = (*tensors, call.inputs.get("sinks"))
    needs_grad = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in inputs
    )
    entry = None if needs_grad or call.dropout else find(call)
    if entry is None:
        if not needs_grad:
            _warn_once(_reason(call))
        return by_torch(call)
    # Triton launches on the present device.
    with torch.cuda.device_of(call.q):
        own = kernel(entry.file, entry.kernel, torch.cuda.current_device() if call.q.is_cuda else None)
        out: Tensor = own.attention(*tensors, call.scale, **call.inputs)[0]
    return out


def _reason(call: Call) -> str:
    """Returns the reason for which no kernel serves a call, as the begin of a warning."""
    if not call.q.is_cuda and not _interprets():
        return f"kernels of this package need a GPU of NVIDIA, and tensors are on {call.q.device.type}"
    kind = call.kind("bottom_right" if call.causal else "none")
    return f"no kernel of this package computes attention of {kind}"


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"{reason}: torch computes it", stacklevel=4)


def by_torch(call: Call) -> Tensor:
    """Returns the output of a call by torch. Sequences of different lengths may be computed one by one."""
    inputs = dict(call.inputs)
    if {*inputs} == {"cu_seqlens_q", "cu_seqlens_kv"} and call.q.is_cuda and not call.dropout:
        return _packed(call)
    starts, ends = inputs.pop("cu_seqlens_q", None), inputs.pop("cu_seqlens_kv", None)
    lengths, table = inputs.pop("seqlens_kv", None), inputs.pop("block_table", None)
    if lengths is not None:
        batch = len(lengths)
    elif starts is not None:
        batch = len(starts) - 1
    else:
        return _dense(call, inputs)
    if _is_captured(call.q):
        # The lengths are unknown on the host.
        if starts is not None:
            raise RuntimeError(
                "no kernel of this package computes these packed sequences, and torch cannot in a CUDA graph"
            )
        keys, values = (_all_rows(cache, table) for cache in (call.k, call.v))
        return _dense(call._replace(k=keys, v=values), inputs, lengths)
    out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[3])
    for sequence in range(batch):
        # Packed sequences are parts of one row of the batch.
        row = 0 if starts is not None else sequence
        first, last = (0, None) if starts is None else starts[sequence : sequence + 2].tolist()
        at = slice(row, row + 1), slice(None), slice(first, last)
        keys, values = (_rows(cache, sequence, ends, lengths, table) for cache in (call.k, call.v))
        own = {**inputs}
        if "slopes" in own:
            own["slopes"] = own["slopes"][sequence : sequence + 1]
        out[at] = _dense(call._replace(q=call.q[at], k=keys, v=values), own)
    return out


def _packed(call: Call) -> Tensor:
    """Returns the output of packed sequences by torch's own kernel."""
    left, right = (-1 if side is None else side for side in call.window)
    # `varlen_attn` of torch 2.11 has no parameter for groups of heads.
    group = call.q.shape[1] // call.k.shape[1]
    k, v = (tensor.repeat_interleave(group, 1) if group > 1 else tensor for tensor in (call.k, call.v))
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (call.q, k, v))
    out = varlen_attn(
        q,
        k,
        v,
        call.inputs["cu_seqlens_q"],
        call.inputs["cu_seqlens_kv"],
        call.longest[0],
        call.longest[1],
        scale=call.scale,
        window_size=(left, 0 if call.causal else right),
    )
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None]


def _rows(
    cache: Tensor, sequence: int, starts: Tensor | None, lengths: Tensor | None, table: Tensor | None
) -> Tensor:
    """Returns the keys or values of one sequence, [1, kv_heads, keys, width]."""
    if starts is not None:
        first, last = starts[sequence : sequence + 2].tolist()
        return cache[:, :, first:last]
    assert lengths is not None
    length = int(lengths[sequence])
    if table is None:
        return cache[sequence : sequence + 1, :, :length]
    pages = cache[table[sequence, : -(-length // cache.shape[2])].long()]
    return pages.transpose(0, 1).flatten(1, 2)[None, :, :length]


def _is_captured(tensor: Tensor) -> bool:
    """Returns whether a CUDA graph is being captured."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _all_rows(cache: Tensor, table: Tensor | None) -> Tensor:
    """Returns all keys or values that sequences have room for, [batch, kv_heads, keys, width]."""
    if table is None:
        return cache
    # Pages after a sequence's last one may have the number -1.
    return cache[table.long().clamp(min=0)].transpose(1, 2).flatten(2, 3)


def _dense(call: Call, inputs: dict[str, Any], lengths: Tensor | None = None) -> Tensor:
    """Returns the output of sequences in one call, with all scores in memory if necessary.

    The first `lengths` keys of each sequence count; all if it is None.
    """
    q, k, v = call.q, call.k, call.v
    queries, keys = q.shape[2], k.shape[2]
    if not keys:
        return q.new_zeros(*q.shape[:3], v.shape[3])
    key = torch.arange(keys, device=q.device)
    first: Tensor | int = keys - queries
    if lengths is not None:
        first = lengths[:, None, None, None] - queries
        # Later rows of a cache may be uninitialized, and NaN times a weight of 0 is NaN.
        unused = key[:, None] >= lengths[:, None, None, None]
        k, v = k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    ahead = key - first - torch.arange(queries, device=q.device)[:, None]
    left, right = call.window[0], 0 if call.causal else call.window[1]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if left is not None:
        hidden |= ahead < -left
    if right is not None:
        hidden |= ahead > right
    if lengths is not None:
        hidden |= unused.mT
    if not {"softcap", "sinks", "slopes"} & {*inputs}:
        out = scaled_dot_product_attention(q, k, v, ~hidden, dropout_p=call.dropout, scale=call.scale)
        return out.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    scores = (q.float() @ k.float().mT) * call.scale
    if "softcap" in inputs:
        scores = inputs["softcap"] * torch.tanh(scores / inputs["softcap"])
    if "slopes" in inputs:
        scores = scores - inputs["slopes"][:, :, None, None] * ahead.abs()
    scores = scores.masked_fill(hidden, -torch.inf)
    if "sinks" in inputs:
        sinks = inputs["sinks"].view(-1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    weights = torch.nn.functional.dropout(weights, call.dropout)
    return (weights @ v.float()).to(q.dtype)


def _mask(window_size: tuple[int | None, int | None], causal: bool, keys: int | None = None) -> Any:
    """Returns whether a call is causal, and its window as kernels have it. `keys` is None if lengths vary."""
    left, right = (None if side is None or side < 0 else side for side in window_size)
    causal = causal or right == 0
    if keys is not None and left is not None and left >= keys - 1:
        left = None
    return causal, (left, None if causal else right)


def _inputs(
    softcap: float, alibi_slopes: Tensor | None, s_aux: Tensor | None, batch: int, heads: int
) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    if softcap:
        inputs["softcap"] = float(softcap)
    if alibi_slopes is not None:
        inputs["slopes"] = alibi_slopes.float().expand(batch, heads)
    if s_aux is not None:
        inputs["sinks"] = s_aux.float().contiguous()
    return inputs


def _require(q: Tensor, k: Tensor, v: Tensor, rank: int, table: Tensor | None, batch: int) -> None:
    """Checks sizes of a call's tensors, which are as flash_attn has them. Kernels would use other memory."""
    of_keys = rank if table is None else 4
    for name, tensor, dimensions in (("q", q, rank), ("k", k, of_keys), ("v", v, of_keys)):
        if tensor.ndim != dimensions:
            raise ValueError(f"{name} has {tensor.ndim} dimensions, expected {dimensions}")
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, expected {q.dtype} on {q.device}")
    if k.shape[:-1] != v.shape[:-1] or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k has shape {tuple(k.shape)}, which does not fit {tuple(q.shape)} and {tuple(v.shape)}"
        )
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"k has {k.shape[-2]} heads, expected a divisor of the {q.shape[-2]} heads of q")
    if table is None:
        if rank == 4 and len(k) != batch:
            raise ValueError(f"k has a batch of {len(k)}, expected {batch} as q")
    elif (table.ndim, len(table), table.dtype, table.device) != (2, batch, torch.int32, q.device):
        raise ValueError(f"block_table is not an int32 tensor of {batch} rows on {q.device}")
    elif table.numel() and not len(k):
        raise ValueError("block_table lists pages of a cache without pages")


def _require_starts(name: str, starts: Tensor, batch: int, rows: int | None, longest: int) -> None:
    """Checks the starts of packed sequences. `rows` is None for pages."""
    if starts.ndim != 1 or starts.dtype != torch.int32 or starts.numel() != batch + 1:
        raise ValueError(f"{name} is not an int32 tensor of {batch + 1} numbers")
    # A larger maximum is allowed, and also a sign of exchanged dimensions.
    if rows is not None and longest > rows and not _is_captured(starts) and int(starts[-1]) > rows:
        raise ValueError(f"{name} ends at {int(starts[-1])}, and there are {rows} rows")


def _lengths(
    cache_seqlens: Tensor | int | None, batch: int, full: int, new: int, device: torch.device
) -> Tensor:
    """Returns the number of keys of each sequence in a cache; all of them without lengths."""
    lengths = full if cache_seqlens is None else cache_seqlens
    _require_lengths(lengths, batch, full, new)
    if isinstance(lengths, Tensor):
        return lengths.to(device, torch.int32).expand(batch)
    # CUDA graphs can capture this, but no copy from the host.
    return torch.full((batch,), lengths, dtype=torch.int32, device=device)


def _require_lengths(lengths: Tensor | int, batch: int, full: int, new: int) -> None:
    """Checks the numbers of keys in a cache, and that new rows fit, where the host has the numbers."""
    if isinstance(lengths, Tensor):
        if lengths.numel() not in (1, batch) or lengths.is_floating_point():
            raise ValueError(f"cache_seqlens is not an integer tensor of {batch} numbers")
        if lengths.device.type != "cpu" or not lengths.numel():
            return
        least, most = int(lengths.min()), int(lengths.max())
    else:
        least = most = lengths
    if least < -1 or most + new > full:
        raise ValueError(f"cache_seqlens of {least} to {most} and {new} new keys do not fit {full} rows")


def _no_probabilities(asked: bool) -> None:
    if asked:
        raise NotImplementedError("this package returns neither a log-sum-exp nor probabilities")


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Returns attention of [batch, seqlen, heads, head_dim] tensors, as flash_attn does; s_aux are sinks."""
    del deterministic  # Only the backward pass, which torch computes, could differ.
    _no_probabilities(return_attn_probs)
    _require(q, k, v, 4, None, len(q))
    causal, window = _mask(window_size, causal, k.shape[1])
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    inputs = _inputs(softcap, alibi_slopes, s_aux, *q.shape[:2])
    return run(Call(q, k, v, scale, causal, window, inputs, dropout_p)).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Returns attention of packed sequences [tokens, heads, head_dim], as flash_attn does.

    With `block_table`, k and v are pages [pages, page_size, kv_heads, head_dim].
    """
    del deterministic
    _no_probabilities(return_attn_probs)
    batch = max(cu_seqlens_q.numel() - 1, 0)
    _require(q, k, v, 3, block_table, batch)
    _require_starts("cu_seqlens_q", cu_seqlens_q, batch, len(q), max_seqlen_q)
    _require_starts(
        "cu_seqlens_k", cu_seqlens_k, batch, len(k) if block_table is None else None, max_seqlen_k
    )
    causal, window = _mask(window_size, causal)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    inputs = _inputs(softcap, alibi_slopes, s_aux, batch, q.shape[1])
    inputs["cu_seqlens_q"] = cu_seqlens_q
    if block_table is None:
        inputs["cu_seqlens_kv"] = cu_seqlens_k
        k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    else:
        inputs |= {"seqlens_kv": cu_seqlens_k.diff(), "block_table": block_table}
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    longest = int(max_seqlen_q), int(max_seqlen_k)
    call = Call(q.transpose(0, 1)[None], k, v, scale, causal, window, inputs, dropout_p, longest)
    return run(call)[0].transpose(0, 1)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Returns attention of new queries [batch, queries, heads, head_dim] to a cache, as flash_attn does.

    The cache is [batch, keys, kv_heads, head_dim], or pages of it with `block_table`. New k and v are
    written to it first.
    """
    del rotary_interleaved, num_splits
    _no_probabilities(return_softmax_lse)
    if any(argument is not None for argument in (rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad)):
        raise NotImplementedError("this package takes no rotary embedding, cache_batch_idx or cache_leftpad")
    batch = q.shape[0]
    _require(q, k_cache, v_cache, 4, block_table, batch)
    if (k is None) != (v is None):
        raise ValueError("k and v are the new rows of the cache: pass both, or neither")
    if k is not None and v is not None:
        for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
            if new.ndim != 4 or new.shape != (batch, k.shape[1], *cache.shape[2:]):
                raise ValueError(f"{name} has shape {tuple(new.shape)}, which does not fit the cache")
    causal, window = _mask(window_size, causal)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    inputs = _inputs(softcap, alibi_slopes, s_aux, batch, q.shape[2])
    if cache_seqlens is not None or block_table is not None:
        full = k_cache.shape[1] if block_table is None else k_cache.shape[1] * block_table.shape[1]
        lengths = _lengths(cache_seqlens, batch, full, 0 if k is None else k.shape[1], q.device)
        if k is not None and v is not None:
            _append((k_cache, v_cache), (k, v), lengths, block_table)
            lengths = (lengths + k.shape[1]).clamp(max=full)
        inputs["seqlens_kv"] = lengths.contiguous()
    elif k is not None:
        raise ValueError("new keys need cache_seqlens, which says where they go")
    if block_table is not None:
        inputs["block_table"] = block_table
    q, keys, values = (tensor.transpose(1, 2) for tensor in (q, k_cache, v_cache))
    return run(Call(q, keys, values, scale, causal, window, inputs)).transpose(1, 2)


def _append(
    caches: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], lengths: Tensor, table: Tensor | None
) -> None:
    """Writes new rows [batch, new, kv_heads, width] after the first `lengths` keys of each sequence.

    Rows that do not fit are dropped. So are those of sequences of -1 keys, with which Transformers fills up
    batches.
    """
    batch, new = rows[0].shape[:2]
    if table is None:
        table = torch.arange(batch, device=lengths.device)[:, None]
    pages, size = caches[0].shape[:2]
    room = size * table.shape[1]
    if not rows[0].numel() or not room * pages:
        return
    places = lengths[:, None].long() + torch.arange(new, device=lengths.device)
    fits = (lengths[:, None] >= 0) & (places < room)
    places = places.clamp(0, room - 1)
    page = table.gather(1, places // size).long()
    fits = (fits & (page >= 0) & (page < pages)).flatten()
    # The host does not know how many rows fit. The others write the first of these once more, or if none
    # fits, a row that is there.
    some = torch.where(fits, torch.arange(batch * new, device=lengths.device), fits.to(torch.uint8).argmax())
    any_fits = fits[some[:1]]
    at = torch.where(any_fits, page.flatten()[some], 0), (places % size).flatten()[some]
    for cache, values in zip(caches, rows, strict=True):
        cache[at] = torch.where(any_fits[:, None, None], values.flatten(0, 1)[some], cache[at])
