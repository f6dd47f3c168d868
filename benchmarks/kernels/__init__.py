"""Times and errors of kernels, and their memory models."""
