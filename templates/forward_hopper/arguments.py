"""Run-time arguments of the kernel: descriptors of its tensors, and addresses of keys in small pages."""

from flashtune.core.kernel import POINTER_ALIGNMENT, Argument, Specialization
from flashtune.core.problem import Bias, Dtype, KvDtype, Problem
from flashtune.templates.common.args.arguments import (
    COUNTS,
    PARTIALS,
    SCALES,
    descriptor,
    pointer_type,
)
from flashtune.templates.common.args.side import side_numbers, side_strides, side_tensors
from flashtune.templates.common.model.sram import Chunk, chunks_of
from flashtune.templates.family import Arguments
from flashtune.templates.forward_hopper.space import (
    HopperConfig,
    copied_keys,
    gathers,
    has_combined_sinks,
    has_lists,
    shares_rows,
    stored_dtype,
)

# Steps of the descriptors of keys and values, if a tensor has the lengths of sequences.
STEPS = ("k_batch_step", "k_head_step", "v_batch_step", "v_head_step")
# Likewise from page to page.
PAGE_STEPS = ("k_page_step", "k_head_step", "v_page_step", "v_head_step")
# Those from page to page, head to head and row to row in pieces of 16 bytes, if threads copy rows.
ROW_STEPS = (
    *("k_page_step", "k_head_step", "k_row_step"),
    *("v_page_step", "v_head_step", "v_row_step"),
)
# Workspaces: kinds of blocks, words of partial blocks of a mask, lists of blocks, and the counter of tiles.
KINDS, WORDS, LISTS, COUNTER = (
    Argument(name, "*i32", POINTER_ALIGNMENT) for name in ("kinds", "words", "lists", "counter")
)
# The outputs of the splits that batch-invariant programs have walked.
FOLDED = Argument("folded", "*fp32", POINTER_ALIGNMENT)
MASK_COUNTS = ("mask_batches", "mask_heads")
# The tiles of queries with lists of their own.
MASK_TILES = "mask_tiles"
LISTED_COUNTS = ("mask_heads", "seqlen_q", "seqlen_kv")
# The most blocks of a list by a block mask.
LIST_WIDTH = "list_width"
# The inputs that a prologue reads, and the kernel does not.
LISTED_INPUTS = ("bias", "block_counts", "block_indices", "full_counts")
LISTED_STRIDES = ("stride_bias", "stride_counts", "stride_indices", "stride_full")
PACKED_COUNTS = ("heads", "group_size", "tokens", "heads_per_swizzle", "sequences", "steps")


