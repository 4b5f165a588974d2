"""Public-domain text that ships with kvconvert, for calibration and evaluation."""
