"""Mutants of Hopper backward kernels with wrong statistics, products or dropout."""

from __future__ import annotations

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
from tests.mutants.forward_hopper.hopper import only

ELEMENT = "DTYPE"
OF_DK = "dk = warpgroup_mma(gl.convert_layout(ds, P_OPERAND), q_tile, dk, is_async=True)"
OF_DV = "dv = warpgroup_mma(gl.convert_layout(p_low, P_OPERAND), do_tile, dv, is_async=True)"


def statistics() -> tuple[Mutant, ...]:
    """Log-sum-exps and deltas: what they are made of, and which row meets which."""
    delta, of_dlse = "-row_delta)", "row_delta -= tl.load(dlse"
    product = "tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)"
    return mutants_of((
        ("delta left out", "There dS is P times dP.", CAUSAL,
         only(delta, "tl.zeros([64], tl.float32))", PREPARE)),
        ("delta of the other sign", "It is added where it should be taken off.", CAUSAL,
         only(delta, "row_delta)", PREPARE)),
        ("delta of the output alone", "It is that of the output's squares.", CAUSAL,
         only(product, product.replace("dout_tile", "out_tile"))),
        ("delta of columns that are not there", "Memory after a row of the output counts.", PADDED,
         only("query_exists[:, None] & (columns < 80)[None, :]", "query_exists[:, None]", PREPARE)),
        ("delta of the first sequence's output", "Deltas of all sequences are made of one's output.", CAUSAL,
         only("out_at = out + batch * stride_ob", "out_at = out", PREPARE)),
        ("dlse of the other sign", "The gradient of the log-sum-exp is added to delta.", TOLD,
         only(of_dlse, of_dlse.replace("-=", "+="))),
        ("dlse forgotten", "The gradient of the log-sum-exp counts for nothing.", TOLD,
         only("other=0.0)\n# A row without visible", "other=0.0) * 0.0\n# A row without visible", PREPARE)),
        ("lse not over the scale", "Products that are scaled later begin at unscaled log-sum-exps.", CAUSAL,
         only("-row_lse / scale", "-row_lse")),
        ("lse in natural units", "Weights are relative to a logarithm to base e.", HALVES,
         only("row_lse * -1.4426950408889634", "-row_lse")),
        ("lse left out", "Products begin at zero.", CAUSAL,
         only("(stats, -row_lse / scale)", "(stats, tl.where(query_exists, 0.0, -row_lse))")),
        ("rows of the KV head", "Log-sum-exps and deltas are those of the head with the KV head's number.",
         CAUSAL, only(ROWS_OF_HEAD, ROWS_OF_HEAD.replace("+ head", "+ kv_head"))),
        ("rows of the first sequence", "All sequences have the log-sum-exps and deltas of one.", CAUSAL,
         only(ROWS_OF_HEAD, "stat = head * 2")),
        ("log-sum-exps for deltas", "Products of values begin at log-sum-exps.", CAUSAL,
         only("[stat + 1, row]", "[stat, row]")),
        ("rows of the block before", "Scores are relative to the log-sum-exps of other queries.", CAUSAL,
         only("[stat, row]", "[stat, gl.maximum(row - BLOCK_M, 0)]")),
    ))  # fmt: skip


