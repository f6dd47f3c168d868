"""The public functions of flashtune.

May import all packages except `tuner`.
"""
