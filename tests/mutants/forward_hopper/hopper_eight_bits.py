"""Mutants of Hopper kernels of 8-bit inputs: scales, transposed values, weights of 8 bits."""

from flashtune.core.problem import Causal, Dtype
from tests.mutants.core import Mutant, mutants_of
from tests.mutants.forward_hopper.hopper import FIRST_BLOCK, LATER_BLOCKS, a_small_problem, subject
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
    return mutants_of(FULL, (
        ("q_scale missing", OF_Q, "1.0"),
        ("q_scale of the group's first head", OF_Q, OF_Q.replace("this.head", "0")),
        ("q_scale of the KV head", OF_Q, "gl.load(q_scale + kv_number)"),
        ("k_scale missing", OF_K, "1.0"),
        ("k_scale of the first sequence", OF_K, "gl.load(k_scale + this.kv_head)"),
        ("v_scale missing", OF_V, "1.0"),
        ("v_scale of the first KV head", OF_V, "gl.load(v_scale)"),
        ("v_scale of the keys", OF_V, OF_K),
        ("v_scale of the tile that comes next",
         "factor = o_scale /",
         "factor = gl.load(v_scale + tile.batch * scheduler.kv_heads + tile.kv_head) /"),
    ))  # fmt: skip


def weights() -> tuple[Mutant, ...]:
    """Weights of 8 bits."""
    return (
        *mutants_of(FULL, (
            # Weights meet the values of other keys among sixteen.
            ("weights' columns not permuted", EXCHANGED, "p"),
            ("first weights' columns not permuted",
             "store_p(p, GROUP)", f"store_p({BACK}, GROUP)", FIRST_BLOCK),
            ("weights of the block before", "store_p(p, GROUP)", "pass", LATER_BLOCKS),
            ("weights of a pair swapped", "low, {second}, {first};", "low, {first}, {second};"),
            ("pairs of weights swapped", "{{low, high}}", "{{high, low}}"),
            # A thread's last four weights are those of its first four columns.
            ("last word of weights not recalled",
             "mov.b32 ${word}, weights_{group}_{word};",
             "mov.b32 ${word}, weights_{group}_{word % (words - 1)};"),
            ("first block not shifted", EXPONENTIATED, SHIFTED_BACK, FIRST_BLOCK),
            ("later blocks not shifted", EXPONENTIATED, SHIFTED_BACK, LATER_BLOCKS),
            # Weights outgrow 448 before a maximum is followed.
            ("slack beyond e4m3",
             "RESCALE_THRESHOLD = gl.constexpr(2.0)", "RESCALE_THRESHOLD = gl.constexpr(4.0)"),
            ("shift beyond e4m3", "P_SHIFT = gl.constexpr(6.0)", "P_SHIFT = gl.constexpr(9.0)"),
            ("tail unmasked", "if this.seqlen_kv % BLOCK_N != 0:", "if this.seqlen_kv < 0:"),
            ("second row of a thread has no vote", VOTE, "${rows}, 0; or.pred"),
        )),
        *mutants_of(CAUSAL, (
            # Scores whose scale is zero in float32 are NaN where they are masked.
            ("a scale of zero masks nothing",
             "s_scale_log2 = gl.where(s_scale_log2 == 0.0, 1e-30, s_scale_log2)", "pass"),
            ("diagonal one key too far",
             "positions + diagonal + RIGHT + 1, this.seqlen_kv)",
             "positions + diagonal + 2, this.seqlen_kv)"),
        )),
        *mutants_of(CAUSAL_LSE, (
            ("shift left in the log-sum-exp", "lse_log2 - P_SHIFT", "lse_log2"),
        )),
    )  # fmt: skip


def transposition() -> tuple[Mutant, ...]:
    """The first kernel, which writes V as the matrix units want it."""
    return mutants_of(FULL, (
        # Weights, whose columns are permuted, meet values that are not.
        ("values in the order of keys", SOURCES, "sources = places"),
        ("places permuted the wrong way round",
         SOURCES, "sources = places - low + low // 8 * 2 + low % 8 // 2 * 4 + low % 2"),
        ("tail of V read", EXISTS, "mask=exists & (sources < seqlen_kv + 16)[:, None]"),
        # Places behind the last key keep the contents of the workspace.
        ("tail of V not cleared", "(places < keys)[None, :]", "(places < seqlen_kv)[None, :]"),
        ("values of another head",
         "(head % kv_heads).to(tl.int64) * stride_vh", "(head // kv_heads).to(tl.int64) * stride_vh"),
        ("last column of V left out", "exists = (columns < 128)", "exists = (columns < 127)"),
        ("last keys of V left out", "keys = (seqlen_kv + 15) // 16 * 16", "keys = seqlen_kv // 16 * 16"),
    ))  # fmt: skip
