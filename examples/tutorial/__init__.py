"""Code of the tutorial in docs/tutorial.md: kernels on a CPU with counters of their memory accesses."""
