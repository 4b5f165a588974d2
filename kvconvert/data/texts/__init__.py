"""Text that ships with kvconvert, for calibration and evaluation: public-domain novels, code of its own, and
conversations written for it.
"""
