"""Checks of a call's arguments, and their conversion to a problem, options and extra inputs.

May import `core`.
"""
