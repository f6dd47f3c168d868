"""The functions that users call.

May import all packages but `tuner`.
"""
