"""Tensors of a case: values in guarded memory, extra inputs, block tables, and their cache.

Queries with scores at steps of a score function are drawn again.
"""
