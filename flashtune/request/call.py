"""`Call`: all arguments of one call of attention, of any entry point."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flashtune.core.arguments import read_count, read_flag, shown
from flashtune.core.block_mask import BlockMask
from flashtune.core.errors import ProblemError, nearest, quoted
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs, FeatureOptions
from flashtune.core.features.table import NUMBER_INPUTS, TENSOR_INPUTS
from flashtune.request.arguments import (
    Bound,
    Window,
    read_bias,
    read_block_mask,
    read_causal,
    read_longest,
    read_number,
    read_window,
)
from flashtune.request.autocast import any_autocast, autocast, autocast_dtype
from flashtune.request.dropout import draw_seed
from flashtune.request.invariance import is_batch_invariant

CausalOption = bool | Literal["none", "top_left", "bottom_right"]
LayoutOption = Literal["bhsd", "bshd"]
PageLayoutOption = Literal["nhd", "hnd"]
PreferOption = Literal["fastest", "generated"]

# Bound once, because each call uses it.
is_compiling = torch.compiler.is_dynamo_compiling
SCALES = ("q_scale", "k_scale", "v_scale")
PAGE_LAYOUTS = {"nhd": "bshd", "hnd": "bhsd"}


class Options(NamedTuple):
    """The options of a call except tensors and numbers for kernels; a part of the call cache's keys."""

    causal: str = "none"  # The causal mask and its alignment, a value of `Causal`.
    layout: str = "bhsd"  # The order of the dimensions of q and the output, a value of `Layout`.
    kv_layout: str = "bhsd"  # The order of the dimensions of k and v.
    return_lse: bool = False  # Whether to return the log-sum-exp.
    # Whether another implementation may serve the call, a value of `Prefer`.
    prefer: str = "fastest"
    window_left: Bound = None  # Number of visible keys before the query's own; None means all.
    window_right: Bound = None  # Number of visible keys after the query's own; None means all.
    sink_tokens: int = 0  # Keys at the start that stay visible.
    chunk: int = 0  # Keys per chunk; 0 means no chunks.
    max_seqlen_q: int = 0  # Queries of the longest varlen sequence; 0 without varlen.
    max_seqlen_k: int = 0  # Keys of the longest varlen sequence.
    latent: int = 0  # Number of columns of k that are also v (MLA); 0 if v is a tensor.
    deterministic: bool = False  # Whether gradients must be reproducible bit for bit.
    block_size: int = 0  # Queries and keys of a block of the block mask; 0 without one.
    batch_invariant: bool = False  # Whether the bits of a row must not depend on the batch.
    functions: str = ""  # Score and mask functions as text; see `flashtune.core.expressions.text`.
    out_order: str = ""  # Dimensions of a bhsd output in memory, outermost first; "" for the layout's order.

    @property
    def has_mask(self) -> bool:
        """Whether a window, chunks or functions are given. Sink tokens alone have no effect."""
        return (
            bool(self.chunk or self.functions)
            or self.window_left is not None
            or self.window_right is not None
        )


class Call(NamedTuple):
    """One call: its tensors in the layouts of `options`, and all other arguments."""

    q: Tensor  # Queries.
    k: Tensor  # Keys, or pages of them.
    v: Tensor  # Values. With MLA, k itself.
    scale: float | None  # Factor of the scores; None means the default.
    options: Options  # All other arguments but the extra inputs.
    side: ExtraInputs  # Tensors and numbers that kernels take in addition to q, k, v and the scale.
    shared_prefix: int = 0  # Number of first tokens that all sequences of a paged cache share.
    # The same object in calls with equal options, and extra inputs of equal properties. None if unknown.
    kind: object = None

    @property
    def is_plain(self) -> bool:
        """Whether the call has no features but the causal mask and scales of q, k and v."""
        scales = dict.fromkeys(SCALES)
        options = self.options
        is_bare = not (options.has_mask or options.batch_invariant)
        return is_bare and not any(self.side._replace(**scales).presence)


class CommonOptions(FeatureOptions, total=False):
    """Keyword arguments that all entry points share, as in `attention`, except `return_lse`."""

    causal: CausalOption
    window: Window | None
    sink_tokens: int
    chunk: int
    scale: float | None
    prefer: PreferOption
    batch_invariant: bool
    k_scale: Tensor | None
    v_scale: Tensor | None


