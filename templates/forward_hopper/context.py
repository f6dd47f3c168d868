"""Values for the template, in addition to the config."""

from flashtune.core.expressions.nodes import Op
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, Causal, KvDtype, KvScale, Problem
from flashtune.templates.common.args.gluon_functions import gluon_function_lines
from flashtune.templates.common.args.problem_context import UNBOUNDED, bound, problem_values
from flashtune.templates.common.model.splits import split_values
from flashtune.templates.common.model.sram import chunks_of, columns, power_of_two
from flashtune.templates.family import ORDERED_KEYS, Context
from flashtune.templates.forward_hopper.space import (
    CONVERTER_REGISTERS,
    HopperConfig,
    Order,
    copied_keys,
    gathers,
    has_combined_sinks,
    has_lists,
    has_one_list,
    raw_stages,
    role_registers,
    shares_rows,
    skips_splits,
    stored_dtype,
)
from flashtune.templates.forward_hopper.splits import COMBINED_AT_ONCE

# Warps of a program that classifies blocks, and the blocks of a bias for each program, which reads few rows.
CLASSIFYING_WARPS = {Bias.BOOLEAN: 2, Bias.ADDITIVE: 8}
CLASSIFIED = 8


def hopper_context(problem: Problem, config: HopperConfig, specialization: Specialization) -> Context:
    """Returns the values of a problem and a config."""
    return (
        _tile_values(problem, config)
        | _element_values(problem, config)
        | _mask_values(problem, config)
        | _ordered_values(problem, config)
        | ({"sinks": False} if has_combined_sinks(problem, config) else {})
        | {"lse": specialization.lse}
    )


def _tile_values(problem: Problem, config: HopperConfig) -> dict[str, object]:
    """Returns the values of tiles, their order and their copies."""
    qk_chunks, v_chunks = chunks_of(problem, config.split_head_dim)
    consumer_registers, producer_registers = role_registers(problem, config)
    lpt = config.order is not Order.LINEAR
    positions = config.block_m // config.pack_gqa
    return {
        "consumer_registers": consumer_registers,
        "producer_registers": producer_registers,
        "converter_registers": CONVERTER_REGISTERS,
        # A tile has rows of several heads.
        "has_packs": config.pack_gqa > 1,
        "ping_pong": config.ping_pong and config.num_consumer_groups > 1,
        "lpt": lpt,
        "serpentine": config.order is Order.SERPENTINE,
        # The tiles of all chunks are in one order, the longest first.
        "sorts_chunks": problem.chunk > 0 and lpt and not problem.packed and problem.chunk % positions == 0,
        "qk_chunks": qk_chunks,
        "v_chunks": v_chunks,
        "qk_columns": columns(qk_chunks),
        "v_columns": columns(v_chunks),
        "padded_values": power_of_two(problem.value_head_dim),
        # Keys of a copy. Threads copy the rows of small pages, and the copy engine copies others.
        "copied_keys": copied_keys(problem, config),
        "gathers": gathers(problem),
        "copies_pages": problem.page_size > 0 and not gathers(problem),
    }


def _ordered_values(problem: Problem, config: HopperConfig) -> dict[str, object]:
    """Returns the values of splits of the keys, also of those of a fixed length."""
    is_ordered = problem.batch_invariant
    return split_values(problem, 1 if is_ordered else config.num_splits) | {
        # Splits begin at fixed keys and are combined one by one, also if one program walks all of them.
        "ordered": is_ordered,
        "folds": is_ordered and config.num_splits == 1,
        "combines_sinks": has_combined_sinks(problem, config),
        "split_blocks": ORDERED_KEYS // config.block_n,
        "combined_at_once": COMBINED_AT_ONCE,
        "is_split": config.num_splits > 1,
        # Programs skip tiles of splits beyond the last key of a sequence.
        "skips": skips_splits(problem, config),
    }


def _element_values(problem: Problem, config: HopperConfig) -> dict[str, object]:
    """Returns the values of the types of elements, and of scales."""
    kv_dtype, is_quantized = stored_dtype(problem), problem.dtype.is_quantized
    # Keys and values are in 8 bits, and queries are not.
    is_converted = isinstance(kv_dtype, KvDtype)
    bits = 8 * problem.dtype.itemsize
    by_page = problem.kv_scale is KvScale.PAGE
    return {
        "kv_dtype": kv_dtype,
        "is_quantized": is_quantized,
        "is_converted": is_converted,
        "is_int8": kv_dtype is KvDtype.INT8,
        # Bits of an element of q, k and v, and of keys and values in memory.
        "bits": bits,
        "kv_bits": 8 if is_converted else bits,
        # Scores and probabilities are multiplied by the scales of pages.
        "has_page_scales": is_converted and by_page,
        # Scores and outputs are multiplied by the scales of keys and values.
        "has_head_scales": is_converted and not by_page,
        "raw_stages": raw_stages(config),
        # 8-bit probabilities are in shared memory, or stay in registers.
        "has_p_tiles": config.p_stages > 0,
        "has_two_p_tiles": config.p_stages > 1,
        "p_in_registers": is_quantized and not config.p_stages,
    }


