"""Reads and writes self-checks with the standard library and msgspec alone, for a short first call."""
