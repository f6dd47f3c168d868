"""Measurements beside other implementations, and what makes tables and pictures of them."""
