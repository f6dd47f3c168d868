"""Paged KV caches: block manager, layouts, and appending.

May import `core`, `request`, `launch` and `runtime`.
"""
