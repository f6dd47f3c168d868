"""Cases, inputs, reference and tolerance of a backward pass."""
