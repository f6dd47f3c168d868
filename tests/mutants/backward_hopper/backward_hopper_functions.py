"""Mutants of Hopper backward kernels with score and mask functions."""

from collections.abc import Callable
from typing import Any

import torch

from flashtune.request.functions.tracing import trace
from tests.mutants.backward_hopper.backward_hopper import (
    BEFORE_STEPS,
    PREPARE,
    STEPS,
    backward_problem,
    backward_subject,
)
from tests.mutants.core import Mutant, Part, Subject, mutants_of

SLOPES, BIAS, GATES = torch.rand(4), torch.rand(4, 17), torch.rand(2, 512)
CAP, SPAN = 1.5, 200
SCORES = Part("def change_scores(", "def hide_by_function(")
HIDES = Part("def hide_by_function(", "def add_elements(")
ADDS = Part("def add_elements(", "def weigh(")
WEIGHS = Part("def weigh(", "def produce(")
# Lengths in which no block ends.
LENGTHS: dict[str, Any] = {"seqlen_q": 500, "seqlen_kv": 490}


def capped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return CAP * torch.tanh(s * GATES[b, q] / CAP)


def windowed(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < SPAN)


def relative(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + SLOPES[h] * (k - q) + BIAS[h, (q - k).clamp(-8, 8)]


def subject(head_dim: int, score: Callable[..., Any], mask: Callable[..., Any] | None = None) -> Subject:
    """A kernel of functions, with gradients of all captured tensors."""
    functions = trace(score, mask).functions
    trained = functions.with_gradients(range(len(functions.tables)))
    return backward_subject(backward_problem(head_dim, functions=trained, **LENGTHS))


CAPPED, RELATIVE = subject(64, capped, windowed), subject(128, relative)


def functions() -> tuple[Mutant, ...]:
    """All of them."""
    return (*derivatives(), *captured())


def derivatives() -> tuple[Mutant, ...]:
    """Derivatives by the score, and masks."""
    slope = "gl.where(p == 0.0, 0.0, p * slope)"
    return mutants_of(
        CAPPED,
        (
            ("functions: derivative left out", slope, "p"),
            ("functions: derivative without its square", "pair_17 * -1.0", "pair_7 * -1.0", SCORES),
            ("functions: gate of the next query", "gl.minimum(query_2, seqlen_q - 1)",
             "gl.minimum(query_2 + 1, seqlen_q - 1)", SCORES),
            ("functions: second half as the first", "m_block * BLOCK_M + BLOCK_M // 2, function_queries",
             "m_block * BLOCK_M, function_queries", STEPS),
            ("functions: elements of the second half as of the first",
             "m_start + BLOCK_M // 2, function_queries", "m_start, function_queries", STEPS),
            ("functions: halves of the log-sum-exp exchanged", "lse_row.slice(0, BLOCK_M // 2, 1)",
             "lse_row.slice(BLOCK_M // 2, BLOCK_M // 2, 1)"),
            ("functions: mask left out", "p = hide_by_function(", "_ = hide_by_function(", WEIGHS),
            ("functions: diagonal hidden", "<= (queries & -7)[None, :]", "< (queries & -7)[None, :]", HIDES),
            ("functions: one key too many", "(queries & -7)[None, :] <", "(queries & -7)[None, :] <=", HIDES),
            ("functions: term without the gradient", "term_0.to(gl.float32) * dp", "term_0.to(gl.float32)"),
            ("functions: sums of one warp", "gl.convert_layout(of_threads, SUMS_LAYOUT), 0)",
             "gl.convert_layout(of_threads, SUMS_LAYOUT), 0) * 0.25"),
        ),
    )  # fmt: skip


def captured() -> tuple[Mutant, ...]:
    """Gradients of captured tensors, and their heads."""
    return mutants_of(
        RELATIVE,
        (
            ("functions: head stays", "head = gl.where(wraps, head + 1, head)",
             "head = gl.where(wraps, head, head)", STEPS),
            ("functions: distances of another key", "row_of_3 = (-origin + key_3)",
             "row_of_3 = (1 - origin + key_3)", BEFORE_STEPS),
            ("functions: sums of warps with several elements", "(least == most) & (of_", "(of_"),
            ("functions: sums of warps left out", "(least == most) & (of_", "(least > most) & (of_"),
            ("functions: elements of warps with one", "(least != most)[:, None] & (change", "(change"),
            ("functions: gradients in the first table", "gradient_1 = gradient_0 + numbers_0_0",
             "gradient_1 = gradient_0", BEFORE_STEPS),
            ("functions: sum of the last block alone", "element_1 += gl.sum(", "element_1 = gl.sum(", ADDS),
            ("functions: sums of all heads", "element_1 = gl.zeros_like(element_1)", "element_1 = element_1",
             STEPS),
            ("functions: gradients not cleared", "mask=places < table_numbers", "mask=places < 0", PREPARE),
        ),
    )  # fmt: skip
