"""Calibration and evaluation data: text, images and the samples made of them."""
