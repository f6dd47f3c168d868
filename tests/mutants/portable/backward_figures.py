"""Mutants of the split backward family: wrong results of a pair, and wrong addresses."""

from flashtune.core.problem import Bias
from tests.mutants.core import Mutant, Part, mutants_of
from tests.mutants.portable.backward_size import (
    DELTA,
    KEYS,
    KEYS_DELTA,
    LOOPS,
    LOW_SCORES,
    LOW_WEIGHTS,
    QUERIES,
    QUERIES_DELTA,
    ROWS,
    SCALE,
    Size,
)


def figures(size: Size) -> tuple[Mutant, ...]:
    """Delta, log-sum-exps and scales."""
    causal, told = size.subject(), size.subject(lse=True)
    product = "tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)"
    of_rows = "mask=query_exists, other=0.0) * LOG2_E"
    of_dlse = "row_delta -= tl.load(dlse + rows, mask=query_exists, other=0.0)"
    of_dk, of_dq, of_dv = "(dk_sum * scale)", "(dq_sum * scale)", "dv_sum.to("
    squares = product.replace("dout_tile", "out_tile")
    biased = size.subject(bias=Bias.ADDITIVE)
    return (
        *mutants_of(causal, (
            ("dk: delta left out", KEYS_DELTA, "dp", KEYS, LOOPS),
            ("dq: delta left out", QUERIES_DELTA, "dp", QUERIES, LOOPS),
            ("delta of the output alone", product, squares, DELTA),
            ("lse in natural units", of_rows, of_rows.removesuffix(" * LOG2_E"), DELTA),
            ("dk: scale missing", of_dk, "dk_sum", KEYS),
            ("dq: scale missing", of_dq, "dq_sum", QUERIES),
            ("dk: scale twice", of_dk, "(dk_sum * scale * scale)", KEYS),
            ("dq: scale in units of log2", of_dq, "(dq_sum * scale_log2)", QUERIES),
            ("dv: scaled", of_dv, "(dv_sum * scale).to(", KEYS),
            ("dk, dv: natural exponentials", SCALE, "scale_log2 = scale", KEYS),
            ("dq: natural exponentials", SCALE, "scale_log2 = scale", QUERIES),
        )),
        *mutants_of(told, (
            ("dlse of the other sign", of_dlse, of_dlse.replace("-=", "+="), DELTA),
            ("dlse forgotten", of_dlse, "pass", DELTA),
        )),
        *mutants_of(biased, (
            # Rows of a finite mask value have too large probabilities.
            ("sums of large scores lost", "LARGE = tl.constexpr(1024.0)", "LARGE = tl.constexpr(1e38)"),
            ("sums of large scores over later keys",
             "tl.range(0, seqlen_kv, SUMMED_KEYS)", "tl.range(SUMMED_KEYS, seqlen_kv, SUMMED_KEYS)"),
        )),
    )  # fmt: skip


def roundings(size: Size) -> tuple[Mutant, ...]:
    """Mutants of a float32 kernel that round values to bfloat16."""
    exact = size.subject(exact=True)
    low, lower = ".to(q.dtype.element_ty)", ".to(tl.bfloat16).to(q.dtype.element_ty)"
    return mutants_of(exact, (
        ("dk: rounded to 8 bits", LOW_SCORES, LOW_SCORES.replace(low, lower), KEYS, LOOPS),
        ("dq: rounded to 8 bits", LOW_SCORES, LOW_SCORES.replace(low, lower), QUERIES, LOOPS),
        ("dv: rounded to 8 bits", LOW_WEIGHTS, LOW_WEIGHTS.replace(low, lower), KEYS, LOOPS),
    ))  # fmt: skip


def places(size: Size) -> tuple[Mutant, ...]:
    """Where tensors are read."""
    causal = size.subject()
    member = "head = kv_head * group_size + member"
    return mutants_of(causal, (
        ("first head of a group for all", member, "head = kv_head * group_size", KEYS, LOOPS),
        ("heads of groups in turn", member, "head = kv_head + member * kv_heads", KEYS, LOOPS),
        ("dq: wrong KV head", "head // group_size", "head % (heads // group_size)", QUERIES),
        ("dk: strides of K used for V", "keys[:, None] * stride_vs", "keys[:, None] * stride_ks", KEYS),
        ("dk: rows of another head", ROWS, ROWS.replace("+ head", "+ kv_head"), KEYS, LOOPS),
        ("dq: rows of another head", ROWS, ROWS.replace("+ head", "+ kv_head"), QUERIES),
        ("dk: dout of the first sequence", "dout + sequence * stride_dob", "dout", KEYS, LOOPS),
        ("dq: keys of the first sequence", "k + sequence * stride_kb", "k", QUERIES),
        ("delta of the first sequence's output", "out + batch * stride_ob", "out", DELTA),
    ))  # fmt: skip


def written(size: Size) -> tuple[Mutant, ...]:
    """Where gradients are written."""
    last, without_last = "heads * batch,)", "heads * batch - (batch > 1),)"
    return mutants_of(size.subject(), (
        ("dk, dv: last tile not written", last, without_last, Part("def launch_plan(", "def epilogue")),
        ("dq: last tile not written", last, without_last, Part("def epilogue_plan(", "def attention")),
        ("delta: last tile not written", last, without_last, Part("def prologue_plan(", "def launch_plan")),
        ("dk: by the strides of k", "stride_dks", "stride_ks", Part("dk_tile = (", "mask=")),
        ("dq: by the strides of q", "stride_dqs", "stride_qs", Part("dq_tile = (", "mask=")),
        ("dv: by the strides of dk", "keys[:, None] * stride_dvs", "keys[:, None] * stride_dks", KEYS),
        ("dq: rows beyond the last written",
         "query_exists[:, None] & ", "", Part("dq_tile = (", "def prologue_plan(")),
        ("dk: rows beyond the last written", "key_exists[:, None] & ", "", Part("dk_tile = (", "dv_tile =")),
    ))  # fmt: skip
