"""Mutants of scales of heads, for both portable serving families."""

from flashtune.core.problem import KvDtype, KvScale
from tests.mutants.core import Mutant, Subject, mutants_of

# Options of a problem with a scale for each head.
HEAD_SCALED = {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.HEAD}
OUTPUT = "accumulator / divisor[:, None] * v_factor"


def head_factors(subject: Subject) -> tuple[Mutant, ...]:
    """Keys and values of 8 bits, with a scale for each head."""
    k_factor, v_factor = (f"kv_head * stride_{letter}_scale_h" for letter in "kv")
    return mutants_of(subject, (
        ("k_scale missing", "scale * k_factor * LOG2_E", "scale * LOG2_E"),
        ("k_scale twice", "scale * k_factor *", "scale * k_factor * k_factor *"),
        ("k_scale of the first head", k_factor, f"0 * {k_factor}"),
        ("v_scale missing", OUTPUT, OUTPUT.removesuffix(" * v_factor")),
        ("v_scale of the keys", OUTPUT, OUTPUT.replace("v_factor", "k_factor")),
        ("v_scale of the first head", v_factor, f"0 * {v_factor}"),
    ))  # fmt: skip
