"""Restamping: moves receipts to kernels with another source and the same machine code."""
