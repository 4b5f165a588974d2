"""A bundle's speed and memory on the machine it is run on, against its source model."""

from kvconvert.benchmark.bench import BenchReport, bench
from kvconvert.benchmark.contender import Measurement

__all__ = ["BenchReport", "Measurement", "bench"]
