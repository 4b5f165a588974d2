"""Tiny random models, checkpoints and processors for tests."""
