"""Randomness on the CPU: arithmetic with what is small loads no kernels there."""

from __future__ import annotations

import torch


def aside(generator: torch.Generator, step: int = 0) -> torch.Generator:
    """A generator of the CPU's with the seed of another one, or with the one so many steps behind it."""
    return torch.Generator().manual_seed((generator.initial_seed() + step) % 2**32)
