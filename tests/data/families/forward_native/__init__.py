"""A family of one GPU, for tests."""
