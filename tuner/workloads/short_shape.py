"""Short text of a problem for columns of tables: `h32/8 d128 s4096 b1 causal`."""

from collections.abc import Iterable

from flashtune.core.problem import Causal, Dtype, Problem, feature_words

# Prefixes of features' words that are common in tables.
SHORT = (("window", "w"), ("page", "p"))
MASKS = {Causal.NONE: "", Causal.BOTTOM_RIGHT: "causal", Causal.TOP_LEFT: "top-left"}


def short_shape(problem: Problem) -> str:
    """Returns the heads, width, length, batch and mask of a problem, and other values that are not defaults.

    Different problems have different texts. bf16 and the forward pass are the defaults.
    """
    words = (
        _pair("h", problem.heads, problem.kv_heads),
        _pair("d", problem.head_dim, problem.value_head_dim),
        _lengths(problem),
        f"b{problem.batch}",
        "" if problem.dtype is Dtype.BF16 else problem.dtype.value,
        MASKS[problem.causal],
        "bwd" if problem.is_backward else "",
        *map(_shortened, feature_words(problem).split("_")),
    )
    return " ".join(word for word in words if word)


def by_length(problems: Iterable[Problem]) -> dict[str, list[Problem]]:
    """Returns problems that differ only in the number of keys, shortest first, by their text without it."""
    groups: dict[str, list[Problem]] = {}
    for problem in sorted(problems, key=lambda each: each.seqlen_kv):
        lengths = f"s{problem.seqlen_kv}", f"k{problem.seqlen_kv}"
        text = " ".join(word for word in short_shape(problem).split() if word not in lengths)
        groups.setdefault(text, []).append(problem)
    return groups


def _shortened(word: str) -> str:
    return next((short + word.removeprefix(name) for name, short in SHORT if word.startswith(name)), word)


def _pair(letter: str, first: int, second: int) -> str:
    return f"{letter}{first}" if first == second else f"{letter}{first}/{second}"


def _lengths(problem: Problem) -> str:
    if problem.seqlen_q == problem.seqlen_kv:
        return f"s{problem.seqlen_q}"
    return f"q{problem.seqlen_q} k{problem.seqlen_kv}"
