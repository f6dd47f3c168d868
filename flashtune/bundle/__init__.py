"""Bundles: files of compiled kernels with all that a launch needs. Nothing here imports Triton.

Loading a bundle runs its machine code on the GPU, so it needs the same trust as a library. Checksums detect
damage, not forgery.
"""
