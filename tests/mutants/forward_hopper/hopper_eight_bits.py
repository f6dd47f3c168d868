"""Mutants of Hopper kernels of 8-bit inputs: scales, transposed values, weights of 8 bits."""

from __future__ import annotations

from flashtune.core.problem import Causal, Dtype
from tests.mutants.core import Mutant
from tests.mutants.forward_hopper.hopper import FIRST_BLOCK, LATER_BLOCKS, a_small_problem, only, subject
from tests.mutants.forward_hopper.hopper_softmax import VOTE

CAUSAL = subject(a_small_problem(causal=Causal.BOTTOM_RIGHT, dtype=Dtype.E4M3, batch=2))
CAUSAL_LSE = subject(a_small_problem(causal=Causal.BOTTOM_RIGHT, dtype=Dtype.E4M3, batch=2), lse=True)
FULL = subject(a_small_problem(dtype=Dtype.E4M3, batch=2))
OF_Q, OF_K, OF_V = (
    "gl.load(q_scale + kv_number * scheduler.group_size + this.head)",
    "gl.load(k_scale + kv_number)",
    "gl.load(v_scale + kv_number)",
)
EXCHANGED = "p.reshape([GROUP_M, BLOCK_N // 16, 2, 4, 2]).permute(0, 1, 3, 2, 4)"
# The inverse of the exchange, which the exchange undoes.
BACK = "p.reshape([GROUP_M, BLOCK_N // 16, 4, 2, 2]).permute(0, 1, 3, 2, 4).reshape([GROUP_M, BLOCK_N])"
EXPONENTIATED, SHIFTED_BACK = (
    f"exponentiate(s, {of}, s_scale_log2)" for of in ("row_max", "row_max + P_SHIFT")
)
SOURCES = "sources = places - low + low // 2 % 2 * 8 + low // 4 * 2 + low % 2"
EXISTS = "mask=exists & (sources < seqlen_kv)[:, None]"


def factors() -> tuple[Mutant, ...]:
    """Which scale multiplies what."""
    return (
        Mutant("q_scale missing", "Queries count as their 8 bits say.", FULL, only(OF_Q, "1.0")),
        Mutant(
            "q_scale of the group's first head",
            "All query heads of a KV head have one scale.",
            FULL,
            only(OF_Q, OF_Q.replace("this.head", "0")),
        ),
        Mutant(
            "q_scale of the KV head",
            "Query heads have the scale of the query head with their KV head's number.",
            FULL,
            only(OF_Q, "gl.load(q_scale + kv_number)"),
        ),
        Mutant("k_scale missing", "Keys count as their 8 bits say.", FULL, only(OF_K, "1.0")),
        Mutant(
            "k_scale of the first sequence",
            "All sequences have the scales of one.",
            FULL,
            only(OF_K, "gl.load(k_scale + this.kv_head)"),
        ),
        Mutant("v_scale missing", "Values count as their 8 bits say.", FULL, only(OF_V, "1.0")),
        Mutant(
            "v_scale of the first KV head",
            "All KV heads have one scale.",
            FULL,
            only(OF_V, "gl.load(v_scale)"),
        ),
        Mutant("v_scale of the keys", "Values have the scale of their head's keys.", FULL, only(OF_V, OF_K)),
        Mutant(
            "v_scale of the tile that comes next",
            "Values have the scale of the program's next tile.",
            FULL,
            only(
                "factor = o_scale /",
                "factor = gl.load(v_scale + tile.batch * scheduler.kv_heads + tile.kv_head) /",
            ),
        ),
    )


