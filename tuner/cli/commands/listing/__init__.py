"""Commands that list the names of shapes, models, GPUs and kernel families."""
