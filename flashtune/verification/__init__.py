"""Checks of kernels against a float64 reference, on a GPU or under Triton's interpreter.

Contains test cases and their inputs, probes, tolerances and schedule fuzzing. May import `core`, `request`,
`templates` and `launch`, but not the database.
"""
