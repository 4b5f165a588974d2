"""What a bundle gains on the machine it is run on: speed and memory, against its source model."""

from kvconvert.benchmark.bench import BenchReport, bench
from kvconvert.benchmark.contender import Measurement

__all__ = ["BenchReport", "Measurement", "bench"]
