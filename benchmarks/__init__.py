"""Measurements of flashtune and other implementations, and the scripts that make tables and figures."""
