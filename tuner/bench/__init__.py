"""Kernels timed beside SDPA's backends and other peers."""
