"""Mutants of Hopper backward kernels with wrong addresses."""

from tests.mutants.backward_hopper.backward_hopper import (
    ADD_DQ,
    CAUSAL,
    CONSUMER,
    FINISH,
    FIRST_PLAN,
    FULL,
    HALVES,
    LAST_PLAN,
    LATE,
    NARROW_HALVES,
    PADDED,
    PLAN,
    PREPARE,
    PRODUCER,
    WIDE,
)
from tests.mutants.core import Mutant, Patch, mutants_of

PLACE = "place = [batch, kv_head, (n_block * 2 + group) * ROWS, 0]\ncopy_in({}_desc"
COPY_DK = "copy_out(dk_desc, [batch, kv_head, n_start, 0], shared.v_tiles.index(GROUP))"
COPY_DV = COPY_DK.replace("dk_", "dv_")
NEXT_HEAD = "head = gl.where(wraps, head + 1, head)"
CLEARED = "tl.program_id(0).to(tl.int64) * 8192 + tl.arange(0, 8192)"


def heads() -> tuple[Mutant, ...]:
    """Which head's and which sequence's tensors meet which."""
    of_k, of_v = PLACE.format("k"), PLACE.format("v")
    return (
        *mutants_of(CAUSAL, (
            ("keys of the first KV head", of_k, of_k.replace("kv_head,", "0,")),
            ("values of the first KV head", of_v, of_v.replace("kv_head,", "0,")),
            ("keys of the first sequence", of_k, of_k.replace("[batch,", "[0,")),
            ("values of the first group for both",
             of_v, of_v.replace("(n_block * 2 + group)", "n_block * 2")),
            ("dout of the first sequence", "copy_in(do_desc, [batch,", "copy_in(do_desc, [0,"),
            ("queries of the first block",
             "copy_in(q_desc, [batch, head, row,", "copy_in(q_desc, [batch, head, 0,"),
            ("first head of a group for all", NEXT_HEAD, "pass", PRODUCER),
            ("heads of groups in turn",
             (Patch("head = kv_head * scheduler.group_size", "head = kv_head", PRODUCER),
              Patch(NEXT_HEAD, NEXT_HEAD.replace("+ 1", "+ scheduler.kv_heads"), PRODUCER))),
        )),
        *mutants_of(FULL, (
            ("heads late by a block", "(step + 1) // m_max", "step // m_max", PRODUCER),
        )),
    )  # fmt: skip


def written() -> tuple[Mutant, ...]:
    """Where gradients of keys and values go."""
    grid = "return (blocks * batch * kv_heads,)"
    return (
        *mutants_of(CAUSAL, (
            ("dk of the second group not written", COPY_DK, f"if GROUP == 0:\n    {COPY_DK}"),
            ("dk, dv: last block not written", grid, grid.replace("heads,", "heads - (batch > 1),"), PLAN),
            ("dk written over dv", COPY_DK, COPY_DK.replace("dk_", "dv_")),
            ("dv of the first KV head", COPY_DV, COPY_DV.replace("kv_head,", "0,")),
            ("dk a group too far", COPY_DK, COPY_DK.replace("n_start", "n_start + ROWS")),
        )),
        *mutants_of(WIDE, (
            ("divided: dk and dv swapped",
             (Patch("copy_out(dk_desc", "copy_out(dx_desc"),
              Patch("copy_out(dv_desc", "copy_out(dk_desc"),
              Patch("copy_out(dx_desc", "copy_out(dv_desc"))),
        )),
    )  # fmt: skip


def sums() -> tuple[Mutant, ...]:
    """Where dq is added up, and what becomes of it."""
    of_block = "((batch * scheduler.kv_heads + kv_head) * scheduler.group_size).to(gl.int64) * m_max"
    own_half, back = "address += GROUP * HALF_BYTES", "address - m_max.to(gl.int64) * SUM_BYTES"
    over_start = "address + m_min.to(gl.int64) * SUM_BYTES"
    return (
        *mutants_of(CAUSAL, (
            ("sums not cleared", CLEARED, "tl.arange(0, 8192)", PREPARE),
            # The last block of queries has no statistics, and its sums are not cleared.
            ("last block not prepared", "* batch * heads,)", "* batch * heads - (batch > 1),)", FIRST_PLAN),
            ("sums of the first sequence",
             of_block, of_block.replace("batch * scheduler.kv_heads + kv_head", "kv_head")),
            ("sums of a late address", ADD_DQ, ADD_DQ.replace("last_address", "address"), None, 2),
            # Where a head's first blocks see nothing, the next one's go astray.
            ("sums not moved over hidden blocks", over_start, "address"),
            ("dq written, not added", "red.relaxed.gpu.global.add.v4.f32", "st.relaxed.gpu.global.v4.f32"),
            ("half of the warps add to the others' rows",
             "and.b32 thread, thread, 127;", "and.b32 thread, thread, 63;"),
            ("a thread's fours overlap", "{2048 * quad}", "{2048 * (quad // 2 * 2)}"),
            ("dq: rows 8 below swapped", "sums.permute((2, 5, 3,", "sums.permute((2, 3, 5,", FINISH),
            ("dq: columns of pairs swapped", "0, 1, 4, 6)", "0, 1, 6, 4)", FINISH),
            ("dq: last block not written", "* batch * heads,)", "* batch * heads - (batch > 1),)", LAST_PLAN),
            ("dq: rows beyond the last written", "(queries < seqlen_q)", "(queries <= seqlen_q)", FINISH),
            ("dq: by the strides of heads", "[:, None] * stride_dqs", "[:, None] * stride_dqh", FINISH),
        )),
        *mutants_of(FULL, (
            ("sums of the block before", "m_block\naddress", "gl.maximum(m_block - 1, 0)\naddress", CONSUMER),
            # Behind the last block of a head comes the next head's first.
            ("sums not wound back", back, "address"),
            ("sums of a group's first head",
             "address + m_max.to(gl.int64) * SUM_BYTES, address)", "address, address)"),
        )),
        *mutants_of(HALVES, (
            ("dq: halves swapped", own_half, own_half.replace("GROUP", "(1 - GROUP)")),
        )),
        *mutants_of(LATE, (
            ("dq: second half over the first", own_half, "pass"),
            ("dq: left half of the keys twice", "k_tile.slice(GROUP * 64,", "k_tile.slice(0,"),
        )),
        *mutants_of(NARROW_HALVES, (
            ("transposed: first queries twice", "ds_tile.slice(GROUP * 64,", "ds_tile.slice(0,"),
            ("transposed: halves of queries interleaved",
             "permute((0, 1, 4, 6, 2, 5, 3))", "permute((1, 0, 4, 6, 2, 5, 3))", FINISH),
        )),
        *mutants_of(WIDE, (
            ("divided: left half twice", ".slice(GROUP * 128,", ".slice(0,"),
            ("divided: sums of the block before",
             "atomic_add(half + last_place.to", "atomic_add(half + place.to", None, 2),
        )),
        *mutants_of(PADDED, (
            ("dq: columns beyond the last written", " & (columns < 96)[None, :]", "", FINISH),
        )),
    )  # fmt: skip
