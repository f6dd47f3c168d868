"""Mutants of the split backward family: wrong results of a pair, and wrong addresses."""

from __future__ import annotations

from flashtune.core.problem import Bias
from tests.mutants.core import Mutant, Part, Patch
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
    changes = (
        ("dk: delta left out", "There dS is P times dP.", Patch(KEYS_DELTA, "dp", KEYS, LOOPS)),
        ("dq: delta left out", "There dS is P times dP.", Patch(QUERIES_DELTA, "dp", QUERIES, LOOPS)),
        ("delta of the output alone", "It is that of the output's squares.", Patch(product, squares, DELTA)),
        ("lse in natural units", "Weights are relative to a logarithm to base e.",
         Patch(of_rows, of_rows.removesuffix(" * LOG2_E"), DELTA)),
        ("dk: scale missing", "The gradient of keys is not scaled.", Patch(of_dk, "dk_sum", KEYS)),
        ("dq: scale missing", "The gradient of queries is not scaled.", Patch(of_dq, "dq_sum", QUERIES)),
        ("dk: scale twice", "The gradient of keys is scaled twice.",
         Patch(of_dk, "(dk_sum * scale * scale)", KEYS)),
        ("dq: scale in units of log2", "The gradient of queries is of scores to base 2.",
         Patch(of_dq, "(dq_sum * scale_log2)", QUERIES)),
        ("dv: scaled", "The gradient of values is scaled.", Patch(of_dv, "(dv_sum * scale).to(", KEYS)),
        ("dk, dv: natural exponentials", "Powers of two are taken of scores in natural units.",
         Patch(SCALE, "scale_log2 = scale", KEYS)),
        ("dq: natural exponentials", "Powers of two are taken of scores in natural units.",
         Patch(SCALE, "scale_log2 = scale", QUERIES)),
        ("dlse of the other sign", "The gradient of the log-sum-exp is added to delta.",
         Patch(of_dlse, of_dlse.replace("-=", "+="), DELTA)),
        ("dlse forgotten", "The gradient of the log-sum-exp is not read.", Patch(of_dlse, "pass", DELTA)),
    )  # fmt: skip
    padded = (
        ("sums of large scores lost", "Rows of a finite mask value have too large probabilities.",
         Patch("LARGE = tl.constexpr(1024.0)", "LARGE = tl.constexpr(1e38)")),
        ("sums of large scores over later keys", "The first keys of a row are not counted.",
         Patch("tl.range(0, seqlen_kv, SUMMED_KEYS)", "tl.range(SUMMED_KEYS, seqlen_kv, SUMMED_KEYS)")),
    )  # fmt: skip
    biased = size.subject(bias=Bias.ADDITIVE)
    return (
        *(Mutant(name, breaks, told if "dlse" in name else causal, (one,)) for name, breaks, one in changes),
        *(Mutant(name, breaks, biased, (one,)) for name, breaks, one in padded),
    )


def roundings(size: Size) -> tuple[Mutant, ...]:
    """What a float32 kernel passes through bfloat16."""
    exact = size.subject(exact=True)
    low, lower = ".to(q.dtype.element_ty)", ".to(tl.bfloat16).to(q.dtype.element_ty)"
    return tuple(
        Mutant(
            f"{name}: rounded to 8 bits",
            f"Of a float32 kernel {what} passes through bfloat16 before it makes {name}.",
            exact,
            (Patch(line, line.replace(low, lower), part, LOOPS),),
        )
        for name, what, line, part in (
            ("dk", "dS", LOW_SCORES, KEYS),
            ("dq", "dS", LOW_SCORES, QUERIES),
            ("dv", "P", LOW_WEIGHTS, KEYS),
        )
    )


def places(size: Size) -> tuple[Mutant, ...]:
    """Where tensors are read."""
    causal = size.subject()
    member = "head = kv_head * group_size + member"
    return (
        Mutant(
            "first head of a group for all",
            "The gradients of keys are those of a group's first head, several times.",
            causal,
            (Patch(member, "head = kv_head * group_size", KEYS, LOOPS),),
        ),
        Mutant(
            "heads of groups in turn",
            "Keys meet query heads of other groups.",
            causal,
            (Patch(member, "head = kv_head + member * kv_heads", KEYS, LOOPS),),
        ),
        Mutant(
            "dq: wrong KV head",
            "Query heads take the KV heads in turn, not in groups.",
            causal,
            (Patch("head // group_size", "head % (heads // group_size)", QUERIES),),
        ),
        Mutant(
            "dk: strides of K used for V",
            "Rows of V are looked for where those of K would lie.",
            causal,
            (Patch("keys[:, None] * stride_vs", "keys[:, None] * stride_ks", KEYS),),
        ),
        Mutant(
            "dk: rows of another head",
            "Log-sum-exps and deltas are those of the head with the KV head's number.",
            causal,
            (Patch(ROWS, ROWS.replace("+ head", "+ kv_head"), KEYS, LOOPS),),
        ),
        Mutant(
            "dq: rows of another head",
            "Log-sum-exps and deltas are those of the head with the KV head's number.",
            causal,
            (Patch(ROWS, ROWS.replace("+ head", "+ kv_head"), QUERIES),),
        ),
        Mutant(
            "dk: dout of the first sequence",
            "All sequences meet the gradients of one's output.",
            causal,
            (Patch("dout + sequence * stride_dob", "dout", KEYS, LOOPS),),
        ),
        Mutant(
            "dq: keys of the first sequence",
            "All sequences meet the keys of one.",
            causal,
            (Patch("k + sequence * stride_kb", "k", QUERIES),),
        ),
        Mutant(
            "delta of the first sequence's output",
            "Deltas of all sequences are made of one's output.",
            causal,
            (Patch("out + batch * stride_ob", "out", DELTA),),
        ),
    )


def written(size: Size) -> tuple[Mutant, ...]:
    """Where gradients are written."""
    causal = size.subject()
    grids = (
        ("dk, dv", "The last block of keys has no gradients.", Part("def launch_plan(", "def epilogue")),
        ("dq", "The last tile of queries has no gradient.", Part("def epilogue_plan(", "def attention")),
        ("delta", "The last rows have no delta.", Part("def prologue_plan(", "def launch_plan")),
    )
    return (
        *(
            Mutant(
                f"{name}: last tile not written",
                breaks,
                causal,
                (Patch("heads * batch,)", "heads * batch - (batch > 1),)", part),),
            )
            for name, breaks, part in grids
        ),
        *(
            Mutant(
                f"{name}: by the strides of {letter}",
                f"Rows of {name} are written where those of {letter} would lie.",
                causal,
                (Patch(f"stride_{name}s", f"stride_{letter}s", Part(f"{name}_tile = (", "mask=")),),
            )
            for name, letter in (("dk", "k"), ("dq", "q"))
        ),
        Mutant(
            "dv: by the strides of dk",
            "Rows of dv are written where those of dk would lie.",
            causal,
            (Patch("keys[:, None] * stride_dvs", "keys[:, None] * stride_dks", KEYS),),
        ),
        Mutant(
            "dq: rows beyond the last written",
            "Rows of the last tile that do not exist are written.",
            causal,
            (Patch("query_exists[:, None] & ", "", Part("dq_tile = (", "def prologue_plan(")),),
        ),
        Mutant(
            "dk: rows beyond the last written",
            "Rows of the last block of keys that do not exist are written.",
            causal,
            (Patch("key_exists[:, None] & ", "", Part("dk_tile = (", "dv_tile =")),),
        ),
    )
