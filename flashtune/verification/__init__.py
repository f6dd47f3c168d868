"""Checks of kernels against a float64 reference, on a GPU or under Triton's interpreter.

Cases and their inputs, probes, tolerances, schedule fuzzing. May import `core`, `request`, `templates` and
`launch`; knows no database.
"""
