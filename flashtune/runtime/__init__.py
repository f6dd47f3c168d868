"""Calls: prepared once, cached by shape, executed by a kernel, by SDPA or unfused.

Also torch's operators and autograd functions. May import all packages but `kv_cache`, `api` and `tuner`.
"""
