"""Mutants of Hopper kernels with keys in pages."""

from __future__ import annotations

from flashtune.core.problem import Causal, KvDtype, KvScale
from tests.mutants.core import Mutant, Part, mutants_of
from tests.mutants.forward_hopper.hopper import a_small_problem, only, subject

SMALL_PAGES = subject(a_small_problem(64, Causal.BOTTOM_RIGHT, page_size=16, packed=1), lse=True)
LARGE_PAGES = subject(a_small_problem(64, page_size=256, seqlen_q=200), lse=True, block_n=64)
SPLIT_PAGES = subject(a_small_problem(96, Causal.BOTTOM_RIGHT, page_size=64), lse=True, block_n=128)
PAGES_OF_ONE = subject(a_small_problem(64, Causal.BOTTOM_RIGHT, page_size=1, packed=1), lse=True)
PAGES_OF_FOUR = subject(a_small_problem(96, page_size=4), lse=True, block_n=64)
EIGHT_BITS = subject(
    a_small_problem(
        64,
        Causal.BOTTOM_RIGHT,
        page_size=16,
        packed=1,
        kv_dtype=KvDtype.E4M3,
        kv_scale=KvScale.HEAD,
    ),
    lse=True,
)
PAGE_SCALES = subject(
    a_small_problem(
        64,
        Causal.BOTTOM_RIGHT,
        page_size=16,
        packed=1,
        kv_dtype=KvDtype.INT8,
        kv_scale=KvScale.PAGE,
    ),
    lse=True,
)
COPY_K = Part("def copy_k(", "def copy_v(")
COPY_V = Part("def copy_v(", "def produce(")
GATHER_K = Part("def gather_k(", "def gather_v(")
GATHER_V = Part("def gather_v(", "def produce(")
PRODUCER = Part("def produce(", "def start_tile(")


def pages() -> tuple[Mutant, ...]:
    """Which pages, rows and lengths are read."""
    used = "used = tile.seqlen_kv - first // PAGE * PAGE"
    row = "FAR - tile.seqlen_kv + first"
    return mutants_of(
        (
            ("pages of the first sequence", "All sequences look their keys up in one's table.", SMALL_PAGES,
             only("scheduler.block_table + tile.batch.to(gl.int64) *", "scheduler.block_table + 0 *")),
            ("pages of the next sequence", "Sequences look their keys up in the next one's table.",
             SPLIT_PAGES,
             only("tile.batch.to(gl.int64)",
                  "((tile.batch + 1) % (scheduler.all_packs // scheduler.packs)).to(gl.int64)")),
            ("lengths of the first sequence", "All sequences have as many keys as one.", SMALL_PAGES,
             only("gl.load(self.seqlens_kv + batch)", "gl.load(self.seqlens_kv)")),
            ("pages a block late", "A block's pages are those of the block that came before it.", SMALL_PAGES,
             only("n_last - step - 1", "n_last - step")),
            ("values of the pages before", "Values are of the pages of the keys that are copied with them.",
             SMALL_PAGES, only("v_pages, this, key, v_steps", "k_pages, this, key, v_steps")),
            ("pages of keys kept for a tile", "All blocks of a tile are its last one.", SPLIT_PAGES,
             only("k_pages = next_pages", "pass", PRODUCER)),
            ("page that is not full not looked up", "The last keys of a sequence are those of page 0.",
             SMALL_PAGES, only("keys < tile.seqlen_kv", "keys + COPIED <= tile.seqlen_kv")),
            ("first page for all copies", "A block's keys are those of its first page.", SPLIT_PAGES,
             only("gl.arange(0, 32, LANES) == copy", "gl.arange(0, 32, LANES) == 0", COPY_K)),
            ("rows of values beyond the last key", "Rows behind a sequence's values are copied too.",
             SMALL_PAGES, only(used, "used = PAGE + first % PAGE", COPY_V)
             + only(row, "FAR - PAGE", COPY_V)),
            ("keys of a block over the first", "All pages of a block are copied to one place.", SMALL_PAGES,
             only(".slice(copy * COPIED, COPIED, 3)", ".slice(0, COPIED, 3)", COPY_K)),
            ("pages: values of one KV head", "All query heads meet the values of one KV head.", SPLIT_PAGES,
             only(" + tile.kv_head * head_step", "", COPY_V, times=1)),
            ("pages a head apart", "Pages of keys overlap.", SPLIT_PAGES,
             only("page * page_step", "page * head_step", COPY_K)),
            ("larger pages: first block twice", "All blocks of a page are its first.", LARGE_PAGES,
             only(used, "used = tile.seqlen_kv - first", COPY_K)),
            ("larger pages: page of the block's number", "Blocks count as pages.", LARGE_PAGES,
             only("row + keys // PAGE", "row + keys // BLOCK_N")),
            ("pages counted from the first key of a block", "Rows of a page end where the block does.",
             LARGE_PAGES, only(used, f"used = gl.minimum({used.removeprefix('used = ')}, BLOCK_N)", COPY_V)),
            ("longest sequence for all", "All sequences are as long as the block table allows.", SMALL_PAGES,
             only("gl.minimum(gl.load(self.seqlens_kv + batch), self.seqlen_kv)", "self.seqlen_kv")),
        )
    )  # fmt: skip


