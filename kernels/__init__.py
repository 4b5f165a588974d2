"""Numerics of kvconvert: pure functions on tensors."""
