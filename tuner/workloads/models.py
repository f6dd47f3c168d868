"""Models as lists of attention problems, so that a search can name a model; the two passes of training."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from flashtune.core.canonical import normal_form, rounded_up
from flashtune.core.errors import UsageError
from flashtune.core.problem import Causal, Direction, Dtype, Problem
from flashtune.tuner.workloads.model_sizes import (
    DEFAULT_BATCH,
    DEFAULT_PAGE_SIZE,
    DEFAULT_SEQLEN,
    ModelSizes,
    Phase,
)
from flashtune.tuner.workloads.shape_values import MAX_LENGTH, Value, parse_values
from flashtune.tuner.workloads.shapes import expand


class Layers(msgspec.Struct, frozen=True):
    """Layers of a model with the same attention."""

    count: int  # Number of layers.
    window: int = 0  # Number of tokens that a token sees, itself included; 0 for all.
    chunk: int = 0  # Length of a chunk, whose tokens see only one another; 0 for no chunks.
    softcap: bool = False  # Whether scores are capped.
    sinks: bool = False  # Whether each head has a learned sink: a score without a value.


class Latent(NamedTuple):
    """Latent keys of a token in decoding, shared by all heads (DeepSeek's MLA)."""

    width: int  # Number of columns.
    values: int  # Number of first columns that are also values.


class ModelAttention(msgspec.Struct, frozen=True):
    """The attention layers of one model."""

    name: str  # The model's name for users: lower case, with its size.
    heads: int  # Query heads.
    kv_heads: int  # Key and value heads in prefill.
    head_dim: int  # Width of queries and keys in prefill.
    value_head_dim: int  # Width of values in prefill.
    dtype: Dtype  # The checkpoint's element type.
    causal: bool  # Whether a token sees only the tokens before it.
    source: str  # Origin of the numbers.
    kinds: tuple[Layers, ...]  # Its layers, each kind once.
    latent: Latent | None = None  # Latent keys of its cache, if it has them.

    @property
    def layers(self) -> int:
        """Number of layers with attention."""
        return sum(kind.count for kind in self.kinds)

    def cache_bytes(self, problem: Problem) -> int:
        """Returns the bytes of all layers' caches after a problem of this model, without gaps."""
        width = self.latent.width if self.latent else self.kv_heads * (self.head_dim + self.value_head_dim)
        return self.layers * problem.batch * problem.seqlen_kv * width * problem.kv_itemsize

    def calls(self, problem: Problem) -> bool:
        """Returns whether some layers call a problem, at any length and batch size, with any cache."""
        heads = (self.heads, 1) if problem.mla else (self.heads, self.kv_heads)
        widths = self.latent if problem.mla and self.latent else (self.head_dim, self.value_head_dim)
        theirs = problem.heads, problem.kv_heads, problem.head_dim, problem.value_head_dim, problem.dtype
        # One query sees all keys, with or without a mask.
        sees_all = problem.causal is Causal.NONE and problem.seqlen_q > 1
        is_like = theirs == (*heads, *widths, self.dtype) and sees_all is not self.causal
        return is_like and any(_of_kind(problem, kind) == problem for kind in self.kinds)


class LayerCall(NamedTuple):
    """One problem of a model, and the number of layers that call it."""

    problem: Problem
    layers: int


def model_calls(attention: ModelAttention, sizes: ModelSizes) -> tuple[tuple[LayerCall, ...], ...]:
    """Returns a model's calls: one problem for each kind of layer, for each length, batch size and type.

    Problems are those that dispatch sees: without a window if sequences fit into it. Training has its forward
    pass here.
    """
    problems_of = _decode if sizes.phase is Phase.DECODE else _prefill
    return tuple(
        tuple(LayerCall(_of_kind(problem, kind), kind.count) for kind in attention.kinds)
        for problem in problems_of(attention, sizes)
    )


def model_problems(attention: ModelAttention, sizes: ModelSizes) -> tuple[Problem, ...]:
    """Returns all problems of `model_calls` without duplicates; in training each with its gradients."""
    called = dict.fromkeys(call.problem for calls in model_calls(attention, sizes) for call in calls)
    return training_passes(called) if sizes.phase is Phase.TRAINING else tuple(called)


def _prefill(attention: ModelAttention, sizes: ModelSizes) -> tuple[Problem, ...]:
    """Returns a prompt's attention to itself, as in a layer without a custom mask."""
    if sizes.page_size is not None:
        raise UsageError("--page-size is of the cache that decode reads: add --phase decode")
    widths = attention.heads, attention.kv_heads, attention.head_dim, attention.value_head_dim
    problems = expand(
        _sizes(attention, sizes, widths) | {"seqlen": parse_values("seqlen", sizes.seqlen or DEFAULT_SEQLEN)}
    )
    return tuple(dict.fromkeys(map(_packed, problems))) if sizes.packed else problems


def _decode(attention: ModelAttention, sizes: ModelSizes) -> tuple[Problem, ...]:
    """Returns the attention of one new token of each sequence to its cache."""
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
            "mla": (latent is not None,),
        }
    )
    return tuple(dict.fromkeys(map(_paged, problems)))


