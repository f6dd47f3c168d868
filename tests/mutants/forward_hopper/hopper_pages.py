"""Mutants of Hopper kernels with keys in pages."""

from flashtune.core.problem import Causal, KvDtype, KvScale
from tests.mutants.core import Mutant, Part, Patch, mutants_of
from tests.mutants.forward_hopper.hopper import a_small_problem, subject

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
    return (
        *mutants_of(SMALL_PAGES, (
            ("pages of the first sequence",
             "scheduler.block_table + tile.batch.to(gl.int64) *", "scheduler.block_table + 0 *"),
            ("lengths of the first sequence", "gl.load(self.seqlens_kv + batch)", "gl.load(self.seqlens_kv)"),
            ("pages a block late", "n_last - step - 1", "n_last - step"),
            ("values of the pages before", "v_pages, this, key, v_steps", "k_pages, this, key, v_steps"),
            ("page that is not full not looked up",
             "keys < tile.seqlen_kv", "keys + COPIED <= tile.seqlen_kv"),
            ("rows of values beyond the last key",
             (Patch(used, "used = PAGE + first % PAGE", COPY_V), Patch(row, "FAR - PAGE", COPY_V))),
            ("keys of a block over the first",
             ".slice(copy * COPIED, COPIED, 3)", ".slice(0, COPIED, 3)", COPY_K),
            ("longest sequence for all",
             "gl.minimum(gl.load(self.seqlens_kv + batch), self.seqlen_kv)", "self.seqlen_kv"),
        )),
        *mutants_of(SPLIT_PAGES, (
            ("pages of the next sequence",
             "tile.batch.to(gl.int64)",
             "((tile.batch + 1) % (scheduler.all_packs // scheduler.packs)).to(gl.int64)"),
            ("pages of keys kept for a tile", "k_pages = next_pages", "pass", PRODUCER),
            ("first page for all copies",
             "gl.arange(0, 32, LANES) == copy", "gl.arange(0, 32, LANES) == 0", COPY_K),
            ("pages: values of one KV head", " + tile.kv_head * head_step", "", COPY_V, 1),
            ("pages a head apart", "page * page_step", "page * head_step", COPY_K),
        )),
        *mutants_of(LARGE_PAGES, (
            ("larger pages: first block twice", used, "used = tile.seqlen_kv - first", COPY_K),
            ("larger pages: page of the block's number", "row + keys // PAGE", "row + keys // BLOCK_N"),
            ("pages counted from the first key of a block",
             used, f"used = gl.minimum({used.removeprefix('used = ')}, BLOCK_N)", COPY_V),
        )),
    )  # fmt: skip


def rows() -> tuple[Mutant, ...]:
    """Which rows of small pages are read, and when."""
    table = "scheduler.block_table + tile.batch.to(gl.int64) *"
    arrival = "async_copy.mbarrier_arrive(ring.full.index(state.stage), increment_count=False)"
    at_once = "mbarrier.arrive(ring.full.index(state.stage), count=32 * GATHERING_WARPS)"
    return (
        *mutants_of(PAGES_OF_ONE, (
            ("rows: pages of the first sequence", table, "scheduler.block_table + 0 *", GATHER_K),
            ("rows: last key not copied",
             "mask=(keys < tile.seqlen_kv)[:", "mask=(keys < tile.seqlen_kv - 1)[:", GATHER_K),
            ("rows: values beyond the last key",
             "mask=(keys < tile.seqlen_kv)[:, None]", "mask=(keys >= 0)[:, None]", GATHER_V),
            ("rows: keys of another tile",
             "ring.tiles[0].index(state.stage)", "ring.tiles[0].index(1 - state.stage)", GATHER_K),
        )),
        *mutants_of(PAGES_OF_FOUR, (
            ("rows: first row of a page for all", "(keys & (PAGE - 1))", "(keys & 0)", GATHER_V, 2),
            ("rows: pages of twice the size", "keys >> PAGE_BITS", "keys >> PAGE_BITS + 1", GATHER_K, 2),
            ("rows: values of one KV head", " + tile.kv_head * head_step", "", GATHER_V, 2),
            ("rows: keys a page apart", "* row_step", "* page_step", GATHER_K, 2),
        )),
        *mutants_of(PAGES_OF_ONE, (
            ("rows: room not waited for", "ring.wait_empty(state)", "pass", GATHER_K),
            ("rows: copies not waited for", arrival, at_once, GATHER_K),
        ), racy=True),
    )  # fmt: skip


