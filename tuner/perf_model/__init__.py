"""Predicted times: roofline, balance of waves, and their calibration."""
