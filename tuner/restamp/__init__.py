"""Receipts carried over to kernels that render differently and compile to the same."""
