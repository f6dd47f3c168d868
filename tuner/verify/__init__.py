"""`flashtune verify`: compiles, checks and times the kernels of a table."""
