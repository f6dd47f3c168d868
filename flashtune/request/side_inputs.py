"""The extra inputs of a call: checks against its problem, and views for kernels."""

from collections.abc import Iterator

import torch
from torch import Tensor

from flashtune.core.errors import ProblemError
from flashtune.core.expressions.nodes import Op
from flashtune.core.features.description import TensorInput
from flashtune.core.features.functions import TORCH_TABLES, function_tensors, has_positions
from flashtune.core.features.records import TABLES, ExtraInputs
from flashtune.core.features.table import TENSOR_INPUTS
from flashtune.core.problem import BlockLists, KvScale, Problem
from flashtune.request.tensor_checks import require_dense


def check_kinds(side: ExtraInputs, device: torch.device) -> None:
    """Checks the type, device and last stride of each extra input."""
    for entry, tensor in _given(side):
        require_dense(entry.option, tensor)
        if tensor.device != device:
            raise ProblemError(f"{entry.option} is on {tensor.device} and q on {device}: move it there")
        if entry.dtype is None:
            continue
        if tensor.dtype is not getattr(torch, entry.dtype):
            raise ProblemError(
                f"{entry.option} is {tensor.dtype}: pass {entry.option}.to(torch.{entry.dtype})"
            )
        if not entry.is_strided and tensor.numel() > 1 and tensor.stride(-1) != 1:
            raise ProblemError(
                f"{entry.option}'s last dimension has stride {tensor.stride(-1)}: pass it contiguous"
            )


def _given(side: ExtraInputs) -> Iterator[tuple[TensorInput, Tensor]]:
    for entry in TENSOR_INPUTS.values():
        tensor = getattr(side, entry.name)
        if tensor is not None:
            yield entry, tensor


def check_shapes(problem: Problem, side: ExtraInputs, batch: int, longest: int) -> None:
    """Checks shapes of extra inputs that follow from heads, sequences and queries, and of the block table.

    `longest` is the number of queries of the longest sequence.
    """
    extents = {"heads": problem.heads, "batch": batch, "batch + 1": batch + 1, "queries": longest}
    for entry, tensor in _given(side):
        shape = None if entry.shape is None else [extents[name] for name in entry.shape]
        if shape is not None and list(tensor.shape) != shape:
            raise ProblemError(
                f"{entry.option} has shape {list(tensor.shape)}: pass {shape} for "
                f"{batch} sequences of {problem.heads} query heads"
            )
    if side.block_table is not None and (side.block_table.dim() != 2 or side.block_table.shape[0] != batch):
        raise ProblemError(
            f"block_table has shape {list(side.block_table.shape)}: pass [{batch}, pages of the longest], "
            "the pages of each sequence in order"
        )


def check_tables(problem: Problem, side: ExtraInputs) -> None:
    """Checks the captured tensors of functions: their types, and sizes of dimensions that places index.

    Positions of paged sequences may be of any size: lengths are on the device.
    """
    functions = problem.functions
    extents = {Op.BATCH: problem.batch, Op.HEAD: problem.heads}
    if not has_positions(problem):
        extents |= {Op.QUERY: problem.seqlen_q, Op.KEY: problem.seqlen_kv}
    tables = [getattr(side, name) for name in TABLES]
    kinds = [(table.dtype, table.dim()) for table in tables if table is not None]
    expected = [(TORCH_TABLES()[table.dtype], table.dimensions) for table in functions.tables]
    if kinds != expected or function_tensors(problem) - {
        tensor for tensor in ExtraInputs._fields if getattr(side, tensor) is not None
    }:
        raise ProblemError(f"functions capture tensors of {expected} and the call has {kinds}: pass these")
    for node in functions.nodes:
        for axis, operand in enumerate(node.operands if node.op is Op.LOAD else ()):
            needed, size = extents.get(functions.nodes[operand].op, 0), tables[node.value].shape[axis]
            if size < needed:
                shape, place = list(tables[node.value].shape), functions.nodes[operand].op
                raise ProblemError(
                    f"a captured tensor is {shape} and a function indexes dimension {axis} by each {place}: "
                    f"pass at least {needed} elements there"
                )


