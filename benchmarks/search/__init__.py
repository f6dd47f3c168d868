"""Searches on a GPU: other tuners, and repeated searches."""
