"""Macros, arguments and models that families share."""
