"""Mutants of Hopper backward kernels with wrong addresses."""

from __future__ import annotations

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
from tests.mutants.core import Mutant, mutants_of
from tests.mutants.forward_hopper.hopper import only

PLACE = "place = [batch, kv_head, (n_block * 2 + group) * ROWS, 0]\ncopy_in({}_desc"
COPY_DK = "copy_out(dk_desc, [batch, kv_head, n_start, 0], shared.v_tiles.index(GROUP))"
COPY_DV = COPY_DK.replace("dk_", "dv_")
NEXT_HEAD = "head = gl.where(wraps, head + 1, head)"
CLEARED = "tl.program_id(0).to(tl.int64) * 8192 + tl.arange(0, 8192)"


def heads() -> tuple[Mutant, ...]:
    """Which head's and which sequence's tensors meet which."""
    of_k, of_v = PLACE.format("k"), PLACE.format("v")
    return mutants_of((
        ("keys of the first KV head", "All query heads meet the keys of one KV head.", CAUSAL,
         only(of_k, of_k.replace("kv_head,", "0,"))),
        ("values of the first KV head", "All query heads meet the values of one KV head.", CAUSAL,
         only(of_v, of_v.replace("kv_head,", "0,"))),
        ("keys of the first sequence", "All sequences meet the keys of one.", CAUSAL,
         only(of_k, of_k.replace("[batch,", "[0,"))),
        ("values of the first group for both", "Both groups meet a program's first 64 values.", CAUSAL,
         only(of_v, of_v.replace("(n_block * 2 + group)", "n_block * 2"))),
        ("dout of the first sequence", "All sequences meet the gradients of one's output.", CAUSAL,
         only("copy_in(do_desc, [batch,", "copy_in(do_desc, [0,")),
        ("queries of the first block", "All blocks of queries are the first.", CAUSAL,
         only("copy_in(q_desc, [batch, head, row,", "copy_in(q_desc, [batch, head, 0,")),
        ("first head of a group for all", "The query heads of a KV head are one.", CAUSAL,
         only(NEXT_HEAD, "pass", PRODUCER)),
        ("heads of groups in turn", "KV heads meet query heads of other groups.", CAUSAL,
         (*only("head = kv_head * scheduler.group_size", "head = kv_head", PRODUCER),
          *only(NEXT_HEAD, NEXT_HEAD.replace("+ 1", "+ scheduler.kv_heads"), PRODUCER))),
        ("heads late by a block",
         "Where programs begin apart, a head's first block is the last head's.", FULL,
         only("(step + 1) // m_max", "step // m_max", PRODUCER)),
    ))  # fmt: skip


def written() -> tuple[Mutant, ...]:
    """Where gradients of keys and values go."""
    grid = "return (blocks * batch * kv_heads,)"
    return mutants_of((
        ("dk of the second group not written", "Every second 64 keys have no gradient.", CAUSAL,
         only(COPY_DK, f"if GROUP == 0:\n    {COPY_DK}")),
        ("dk, dv: last block not written", "The last block of keys has no gradients.", CAUSAL,
         only(grid, grid.replace("heads,", "heads - (batch > 1),"), PLAN)),
        ("dk written over dv", "Gradients of keys go where those of values belong.", CAUSAL,
         only(COPY_DK, COPY_DK.replace("dk_", "dv_"))),
        ("dv of the first KV head", "Gradients of all values of a sequence are written to one head.", CAUSAL,
         only(COPY_DV, COPY_DV.replace("kv_head,", "0,"))),
        ("dk a group too far", "Gradients of keys go 64 rows too far.", CAUSAL,
         only(COPY_DK, COPY_DK.replace("n_start", "n_start + ROWS"))),
        ("divided: dk and dv swapped", "Where groups divide products, one's gradients are the other's.", WIDE,
         (*only("copy_out(dk_desc", "copy_out(dx_desc"), *only("copy_out(dv_desc", "copy_out(dk_desc"),
          *only("copy_out(dx_desc", "copy_out(dv_desc"))),
    ))  # fmt: skip


