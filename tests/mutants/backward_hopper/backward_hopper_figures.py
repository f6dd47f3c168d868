"""Mutants of Hopper backward kernels with wrong statistics, products or dropout."""

from tests.mutants.backward_hopper.backward_hopper import (
    CAUSAL,
    CONSUMER,
    DROPPING,
    FINISH,
    HALVES,
    NARROW,
    PADDED,
    PREPARE,
    ROWS_OF_HEAD,
    TOLD,
    WIDE,
)
from tests.mutants.core import Mutant, mutants_of

ELEMENT = "DTYPE"
OF_DK = "dk = warpgroup_mma(gl.convert_layout(ds, P_OPERAND), q_tile, dk, is_async=True)"
OF_DV = "dv = warpgroup_mma(gl.convert_layout(p_low, P_OPERAND), do_tile, dv, is_async=True)"


def statistics() -> tuple[Mutant, ...]:
    """Mutants of log-sum-exps and deltas: of their terms and of their rows."""
    delta, of_dlse = "-row_delta)", "row_delta -= tl.load(dlse"
    product = "tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)"
    return (
        *mutants_of(CAUSAL, (
            ("delta left out", delta, "tl.zeros([64], tl.float32))", PREPARE),
            ("delta of the other sign", delta, "row_delta)", PREPARE),
            ("delta of the output alone", product, product.replace("dout_tile", "out_tile")),
            ("delta of the first sequence's output",
             "out_at = out + batch * stride_ob", "out_at = out", PREPARE),
            # Products that are scaled later begin at unscaled log-sum-exps.
            ("lse not over the scale", "-row_lse / scale", "-row_lse"),
            ("lse left out", "(stats, -row_lse / scale)", "(stats, tl.where(query_exists, 0.0, -row_lse))"),
            # Log-sum-exps and deltas are those of the head with the KV head's number.
            ("rows of the KV head", ROWS_OF_HEAD, ROWS_OF_HEAD.replace("+ head", "+ kv_head")),
            ("rows of the first sequence", ROWS_OF_HEAD, "stat = head * 2"),
            ("log-sum-exps for deltas", "[stat + 1, row]", "[stat, row]"),
            ("rows of the block before", "[stat, row]", "[stat, gl.maximum(row - BLOCK_M, 0)]"),
        )),
        *mutants_of(PADDED, (
            ("delta of columns that are not there",
             "query_exists[:, None] & (columns < 80)[None, :]", "query_exists[:, None]", PREPARE),
        )),
        *mutants_of(TOLD, (
            ("dlse of the other sign", of_dlse, of_dlse.replace("-=", "+=")),
            ("dlse forgotten",
             "other=0.0)\n# A row without visible", "other=0.0) * 0.0\n# A row without visible", PREPARE),
        )),
        *mutants_of(HALVES, (
            ("lse in natural units", "row_lse * -1.4426950408889634", "-row_lse"),
        )),
    )  # fmt: skip


def products() -> tuple[Mutant, ...]:
    """Mutants of the operands of products, and of their scales."""
    return (
        *mutants_of(CAUSAL, (
            ("natural exponentials", "scale_log2 = scale * LOG2_E", "scale_log2 = scale"),
            ("dk: scale missing", "(dk * scale)", "dk"),
            ("dk: scale twice", "(dk * scale)", "(dk * scale * scale)"),
            ("dv: scaled", f"dv.to({ELEMENT})", f"(dv * scale).to({ELEMENT})"),
            ("dq: scale missing",
             "(tl.load(workspace_1 + numbers) * scale)", "tl.load(workspace_1 + numbers)", FINISH),
            ("dq: scale in units of log2", "* scale).to(dq", "* scale * 1.4426950408889634).to(dq", FINISH),
            ("dq of weights", ".store(ds)", ".store(p_low)"),
            ("dk of weights", OF_DK, OF_DK.replace("ds,", "p_low,")),
            ("dk of the output's gradient", OF_DK, OF_DK.replace("q_tile", "do_tile")),
            ("dv of queries", OF_DV, OF_DV.replace("do_tile", "q_tile")),
            ("scores of values", "(shared.k_tiles, GROUP, ", "(shared.v_tiles, GROUP, ", CONSUMER, 2),
            ("dq of one group's keys", "GROUP if turn == 0 else 1 - GROUP", "GROUP"),
            ("dq of the other group's keys",
             "shared.k_tiles.index(opaque(source))", "shared.k_tiles.index(opaque(1 - source))"),
            ("dq of the second group alone", "use_acc=turn > 0", "use_acc=False"),
        )),
        *mutants_of(WIDE, (
            ("divided: dk: scale missing", "(grads * scale)", "grads"),
        )),
        *mutants_of(NARROW, (
            # With tiles of 64 columns they meet the other 64 keys.
            ("transposed: dq of the other group's keys",
             "shared.k_tiles.index(opaque(source))", "shared.k_tiles.index(opaque(1 - source))"),
        )),
    )  # fmt: skip


def dropping() -> tuple[Mutant, ...]:
    """Which weights fall, and what their gradients are."""
    return mutants_of(DROPPING, (
        ("keys count in their block", "((n_start + keys)", "(keys"),
        ("keys are one off", "((n_start + keys)", "((n_start + keys + 1)"),
        ("dv of all weights", "p_low = gl.maximum(p, 0.0)", "p_low = gl.abs(p)"),
        ("gradients of dropped weights", "ds = gl.abs(p) *", "ds = gl.maximum(p, 0.0) *"),
        ("weights' gradients do not fall", "(gl.maximum(p, 0.0) * dp + ds)", "(gl.abs(p) * dp + ds)"),
        ("deltas unscaled", "row_delta *= 1.0 - dropout", "pass"),
        ("unscaled", "row_lse += tl.log(1.0 - dropout)", "pass"),
        ("words swapped", "[stat + 2, row]", "[stat + 3, row]"),
        ("mask of the next head",
         "tl.load(seed), batch_head, queries)", "tl.load(seed), batch_head + 1, queries)"),
        ("another seed", "random_rows(tl.load(seed),", "random_rows(tl.load(seed) + 1,"),
        ("queries count in their block", "batch_head, queries)", "batch_head, queries - tile * 64)"),
        ("the others fall", "setp.ge.u32 stays", "setp.lt.u32 stays"),
    ), prefix="dropout: ")  # fmt: skip
