"""Lists of random block masks, as kernels are given them."""

import torch
from torch import Tensor

from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import BlockLists, Problem

# Elements of a row behind its list's last one.
BEHIND = 3


def visible_blocks(problem: Problem, share: float = 0.5) -> Tensor:
    """Random blocks of each head or group, with an empty and a full row."""
    heads = problem.kv_heads if problem.block_lists is BlockLists.GROUP else problem.heads
    size = problem.block_mask
    shape = (problem.batch, heads, -(-problem.seqlen_q // size), -(-problem.seqlen_kv // size))
    visible = torch.rand(shape) < share
    visible[0, 0, 0] = False
    visible[-1, -1, -1] = True
    return visible


def with_lists(side: ExtraInputs, visible: Tensor) -> ExtraInputs:
    """Side inputs with these blocks. Elements after the end of a list are those of hidden blocks."""
    counts = visible.sum(-1, dtype=torch.int32)
    indices = (~visible).byte().argsort(dim=-1, stable=True).int()
    wide = torch.nn.functional.pad(indices, (0, BEHIND), value=2**30)
    return side._replace(block_counts=counts, block_indices=wide[..., :-BEHIND])