def as_called(number: int) -> int:
    """Returns the number of tokens or pages in the problem that dispatch derives from a call."""
    rounded = rounded_up(number)
    if rounded > MAX_LENGTH:
        raise UsageError(f"{number} tokens are rounded up to {rounded}, beyond {MAX_LENGTH:,}: make it fewer")
    return rounded


def _packed(problem: Problem) -> Problem:
    longest, tokens = as_called(problem.seqlen_q), as_called(problem.batch * problem.seqlen_q)
    return msgspec.structs.replace(problem, seqlen_q=longest, seqlen_kv=longest, packed=tokens)


def _paged(problem: Problem) -> Problem:
    """Returns a problem with pages: its number of keys is the capacity of the block table's pages."""
    if not problem.page_size:
        return problem
    pages = as_called(-(-problem.seqlen_kv // problem.page_size))
    return msgspec.structs.replace(problem, seqlen_kv=pages * problem.page_size)


def _sizes(
    attention: ModelAttention, sizes: ModelSizes, widths: tuple[int, int, int, int]
) -> dict[str, tuple[Value, ...]]:
    """Returns the fields of both phases; `widths` are heads, KV heads and the widths of keys and values."""
    own = dict(zip(("heads", "kv_heads", "head_dim", "value_head_dim"), widths, strict=True))
    return {
        **{key: (number,) for key, number in own.items()},
        "causal": (Causal.BOTTOM_RIGHT if attention.causal else Causal.NONE,),
        "batch": parse_values("batch", sizes.batch or DEFAULT_BATCH),
        "dtype": parse_values("dtype", sizes.dtype) if sizes.dtype else (attention.dtype,),
    }


def _of_kind(problem: Problem, kind: Layers) -> Problem:
    problem = msgspec.structs.replace(
        problem,
        # A layer's window counts the token itself, a problem's only the tokens before it.
        window_left=kind.window - 1 if kind.window else None,
        # An encoder's window is symmetric.
        window_right=kind.window - 1 if kind.window and problem.causal is Causal.NONE else None,
        chunk=kind.chunk,
        softcap=kind.softcap,
        sinks=kind.sinks,
    )
    return normal_form(problem)


def forward_of(problem: Problem) -> Problem:
    """Returns the forward pass of a backward problem. A forward problem is returned unchanged."""
    if not problem.is_backward:
        return problem
    return normal_form(msgspec.structs.replace(problem, direction=Direction.FORWARD))


def backward_of(problem: Problem) -> Problem:
    """Returns the gradients of a forward problem, not deterministic. A backward problem is unchanged."""
    return msgspec.structs.replace(problem, direction=Direction.BACKWARD)


def training_passes(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Returns both passes of each problem, forward first, without duplicates."""
    return tuple(
        dict.fromkeys(pass_ for problem in problems for pass_ in (forward_of(problem), backward_of(problem)))
    )


def saving_lse(problems: Iterable[Problem]) -> frozenset[Problem]:
    """Returns the forward problems with a backward problem among `problems`. These need the log-sum-exp."""
    listed = tuple(problems)
    trained = {forward_of(problem) for problem in listed if problem.is_backward}
    return frozenset(problem for problem in listed if problem in trained)


MODEL_HEADS = ("model", "layers", "heads, KV heads, head dim", "type", "from")


def model_row(model: ModelAttention) -> tuple[str, ...]:
    """Returns a model's cells, one for each of `MODEL_HEADS`."""
    width = str(model.head_dim)
    if model.value_head_dim != model.head_dim:
        width += f" (values {model.value_head_dim})"
    mask = "" if model.causal else ", not causal"
    sizes = f"{model.heads}, {model.kv_heads}, {width}{mask}"
    if model.latent:
        sizes += f"; decode {model.heads}, 1, {model.latent.width} (values {model.latent.values})"
    layers = " and ".join(map(_kind, model.kinds))
    return model.name, layers, sizes, model.dtype.value, model.source


def _kind(kind: Layers) -> str:
    """Returns the count and the features of layers of one kind."""
    words = (
        f"window {kind.window}" if kind.window else "",
        f"chunk {kind.chunk}" if kind.chunk else "",
        "softcap" if kind.softcap else "",
        "sinks" if kind.sinks else "",
    )
    features = ", ".join(word for word in words if word)
    return f"{kind.count} with {features}" if features else str(kind.count)
