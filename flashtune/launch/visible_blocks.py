"""The kernel that lists the blocks which a mask function may show, compiled by Triton for each function.

It replaces a block mask. Numbers of queries and keys, and captured values, are its arguments, so that new
ones need no compilation.
"""

from collections.abc import Callable

import torch

from flashtune.core.block_mask import BLOCK_SIZE
from flashtune.core.caches import keep
from flashtune.core.config import LaunchOptions
from flashtune.core.expressions.nodes import Functions, Op
from flashtune.core.features.records import TABLES, ExtraInputs
from flashtune.core.kernel import Argument, Kernel, Specialization
from flashtune.launch.binding import Binary
from flashtune.launch.compilation import load_module
from flashtune.launch.launcher import Queue, current_device, current_stream, interpreted_queue, queue_of
from flashtune.templates.common.args.interval_lines import ENTRY, EXTENTS, LISTS, ROWS, listing_source
from flashtune.templates.common.args.side import POINTERS

# The name in place of a family.
NAME = "visible_blocks"
OPTIONS = LaunchOptions(num_warps=4, num_stages=1)
# Writes the lists among extra inputs, for a number of heads with own lists, of queries and of keys.
Listing = Callable[[ExtraInputs, tuple[int, int, int]], None]


def listing_kernel(functions: Functions, block_size: int = BLOCK_SIZE) -> Kernel:
    """Returns the kernel of a mask function."""
    nodes = [functions.nodes[place] for place in functions.needed(functions.mask)]
    tables = {node.value for node in nodes if node.op is Op.LOAD}
    ops = {node.op for node in nodes}
    pointers = dict.fromkeys(LISTS, "*i32")
    if tables or Op.INT_NUMBER in ops:
        pointers["function_ints"] = "*i32"
    if Op.FLOAT_NUMBER in ops:
        pointers["function_floats"] = "*fp32"
    pointers |= {TABLES[place]: POINTERS[functions.tables[place].dtype] for place in sorted(tables)}
    source = listing_source(functions, (*pointers, *EXTENTS), block_size)
    arguments = (
        *(Argument(name, kind) for name, kind in pointers.items()),
        *(Argument(name, "i32") for name in EXTENTS),
    )
    return Kernel(NAME, ENTRY, source, arguments, OPTIONS, Specialization())


def listing_of(kernel: Kernel, binary: Binary | None, device: torch.device) -> Listing:
    """Returns the function that launches a kernel of `listing_kernel` on the current stream of a device.

    Without a binary, Triton's interpreter runs it.
    """
    names = tuple(argument.name for argument in kernel.arguments if argument.name not in EXTENTS)
    index = device.index
    queues: dict[tuple[int, ...], Queue] = {}

    def write(inputs: ExtraInputs, extents: tuple[int, int, int]) -> None:
        tensors = [getattr(inputs, name) for name in names]
        batch, heads, queries = tensors[0].shape
        grid = (-(-queries // ROWS) * batch * heads,)
        if binary is None:
            interpreted_queue(load_module(kernel), ENTRY, grid, extents)(*tensors)
            return
        if current_device() != index:
            # The binary belongs to its device's context, which must be current.
            with torch.cuda.device(index):
                write(inputs, extents)
            return
        queue = queues.get(grid)
        if queue is None:
            (compiled,) = binary.values()
            queue = queue_of(compiled, grid, (), device)
            keep(queues, grid, queue)
        addresses = (*[tensor.data_ptr() for tensor in tensors], *extents)
        own = (addresses,) if queue.as_one else addresses
        queue.launch(*queue.before, current_stream(index), *queue.after, *own)

    return write
