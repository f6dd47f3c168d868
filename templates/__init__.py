"""Kernel families, one folder each, and the code that finds and renders them.

`common` has the macros, arguments and models that families share. This package imports only `core`. Families
import no other family.
"""
