"""Measurements of libraries that use flashtune."""
