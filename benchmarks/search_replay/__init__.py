"""Policies of the search, replayed on exhaustive measurements."""
