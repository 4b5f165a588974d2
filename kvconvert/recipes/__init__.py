"""Recipes: what to do with a model, from presets and files, and as text."""
