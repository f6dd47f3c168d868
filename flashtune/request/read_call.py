"""The conversion of a call to a request, with all checks of its arguments."""

import functools

import torch

from flashtune.core.arguments import read_scale
from flashtune.core.canonical import normal_form, rounded_up
from flashtune.core.errors import ProblemError
from flashtune.core.expressions.nodes import NO_FUNCTIONS
from flashtune.core.expressions.text import parse_functions
from flashtune.core.features.records import TABLES, ExtraInputs
from flashtune.core.features.table import flags_of
from flashtune.core.layouts import DENSE_LAYOUTS, DTYPES, KV_DTYPES, LAYOUTS, Layout
from flashtune.core.problem import MAX_HEAD_DIM, Bias, Dtype, KvDtype, KvScale, Problem
from flashtune.request.arguments import CAUSALS, read_option
from flashtune.request.call import Call, requires_grad
from flashtune.request.quantization import check_scales
from flashtune.request.request import PREFERENCES, Prefer, Request
from flashtune.request.side_inputs import (
    block_lists,
    check_kinds,
    check_shapes,
    check_tables,
    scale_kind,
    side_views,
)
from flashtune.request.tensor_checks import check_double, check_extents, dtype_of, require_dense

known_functions = functools.lru_cache(256)(parse_functions)
ORDERS = {
    Layout.BHSD: "[batch, heads, seqlen, head_dim]",
    Layout.BSHD: "[batch, seqlen, heads, head_dim]",
    Layout.THD: "[tokens, heads, head_dim]",
    Layout.BHD: "[batch, heads, head_dim]",
}
PAGES = {
    Layout.BHSD: "[pages, kv_heads, page_size, head_dim]",
    Layout.BSHD: "[pages, page_size, kv_heads, head_dim]",
}


def read_call(call: Call, needs_grad: bool | None = None) -> Request:
    """Returns the request of a call.

    `needs_grad` is whether it has a backward pass. By default the tensors determine this.
    """
    options, side = call.options, call.side
    read_scale(call.scale)
    require_tensors(call)
    packed, paged = side.cu_seqlens_q is not None, side.block_table is not None
    layout = read_option("layout", options.layout, LAYOUTS if packed or paged else DENSE_LAYOUTS)
    kv_layout = read_option("layout", options.kv_layout, LAYOUTS)
    _check_tensors(call, layout, kv_layout)
    check_kinds(side, call.q.device)
    q = layout.heads_first(call.q)
    k, v = kv_layout.heads_first(call.k), kv_layout.heads_first(call.v)
    batch = q.shape[0]
    if side.cu_seqlens_q is not None:
        batch = side.cu_seqlens_q.numel() - 1
    page_size = k.shape[2] if paged else 0
    seqlen_q, seqlen_kv = q.shape[2], k.shape[2]
    if packed:
        seqlen_q = rounded_up(options.max_seqlen_q)
        # Without keys, the problem has none, whatever the given maximum length is.
        seqlen_kv = rounded_up(options.max_seqlen_k) if seqlen_kv else 0
    if side.block_table is not None:
        # `check_shapes` reports a table that is not two-dimensional.
        seqlen_kv = page_size * (rounded_up(side.block_table.shape[-1]) if side.block_table.numel() else 0)
    kv_dtype = KV_DTYPES.get(k.dtype) if k.dtype is not q.dtype else None
    places = k.shape[0]
    # With pages, there are always lengths.
    flags = flags_of(side) | ({"kv_lengths": False} if paged else {})
    problem = Problem(
        dtype=dtype_of(q),
        head_dim=q.shape[3],
        value_head_dim=options.latent or v.shape[3],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        batch=max(batch, 0) if packed else batch,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        causal=read_option("causal", options.causal, CAUSALS),
        window_left=options.window_left,
        window_right=options.window_right,
        sink_tokens=options.sink_tokens,
        chunk=options.chunk,
        block_mask=options.block_size,
        functions=known_functions(options.functions) if options.functions else NO_FUNCTIONS,
        block_lists=block_lists(side, q.shape[1], k.shape[1]),
        bias=_bias_kind(call),
        packed=rounded_up(q.shape[2]) if packed else 0,
        page_size=page_size,
        kv_dtype=kv_dtype,
        kv_scale=_scale_kind(call, kv_dtype, paged, places, k.shape[1]),
        mla=options.latent > 0,
        batch_invariant=options.batch_invariant,
        **flags,
    )
    check_extents(problem)
    check_shapes(problem, side, batch, options.max_seqlen_q if packed else q.shape[2])
    check_tables(problem, side)
    problem = normal_form(problem)
    if problem.dtype.is_quantized:
        check_scales(problem, q.device, side)
    else:
        # Report shapes that do not match before any computation.
        side_views(problem, side, places)
    prefer = read_option("prefer", options.prefer, PREFERENCES)
    if problem.dtype.is_quantized or problem.batch_invariant:
        prefer = Prefer.GENERATED  # no other implementation supports it
    check_double(q, prefer is Prefer.GENERATED)
    needs_grad = requires_grad(call) if needs_grad is None else needs_grad
    is_trained = side.bias is not None and side.bias.requires_grad
    return Request(
        problem,
        q.device,
        layout,
        options.return_lse,
        prefer,
        needs_grad,
        kv_layout,
        q.shape[2] if packed else 0,
        options.deterministic or torch.are_deterministic_algorithms_enabled(),
        q.dtype is torch.float64,
        needs_grad and problem.bias is Bias.ADDITIVE and not is_trained,
        _trained_tables(problem, side) if needs_grad else (),
        options.out_order,
    )


