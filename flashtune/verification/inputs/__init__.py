"""Tensors of a case: values in guarded memory, extra inputs, block tables, and their cache."""