def products() -> tuple[Mutant, ...]:
    """What meets what, and by which scale."""
    return mutants_of((
        ("natural exponentials", "Powers of two are taken of scores in natural units.", CAUSAL,
         only("scale_log2 = scale * LOG2_E", "scale_log2 = scale")),
        ("dk: scale missing", "The gradient of keys is not scaled.", CAUSAL, only("(dk * scale)", "dk")),
        ("dk: scale twice", "The gradient of keys is scaled twice.", CAUSAL,
         only("(dk * scale)", "(dk * scale * scale)")),
        ("dv: scaled", "The gradient of values is scaled.", CAUSAL,
         only(f"dv.to({ELEMENT})", f"(dv * scale).to({ELEMENT})")),
        ("dq: scale missing", "The gradient of queries is not scaled.", CAUSAL,
         only("(tl.load(workspace_1 + numbers) * scale)", "tl.load(workspace_1 + numbers)", FINISH)),
        ("dq: scale in units of log2", "The gradient of queries is of scores to base 2.", CAUSAL,
         only("* scale).to(dq", "* scale * 1.4426950408889634).to(dq", FINISH)),
        ("divided: dk: scale missing", "Where groups divide products, dk is not scaled.", WIDE,
         only("(grads * scale)", "grads")),
        ("dq of weights", "Keys are weighed by weights in place of the gradients of scores.", CAUSAL,
         only(".store(ds)", ".store(p_low)")),
        ("dk of weights", "Queries are weighed by weights.", CAUSAL,
         only(OF_DK, OF_DK.replace("ds,", "p_low,"))),
        ("dk of the output's gradient", "The gradients of scores meet dout.", CAUSAL,
         only(OF_DK, OF_DK.replace("q_tile", "do_tile"))),
        ("dv of queries", "Weights meet queries in place of dout.", CAUSAL,
         only(OF_DV, OF_DV.replace("do_tile", "q_tile"))),
        ("scores of values", "Queries meet values in place of keys.", CAUSAL,
         only("(shared.k_tiles, GROUP, ", "(shared.v_tiles, GROUP, ", CONSUMER, 2)),
        ("dq of one group's keys", "A group takes its own gradients of scores twice.", CAUSAL,
         only("GROUP if turn == 0 else 1 - GROUP", "GROUP")),
        ("dq of the other group's keys", "Gradients of scores meet the other 64 keys.", CAUSAL,
         only("shared.k_tiles.index(opaque(source))", "shared.k_tiles.index(opaque(1 - source))")),
        ("dq of the second group alone", "The second product begins anew.", CAUSAL,
         only("use_acc=turn > 0", "use_acc=False")),
        ("transposed: dq of the other group's keys", "With tiles of 64 columns they meet the other 64 keys.",
         NARROW, only("shared.k_tiles.index(opaque(source))", "shared.k_tiles.index(opaque(1 - source))")),
    ))  # fmt: skip


def dropping() -> tuple[Mutant, ...]:
    """Which weights fall, and what their gradients are."""
    changes = (
        ("keys count in their block", "Groups' keys drop alike.", "((n_start + keys)", "(keys"),
        ("keys are one off",
         "The mask lies one key beside.", "((n_start + keys)", "((n_start + keys + 1)"),
        ("dv of all weights", "Dropped weights count in dv.",
         "p_low = gl.maximum(p, 0.0)", "p_low = gl.abs(p)"),
        ("gradients of dropped weights", "Scores of dropped weights have no gradient.",
         "ds = gl.abs(p) *", "ds = gl.maximum(p, 0.0) *"),
        ("weights' gradients do not fall", "Dropped weights have a gradient like others.",
         "(gl.maximum(p, 0.0) * dp + ds)", "(gl.abs(p) * dp + ds)"),
        ("deltas unscaled", "Deltas lack the share of kept weights.", "row_delta *= 1.0 - dropout", "pass"),
        ("unscaled", "Kept weights are not scaled.", "row_lse += tl.log(1.0 - dropout)", "pass"),
        ("words swapped", "The first word is not used.", "[stat + 2, row]", "[stat + 3, row]"),
        ("mask of the next head", "Heads drop as others do.",
         "tl.load(seed), batch_head, queries)", "tl.load(seed), batch_head + 1, queries)"),
        ("another seed", "The mask is that of the next seed.",
         "random_rows(tl.load(seed),", "random_rows(tl.load(seed) + 1,"),
        ("queries count in their block", "Blocks of queries drop alike.",
         "batch_head, queries)", "batch_head, queries - tile * 64)"),
        ("the others fall", "Kept weights are dropped.", "setp.ge.u32 stays", "setp.lt.u32 stays"),
    )  # fmt: skip
    return mutants_of(
        (f"dropout: {name}", breaks, DROPPING, only(old, new)) for name, breaks, old, new in changes
    )
