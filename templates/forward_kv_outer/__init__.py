"""The forward pass in Triton with the outer loop over keys, as in FlashAttention-1."""
