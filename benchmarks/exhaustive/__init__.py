"""Measurement of every config of a problem."""
