"""Resources and machine code of compiled kernels."""
