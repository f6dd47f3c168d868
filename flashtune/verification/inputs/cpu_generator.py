"""Random generators on the CPU, where arithmetic with small tensors loads no CUDA kernels."""

from __future__ import annotations

import torch


def aside(generator: torch.Generator, step: int = 0) -> torch.Generator:
    """Returns a CPU generator with the seed of another generator plus `step`."""
    return torch.Generator().manual_seed((generator.initial_seed() + step) % 2**32)