def _mask_values(problem: Problem, config: HopperConfig) -> dict[str, object]:
    """Returns the values of the problem's masks and changed scores, and of lists of blocks."""
    is_causal = problem.causal is not Causal.NONE
    bounds = {
        "window_left": bound(problem.sight.left),
        "window_right": UNBOUNDED if is_causal else bound(problem.window_right),
    }
    listed = problem_values(problem, window_left=bounds["window_left"])
    if problem.bias is Bias.BOOLEAN:
        # The lists and words of the blocks include the masks by position.
        bounds = {"window_left": UNBOUNDED, "window_right": UNBOUNDED, "chunk": 0, "first_tokens": 0}
    values = problem_values(problem, **bounds) | {"lengths": problem.kv_lengths}
    one_list = has_one_list(problem, config)
    has_group_lists = has_lists(problem) and not one_list
    has_left = values["has_window_left"] or values["has_chunk"]
    has_right = (is_causal and not values["has_mask"]) or values["has_window_right"]
    is_bounded = has_right or values["has_chunk"]
    has_border = is_bounded or has_left
    has_prefix = problem.prefix and has_border
    has_first_tokens = values["first_tokens"] > 0 and has_left
    ends_early = values["packed"] or values["lengths"] or values["is_paged"]
    is_split = config.num_splits > 1 or problem.batch_invariant
    # Relative to other rows of a tile, ALiBi would depend on them.
    measures_distance = problem.alibi and (not is_causal or has_prefix or problem.batch_invariant)
    return values | {
        # Queries see no keys before, or beyond, a position of their own.
        "has_left": has_left,
        "has_right": has_right,
        "is_bounded": is_bounded,
        "has_border": has_border,
        # A prefix makes keys visible that would be hidden without it.
        "has_prefix": has_prefix,
        # The first keys, or those of the prefix, are visible before the window or chunk.
        "has_first_tokens": has_first_tokens,
        "lifts": has_left and (has_first_tokens or has_prefix),
        # Chunks or a prefix change where the visible keys of a query end.
        "moves_end": is_bounded and (has_prefix or (values["has_chunk"] and not is_causal)),
        # A sequence has fewer keys than its tensor. Two more dimensions of a tile of keys mark where it ends.
        "ends_early": ends_early,
        "keys_rank": 5 if ends_early else 4,
        # Scores with a bias, and those of some functions, are in natural units.
        "is_natural": values["has_bias"] or gluon_function_lines(problem.functions, "natural") != "",
        # A mask function makes words with a bit for each score.
        "has_words": gluon_function_lines(problem.functions, "words", values["by_position"]) != "",
        # A score function has a hyperbolic tangent of pairs.
        "has_tanh": any(node.op is Op.TANH for node in problem.functions.nodes),
        # A block may hold no key that a row sees.
        "is_masked": has_border
        or ends_early
        or has_lists(problem)
        or problem.tree
        or is_split
        or bool(problem.functions),
        # ALiBi depends on the distance of keys on both sides, instead of on their position.
        "measures_distance": measures_distance,
        # Scores of a row lack a term that is equal for all its keys.
        "shifts_scores": problem.softcap or (problem.alibi and not measures_distance),
        # A prologue lists the blocks of each tile, or of each of its groups.
        "has_lists": has_lists(problem),
        "one_list": one_list,
        "has_group_lists": has_group_lists,
        # A mask with the same row for all queries has the same lists for all tiles.
        "shares_rows": shares_rows(problem),
        # A group needs the numbers of the blocks of its list.
        "reads_entries": has_group_lists
        or (one_list and bool(has_border or problem.dropout or problem.alibi or problem.functions)),
        "classified": CLASSIFIED if problem.bias is Bias.ADDITIVE else 1,
        "classifying_warps": CLASSIFYING_WARPS.get(problem.bias, 0),
        # The masks by position of these lists.
        "listed_left": listed["window_left"],
        "listed_right": bound(problem.sight.right),
        "listed_chunk": listed["chunk"],
        "listed_first": listed["first_tokens"],
    }
