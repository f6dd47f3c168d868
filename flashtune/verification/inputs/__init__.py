"""Tensors of a case: values in guarded memory, side inputs, block tables, and what is kept of them."""
