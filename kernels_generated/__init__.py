"""Rendered kernels of the shipped selections, to read. Nothing imports them."""
