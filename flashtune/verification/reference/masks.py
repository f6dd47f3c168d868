"""Reference masks: the visible keys of each query as booleans, computed from each mask's definition.

Dropout uses the same random number generator as the kernels.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.features.functions import has_positions, visible_by_function
from flashtune.core.features.masks import both, seen_blocks, seen_keys, seen_newest
from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Bias, BlockLists, Causal, Problem
from flashtune.request.dropout import kept_weights
from flashtune.verification.inputs.placement import is_all
from flashtune.verification.lengths import Lengths

# At most this many comparisons of rows with keys are done on the CPU, which takes a few milliseconds.
FEW_COMPARISONS = 2**22
# Comparisons for each pair of a row and a key that a mask of features, or the choice of a border, takes.
COMPARISONS_OF_A_MASK = 3

# The cost of a row's generator state, about eighty integer operations, in comparisons.
COMPARISONS_OF_A_STATE = 64


class Rows(NamedTuple):
    """Some rows of some heads."""

    batch: Tensor  # The sequence of each head, [heads] in int64, on the CPU.
    head: Tensor  # The head within its sequence, of the same form.
    rows: Tensor  # Query rows, [rows] in int64, on the CPU.


def compared_on(comparisons: int, device: torch.device) -> torch.device:
    """Returns the device for so many comparisons: the CPU, which loads no CUDA kernels, if they are few."""
    return torch.device("cpu") if comparisons <= FEW_COMPARISONS else device


class Masks(NamedTuple):
    """The distinct masks of some heads, of which several usually share one."""

    rows: Rows  # A sequence and a head of each mask, [masks] each, and all rows.
    of_head: Tensor  # Index of each head's mask, [heads] in int64, on the CPU.

    @property
    def one_each(self) -> bool:
        """Whether each head has its own mask, in the order of the heads."""
        return torch.equal(self.of_head, torch.arange(len(self.rows.batch)))


def distinct_masks(lengths: Lengths, side: ExtraInputs, some: Rows, has_function: bool = False) -> Masks:
    """Returns the masks of some heads: one for all or a sequence; with a bias or block mask one per head.

    `has_function` is whether there is a mask function, which may differ between heads.
    """
    if side.bias is not None or side.block_counts is not None or has_function:
        return Masks(some, torch.arange(len(some.batch)))
    if not _differ(lengths) and side.prefix is None and side.tree is None:
        return Masks(Rows(some.batch[:1], some.head[:1], some.rows), torch.zeros_like(some.batch))
    batch, of_head = some.batch.unique(return_inverse=True)
    return Masks(Rows(batch, torch.zeros_like(batch), some.rows), of_head)


def places(problem: Problem, lengths: Lengths, batch: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Returns the positions of queries relative to the keys: [heads | 1, rows, 1].

    If all lengths are equal, the result has one entry for all heads.
    """
    own = rows[None, :, None].to(device)
    if problem.causal is Causal.TOP_LEFT:
        return own
    queries, keys = _lengths(lengths, batch, device)
    return own + (keys - queries)


def visible_keys(
    problem: Problem, lengths: Lengths, batch: Tensor, rows: Tensor, side: ExtraInputs, device: torch.device
) -> Tensor:
    """Returns the visible keys of rows, without the effect of a bias: [heads | 1, rows, keys].

    Rows after a sequence's last query have no visible keys. `batch` has the sequence of each head. Prefix
    lengths are on any device.
    """
    positions = places(problem, lengths, batch, rows, device)
    queries, keys = _lengths(lengths, batch, device)
    key = torch.arange(problem.seqlen_kv, device=device)
    prefix = None if side.prefix is None else side.prefix.cpu()[batch].to(device, torch.int64)[:, None, None]
    seen = seen_keys(problem, positions, key, prefix)
    return both(both(seen, key < keys), rows[None, :, None].to(device) < queries)


def counted(seen: Tensor) -> Tensor:
    """Returns the number of visible keys per row, float64 [heads, rows], of a mask [heads, rows, keys]."""
    # The CPU sums bytes with vector instructions, but not booleans, which take twenty times as long.
    return seen.view(torch.uint8).sum(-1, dtype=torch.int32).double()


