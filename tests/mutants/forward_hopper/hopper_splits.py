"""Mutants of splits: their borders, results, statistics and sinks, and the kernel that combines them."""

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant, Part, Row, mutants_of
from tests.mutants.forward_hopper.hopper import a_small_problem, subject

FIRST = "n_first = n_start + tile.split * (n_end - n_start) // splits"
LAST = "n_last = n_start + (tile.split + 1) * (n_end - n_start) // splits - 1"
EMPTY = "n_last < n_first"
FINAL = "return n_first, gl.maximum(n_first, n_last), n_last < n_first"
WEIGHTED = "tl.sum(part_out * weights[:, None], 0)"
SUM = "tl.where(total == 0.0, 1.0, total)"
ROW_LSE = "(shift + tl.log2(total)) * 0.6931471805599453"
PLACES = "places = parts * rows + row"
SINK = 'gl.where(this.split == 0, sink_log2, float("-inf"))'
SPLIT_PLACE = "tile.split.to(gl.int64) * scheduler.all_rows"
STORED = "store_partials(outputs, lse_log2, this"

# Some tiles have fewer blocks than splits.
FIELDS = {"num_splits": 5, "block_n": 64, "defer_pv_wait": False, "pack_gqa": 2}
_CAUSAL = a_small_problem(64, Causal.BOTTOM_RIGHT, sinks=True)
CAUSAL = subject(_CAUSAL, lse=True, **FIELDS)
WINDOW = subject(a_small_problem(64, Causal.BOTTOM_RIGHT, window_left=30, sink_tokens=10), lse=True, **FIELDS)
PACKED = subject(a_small_problem(64, packed=1), lse=True, **{**FIELDS, "pack_gqa": 1})


def splits() -> tuple[Mutant, ...]:
    """Those of the main kernel."""
    return (*borders(), *results())


def borders() -> tuple[Mutant, ...]:
    """The blocks of a split."""
    return (
        *mutants_of(CAUSAL, (
            ("last block of a split skipped", LAST, f"{LAST} - 1"),
            ("first block of a split skipped", FIRST, f"{FIRST} + 1"),
            ("last block of the split before", FIRST, f"{FIRST} - gl.where(tile.split > 0, 1, 0)"),
            ("remaining blocks skipped",
             LAST, "n_last = n_first + gl.maximum((n_end - n_start) // splits, 1) - 1"),
            ("splits that begin where the next one does",
             FIRST, "n_first = n_start + (tile.split * (n_end - n_start) + splits - 1) // splits"),
            ("every split to the end", LAST, "n_last = n_end - 1"),
            ("one split for all", FIRST, "n_first = n_start"),
            ("keys of empty splits", FINAL, FINAL.replace(EMPTY, "False")),
            ("splits of single blocks hidden", FINAL, FINAL.replace(EMPTY, "n_last <= n_first")),
            ("a split has one tile more",
             "split = index // (self.m_blocks * self.all_packs)",
             "split = index // (self.m_blocks * self.all_packs + 1)"),
            ("tiles of a split one too few",
             "index = index % (self.m_blocks * self.all_packs)",
             "index = index % gl.maximum(self.m_blocks * self.all_packs - 1, 1)"),
        )),
        *mutants_of(WINDOW, (
            ("keys before the window unsplit", "n_start -= get_n_lifted(tile, n_start)", "pass"),
            ("first keys behind the split's window",
             "first_block = get_block(n_last, n_block_min, n_lifted)", "first_block = n_last"),
        )),
        *mutants_of(CAUSAL, (
            ("blocks of other groups kept", "passed += gl.where(more, n_split_last - n_last, 0)", "pass"),
        ), hangs=True),
    )  # fmt: skip


def results() -> tuple[Mutant, ...]:
    """Stored outputs and statistics of a split."""
    return (
        *mutants_of(CAUSAL, (
            ("sink in every split", SINK, "sink_log2"),
            ("sink in no split", SINK, SINK.replace("== 0", "< 0")),
            ("splits in one place", SPLIT_PLACE, "tile.split.to(gl.int64)"),
            ("results of the next tile's split", STORED, STORED.replace("this", "tile")),
            ("split outputs not divided", "factor = kept / divisor", "factor = kept"),
            ("split statistics without the sum",
             "lse_log2 = row_max + gl.log2(row_sum)", "lse_log2 = row_max"),
            ("split statistics without the maximum",
             "lse_log2 = row_max + gl.log2(row_sum)", "lse_log2 = gl.log2(row_sum)"),
            ("split statistics in natural units",
             "lse_log2 = row_max + gl.log2(row_sum)", "lse_log2 = (row_max + gl.log2(row_sum)) * LN_2"),
            ("split outputs of the first sequence's heads",
             "rows = (first_head + row_heads)", "rows = row_heads"),
            ("split outputs beyond the group's heads",
             "exists = (positions < tile.seqlen_q) & (row_heads < scheduler.group_size)",
             "exists = (positions < tile.seqlen_q) & (row_heads < scheduler.group_size - 1)"),
        )),
        *mutants_of(PACKED, (
            ("split outputs of the first sequence",
             "tile.head * scheduler.tokens + tile.q_start + positions",
             "tile.head * scheduler.tokens + positions"),
        )),
    )  # fmt: skip


def waits() -> tuple[Mutant, ...]:
    """Those that combine splits before these end."""
    return mutants_of(CAUSAL, (("splits not waited for", "tl.extra.cuda.gdc_wait()", "pass"),), racy=True)


def combining() -> tuple[Mutant, ...]:
    """Those of the kernel that combines splits."""
    return mutants_of(PACKED, combining_rows("def descriptors("))


def combining_rows(end: str) -> tuple[Row, ...]:
    """Errors of the kernel that combines splits, in files that have `end` after it."""
    exists, kernel = "mask=parts < splits", Part("def combine(", end)
    return (
        ("splits not weighted", WEIGHTED, "tl.sum(part_out, 0)", kernel),
        ("splits averaged", SUM, "splits", kernel),
        ("splits without their maximum", "tl.exp2(part_lse - shift)", "tl.exp2(part_lse)", kernel),
        ("splits that are not there counted", 'other=float("-inf")', "other=0.0", kernel),
        ("last split left out", exists, f"{exists} - 1", kernel),
        ("splits in rows' order", PLACES, "places = row * splits + parts", kernel),
        ("splits one row apart", PLACES, "places = parts + row", kernel),
        ("rows that no split saw divided by zero", SUM, "total", kernel),
        ("rows that no split saw shifted by -inf",
         'tl.where(largest == float("-inf"), 0.0, largest)', "largest", kernel),
        ("combined split lse in base 2", ROW_LSE, "shift + tl.log2(total)", kernel),
        ("combined split lse of the largest split", ROW_LSE, "shift * 0.6931471805599453", kernel),
        ("rows after the last sequence written",
         "row % seqlen_q >= tl.load(cu_seqlens_q + sequences)", "row % seqlen_q < 0", kernel),
        ("output rows of the first head",
         "row // seqlen_q % heads * stride_oh", "row // seqlen_q % heads * 0", kernel),
        ("last rows not combined", "return (rows, 1)", "return (rows - rows // 4, 1)"),
    )  # fmt: skip
