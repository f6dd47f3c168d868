"""Worker processes for compilation, verification and timing.

Also the interfaces that a simulation of a search implements.
"""
