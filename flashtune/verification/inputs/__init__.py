"""Tensors of a case: values in guarded memory, extra inputs, block tables, and their cache.

Queries with scores near steps of a score function are changed a little.
"""
