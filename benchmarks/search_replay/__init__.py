"""Simulated searches on tabular benchmarks."""
