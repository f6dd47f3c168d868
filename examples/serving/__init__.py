"""A server of a small transformer."""