def weights() -> tuple[Mutant, ...]:
    """Weights of 8 bits."""
    return (
        Mutant(
            "weights' columns not permuted",
            "Weights meet the values of other keys among sixteen.",
            FULL,
            only(EXCHANGED, "p"),
        ),
        Mutant(
            "first weights' columns not permuted",
            "Weights of the first block meet the values of other keys.",
            FULL,
            only("store_p(p, GROUP)", f"store_p({BACK}, GROUP)", FIRST_BLOCK),
        ),
        Mutant(
            "weights of the block before",
            "Values meet the weights of the block that came before them.",
            FULL,
            only(
                "store_p(p, GROUP)",
                "pass",
                LATER_BLOCKS,
            ),
        ),
        Mutant(
            "weights of a pair swapped",
            "Neighbouring weights trade places as they are rounded.",
            FULL,
            only("low, {second}, {first};", "low, {first}, {second};"),
        ),
        Mutant(
            "pairs of weights swapped",
            "Of four weights the second two come first.",
            FULL,
            only("{{low, high}}", "{{high, low}}"),
        ),
        Mutant(
            "last word of weights not recalled",
            "A thread's last four weights are those of its first four columns.",
            FULL,
            only(
                "mov.b32 ${word}, weights_{group}_{word};",
                "mov.b32 ${word}, weights_{group}_{word % (words - 1)};",
            ),
        ),
        Mutant(
            "a scale of zero masks nothing",
            "Scores whose scale is zero in float32 are NaN where they are masked.",
            CAUSAL,
            only("s_scale_log2 = gl.where(s_scale_log2 == 0.0, 1e-30, s_scale_log2)", "pass"),
        ),
        Mutant(
            "shift left in the log-sum-exp",
            "The log-sum-exp is that of the shifted weights.",
            CAUSAL_LSE,
            only("lse_log2 - P_SHIFT", "lse_log2"),
        ),
        Mutant(
            "first block not shifted",
            "Weights of the first block are smaller than the others.",
            FULL,
            only(EXPONENTIATED, SHIFTED_BACK, FIRST_BLOCK),
        ),
        Mutant(
            "later blocks not shifted",
            "Weights of the first block are larger than the others.",
            FULL,
            only(EXPONENTIATED, SHIFTED_BACK, LATER_BLOCKS),
        ),
        Mutant(
            "slack beyond e4m3",
            "Weights outgrow 448 before a maximum is followed.",
            FULL,
            only("RESCALE_THRESHOLD = gl.constexpr(2.0)", "RESCALE_THRESHOLD = gl.constexpr(4.0)"),
        ),
        Mutant(
            "shift beyond e4m3",
            "The largest weights are cut off at 448.",
            FULL,
            only("P_SHIFT = gl.constexpr(6.0)", "P_SHIFT = gl.constexpr(9.0)"),
        ),
        Mutant(
            "diagonal one key too far",
            "Every query sees the key after its last one.",
            CAUSAL,
            only(
                "positions + diagonal + RIGHT + 1, this.seqlen_kv)",
                "positions + diagonal + 2, this.seqlen_kv)",
            ),
        ),
        Mutant(
            "tail unmasked",
            "Zeros that the copy engine reads behind the last key take part in the softmax.",
            FULL,
            only("if this.seqlen_kv % BLOCK_N != 0:", "if this.seqlen_kv < 0:"),
        ),
        Mutant(
            "second row of a thread has no vote",
            "A warp is rescaled when some first row of a thread has grown.",
            FULL,
            only(VOTE, "${rows}, 0; or.pred"),
        ),
    )


def transposition() -> tuple[Mutant, ...]:
    """The first kernel, which writes V as the matrix units want it."""
    return (
        Mutant(
            "values in the order of keys",
            "Weights, whose columns are permuted, meet values that are not.",
            FULL,
            only(SOURCES, "sources = places"),
        ),
        Mutant(
            "places permuted the wrong way round",
            "Values lie where the inverse permutation would put them.",
            FULL,
            only(SOURCES, "sources = places - low + low // 8 * 2 + low % 8 // 2 * 4 + low % 2"),
        ),
        Mutant(
            "tail of V read",
            "Rows after the last value are copied too.",
            FULL,
            only(EXISTS, "mask=exists & (sources < seqlen_kv + 16)[:, None]"),
        ),
        Mutant(
            "tail of V not cleared",
            "Places behind the last key keep the contents of the workspace.",
            FULL,
            only("(places < keys)[None, :]", "(places < seqlen_kv)[None, :]"),
        ),
        Mutant(
            "values of another head",
            "Heads are indexed by the sequence's number.",
            FULL,
            only("(head % kv_heads).to(tl.int64) * stride_vh", "(head // kv_heads).to(tl.int64) * stride_vh"),
        ),
        Mutant(
            "last column of V left out",
            "The last column of V is neither read nor written.",
            FULL,
            only("exists = (columns < 128)", "exists = (columns < 127)"),
        ),
        Mutant(
            "last keys of V left out",
            "The last group of sixteen keys is not transposed.",
            FULL,
            only("keys = (seqlen_kv + 15) // 16 * 16", "keys = seqlen_kv // 16 * 16"),
        ),
    )
