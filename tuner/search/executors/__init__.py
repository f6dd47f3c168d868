"""Executors run many searches: on the GPUs of a host, or elsewhere. `executor` has the interface."""