def hopper_arguments(problem: Problem, config: HopperConfig, specialization: Specialization) -> Arguments:
    """Returns descriptors of q, k, v and out, tile by tile; lse, scales of inputs, scale, counts.

    With pages of fewer than 8 keys, k and v are addresses behind the descriptors.
    """
    dtype = problem.dtype
    stored = stored_dtype(problem)
    qk_chunks, v_chunks = chunks_of(problem, config.split_head_dim)
    # If sequences end before their tensor, more dimensions mark their ends.
    ends_early = problem.packed or problem.kv_lengths or problem.page_size
    outer = (1, 1, 1) if ends_early else (1, 1)
    queries = 1, 1, config.pack_gqa, config.rows_per_group // config.pack_gqa
    rows = copied_keys(problem, config)
    keys = *outer, rows
    counts: tuple[str, ...] = PACKED_COUNTS if problem.packed else (*COUNTS, "heads_per_swizzle")
    is_split = config.num_splits > 1
    counts += ("splits",) * is_split
    if problem.page_size and problem.packed:
        counts += ("seqlen_kv",)
    steps = STEPS if problem.kv_lengths and not problem.packed else ()
    # If outputs are stored in halves, so is the descriptor's tile.
    parts = 2 if config.split_epilogue else 1
    page_steps = ROW_STEPS if gathers(problem) else PAGE_STEPS if problem.page_size else ()
    keys_and_values = (
        *(_descriptor("k", chunk, qk_chunks, stored, (*keys, chunk.width)) for chunk in qk_chunks),
        *(
            _descriptor("v", chunk, v_chunks, stored, _values(chunk, rows, dtype, outer))
            for chunk in v_chunks
        ),
    )
    addresses: Arguments = ()
    if gathers(problem):
        keys_and_values = ()
        addresses = tuple(Argument(name, pointer_type(stored), POINTER_ALIGNMENT) for name in ("k", "v"))
    elsewhere = (*LISTED_INPUTS, *(("sinks",) if has_combined_sinks(problem, config) else ()))
    folds = (FOLDED,) if problem.batch_invariant and not is_split else ()
    return (
        *(_descriptor("q", chunk, qk_chunks, dtype, (*queries, chunk.width)) for chunk in qk_chunks),
        *keys_and_values,
        *(
            _descriptor("o", chunk, v_chunks, dtype.out, (*queries, chunk.width // parts))
            for chunk in (() if is_split else v_chunks)
        ),
        *_bias_descriptor(problem, config),
        *addresses,
        Argument("lse", "*fp32", POINTER_ALIGNMENT if specialization.lse else 1),
        *(Argument(name, "*fp32") for name in (SCALES if dtype.is_quantized else ())),
        *(tensor for tensor in side_tensors(problem) if tensor.name not in elsewhere),
        *_lists(problem, config),
        *(Argument(name, "*fp32", POINTER_ALIGNMENT) for name in PARTIALS if is_split),
        *folds,
        Argument("scale", "fp32"),
        *side_numbers(problem),
        *(Argument(name, "i32") for name in (*counts, *_list_counts(problem))),
        *(() if dtype.is_quantized else _strides(problem, specialization, of_lists=False)),
        *(Argument(name, "i32") for name in steps),
        *(Argument(name, "i32") for name in page_steps),
    )


def classifying_arguments(problem: Problem, specialization: Specialization) -> Arguments:
    """Returns the bias or mask, kinds, words, strides, counts, for the prologue that classifies blocks."""
    return (
        *(tensor for tensor in side_tensors(problem) if tensor.name == "bias"),
        KINDS,
        *_words(problem),
        *_strides(problem, specialization, of_lists=True),
        *(Argument(name, "i32") for name in LISTED_COUNTS),
    )


def listing_arguments(problem: Problem, config: HopperConfig, specialization: Specialization) -> Arguments:
    """Returns the arguments of the prologue that lists blocks.

    They are kinds, lists and the number of keys. For a block mask: its tensors, lists, strides, counts.
    """
    if not problem.block_mask:
        return KINDS, LISTS, Argument("seqlen_kv", "i32")
    return (
        *(tensor for tensor in side_tensors(problem) if tensor.name in (*LISTED_INPUTS, "seqlens_kv")),
        *_lists(problem, config),
        *_strides(problem, specialization, of_lists=True),
        *(Argument(name, "i32") for name in LISTED_COUNTS),
        Argument(LIST_WIDTH, "i32"),
    )


def _words(problem: Problem) -> Arguments:
    return (WORDS,) if problem.bias is Bias.BOOLEAN else ()


def _lists(problem: Problem, config: HopperConfig) -> Arguments:
    """Returns the workspaces that prologues write and the kernel reads."""
    if not has_lists(problem):
        return ()
    return (*_words(problem), LISTS, *((COUNTER,) if config.dynamic_schedule else ()))


def _list_counts(problem: Problem) -> tuple[str, ...]:
    if problem.block_mask:
        return (*MASK_COUNTS, LIST_WIDTH)
    if problem.bias is Bias.NONE:
        return ()
    return (*MASK_COUNTS, MASK_TILES) if shares_rows(problem) else MASK_COUNTS


def _strides(problem: Problem, specialization: Specialization, *, of_lists: bool) -> Arguments:
    """Returns the strides of the inputs that a prologue lists, or those of all other extra inputs."""
    strides = side_strides(problem, specialization)
    return tuple(stride for stride in strides if stride.name.startswith(LISTED_STRIDES) is of_lists)


def _bias_descriptor(problem: Problem, config: HopperConfig) -> Arguments:
    if problem.bias is not Bias.ADDITIVE:
        return ()
    chunk = Chunk(0, 0, config.block_n, padded=False)
    return (
        _descriptor("bias", chunk, (chunk,), problem.dtype, (1, 1, config.rows_per_group, config.block_n)),
    )


def _values(chunk: Chunk, rows: int, dtype: Dtype, outer: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a tile of V, which the prologue of quantised kernels transposes."""
    sides = (chunk.width, rows) if dtype.is_quantized else (rows, chunk.width)
    return *outer, *sides


def _descriptor(
    tensor: str, chunk: Chunk, chunks: tuple[Chunk, ...], dtype: KvDtype | Dtype, box: tuple[int, ...]
) -> Argument:
    name = f"{tensor}_desc_{chunk.index}" if len(chunks) > 1 else f"{tensor}_desc"
    return descriptor(name, dtype, box)
