"""Mutants of the portable families, for the interpreter and the GPU."""

from typing import NamedTuple

import msgspec

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.templates.registry import find_family
from tests.mutants.core import Mutant, Patch, Subject, mutants_of

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
        *mutants_of(causal, (
            ("diagonal one key too far", last, "queries + diagonal + 2"),
            ("diagonal one key too short", last, "queries + diagonal"),
            ("diagonal aligned to the other corner", "diagonal = seqlen_kv - seqlen_q", "diagonal = 0"),
            ("diagonal off", f"s = tl.where({CAUSAL_MASK[name]}, {IN_LOGITS}", "pass"),
            ("one key in some rows forgotten", (forget("(key_offsets == 5)[None, :]"),)),
        )),
        *mutants_of(full, (
            ("tail of K unmasked", f"s = tl.where({TAIL_MASK[name]}, {IN_LOGITS}", "pass"),
            ("a block forgotten in some rows", (forget("(start == BLOCK_N)"),)),
        )),
    )  # fmt: skip


def softmax(bench: Bench) -> tuple[Mutant, ...]:
    """Maxima, sums, rescaling, scale and log-sum-exp."""
    causal, loops = bench.subject(), bench.loops()
    return (
        *mutants_of(causal, (
            ("accumulator not rescaled", "accumulator * rescale[:, None]", "accumulator", None, loops),
            ("sum not rescaled", "running_sum * rescale", "running_sum"),
            ("maximum not kept",
             "return p, rescale, new_max,", "return p, rescale, tl.minimum(running_max, new_max),"),
            ("scale applied twice", "scale_log2 = scale * LOG2_E", "scale_log2 = scale * scale * LOG2_E"),
            ("natural exponentials", "scale_log2 = scale * LOG2_E", "scale_log2 = scale"),
            ("lse in base 2", "tl.log2(running_sum)) * LN_2", "tl.log2(running_sum))"),
            ("lse without the maximum", "(running_max + tl.log2(running_sum))", "tl.log2(running_sum)"),
            ("empty rows divided by zero", "tl.where(running_sum == 0.0, 1.0, running_sum)", "running_sum"),
            ("empty rows shifted by -inf", 'tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max"),
        )),
        *mutants_of(bench.subject(exact=True), (
            ("weights rounded to 8 bits",
             "p_low = p.to(v.dtype.element_ty)", "p_low = p.to(tl.bfloat16).to(v.dtype.element_ty)", None,
             loops),
        )),
    )  # fmt: skip


def places(bench: Bench) -> tuple[Mutant, ...]:
    """Where tensors are read and written."""
    causal = bench.subject()
    queries_outer = bench.family == QUERIES_OUTER
    return mutants_of(causal, (
        ("wrong KV head", "head // group_size", "head % (heads // group_size)"),
        ("keys of the wrong batch", "batch * stride_kb", "batch * stride_vb"),
        ("strides of K used for V",
         "keys[:, None] * stride_vs", "keys[:, None] * stride_ks", None, bench.loops()),
        ("padding columns read", " & (columns_32 < HEAD_DIM)[None, :]", "", None, 2),
        ("padding columns written",
         " & (columns_32 < VALUE_HEAD_DIM)[None, :]", "", None, 2 if queries_outer else 6),
        ("lse of another head", "tl.store(lse + ", "tl.store(lse + seqlen_q + "),
    ))  # fmt: skip
