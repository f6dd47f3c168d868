"""The inputs of a call in addition to q, k and v, and the names of its tensors and numbers."""

from flashtune.core.features.table import NO_EXTRA_INPUTS, NUMBERS, TENSORS, ExtraInputs

__all__ = ["NO_EXTRA_INPUTS", "NUMBERS", "TENSORS", "ExtraInputs"]
