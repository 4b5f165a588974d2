"""Estimates before a conversion runs: memory, disk, cache, time, and what will fit."""
