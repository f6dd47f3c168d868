"""Lists of the blocks that a mask function shows, from the values of all pairs."""

import torch

from flashtune.core.block_mask import BLOCK_SIZE
from flashtune.core.expressions.evaluation import evaluate
from flashtune.core.expressions.nodes import Functions
from flashtune.core.features.functions import captured_values
from flashtune.core.features.records import ExtraInputs
from flashtune.request.functions.block_lists import Lists, ordered_lists
from flashtune.request.functions.built_in import Extents


def exact_lists(functions: Functions, extents: Extents, captured: ExtraInputs, device: torch.device) -> Lists:
    """The lists of a call, of each head. Blocks with keys or queries that do not exist are not full."""
    places = [
        torch.arange(extent, device=device).view(-1, *[1] * axis)
        for extent, axis in zip(extents, (3, 2, 1, 0), strict=True)
    ]
    values = captured_values(functions, captured, tuple(places), None)  # type: ignore[arg-type]
    visible = evaluate(functions, values, functions.mask).expand(extents)
    rows, columns = (-extent % BLOCK_SIZE for extent in extents[2:])
    padded = torch.nn.functional.pad(visible, (0, columns, 0, rows))
    tiles = padded.unflatten(-1, (-1, BLOCK_SIZE)).unflatten(-3, (-1, BLOCK_SIZE))
    return ordered_lists(tiles.any(-1).any(-2).int() + tiles.all(-1).all(-2), BLOCK_SIZE)
