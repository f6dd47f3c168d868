"""Gradients by two kernels in Triton: one for dk and dv, one for dq."""