def sums() -> tuple[Mutant, ...]:
    """Where dq is added up, and what becomes of it."""
    of_block = "((batch * scheduler.kv_heads + kv_head) * scheduler.group_size).to(gl.int64) * m_max"
    own_half, back = "address += GROUP * HALF_BYTES", "address - m_max.to(gl.int64) * SUM_BYTES"
    over_start = "address + m_min.to(gl.int64) * SUM_BYTES"
    return mutants_of((
        ("sums not cleared", "Earlier contents of memory are added to dq.", CAUSAL,
         only(CLEARED, "tl.arange(0, 8192)", PREPARE)),
        ("last block not prepared",
         "The last block of queries has no statistics, and its sums are not cleared.",
         CAUSAL, only("* batch * heads,)", "* batch * heads - (batch > 1),)", FIRST_PLAN)),
        ("sums of the first sequence", "All sequences add to one.", CAUSAL,
         only(of_block, of_block.replace("batch * scheduler.kv_heads + kv_head", "kv_head"))),
        ("sums of the block before", "A block's share goes to other queries.", FULL,
         only("m_block\naddress", "gl.maximum(m_block - 1, 0)\naddress", CONSUMER)),
        ("sums of a late address", "A block's share, made a step late, goes to the next block.", CAUSAL,
         only(ADD_DQ, ADD_DQ.replace("last_address", "address"), times=2)),
        ("sums not wound back", "Behind the last block of a head comes the next head's first.", FULL,
         only(back, "address")),
        ("sums of a group's first head", "A program that comes round stays with the first head.", FULL,
         only("address + m_max.to(gl.int64) * SUM_BYTES, address)", "address, address)")),
        ("sums not moved over hidden blocks",
         "Where a head's first blocks see nothing, the next one's go astray.",
         CAUSAL, only(over_start, "address")),
        ("dq: halves swapped", "A group adds to the other's half.", HALVES,
         only(own_half, own_half.replace("GROUP", "(1 - GROUP)"))),
        ("dq: second half over the first", "Both groups add to the first half.", LATE,
         only(own_half, "pass")),
        ("dq: left half of the keys twice", "Both groups make the first columns.", LATE,
         only("k_tile.slice(GROUP * 64,", "k_tile.slice(0,")),
        ("transposed: first queries twice", "Both groups make the first queries of a block.", NARROW_HALVES,
         only("ds_tile.slice(GROUP * 64,", "ds_tile.slice(0,")),
        ("divided: left half twice", "Both groups make the first columns.", WIDE,
         only(".slice(GROUP * 128,", ".slice(0,")),
        ("divided: sums of the block before", "Sums that are one step late go to the next step.", WIDE,
         only("atomic_add(half + last_place.to", "atomic_add(half + place.to", times=2)),
        ("dq written, not added", "Of all blocks of keys one is left in dq.", CAUSAL,
         only("red.relaxed.gpu.global.add.v4.f32", "st.relaxed.gpu.global.v4.f32")),
        ("half of the warps add to the others' rows", "Threads count to 64 where they are 128.", CAUSAL,
         only("and.b32 thread, thread, 127;", "and.b32 thread, thread, 63;")),
        ("a thread's fours overlap",
         "Every second four of a thread's sums go where the one before lies.", CAUSAL,
         only("{2048 * quad}", "{2048 * (quad // 2 * 2)}")),
        ("dq: rows 8 below swapped", "Sums are put in another order than registers have.", CAUSAL,
         only("sums.permute((2, 5, 3,", "sums.permute((2, 3, 5,", FINISH)),
        ("dq: columns of pairs swapped", "Pairs of columns and columns of a pair trade places.", CAUSAL,
         only("0, 1, 4, 6)", "0, 1, 6, 4)", FINISH)),
        ("transposed: halves of queries interleaved", "With tiles of 64 columns rows are in another order.",
         NARROW_HALVES, only("permute((0, 1, 4, 6, 2, 5, 3))", "permute((1, 0, 4, 6, 2, 5, 3))", FINISH)),
        ("dq: last block not written", "The last block of queries has no gradient.", CAUSAL,
         only("* batch * heads,)", "* batch * heads - (batch > 1),)", LAST_PLAN)),
        ("dq: rows beyond the last written", "A row behind the last query is written.", CAUSAL,
         only("(queries < seqlen_q)", "(queries <= seqlen_q)", FINISH)),
        ("dq: columns beyond the last written", "Memory after a row of dq is overwritten.", PADDED,
         only(" & (columns < 96)[None, :]", "", FINISH)),
        ("dq: by the strides of heads", "Rows of dq are written where heads would lie.", CAUSAL,
         only("[:, None] * stride_dqs", "[:, None] * stride_dqh", FINISH)),
    ))  # fmt: skip
