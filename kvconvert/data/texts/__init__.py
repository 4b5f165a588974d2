"""Text that ships with kvconvert, for calibration and evaluation: public-domain novels, and code of its own."""
