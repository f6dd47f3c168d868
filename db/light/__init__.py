"""Reading and noting self-checks with the standard library and msgspec alone, as a first call does."""
