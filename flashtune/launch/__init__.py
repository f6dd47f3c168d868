"""Compilation and launch of kernels: binaries, tensor descriptors and arguments of the driver.

May import `core`, `request` and `templates`.
"""
