"""Cases, inputs, reference and tolerance of the backward pass."""