def scale_kind(k_scale: Tensor, v_scale: Tensor, paged: bool, places: int, kv_heads: int) -> KvScale:
    """Returns the granularity of a quantised cache's scales, from their shapes.

    Scales are one number, one per head, or one per page (dense cache: sequence) and head. A tensor that is
    expanded over pages has one scale for all pages.
    """
    kinds = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale.numel() == 1 and scale.dim() <= 1:
            kinds.append(KvScale.TENSOR)
        elif scale.shape == (kv_heads,):
            kinds.append(KvScale.HEAD)
        elif scale.shape == (places, kv_heads):
            kinds.append(KvScale.PAGE if paged and scale.stride(0) else KvScale.HEAD)
        else:
            what = "page" if paged else "sequence"
            raise ProblemError(
                f"{name} has shape {list(scale.shape)}: pass [1], a scale for each head [{kv_heads}], or one "
                f"for each {what} and head [{places}, {kv_heads}]"
            )
    order = (KvScale.TENSOR, KvScale.HEAD, KvScale.PAGE)
    return max(kinds, key=order.index)


def block_lists(side: ExtraInputs, heads: int, kv_heads: int) -> BlockLists:
    """Returns the heads that share the lists of a block mask, from the shape of their counts.

    A single list for all heads counts as one for each KV head.
    """
    counts = side.block_counts
    shared = (
        counts is not None and counts.dim() == 3 and counts.shape[1] in (1, kv_heads) and kv_heads < heads
    )
    return BlockLists.GROUP if shared else BlockLists.HEAD


def side_views(problem: Problem, side: ExtraInputs, places: int) -> ExtraInputs:
    """Returns the extra inputs as kernels take them. Shared dimensions are expanded with a stride of zero.

    `places` is the number of pages (dense cache: sequences) of the cache's scales.
    """
    slopes, bias = side.slopes, side.bias
    if slopes is not None:
        if slopes.shape not in ((problem.heads,), (problem.batch, problem.heads)) or (
            problem.heads > 1 and slopes.stride(-1) != 1
        ):
            raise ProblemError(
                f"alibi_slopes has shape {list(slopes.shape)}: pass contiguous [{problem.heads}] or "
                f"[{problem.batch}, {problem.heads}]"
            )
        slopes = slopes.expand(problem.batch, problem.heads)
    if bias is not None:
        bias = _bias_view(problem, bias)
    k_scale, v_scale = (
        # Kernels read the row of a sequence, also of packed ones, which are a batch of one.
        scale.expand(max(places, problem.batch), problem.kv_heads)
        if scale is not None and (scale.dim() < 2 or scale.shape[0] == 1)
        else scale
        for scale in (side.k_scale, side.v_scale)
    )
    side = side._replace(slopes=slopes, bias=bias, k_scale=k_scale, v_scale=v_scale)
    return side if side.block_counts is None else _with_lists(problem, side, side.block_counts)


def _with_lists(problem: Problem, side: ExtraInputs, counts: Tensor) -> ExtraInputs:
    """Returns extra inputs with the lists of a block mask expanded to all sequences and heads."""
    indices, size = side.block_indices, problem.block_mask
    assert indices is not None
    queries = -(-problem.seqlen_q // size)
    heads = problem.heads if problem.block_lists is BlockLists.HEAD else problem.kv_heads
    fits = (
        counts.dim() == 3
        and indices.dim() == 4
        and indices.shape[:3] == counts.shape
        and counts.shape[0] in (1, problem.batch)
        and counts.shape[1] in (1, heads)
        and counts.shape[2] == queries
        and (indices.shape[3] > 0 or not problem.seqlen_kv)
    )
    if not fits:
        raise ProblemError(
            f"block_mask has counts {list(counts.shape)} and indices {list(indices.shape)}: pass counts "
            f"[{problem.batch} or 1, {problem.heads}, {problem.kv_heads} or 1, {queries}] for "
            f"{problem.seqlen_q} queries in blocks of {size}, and indices of this shape and at least one key "
            "block"
        )
    shape = problem.batch, heads, queries
    full = side.full_counts
    return side._replace(
        block_counts=counts.expand(shape),
        block_indices=indices.expand(*shape, indices.shape[3]),
        full_counts=None if full is None else full.expand(shape),
    )


def _bias_view(problem: Problem, bias: Tensor) -> Tensor:
    shape = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_kv
    fits = bias.dim() <= 4 and all(
        size in (1, full) for size, full in zip(reversed(bias.shape), reversed(shape), strict=False)
    )
    if not fits or bias.dim() < 2 or bias.shape[-1] != problem.seqlen_kv:
        raise ProblemError(
            f"attn_bias or attn_mask has shape {list(bias.shape)}: pass {list(shape)}, or 1 in place of any "
            "number but the last"
        )
    if problem.seqlen_kv > 1 and bias.stride(-1) != 1:
        raise ProblemError(
            f"attn_bias's or attn_mask's last dimension has stride {bias.stride(-1)}: pass it contiguous"
        )
    return bias.expand(shape)
