"""The version, in a module of its own that imports nothing: bundles, reports and the command line name it."""

__version__ = "1.0.0"
