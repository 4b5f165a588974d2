"""Everything about the package is in pyproject.toml; this file only refuses a checkout that cannot be installed."""

from pathlib import Path

if not Path(__file__).with_name("src").joinpath("kvconvert", "kernels").is_dir():
    raise SystemExit(
        "This checkout has no symbolic links, which src/kvconvert is; kvconvert needs Linux (on Windows: WSL), where "
        "git makes them: clone it there, with `git config core.symlinks` not set to false."
    )

from setuptools import setup

setup()
