"""Mutants of scales of heads, for both portable serving families."""

from __future__ import annotations

from flashtune.core.problem import KvDtype, KvScale
from tests.mutants.core import Mutant, Subject
from tests.mutants.serving_size import change, mutants_of

# What a kernel computes that they are mistakes of.
HEAD_SCALED = {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.HEAD}
OUTPUT = "accumulator / divisor[:, None] * v_factor"


def head_factors(subject: Subject) -> tuple[Mutant, ...]:
    """Keys and values of 8 bits, with a scale for each head."""
    k_factor, v_factor = (f"kv_head * stride_{letter}_scale_h" for letter in "kv")
    changes = (
        change("k_scale missing", "Keys count as their 8 bits say.",
               "scale * k_factor * LOG2_E", "scale * LOG2_E"),
        change("k_scale twice", "Keys are scaled twice.",
               "scale * k_factor *", "scale * k_factor * k_factor *"),
        change("k_scale of the first head", "Keys of all heads have one scale.", k_factor, f"0 * {k_factor}"),
        change("v_scale missing", "Values count as their 8 bits say.",
               OUTPUT, OUTPUT.removesuffix(" * v_factor")),
        change("v_scale of the keys", "Values have the scale of their head's keys.",
               OUTPUT, OUTPUT.replace("v_factor", "k_factor")),
        change("v_scale of the first head", "Values of all heads have one scale.",
               v_factor, f"0 * {v_factor}"),
    )  # fmt: skip
    return mutants_of(subject, changes)
