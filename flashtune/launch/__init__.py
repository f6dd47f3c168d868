"""From a kernel's source to its launch: compilation, binaries, descriptors, the driver's arguments.

May import `core`, `request` and `templates`.
"""
