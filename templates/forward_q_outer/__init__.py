"""The forward pass in Triton with the outer loop over queries, as in FlashAttention-2."""