class DenseOptions(CommonOptions, total=False):
    """Keyword arguments of `attention`."""

    layout: LayoutOption
    attn_bias: Tensor | None
    attn_mask: Tensor | None
    block_mask: BlockMask | None
    kv_lengths: Tensor | None
    q_scale: Tensor | None
    dropout_p: float
    deterministic: bool


class VarlenOptions(CommonOptions, total=False):
    """Keyword arguments of `attention_varlen`."""

    dropout_p: float
    deterministic: bool


class PagedCallOptions(CommonOptions, total=False):
    """Keyword arguments of `attention_paged` for a single pass over the keys."""

    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    tree_mask: Tensor | None
    layout: PageLayoutOption
    value_head_dim: int | None


class PagedFlexOptions(PagedCallOptions, total=False):
    """Keyword arguments of `attention_paged`, also functions, for a single pass over the keys."""

    score_mod: Callable[..., Tensor] | None
    mask_mod: Callable[..., Tensor] | None


class PagedOptions(PagedFlexOptions, total=False):
    """Keyword arguments of `attention_paged`."""

    shared_prefix: int


# The names in `ExtraInputs` of the arguments that are tensors, the numbers, and the readers of options.
TENSOR_NAMES = {tensor.option: tensor.name for tensor in TENSOR_INPUTS.values()}
NUMBERS = {number.option: number for number in NUMBER_INPUTS.values()}
READERS: dict[str, Callable[[Any], Any]] = {
    "causal": read_causal,
    "prefer": lambda prefer: prefer,
    "sink_tokens": lambda tokens: read_count("sink_tokens", tokens, "how many first tokens stay visible"),
    "chunk": lambda keys: read_count("chunk", keys, "how many keys are a chunk, or 0 for no chunks"),
    "deterministic": lambda flag: read_flag("deterministic", flag),
    "batch_invariant": lambda flag: read_flag("batch_invariant", flag),
}
DENSE_NAMES = DenseOptions.__optional_keys__
VARLEN_NAMES = VarlenOptions.__optional_keys__
PAGED_NAMES = PagedCallOptions.__optional_keys__
FUNCTIONS = {DENSE_NAMES: "attention", VARLEN_NAMES: "attention_varlen", PAGED_NAMES: "attention_paged"}


def dense_call(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Any) -> Call:
    """Returns the record of a call of `attention`, with the same arguments and errors."""
    layout = options.get("layout", "bhsd")
    own: dict[str, Any] = {
        "layout": layout,
        "kv_layout": layout,
        "return_lse": read_flag("return_lse", return_lse),
    }
    inputs: dict[str, Any] = {}
    if "attn_bias" in options or "attn_mask" in options:
        inputs["bias"] = read_bias(options.get("attn_bias"), options.get("attn_mask"))
    if options.get("block_mask") is not None:
        mask = read_block_mask(options["block_mask"])
        own["block_size"] = mask.block_size
        inputs["block_counts"], inputs["block_indices"] = mask.counts, mask.indices
    if "kv_lengths" in options:
        inputs["seqlens_kv"] = options["kv_lengths"]
    return _record(q, k, v, options, DENSE_NAMES, own, inputs)


def varlen_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool = False,
    **options: Any,
) -> Call:
    """Returns the record of a call of `attention_varlen`, with the same arguments and errors."""
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if starts is None:
            raise ProblemError(
                f"{name} is None: pass where sequences begin and the last ends, int32 [batch + 1]"
            )
    own: dict[str, Any] = {
        "layout": "thd",
        "kv_layout": "thd",
        "return_lse": read_flag("return_lse", return_lse),
        "max_seqlen_q": read_longest(max_seqlen_q, q),
        "max_seqlen_k": read_count("max_seqlen_k", max_seqlen_k, "the keys of the longest sequence"),
    }
    inputs = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_k}
    return _record(q, k, v, options, VARLEN_NAMES, own, inputs)


