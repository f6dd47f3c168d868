"""Generates, searches, proves and dispatches flash-attention kernels."""