def conversion() -> tuple[Mutant, ...]:
    """Conversion of keys and values in 8 bits, and their scales."""
    return mutants_of(EIGHT_BITS, (
        ("8-bit: scale of keys of the first head",
         "gl.load(k_scale + this.batch * k_strides[0] + this.kv_head * k_strides[1])",
         "gl.load(k_scale + this.batch * k_strides[0])"),
        ("8-bit: scale of keys left out",
         "s_scale_log2 = scale_log2 * gl.load(k_scale +",
         "s_scale_log2 = scale_log2 + 0.0 * gl.load(k_scale +"),
        ("8-bit: scale of keys for values", "o_scale = gl.load(v_scale +", "o_scale = gl.load(k_scale +"),
        ("8-bit: scale of values left out", "factor = o_scale / ", "factor = 1.0 / "),
        ("8-bit: parts over the first", "target.slice(part * CONVERTED,", "target.slice(0,"),
        ("8-bit: first part for all", "source.slice(part * CONVERTED,", "source.slice(0,"),
        ("8-bit: other stored tile",
         "raw.tiles[0].index(raw_state.stage)", "raw.tiles[0].index(1 - raw_state.stage)"),
        ("8-bit: converted to the tile before",
         "target = ring.tiles[0].index(state.stage)", "target = ring.tiles[0].index(1 - state.stage)"),
    ))  # fmt: skip


def page_scales() -> tuple[Mutant, ...]:
    """Scales of pages of 8-bit caches."""
    of_head = "tile.kv_head * of_head"
    return (
        *mutants_of(PAGE_SCALES, (
            ("page scales: those of the first head", of_head, "0 * of_head"),
            ("page scales: those of the first page",
             "pages.to(gl.int64) * of_page", "0 * pages.to(gl.int64) * of_page"),
            ("page scales: keys for values",
             "k.tiles[2].index(k_state.stage).store(v_scales)",
             "k.tiles[2].index(k_state.stage).store(k_scales)"),
            ("page scales: pages of half the size",
             "row + keys // PAGE, mask=keys < tile.seqlen_kv, other=-1",
             "row + keys // PAGE // 2, mask=keys < tile.seqlen_kv, other=-1"),
            ("page scales: a block late", "k_scales = next_k_scales", "pass"),
            ("page scales: last page unscaled",
             "mask=keys < tile.seqlen_kv, other=-1", "mask=keys + PAGE <= tile.seqlen_kv, other=-1"),
            ("page scales: other tile",
             "k.tiles[1].index(k_state.stage).load(", "k.tiles[1].index(1 - k_state.stage).load("),
        )),
        *mutants_of(PAGE_SCALES, (
            ("page scales: room not waited for", "k.wait_empty(k_state)\n    k.tiles[1]", "k.tiles[1]"),
        ), racy=True),
    )  # fmt: skip


def conversion_waits() -> tuple[Mutant, ...]:
    """A block is converted too early, or read before it is converted."""
    return (
        *mutants_of(EIGHT_BITS, (
            ("8-bit: block not waited for", "raw.wait_full(raw_state)", "pass"),
            ("8-bit: room not waited for", "ring.wait_empty(state)", "pass"),
            ("8-bit: fence left out",
             "fence_async_shared()\n    mbarrier.arrive(ring.full", "mbarrier.arrive(ring.full"),
        ), racy=True),
        *mutants_of(EIGHT_BITS, (
            ("8-bit: raw block never given back",
             "return raw.release(raw_state),", "return raw.advance(raw_state),"),
        ), hangs=True),
    )  # fmt: skip
