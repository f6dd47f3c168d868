"""Lists of the blocks that a mask function may show, which a kernel writes on the device of a call."""

import functools

import torch

from flashtune.core.expressions.nodes import Functions
from flashtune.core.features.records import ExtraInputs
from flashtune.dispatch.platform import PLATFORM
from flashtune.launch.compilation import interpreting
from flashtune.launch.visible_blocks import Listing, listing_kernel, listing_of
from flashtune.request.functions.block_lists import Lists, unwritten_lists
from flashtune.request.functions.built_in import Extents
from flashtune.runtime.kernel_loader import require_triton
from flashtune.runtime.session import SESSION

# Mask functions of which the kernels are kept.
MAX_KEPT = 1024


def visible_lists(
    functions: Functions, extents: Extents, captured: ExtraInputs, device: torch.device
) -> Lists | None:
    """Returns the lists of a call without a block mask. A kernel is queued that writes them.

    Returns None on a CPU without an interpreter, where torch evaluates the mask function.
    """
    if device.type == "cpu" and not interpreting():
        return None
    lists = unwritten_lists(functions, extents, captured, device)
    if device.type != "meta":
        inputs = captured._replace(**lists.inputs)  # type: ignore[arg-type]
        _listing(functions, device)(inputs, (lists.mask.counts.shape[1], *extents[2:]))
    return lists


@functools.lru_cache(MAX_KEPT)
def _listing(functions: Functions, device: torch.device) -> Listing:
    """Returns the function that queues the kernel of a mask function, which is compiled once."""
    require_triton()
    kernel = listing_kernel(functions)
    if interpreting():
        return listing_of(kernel, None, device)
    binary = SESSION.loader.binaries.of(kernel, PLATFORM.target(device), device)
    return listing_of(kernel, binary, device)
