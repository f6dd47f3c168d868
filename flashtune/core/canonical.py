"""Problems in canonical form, and problems without some of their features.

Calls with the same computation get the same problem: a window that hides no key is removed. A layer with a
window of 4,096 keys then uses the kernels without a window on shorter sequences.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flashtune.core.problem import Bias, Causal, Feature, Problem


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
    if problem.first_tokens and problem.window_left is None and not problem.chunk:
        problem = replace(problem, first_tokens=0)
    if problem.deterministic and not problem.is_backward:
        # The forward pass is always deterministic.
        problem = replace(problem, deterministic=False)
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
    ragged = problem.packed or problem.lengths or problem.page_size
    return problem.seqlen_q > (1 if ragged else problem.seqlen_kv)


def rounded_up(tokens: int) -> int:
    """Returns the next power of two. Numbers of tokens and pages are rounded so that problems repeat."""
    return 1 << max(0, tokens - 1).bit_length()


# Values of each feature's fields in a problem without the feature.
DEFAULTS: dict[Feature, dict[str, object]] = {
    Feature.WINDOW: {"window_left": None, "window_right": None},
    Feature.FIRST_TOKENS: {"first_tokens": 0},
    Feature.CHUNK: {"chunk": 0},
    Feature.PREFIX: {"prefix": False},
    Feature.SOFTCAP: {"softcap": False},
    Feature.ALIBI: {"alibi": False},
    Feature.BIAS: {"bias": Bias.NONE},
    Feature.SINKS: {"sinks": False},
    Feature.PACKED: {"packed": 0},
    Feature.LENGTHS: {"lengths": False},
    Feature.PAGES: {"page_size": 0},
    Feature.QUANTIZED_KV: {"kv_dtype": None},
    Feature.LATENT: {"latent": False},
    Feature.DROPOUT: {"dropout": False},
    Feature.DETERMINISTIC: {"deterministic": False},
}


def without(problem: Problem, features: Iterable[Feature]) -> Problem:
    """Returns a problem without some features."""
    changes = {field: value for feature in features for field, value in DEFAULTS[feature].items()}
    return msgspec.structs.replace(problem, **changes)
