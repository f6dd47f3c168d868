"""Predicted times: roofline, wave quantization, and calibration."""