def rows() -> tuple[Mutant, ...]:
    """Which rows of small pages are read, and when."""
    table = "scheduler.block_table + tile.batch.to(gl.int64) *"
    arrival = "async_copy.mbarrier_arrive(ring.full.index(state.stage), increment_count=False)"
    at_once = "mbarrier.arrive(ring.full.index(state.stage), count=32 * GATHERING_WARPS)"
    wrong = (
        ("rows: pages of the first sequence", "All sequences use one's table.", PAGES_OF_ONE,
         only(table, "scheduler.block_table + 0 *", GATHER_K)),
        ("rows: first row of a page for all", "All values of a page are its first.", PAGES_OF_FOUR,
         only("(keys & (PAGE - 1))", "(keys & 0)", GATHER_V, times=2)),
        ("rows: pages of twice the size", "Keys are looked up in pages of twice the size.", PAGES_OF_FOUR,
         only("keys >> PAGE_BITS", "keys >> PAGE_BITS + 1", GATHER_K, times=2)),
        ("rows: last key not copied", "The last key of each sequence counts as zeros.", PAGES_OF_ONE,
         only("mask=(keys < tile.seqlen_kv)[:", "mask=(keys < tile.seqlen_kv - 1)[:", GATHER_K)),
        ("rows: values beyond the last key", "Rows behind a sequence's values are copied too.", PAGES_OF_ONE,
         only("mask=(keys < tile.seqlen_kv)[:, None]", "mask=(keys >= 0)[:, None]", GATHER_V)),
        ("rows: values of one KV head", "All query heads meet the values of one KV head.", PAGES_OF_FOUR,
         only(" + tile.kv_head * head_step", "", GATHER_V, times=2)),
        ("rows: keys a page apart", "Rows of one page are a page apart.", PAGES_OF_FOUR,
         only("* row_step", "* page_step", GATHER_K, times=2)),
        ("rows: keys of another tile", "Keys are copied to another tile.", PAGES_OF_ONE,
         only("ring.tiles[0].index(state.stage)", "ring.tiles[0].index(1 - state.stage)", GATHER_K)),
    )  # fmt: skip
    early = (
        ("rows: room not waited for", "Keys that are still read are overwritten.", PAGES_OF_ONE,
         only("ring.wait_empty(state)", "pass", GATHER_K)),
        ("rows: copies not waited for", "Keys may not have arrived when they are read.", PAGES_OF_ONE,
         only(arrival, at_once, GATHER_K)),
    )  # fmt: skip
    return *mutants_of(wrong), *mutants_of(early, racy=True)


