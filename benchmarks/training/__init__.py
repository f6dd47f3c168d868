"""Memory, host time and losses of attention in training."""
