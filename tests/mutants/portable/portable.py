"""Mutants of the portable families, for the interpreter and the GPU."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.templates.registry import find_family
from tests.mutants.core import Mutant, Patch, Subject

QUERIES_OUTER, KEYS_OUTER = "forward_q_outer", "forward_kv_outer"
CAUSAL_MASK = {
    QUERIES_OUTER: "(start + key_offsets)[None, :] < row_end[:, None]",
    KEYS_OUTER: "keys[None, :] < row_end[:, None]",
}
TAIL_MASK = {QUERIES_OUTER: "(start + key_offsets)[None, :] < seqlen_kv", KEYS_OUTER: "key_exists[None, :]"}
IN_LOGITS = 's, float("-inf"))'


class Size(NamedTuple):
    """Type of the inputs, tile, and how many queries and keys there are."""

    dtype: Dtype
    block_m: int
    block_n: int
    seqlen: int


# Under the interpreter 16-bit products are garbage.
INTERPRETED = Size(Dtype.FP32, 16, 16, 64)
USUAL = Size(Dtype.BF16, 64, 32, 512)


class Bench(NamedTuple):
    """A family, by its name, at a size."""

    family: str
    size: Size

    def subject(self, causal: Causal = Causal.BOTTOM_RIGHT, exact: bool = False, **fields: object) -> Subject:
        """A kernel with head dims that are no power of two, in float32 where it must be `exact`."""
        dtype, block_m, block_n, seqlen = self.size
        problem = Problem(
            dtype=Dtype.FP32 if exact else dtype,
            head_dim=24,
            value_head_dim=20,
            heads=4,
            kv_heads=2,
            batch=2,
            seqlen_q=seqlen,
            seqlen_kv=seqlen,
            causal=causal,
        )
        tile = {"block_m": block_m, "block_n": block_n, "num_warps": 4, "num_stages": 2}
        config = msgspec.convert({**tile, **fields}, find_family(self.family).config_type)
        return Subject(self.family, problem, config, Specialization(lse=True))

    def loops(self) -> int:
        """Text of the processing of a key block: one family has a separate loop for full blocks."""
        return 2 if self.family == QUERIES_OUTER else 1


def of_any_order(bench: Bench) -> tuple[Mutant, ...]:
    """Mutants of both loop orders."""
    return (*masks(bench), *softmax(bench), *places(bench))


def masks(bench: Bench) -> tuple[Mutant, ...]:
    """Which keys a query sees."""
    causal, full = bench.subject(), bench.subject(Causal.NONE)
    name, loops = bench.family, bench.loops()
    last = "queries + diagonal + 1"
    rows = "(queries % 8 == 3)[:, None]"

    def forget(which: str) -> Patch:
        hidden = f'tl.where({rows} & {which}, float("-inf"), s)'
        return Patch("= softmax_step(s,", f"= softmax_step({hidden},", times=loops)

    return (
        Mutant(
            "diagonal one key too far",
            "Every query sees the key after its last one.",
            causal,
            (Patch(last, "queries + diagonal + 2"),),
        ),
        Mutant(
            "diagonal one key too short",
            "No query sees its last key.",
            causal,
            (Patch(last, "queries + diagonal"),),
        ),
        Mutant(
            "diagonal aligned to the other corner",
            "The mask starts at the first key where it should end at the last.",
            causal,
            (Patch("diagonal = seqlen_kv - seqlen_q", "diagonal = 0"),),
        ),
        Mutant(
            "diagonal off",
            "No block of keys is masked.",
            causal,
            (Patch(f"s = tl.where({CAUSAL_MASK[name]}, {IN_LOGITS}", "pass"),),
        ),
        Mutant(
            "tail of K unmasked",
            "Padding behind the last key takes part in the softmax.",
            full,
            (Patch(f"s = tl.where({TAIL_MASK[name]}, {IN_LOGITS}", "pass"),),
        ),
        Mutant(
            "one key in some rows forgotten",
            "In one row of eight the sixth key of each block has no weight.",
            causal,
            (forget("(key_offsets == 5)[None, :]"),),
        ),
        Mutant(
            "a block forgotten in some rows",
            "In one row of eight the second block of keys has no weight.",
            full,
            (forget("(start == BLOCK_N)"),),
        ),
    )


def softmax(bench: Bench) -> tuple[Mutant, ...]:
    """Maxima, sums, rescaling, scale and log-sum-exp."""
    causal, loops = bench.subject(), bench.loops()
    return (
        Mutant(
            "accumulator not rescaled",
            "Weighted values of earlier blocks keep a scale that the maximum has left behind.",
            causal,
            (Patch("accumulator * rescale[:, None]", "accumulator", times=loops),),
        ),
        Mutant(
            "sum not rescaled",
            "The sum of weights keeps a scale that the maximum has left behind.",
            causal,
            (Patch("running_sum * rescale", "running_sum"),),
        ),
        Mutant(
            "maximum not kept",
            "The running maximum falls where it should rise.",
            causal,
            (Patch("return p, rescale, new_max,", "return p, rescale, tl.minimum(running_max, new_max),"),),
        ),
        Mutant(
            "scale applied twice",
            "Scores are scaled by the square of the scale.",
            causal,
            (Patch("scale_log2 = scale * LOG2_E", "scale_log2 = scale * scale * LOG2_E"),),
        ),
        Mutant(
            "natural exponentials",
            "Powers of two are taken of scores in natural units.",
            causal,
            (Patch("scale_log2 = scale * LOG2_E", "scale_log2 = scale"),),
        ),
        Mutant(
            "lse in base 2",
            "The log-sum-exp is in units of log2.",
            causal,
            (Patch("tl.log2(running_sum)) * LN_2", "tl.log2(running_sum))"),),
        ),
        Mutant(
            "lse without the maximum",
            "The log-sum-exp lacks the maximum of the scores.",
            causal,
            (Patch("(running_max + tl.log2(running_sum))", "tl.log2(running_sum)"),),
        ),
        Mutant(
            "empty rows divided by zero",
            "A row that sees no key is NaN.",
            causal,
            (Patch("tl.where(running_sum == 0.0, 1.0, running_sum)", "running_sum"),),
        ),
        Mutant(
            "empty rows shifted by -inf",
            "A row that has seen no key yet turns NaN.",
            causal,
            (Patch('tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max"),),
        ),
        Mutant(
            "weights rounded to 8 bits",
            "Weights of a float32 kernel pass through bfloat16.",
            bench.subject(exact=True),
            (
                Patch(
                    "p_low = p.to(v.dtype.element_ty)",
                    "p_low = p.to(tl.bfloat16).to(v.dtype.element_ty)",
                    times=loops,
                ),
            ),
        ),
    )


def places(bench: Bench) -> tuple[Mutant, ...]:
    """Where tensors are read and written."""
    causal = bench.subject()
    queries_outer = bench.family == QUERIES_OUTER
    return (
        Mutant(
            "wrong KV head",
            "Query heads take the KV heads in turn, not in groups.",
            causal,
            (Patch("head // group_size", "head % (heads // group_size)"),),
        ),
        Mutant(
            "keys of the wrong batch",
            "Batches of K lie apart as those of V do.",
            causal,
            (Patch("batch * stride_kb", "batch * stride_vb"),),
        ),
        Mutant(
            "strides of K used for V",
            "Rows of V are looked for where those of K would lie.",
            causal,
            (Patch("keys[:, None] * stride_vs", "keys[:, None] * stride_ks", times=bench.loops()),),
        ),
        Mutant(
            "padding columns read",
            "Columns past the head dim are multiplied as well.",
            causal,
            (Patch(" & (columns_32 < HEAD_DIM)[None, :]", "", times=2),),
        ),
        Mutant(
            "padding columns written",
            "Columns past the value head dim are written into the next row.",
            causal,
            (Patch(" & (columns_32 < VALUE_HEAD_DIM)[None, :]", "", times=2 if queries_outer else 6),),
        ),
        Mutant(
            "lse of another head",
            "The log-sum-exp is written where the next head's lies.",
            causal,
            (Patch("tl.store(lse + ", "tl.store(lse + seqlen_q + "),),
        ),
    )
