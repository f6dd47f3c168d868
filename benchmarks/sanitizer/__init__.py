"""Kernels under compute-sanitizer."""