def paged_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    return_lse: bool = False,
    **options: Any,
) -> Call:
    """Returns the record of a call of `attention_paged`, with the same arguments and errors."""
    layout, starts = options.get("layout", "nhd"), options.get("cu_seqlens_q")
    width, longest = options.get("value_head_dim"), options.get("max_seqlen_q")
    if not isinstance(layout, str) or layout not in PAGE_LAYOUTS:
        raise ProblemError(f"layout cannot be {shown(layout)}: pass 'nhd' or 'hnd'")
    if block_table is None or kv_lengths is None:
        raise ProblemError("block_table or kv_lengths is None: pass the pages and lengths of sequences")
    if (v_cache is None) != (width is not None):
        raise ProblemError(
            "values are either a tensor or the first value_head_dim columns of the keys: pass one of v_cache "
            "and value_head_dim"
        )
    if (starts is None) != (longest is None):
        raise ProblemError("cu_seqlens_q and max_seqlen_q belong together: pass both for packed queries")
    own: dict[str, Any] = {
        "causal": "bottom_right",
        "layout": "thd" if starts is not None else "bhd" if getattr(q, "ndim", 4) == 3 else "bshd",
        "kv_layout": PAGE_LAYOUTS[layout],
        "return_lse": read_flag("return_lse", return_lse),
    }
    if longest is not None:
        own["max_seqlen_q"] = read_longest(longest, q)
    if width is not None:
        own["latent"] = read_count("value_head_dim", width, "how many columns of the keys are values", 1)
    inputs = {"cu_seqlens_q": starts, "seqlens_kv": kv_lengths, "block_table": block_table}
    return _record(q, k_cache, k_cache if v_cache is None else v_cache, options, PAGED_NAMES, own, inputs)


def _record(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: dict[str, Any],
    accepted: frozenset[str],
    options: dict[str, Any],
    inputs: dict[str, Any],
) -> Call:
    """Returns a call.

    `arguments` are the keyword arguments of the call, `accepted` those of the entry point. `options` and
    `inputs` do not come from `arguments` alone.
    """
    for option, value in arguments.items():
        if option not in accepted:
            function = FUNCTIONS[accepted]
            near = nearest(option, sorted(accepted), cutoff=0.75)
            raise TypeError(f"{function} has no argument {quoted(option)}: {near}")
        if option in TENSOR_NAMES:
            inputs[TENSOR_NAMES[option]] = value
        elif option in NUMBERS:
            inputs[NUMBERS[option].name] = read_number(NUMBERS[option], value)
        elif option in READERS:
            options[option] = READERS[option](value)
    if "window" in arguments:
        options["window_left"], options["window_right"] = read_window(arguments["window"])
    options.setdefault("batch_invariant", is_batch_invariant())
    side = known_if_empty(ExtraInputs(**inputs))
    call = Call(q, k, v, arguments.get("scale"), Options(**options), side)
    # Compilers see the casts of the operators.
    return call if is_compiling() or not any_autocast() else autocasted(call)


def autocasted(call: Call) -> Call:
    """Returns the call with q, k, v and the bias in the type to which autocast casts them, as SDPA's."""
    dtype = autocast_dtype(call.q.device) if isinstance(call.q, Tensor) else None
    if dtype is None:
        return call
    k = autocast(call.k, dtype)
    # With MLA, values are the keys themselves.
    v = k if call.v is call.k else autocast(call.v, dtype)
    side = call.side
    if side.bias is not None:
        side = side._replace(bias=autocast(side.bias, dtype))
    return call._replace(q=autocast(call.q, dtype), k=k, v=v, side=side)


def known_if_empty(side: ExtraInputs) -> ExtraInputs:
    """Returns `NO_EXTRA_INPUTS` in place of an equal record, for checks by identity."""
    for value in side:
        if value is not None:
            return side
    return NO_EXTRA_INPUTS


def seeded(call: Call) -> Call:
    """Returns the call with a new seed if it has dropout and no seed."""
    if call.side.dropout is None or call.side.seed is not None:
        return call
    return call._replace(side=call.side._replace(seed=draw_seed(call.q.device)))


def requires_grad(call: Call) -> bool:
    """Returns whether autograd needs a backward pass of a call."""
    if not torch.is_grad_enabled():
        return False
    if call.q.requires_grad or call.k.requires_grad or call.v.requires_grad:
        return True
    if call.side is not NO_EXTRA_INPUTS:
        for tensor in call.side.optional_tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
