"""The forward pass in Triton with masks, biases, varlen batches and paged caches."""
