"""Execution of calls: prepared once, cached by shape, computed by a kernel, by SDPA or unfused.

Also torch's operators and autograd functions. May import all packages but `kv_cache`, `api` and `tuner`.
"""
