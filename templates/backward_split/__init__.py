"""Gradients by two Triton kernels: one for dk and dv, one for dq."""
