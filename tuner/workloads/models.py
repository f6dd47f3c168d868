"""Models as the attention problems that they call, so that a search can name a model."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from flashtune.core.canonical import normal_form, rounded_up
from flashtune.core.errors import UsageError
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.tuner.workloads.model_sizes import (
    DEFAULT_BATCH,
    DEFAULT_PAGE_SIZE,
    DEFAULT_SEQLEN,
    ModelSizes,
    Phase,
)
from flashtune.tuner.workloads.passes import training_passes
from flashtune.tuner.workloads.shape_values import MAX_LENGTH, Value, parse_values
from flashtune.tuner.workloads.shapes import expand


class Layers(msgspec.Struct, frozen=True):
    """Layers of a model that attend alike.

    Attributes:
        count: How many of them.
        window: Tokens that a token sees, itself among them; 0 for all.
        chunk: Tokens of a chunk, whose tokens see one another alone; 0 for no chunks.
        softcap: Whether scores are capped.
        sinks: Whether each head has a score that takes weight and has no value.
    """

    count: int
    window: int = 0
    chunk: int = 0
    softcap: bool = False
    sinks: bool = False


class Latent(NamedTuple):
    """What decode reads of a token where all heads share one compressed key (DeepSeek's MLA).

    Attributes:
        width: Columns of it.
        values: How many of these, from the first on, are values too.
    """

    width: int
    values: int


class ModelAttention(msgspec.Struct, frozen=True):
    """The attention layers of one model.

    Attributes:
        name: How a user names it: lower case, with its size.
        heads: Query heads.
        kv_heads: Key and value heads, as prefill has them.
        head_dim: Width of queries and keys, as prefill has them.
        value_head_dim: Width of values, as prefill has them.
        dtype: The checkpoint's element type.
        causal: Whether a token sees only what came before it.
        source: Where the numbers are from.
        kinds: Its layers, each kind once.
        latent: What its cache holds in place of keys and values, if anything.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: Dtype
    causal: bool
    source: str
    kinds: tuple[Layers, ...]
    latent: Latent | None = None

    @property
    def layers(self) -> int:
        """How many layers with attention."""
        return sum(kind.count for kind in self.kinds)

    def cache_bytes(self, problem: Problem) -> int:
        """Bytes that the cache of all layers holds after a problem of this model, without gaps."""
        width = self.latent.width if self.latent else self.kv_heads * (self.head_dim + self.value_head_dim)
        return self.layers * problem.batch * problem.seqlen_kv * width * problem.kv_itemsize


class LayerCall(NamedTuple):
    """One problem that a model calls, and how many of its layers call it."""

    problem: Problem
    layers: int


def model_calls(attention: ModelAttention, sizes: ModelSizes) -> tuple[tuple[LayerCall, ...], ...]:
    """What a model calls: for each length, batch size and type one problem for each kind of its layers.

    As dispatch names them: on sequences that fit into a window there is none. Of training the forward pass.

    Raises:
        UsageError: A size that no shape can have, a decoding encoder, or a size that is not of this phase.
    """
    posed = _decode if sizes.phase is Phase.DECODE else _prefill
    return tuple(
        tuple(LayerCall(_of_kind(problem, kind), kind.count) for kind in attention.kinds)
        for problem in posed(attention, sizes)
    )


def model_problems(attention: ModelAttention, sizes: ModelSizes) -> tuple[Problem, ...]:
    """All problems of `model_calls`, none twice; in training each with its gradients.

    Raises:
        UsageError: As `model_calls`.
    """
    called = dict.fromkeys(call.problem for calls in model_calls(attention, sizes) for call in calls)
    return training_passes(called) if sizes.phase is Phase.TRAINING else tuple(called)


def _prefill(attention: ModelAttention, sizes: ModelSizes) -> tuple[Problem, ...]:
    """A whole prompt attending to itself, as a layer without a mask of its own does it."""
    if sizes.page_size is not None:
        raise UsageError("--page-size is of the cache that decode reads: add --phase decode")
    widths = attention.heads, attention.kv_heads, attention.head_dim, attention.value_head_dim
    problems = expand(
        _sizes(attention, sizes, widths) | {"seqlen": parse_values("seqlen", sizes.seqlen or DEFAULT_SEQLEN)}
    )
    return tuple(dict.fromkeys(map(_packed, problems))) if sizes.packed else problems


def _decode(attention: ModelAttention, sizes: ModelSizes) -> tuple[Problem, ...]:
    """One new token of each sequence attending to its cache."""
    if not attention.causal:
        raise UsageError(f"{attention.name} is an encoder and does not decode: pass --phase prefill")
    if sizes.packed:
        raise UsageError("--packed is of prompts, and decode has one token of each sequence: leave it out")
    latent = attention.latent
    widths = attention.heads, attention.kv_heads, attention.head_dim, attention.value_head_dim
    if latent is not None:
        widths = attention.heads, 1, latent.width, latent.values
    problems = expand(
        _sizes(attention, sizes, widths)
        | {
            "seqlen_q": (1,),
            "seqlen_kv": parse_values("seqlen_kv", sizes.seqlen or DEFAULT_SEQLEN),
            "page_size": parse_values("page_size", sizes.page_size or DEFAULT_PAGE_SIZE),
            "latent": (latent is not None,),
        }
    )
    return tuple(dict.fromkeys(map(_paged, problems)))


def as_called(number: int) -> int:
    """The number of tokens or pages by which dispatch knows a call of so many.

    Raises:
        UsageError: It is more than a problem may have.
    """
    found = rounded_up(number)
    if found > MAX_LENGTH:
        raise UsageError(f"{number} tokens are rounded up to {found}, beyond {MAX_LENGTH:,}: make it fewer")
    return found


def _packed(problem: Problem) -> Problem:
    longest, tokens = as_called(problem.seqlen_q), as_called(problem.batch * problem.seqlen_q)
    return msgspec.structs.replace(problem, seqlen_q=longest, seqlen_kv=longest, packed=tokens)


def _paged(problem: Problem) -> Problem:
    """A cache in pages holds as many keys as there is room for in the pages that a block table can name."""
    if not problem.page_size:
        return problem
    pages = as_called(-(-problem.seqlen_kv // problem.page_size))
    return msgspec.structs.replace(problem, seqlen_kv=pages * problem.page_size)


def _sizes(
    attention: ModelAttention, sizes: ModelSizes, widths: tuple[int, int, int, int]
) -> dict[str, tuple[Value, ...]]:
    """What both phases have in common; `widths` are heads, KV heads and the widths of keys and values."""
    own = dict(zip(("heads", "kv_heads", "head_dim", "value_head_dim"), widths, strict=True))
    return {
        **{key: (number,) for key, number in own.items()},
        "causal": (Causal.BOTTOM_RIGHT if attention.causal else Causal.NONE,),
        "batch": parse_values("batch", sizes.batch or DEFAULT_BATCH),
        "dtype": parse_values("dtype", sizes.dtype) if sizes.dtype else (attention.dtype,),
    }


def _of_kind(problem: Problem, kind: Layers) -> Problem:
    posed = msgspec.structs.replace(
        problem,
        # A window counts the token itself, a problem's what lies before it.
        window_left=kind.window - 1 if kind.window else None,
        # An encoder's window is as wide on the other side.
        window_right=kind.window - 1 if kind.window and problem.causal is Causal.NONE else None,
        chunk=kind.chunk,
        softcap=kind.softcap,
        sinks=kind.sinks,
    )
    return normal_form(posed)
