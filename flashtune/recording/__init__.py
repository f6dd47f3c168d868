"""Counts of a program's calls per problem, in a file for `flashtune search --from`.

May import `core`.
"""
