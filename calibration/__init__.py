"""Calibration passes: one file per method."""
