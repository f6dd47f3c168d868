"""Problems in canonical form, without some of their features, and as text.

Calls with the same computation get the same problem: a window that hides no key is removed. A layer with a
window of 4,096 keys then uses the kernels without a window on shorter sequences.
"""

from collections.abc import Iterable

import msgspec

from flashtune.core.expressions.nodes import Functions
from flashtune.core.expressions.text import functions_text
from flashtune.core.features.records import DEFAULTS, BlockLists
from flashtune.core.features.table import FEATURES
from flashtune.core.problem import Causal, Feature, Problem

# The extents that `rounded_extents` rounds up. Numbers of packed tokens and pages are rounded already.
ROUNDED = ("batch", "seqlen_q", "seqlen_kv")
CAUSAL_WORDS = {Causal.NONE: "", Causal.BOTTOM_RIGHT: "causal", Causal.TOP_LEFT: "causal=top_left"}


def normal_form(problem: Problem) -> Problem:
    """Returns the canonical form of a problem: all problems with the same computation have the same one.

    Lengths can be upper bounds of lengths on the device: a mask that hides no key at these bounds hides none
    at shorter lengths.
    """
    problem = _without_right(problem)
    replace = msgspec.structs.replace
    # The largest distance between a query and the first key.
    farthest = max(problem.seqlen_q if problem.causal is Causal.TOP_LEFT else 0, problem.seqlen_kv) - 1
    if problem.window_left is not None and problem.window_left >= farthest:
        problem = replace(problem, window_left=None)
    if problem.chunk and problem.chunk > farthest and not _may_stand_before_keys(problem):
        problem = replace(problem, chunk=0)
    if problem.sink_tokens and problem.window_left is None and not problem.chunk:
        problem = replace(problem, sink_tokens=0)
    if problem.block_lists is BlockLists.GROUP and (not problem.block_mask or problem.group_size == 1):
        problem = replace(problem, block_lists=BlockLists.HEAD)
    if problem.deterministic and not problem.is_backward:
        # The forward pass is always deterministic.
        problem = replace(problem, deterministic=False)
    if problem.functions and not problem.is_backward:
        problem = replace(problem, functions=problem.functions.with_gradients(()))
    return problem


def _without_right(problem: Problem) -> Problem:
    """Returns a problem without a redundant right bound. A bound of 0 becomes the causal mask."""
    right = problem.window_right
    if right is None:
        return problem
    if problem.causal is not Causal.NONE or right >= problem.seqlen_q - 1:
        return msgspec.structs.replace(problem, window_right=None)
    if right == 0:
        return msgspec.structs.replace(problem, window_right=None, causal=Causal.BOTTOM_RIGHT)
    return problem


def _may_stand_before_keys(problem: Problem) -> bool:
    """Returns whether a query of a non-causal problem can be before key 0, in a chunk without keys."""
    if problem.causal is not Causal.NONE:
        return False
    ragged = problem.packed or problem.kv_lengths or problem.page_size
    return problem.seqlen_q > (1 if ragged else problem.seqlen_kv)


def rounded_up(tokens: int) -> int:
    """Returns the next power of two. Numbers of tokens and pages are rounded so that problems repeat."""
    return 1 << max(0, tokens - 1).bit_length()


def rounded_extents(problem: Problem) -> Problem:
    """Returns a problem with its batch and lengths rounded up. Only equal lengths become equal."""
    extents = {name: rounded_up(getattr(problem, name)) for name in ROUNDED}
    if extents["seqlen_q"] == extents["seqlen_kv"] and problem.seqlen_q != problem.seqlen_kv:
        # Kernels for equal lengths may align the causal mask in another way.
        extents["seqlen_q" if problem.seqlen_q > problem.seqlen_kv else "seqlen_kv"] *= 2
    return msgspec.structs.replace(problem, **extents)


def without(problem: Problem, features: Iterable[Feature]) -> Problem:
    """Returns a problem without some features."""
    entries = [FEATURES[feature] for feature in features]
    fields = [field for entry in entries for field in (*entry.fields, *entry.details)]
    return msgspec.structs.replace(problem, **{field: DEFAULTS[field] for field in fields})


def shape_text(problem: Problem) -> str:
    """Returns the shape of a problem: `heads=8,kv_heads=2,seqlen=512,head_dim=64,dtype=bf16,batch=1`."""
    lengths = (
        f"seqlen={problem.seqlen_q}"
        if problem.seqlen_q == problem.seqlen_kv
        else f"seqlen_q={problem.seqlen_q},seqlen_kv={problem.seqlen_kv}"
    )
    widths = f"head_dim={problem.head_dim}"
    if problem.value_head_dim != problem.head_dim:
        widths += f",value_head_dim={problem.value_head_dim}"
    words = (
        f"heads={problem.heads}",
        f"kv_heads={problem.kv_heads}",
        lengths,
        widths,
        f"dtype={problem.dtype}",
        CAUSAL_WORDS[problem.causal],
        f"batch={problem.batch}",
        "backward" if problem.is_backward else "",
        *_feature_texts(problem),
    )
    return ",".join(word for word in words if word)


def features_text(problem: Problem) -> str:
    """Returns the causal mask and the features of a problem as `shape_text` has them, or an empty text."""
    words = (CAUSAL_WORDS[problem.causal], *_feature_texts(problem))
    return ",".join(word for word in words if word)


def _feature_texts(problem: Problem) -> tuple[str, ...]:
    """Returns the features of a problem except the causal mask, each as a key or an empty text."""
    has = problem.features
    fields = [
        field
        for feature, entry in FEATURES.items()
        if feature in has and feature is not Feature.WINDOW
        for field in (*entry.fields, *entry.details)
    ]
    values = [(field, getattr(problem, field)) for field in fields]
    present = ((name, value) for name, value in values if value != DEFAULTS[name])
    texts = (name if value is True else f"{name}={_word(value)}" for name, value in present)
    return _window_text(problem), *texts


def _word(value: object) -> object:
    return functions_text(value) if isinstance(value, Functions) else value


def _window_text(problem: Problem) -> str:
    left, right = problem.window_left, problem.window_right
    if left is None and right is None:
        return ""
    before = "" if left is None else str(left)
    return f"window={before}" if right is None else f"window={before}:{right}"