def _trained_tables(problem: Problem, side: ExtraInputs) -> tuple[int, ...]:
    """Returns the places of the captured tensors that require grad."""
    named = ((place, getattr(side, TABLES[place])) for place in range(len(problem.functions.tables)))
    return tuple(place for place, table in named if table.requires_grad)


def require_tensors(call: Call) -> None:
    """Checks that queries, keys and values are tensors with strides."""
    for name in ("q", "k", "v"):
        require_dense(name, getattr(call, name))


def _bias_kind(call: Call) -> Bias:
    bias = call.side.bias
    if bias is None:
        return Bias.NONE
    if bias.dtype is torch.bool:
        return Bias.BOOLEAN
    if bias.dtype is not call.q.dtype:
        raise ProblemError(
            f"attn_bias is {bias.dtype} and q {call.q.dtype}: pass attn_bias.to({call.q.dtype})"
        )
    return Bias.ADDITIVE


def _scale_kind(call: Call, kv_dtype: KvDtype | None, paged: bool, places: int, kv_heads: int) -> KvScale:
    q_scale, k_scale, v_scale = call.side.scales
    scales = (
        {"q_scale": q_scale} if kv_dtype else {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    )
    for name, scale in scales.items():
        dtype = call.q.dtype if name == "q_scale" else call.k.dtype
        if scale is not None and dtype is not torch.float8_e4m3fn:
            raise ProblemError(
                f"{name} is given and {name[0]} is {dtype}: scales belong to 8-bit inputs, leave it out"
            )
    if kv_dtype is None:
        return KvScale.TENSOR
    if k_scale is None or v_scale is None:
        raise ProblemError(
            f"k and v are {call.k.dtype} and q is {call.q.dtype}: pass k_scale and v_scale, float32 tensors "
            "of what their elements are to be multiplied with"
        )
    return scale_kind(k_scale, v_scale, paged, places, kv_heads)


def _check_tensors(call: Call, layout: Layout, kv_layout: Layout) -> None:
    """Checks q, k and v one by one, and that they match."""
    q, k, v = call.q, call.k, call.v
    orders = PAGES if call.side.block_table is not None else ORDERS
    for name, tensor, order in (
        ("q", q, ORDERS[layout]),
        ("k", k, orders[kv_layout]),
        ("v", v, orders[kv_layout]),
    ):
        dimensions = order.count(",") + 1
        if tensor.dim() != dimensions:
            heads = order.split(", ").index("heads") if "heads" in order.split(", ") else None
            remedy = ""
            if heads is not None and (tensor.dim(), dimensions) == (3, 4):
                remedy = f"; {name}.unsqueeze({heads}) makes one head of [batch, seqlen, head_dim]"
            raise ProblemError(f"{name} has {tensor.dim()} dimensions: pass a dense tensor {order}{remedy}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ProblemError(
                f"{name}'s last dimension has stride {tensor.stride(-1)}: pass {name}.contiguous()"
            )
        if tensor.device != q.device:
            raise ProblemError(f"{name} is on {tensor.device} and q on {q.device}: move them to one device")
    _check_dtypes(call)
    _check_widths(call)
    _check_alike(call, layout, kv_layout)


def _check_dtypes(call: Call) -> None:
    q, k, v = call.q.dtype, call.k.dtype, call.v.dtype
    if q is not torch.float64 and q not in DTYPES:
        raise ProblemError(f"q is {q}: no kernel takes it, pass bfloat16, float16, float32 or float8_e4m3fn")
    if q in DTYPES and DTYPES[q] is Dtype.E4M3 and not call.is_plain:
        raise ProblemError(
            f"q is {q}: with masks, packed sequences, pages, a quantised cache or batch_invariant pass it in "
            "bfloat16, float16 or float32"
        )
    if k is not v or (k is not q and k not in KV_DTYPES):
        raise ProblemError(
            f"q, k and v are {q}, {k} and {v}: give them one dtype, or k and v both float8_e4m3fn or int8"
        )


def _check_widths(call: Call) -> None:
    width, latent = call.q.shape[-1], call.options.latent
    if call.k.shape[-1] != width:
        raise ProblemError(f"q has head dim {width} and k has {call.k.shape[-1]}: make them equal")
    if latent:
        if not 1 <= latent <= width:
            raise ProblemError(
                f"value_head_dim is {latent} and keys are {width} wide: values are the keys' first columns, "
                "pass at most so many"
            )
        return
    for name, size in (("q", width), ("v", call.v.shape[-1])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ProblemError(f"{name} has head dim {size}: kernels take 1 to {MAX_HEAD_DIM}")


def _check_alike(call: Call, layout: Layout, kv_layout: Layout) -> None:
    q, k, v = layout.heads_first(call.q), kv_layout.heads_first(call.k), kv_layout.heads_first(call.v)
    if k.shape[:3] != v.shape[:3]:
        raise ProblemError(f"k is {list(call.k.shape)} and v {list(call.v.shape)}: make all but widths equal")
    if call.side.block_table is not None and not k.shape[2]:
        raise ProblemError(f"k is {list(call.k.shape)}: pass pages {PAGES[kv_layout]}")
    if call.side.block_table is not None and not k.shape[0] and call.side.block_table.numel():
        raise ProblemError("k_cache has no pages and block_table names some: pass the whole cache")
    if call.side.block_table is None and q.shape[0] != k.shape[0]:
        raise ProblemError(f"q has {q.shape[0]} sequences and k has {k.shape[0]}: make them equal")
    if not q.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ProblemError(
            f"{q.shape[1]} query heads do not divide among {k.shape[1]} KV heads: check the shapes and layout"
        )
