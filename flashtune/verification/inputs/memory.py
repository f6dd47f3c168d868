"""The inputs of a case in poisoned memory: tensors, lengths, block tables and scales of a launch."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.features.records import TABLES, TENSORS, ExtraInputs
from flashtune.core.kernel import Alignment
from flashtune.core.layouts import STORED_DTYPES, TORCH_DTYPES, Layout
from flashtune.core.problem import Bias, KvScale, Problem
from flashtune.verification.inputs.guarded_tensors import (
    Guarded,
    Role,
    guarded,
    guarded_flat,
    guarded_integers,
)
from flashtune.verification.inputs.placement import (
    FAULTY_ENTRIES,
    Places,
    Table,
    key_places,
    key_shape,
    make_table,
    put,
    query_places,
    sequence_inputs,
    unused_entries,
)
from flashtune.verification.lengths import Lengths

# Hostile lengths exceed the true ones by this. A kernel that uses them reads the poison after the tensors.
OVER = 37


class Dense(NamedTuple):
    """Values of sequences in padded form, and the extra inputs."""

    q: Tensor  # [batch, heads, seqlen_q, head_dim] in the problem's dtype.
    k: Tensor  # [batch, kv_heads, seqlen_kv, head_dim] in the cache's dtype.
    v: Tensor  # [batch, kv_heads, seqlen_kv, value_head_dim] in the cache's dtype.
    # Extra inputs. A quantised cache has a scale for each key, [batch, kv_heads, seqlen_kv].
    side: ExtraInputs


class MemoryFrame(NamedTuple):
    """The memory layout of tensors."""

    alignment: Alignment  # Their exact alignment class.
    layout: Layout  # Order of heads and positions.
    # Index of the tensor of q, k, v, out that spans more than 2^31 elements, if any.
    far: int | None = None
    # Whether unused entries of the block table are page numbers far outside of the cache.
    faulty: bool = False
    behind: int = 0  # Unused rows after the last sequence of varlen queries and outputs.


class Memory(NamedTuple):
    """The tensors of a launch, each in poisoned or hostile surroundings."""

    q: Guarded
    k: Guarded
    v: Guarded
    out: Guarded
    lse: Guarded  # The log-sum-exp, [batch, heads, seqlen_q], or [1, heads, total_q] of a varlen batch.
    extra_inputs: tuple[Guarded, ...]
    side: ExtraInputs  # The extra inputs as a launch takes them.

    @property
    def read(self) -> tuple[Guarded, ...]:
        """All tensors that a forward kernel reads."""
        return self.q, self.k, self.v, *self.extra_inputs


def placed(
    problem: Problem, dense: Dense, lengths: Lengths, frame: MemoryFrame, generator: torch.Generator
) -> Memory:
    """Copies a case's values into the memory layout of the kernel, with poison everywhere else.

    The generator on the CPU assigns pages to sequences.
    """
    table = _table(problem, lengths, frame, generator) if problem.page_size else None
    queries = (1, lengths.total_q) if problem.packed else (problem.batch, problem.seqlen_q)
    behind = frame.behind if problem.packed else 0
    rows = (queries[0], problem.heads, queries[1] + behind)
    keys = key_shape(problem, lengths, table, spare=2)
    own = TORCH_DTYPES[problem.dtype]
    stored = STORED_DTYPES[problem.kv_dtype] if problem.kv_dtype else own
    shapes = (
        ((*rows, problem.head_dim), own, Role.INPUT),
        ((*keys, problem.head_dim), stored, Role.INPUT),
        ((*keys, problem.value_head_dim), stored, Role.INPUT),
        ((*rows, problem.value_head_dim), TORCH_DTYPES[problem.out_dtype], Role.OUTPUT),
    )
    # Row strides differ between tensors, so that the stride of another tensor gives a wrong result.
    q, k, v, out = (
        guarded(
            shape, dtype, frame.alignment, frame.layout, dense.q.device, role,
            spare=2 * index, far=frame.far == index,
        )
        for index, (shape, dtype, role) in enumerate(shapes)
    )  # fmt: skip
    q, out = q.without(behind), out.without(behind)
    if table is not None:
        # The first and the last page are poison. Only unused entries of the block table refer to them.
        k, v = (tensor._replace(view=tensor.view[1:-1]) for tensor in (k, v))
    if problem.mla:
        v = k._replace(view=k.view[..., : problem.value_head_dim])
    of_queries = query_places(problem, lengths)
    of_keys = key_places(problem, lengths, None if table is None else table.entries)
    for tensor, values, places in ((q, dense.q, of_queries), (k, dense.k, of_keys), (v, dense.v, of_keys)):
        fill(tensor.view, values, places, paged=problem.page_size > 0)
    lse = guarded_flat(rows, dense.q.device, Role.OUTPUT).without(behind)
    extra_inputs, side = _place_extra_inputs(problem, dense.side, lengths, table, frame, dense.q.device)
    return Memory(q, k, v, out, lse, extra_inputs, side)


def fill(view: Tensor, values: Tensor, places: Places, *, paged: bool = False) -> None:
    """Copies values of sequences to their places."""
    if view.dim() == 3:
        view, values = view[..., None], values[..., None]
    is_whole = not paged and view.shape == values.shape
    if is_whole and len(places.row) == values.shape[0] * values.shape[2]:
        view.copy_(values)
    else:
        put(view, values, places)


def _table(problem: Problem, lengths: Lengths, frame: MemoryFrame, generator: torch.Generator) -> Table:
    state = generator.get_state()
    table = make_table(problem, lengths, generator)
    beyond = FAULTY_ENTRIES if frame.faulty else unused_entries(table)
    # The same page assignment, with other numbers in unused entries.
    return make_table(problem, lengths, generator.set_state(state), beyond)


class _Placing(NamedTuple):
    """Copies of extra inputs in poisoned or hostile surroundings."""

    device: torch.device
    kept: list[Guarded]

    def keep(self, copy: Guarded, values: Tensor) -> Tensor:
        """Returns the view of a copy, filled with values."""
        self.kept.append(copy)
        copy.view.copy_(values)
        return copy.view

    def floats(self, values: Tensor) -> Tensor:
        """Returns a copy of float32 values."""
        return self.keep(guarded_flat(tuple(values.shape), self.device, Role.INPUT), values)

    def integers(self, values: Tensor, hostile: int) -> Tensor:
        """Returns a copy of integers, surrounded by `hostile` ones."""
        self.kept.append(guarded_integers(values.to(self.device), hostile))
        return self.kept[-1].view


def _place_extra_inputs(
    problem: Problem,
    side: ExtraInputs,
    lengths: Lengths,
    table: Table | None,
    frame: MemoryFrame,
    device: torch.device,
) -> tuple[tuple[Guarded, ...], ExtraInputs]:
    placing = _Placing(device, [])
    copies = _scales(problem, side, lengths, table, placing)
    if side.slopes is not None:
        # Rows of slopes are padded with NaN.
        wide = torch.nn.functional.pad(side.slopes, (0, 3), value=float("nan"))
        copies["slopes"] = placing.floats(wide)[:, : problem.heads]
    if side.bias is not None:
        copies["bias"] = _bias(problem, side.bias, frame, placing)
    if side.prefix is not None:
        copies["prefix"] = placing.integers(side.prefix, problem.seqlen_kv + OVER)
    for name, values in sequence_inputs(problem, lengths, table).items():
        # Cumulative lengths end with the number of rows.
        own = {"seqlens_kv": problem.seqlen_kv + OVER, "block_table": -1}
        copies[name] = placing.integers(values, own.get(name, int(values.flatten()[-1]) + OVER))
    if side.block_counts is not None and side.block_indices is not None:
        for name, lists, hostile in (
            ("block_counts", side.block_counts, side.block_indices.shape[-1] + OVER),
            ("block_indices", side.block_indices, -1),
        ):
            copies[name] = placing.integers(lists.flatten(0, -2), hostile).unflatten(0, lists.shape[:-1])
    if side.tree is not None:
        # Rows have a stride of their own, and lie between those of no sequence.
        shape = (1, *side.tree.shape)
        copy = guarded(shape, torch.bool, Alignment.ANY, Layout.BHSD, device, Role.INPUT, spare=1)
        copies["tree"] = placing.keep(copy._replace(view=copy.view[0]), side.tree)
    if side.seed is not None:
        copies["seed"] = placing.keep(guarded_flat((1,), device, Role.INPUT, torch.int64), side.seed)
    for name in (*TABLES, "full_counts", "function_ints"):
        if (values := getattr(side, name)) is not None:
            # Broadcast dimensions stay broadcast.
            stored = values[tuple(slice(1 if stride == 0 else None) for stride in values.stride())]
            guard = guarded_flat(stored.shape, device, Role.INPUT, values.dtype)
            copies[name] = placing.keep(guard, stored).expand(values.shape)
    for name, tensor in zip(TENSORS, side.optional_tensors, strict=True):
        if name not in copies and tensor is not None:
            copies[name] = placing.floats(tensor)
    return tuple(placing.kept), side._replace(**copies)


def _scales(
    problem: Problem, side: ExtraInputs, lengths: Lengths, table: Table | None, placing: _Placing
) -> dict[str, Any]:
    copies: dict[str, Any] = {}
    for name, scale, step in (
        ("q_scale", side.q_scale, 1),
        ("k_scale", side.k_scale, 1),
        ("v_scale", side.v_scale, 2),
    ):
        if scale is not None and problem.kv_dtype is None:
            copies[name] = placing.floats(scale)
        elif scale is not None:
            copies[name] = _cache_scale(problem, scale, lengths, table, placing, step)
    return copies


def _bias(problem: Problem, bias: Tensor, frame: MemoryFrame, placing: _Placing) -> Tensor:
    # Broadcast dimensions of sequences or heads stay broadcast.
    own = bias[: 1 if bias.stride(0) == 0 else None, : 1 if bias.stride(1) == 0 else None]
    # Families with descriptors need aligned biases next to aligned tensors. Masks are never aligned.
    aligned = problem.bias is Bias.ADDITIVE and frame.alignment is not Alignment.ANY
    alignment = Alignment.EIGHT if aligned else Alignment.ANY
    shape = tuple(own.shape)
    copy = guarded(shape, own.dtype, alignment, frame.layout, placing.device, Role.INPUT, spare=1)
    return placing.keep(copy, own).expand(bias.shape)


def _cache_scale(
    problem: Problem,
    scale: Tensor,
    lengths: Lengths,
    table: Table | None,
    placing: _Placing,
    step: int,
) -> Tensor:
    """Returns the scales of a cache as kernels take them, [pages or batch, kv_heads].

    `scale` has the scale of each key. The stride of heads is `step` elements, and rows have one more head of
    poison. The scales of unused pages are poison.
    """
    blocks = problem.batch if table is None else table.pages
    if problem.kv_scale is KvScale.TENSOR:
        return placing.floats(scale[:1, :1, 0]).expand(blocks, problem.kv_heads)
    of_pages = problem.kv_scale is KvScale.PAGE
    wide = scale.new_full((blocks if of_pages else 1, problem.kv_heads + 1, step), float("nan"))
    if table is None or not of_pages:
        wide[:, :-1, 0] = scale[: len(wide), :, 0]
    else:
        places = key_places(problem, lengths, table.entries).to(scale.device)
        first = places.slot == 0
        wide[places.block[first], :-1, 0] = scale[places.sequence[first], :, places.row[first]]
    return placing.floats(wide)[:, :-1, 0].expand(blocks, problem.kv_heads)
