"""Continuous batching: many requests decoded together over a fixed number of rows of one low-bit cache."""

from kvconvert.runtime.engine.engine import Engine
from kvconvert.runtime.engine.request import EngineStats, Event, Request
from kvconvert.runtime.engine.sampling import Sampling

__all__ = ["Engine", "EngineStats", "Event", "Request", "Sampling"]
