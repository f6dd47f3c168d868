"""Selection of a kernel or of SDPA for a request, from tables and estimates. Compiles and launches nothing.

May import `core`, `request`, `templates`, `launch` and `db`.
"""
