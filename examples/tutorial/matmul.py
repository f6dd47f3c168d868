"""Two kernels for the product of square matrices: one output element per program, and one tile."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from examples.tutorial.traffic import Traffic, recorded


@triton.jit  # type: ignore[untyped-decorator]
def multiply(a, b, c, n, BLOCK: tl.constexpr, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N803
    """Computes a tile of c = a b, of BLOCK x BLOCK elements. Each step loads DEPTH columns of a."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    depths = tl.arange(0, DEPTH)
    tile = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in tl.range(0, n, DEPTH):
        a_tile = tl.load(a + rows * n + start + depths[None, :])
        b_tile = tl.load(b + (start + depths[:, None]) * n + columns)
        tile += tl.sum(a_tile[:, :, None] * b_tile[None, :, :], 1)
    tl.store(c + rows * n + columns, tile)


def product(a: Tensor, b: Tensor, *, block: int) -> tuple[Tensor, Traffic]:
    """Returns the product of square matrices, and the accesses to global memory.

    Args:
        a: The left matrix, float32 [n, n].
        b: The right matrix, float32 [n, n].
        block: Rows and columns of the tile of a program, which divide n; 1 for the naive product.
    """
    n = len(a)
    c = torch.empty_like(a)
    with recorded() as traffic:
        multiply[n // block, n // block](a, b, c, n, block, block)
    traffic.tensors = {"a": a, "b": b, "c": c}
    return c, traffic
