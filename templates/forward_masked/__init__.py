"""The forward pass in Triton with masks, biases, packed sequences and pages."""
