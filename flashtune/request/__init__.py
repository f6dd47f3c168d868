"""Arguments of calls: checked once, and read into a problem, options and extra inputs.

May import `core`.
"""
