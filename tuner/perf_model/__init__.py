"""Predicted times: makespans of schedules, spills, and calibration."""
