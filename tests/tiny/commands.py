"""kvconvert's commands in the process of the test, which spares their start."""

from __future__ import annotations

from click.testing import CliRunner, Result

from kvconvert.cli import cli


def kvconvert(*arguments: object, stdin: str = "") -> Result:
    """Run a command; an exception that is not kvconvert's own fails the test."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
