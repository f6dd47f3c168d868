"""Times kernels in the same run as SDPA's backends and other baselines."""
