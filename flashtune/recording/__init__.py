"""Counts of the problems that a program calls, in a file for `flashtune search --from`.

May import `core`.
"""
