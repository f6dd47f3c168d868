"""Tensors of constants on a device."""

import functools

import torch
from torch import Tensor


@functools.cache
def constants(
    values: tuple[float, ...], count: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Returns a tensor of `count` equal elements for each value.

    Any stream may read them at once, because the copy from the host is synchronous. The cache never releases
    them, because a CUDA graph may outlive the launch that it captured.
    """
    with torch.inference_mode(False):
        return tuple(torch.full((count,), value, dtype=dtype).to(device) for value in values)
