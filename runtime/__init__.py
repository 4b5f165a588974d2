"""Load a bundle and generate with its low-bit key-value cache."""