def conversion() -> tuple[Mutant, ...]:
    """Conversion of keys and values in 8 bits, and their scales."""
    return mutants_of(
        (
            ("8-bit: scale of keys of the first head", "All KV heads have one scale.", EIGHT_BITS,
             only("gl.load(k_scale + this.batch * k_strides[0] + this.kv_head * k_strides[1])",
                  "gl.load(k_scale + this.batch * k_strides[0])")),
            ("8-bit: scale of keys left out", "Scores are of the stored keys.", EIGHT_BITS,
             only("s_scale_log2 = scale_log2 * gl.load(k_scale +",
                  "s_scale_log2 = scale_log2 + 0.0 * gl.load(k_scale +")),
            ("8-bit: scale of keys for values", "Values have the scale of keys.", EIGHT_BITS,
             only("o_scale = gl.load(v_scale +", "o_scale = gl.load(k_scale +")),
            ("8-bit: scale of values left out", "Outputs are of the stored values.", EIGHT_BITS,
             only("factor = o_scale / ", "factor = 1.0 / ")),
            ("8-bit: parts over the first", "All parts of a block are converted to one place.", EIGHT_BITS,
             only("target.slice(part * CONVERTED,", "target.slice(0,")),
            ("8-bit: first part for all", "A block's parts are its first.", EIGHT_BITS,
             only("source.slice(part * CONVERTED,", "source.slice(0,")),
            ("8-bit: other stored tile", "Another stored tile is converted.", EIGHT_BITS,
             only("raw.tiles[0].index(raw_state.stage)", "raw.tiles[0].index(1 - raw_state.stage)")),
            ("8-bit: converted to the tile before", "A block is converted to another tile.", EIGHT_BITS,
             only("target = ring.tiles[0].index(state.stage)",
                  "target = ring.tiles[0].index(1 - state.stage)")),
        )
    )  # fmt: skip


def page_scales() -> tuple[Mutant, ...]:
    """Scales of pages of 8-bit caches."""
    of_head = "tile.kv_head * of_head"
    wrong = (
        ("page scales: those of the first head", "All KV heads have one's scales.", PAGE_SCALES,
         only(of_head, "0 * of_head")),
        ("page scales: those of the first page", "All pages have one's scales.", PAGE_SCALES,
         only("pages.to(gl.int64) * of_page", "0 * pages.to(gl.int64) * of_page")),
        ("page scales: keys for values", "Values have the scales of keys.", PAGE_SCALES,
         only("k.tiles[2].index(k_state.stage).store(v_scales)",
              "k.tiles[2].index(k_state.stage).store(k_scales)")),
        ("page scales: pages of half the size", "Pages are looked up as if they had half as many keys.",
         PAGE_SCALES, only("row + keys // PAGE, mask=keys < tile.seqlen_kv, other=-1",
                           "row + keys // PAGE // 2, mask=keys < tile.seqlen_kv, other=-1")),
        ("page scales: a block late", "Scales of keys are those of the block before.", PAGE_SCALES,
         only("k_scales = next_k_scales", "pass")),
        ("page scales: last page unscaled", "Pages that are not full have a scale of zero.", PAGE_SCALES,
         only("mask=keys < tile.seqlen_kv, other=-1", "mask=keys + PAGE <= tile.seqlen_kv, other=-1")),
        ("page scales: other tile", "Scales are those of another tile of keys.", PAGE_SCALES,
         only("k.tiles[1].index(k_state.stage).load(", "k.tiles[1].index(1 - k_state.stage).load(")),
    )  # fmt: skip
    early = (
        ("page scales: room not waited for", "Scales that are still read are overwritten.", PAGE_SCALES,
         only("k.wait_empty(k_state)\n    k.tiles[1]", "k.tiles[1]")),
    )  # fmt: skip
    return *mutants_of(wrong), *mutants_of(early, racy=True)


def conversion_waits() -> tuple[Mutant, ...]:
    """A block is converted too early, or read before it is converted."""
    changes = (
        ("8-bit: block not waited for", "Values are converted before they have arrived.", EIGHT_BITS,
         only("raw.wait_full(raw_state)", "pass")),
        ("8-bit: room not waited for", "Keys that are still read are overwritten.", EIGHT_BITS,
         only("ring.wait_empty(state)", "pass")),
        ("8-bit: fence left out", "Products may read values from before the conversion.", EIGHT_BITS,
         only("fence_async_shared()\n    mbarrier.arrive(ring.full", "mbarrier.arrive(ring.full")),
    )  # fmt: skip
    endless = ("8-bit: raw block never given back", "The producer waits forever.", EIGHT_BITS,
               only("return raw.release(raw_state),", "return raw.advance(raw_state),"))  # fmt: skip
    return *mutants_of(changes, racy=True), *mutants_of((endless,), hangs=True)
