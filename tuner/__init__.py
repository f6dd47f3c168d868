"""Search, timing and tables of kernels, and the command line.

May import all packages; no other package imports it.
"""