def unhidden_keys(
    problem: Problem, lengths: Lengths, side: ExtraInputs, some: Rows, device: torch.device
) -> Tensor:
    """Returns the result of `visible_keys` without keys that a bias or block mask hides.

    Returns:
        [heads | 1, rows, keys].
    """
    seen = visible_keys(problem, lengths, some.batch, some.rows, side, device)
    if side.block_counts is not None:
        seen = both(seen, _block_keys(problem, side, some).to(device))
    if side.tree is not None:
        seen = both(seen, _newest_keys(problem, lengths, side.tree, some).to(device))
    query = some.rows[None, :, None].to(device)
    if has_positions(problem):
        query = places(problem, lengths, some.batch, some.rows, device)
    shown = visible_by_function(
        problem,
        side,
        some.batch[:, None, None].to(device),
        some.head[:, None, None].to(device),
        query,
        problem.seqlen_kv,
    )
    if shown is not None:
        seen = (seen & shown).expand(len(some.batch), -1, -1)
    if side.bias is None:
        return seen
    picked = bias_of(problem, side.bias, some).to(device)
    # Minus infinity times zero is NaN, which converts to True. A comparison would load another CUDA kernel.
    return seen & (picked if problem.bias is Bias.BOOLEAN else ~(picked * 0).bool())


def _newest_keys(problem: Problem, lengths: Lengths, tree: Tensor, some: Rows) -> Tensor:
    """Returns the keys that a tree mask leaves visible, [heads, rows, keys], on the CPU."""
    queries, keys = _lengths(lengths, some.batch, torch.device("cpu"))
    places = torch.arange(problem.seqlen_kv) - (keys - queries)
    return seen_newest(tree.cpu()[some.batch][:, some.rows], places.view(-1, 1, problem.seqlen_kv))


def _block_keys(problem: Problem, side: ExtraInputs, some: Rows) -> Tensor:
    """Returns the keys that a block mask leaves visible, [heads, rows, keys], on the CPU."""
    assert side.block_counts is not None
    assert side.block_indices is not None
    size = problem.block_mask
    # Indexing on the CPU loads no CUDA kernels.
    counts, indices = side.block_counts.cpu(), side.block_indices.cpu()
    of_list = some.head if problem.block_lists is BlockLists.HEAD else some.head // problem.group_size
    indices_of_lists = some.batch[:, None], of_list[:, None], (some.rows // size)[None, :]
    blocks = seen_blocks(counts[indices_of_lists], indices[indices_of_lists], -(-problem.seqlen_kv // size))
    return blocks.repeat_interleave(size, -1)[..., : problem.seqlen_kv]


def bias_of(problem: Problem, bias: Tensor, some: Rows) -> Tensor:
    """Returns a bias at some rows of some heads, [heads, rows, keys]. Does not index it if these are all."""
    if is_all(problem, some.batch * problem.heads + some.head, some.rows):
        return bias.flatten(0, 1)
    return bias[some.batch, some.head][:, some.rows]


def _lengths(
    lengths: Lengths, batch: Tensor, device: torch.device
) -> tuple[int, int] | tuple[Tensor, Tensor]:
    """Returns query and key lengths of each head's sequence, [heads, 1, 1], or numbers if all are equal."""
    if not _differ(lengths):
        return lengths.queries[0], lengths.keys[0]
    queries, keys = (torch.tensor(part)[batch][:, None, None].to(device) for part in lengths)
    return queries, keys


def _differ(lengths: Lengths) -> bool:
    """Returns whether sequences have different lengths."""
    return len(set(zip(*lengths, strict=True))) > 1


def factors(
    problem: Problem, lengths: Lengths, side: ExtraInputs, some: Rows, device: torch.device
) -> Tensor | None:
    """Returns the factors of the probabilities: 0 if dropped, otherwise 1 / (1 - dropout).

    Rows of a varlen batch are numbered through the batch.

    Returns:
        Float64 [heads, rows, keys], or None without dropout.
    """
    if side.seed is None or side.dropout is None:
        return None
    number, rows = some.batch * problem.heads + some.head, some.rows
    if problem.packed:
        begins = torch.tensor([0, *itertools.accumulate(lengths.queries)])
        number, rows = some.head, begins[some.batch][:, None] + rows
    where = compared_on(COMPARISONS_OF_A_STATE * len(number) * len(some.rows), device)
    number, rows = number.to(where), rows.to(where)
    stay = kept_weights(side.seed, number, rows, problem.seqlen_kv, side.dropout, device)
    return stay.double().div_(1.0 - side.dropout)
