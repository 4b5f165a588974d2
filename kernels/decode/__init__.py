"""Attention over a paged cache."""
