"""Paged caches of keys and values: blocks, layouts, and appending.

May import `core`, `request`, `launch` and `runtime`.
"""
