"""The command line."""

from __future__ import annotations

import os
import signal
from typing import Any

import click

from kvconvert.commands.bench import bench
from kvconvert.commands.calibrate import calibrate
from kvconvert.commands.evaluate import evaluate
from kvconvert.commands.export import export
from kvconvert.commands.generate import generate
from kvconvert.commands.inspect import inspect
from kvconvert.commands.verify import verify
from kvconvert.errors import KvconvertError
from kvconvert.version import __version__


class _Commands(click.Group):
    """Commands in the order of their use; kvconvert's own errors become one sentence and their exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvconvertError as error:
            message = self._with_options(" ".join(str(error).splitlines()), ctx.invoked_subcommand)
            click.echo(f"Error: {message}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            going_on = "go on from the last finished layer" if ctx.invoked_subcommand == "calibrate" else "repeat it"
            message = f"Interrupted; nothing half written was left behind: run the same command again to {going_on}."
            click.echo(f"Error: {message}", err=True)
            ctx.exit(1)

    def _with_options(self, message: str, invoked: str | None) -> str:
        """A message in which options stand for the arguments that the library names: `restart=True` is --restart.

        The invoked command's options come first, for its `work` may be another's -o.
        """
        for command in sorted(self.commands.values(), key=lambda command: command.name != invoked):
            for parameter in command.params:
                argument = isinstance(parameter, click.Argument)
                shown = parameter.human_readable_name if argument else parameter.opts[0]
                for name in (f"`{parameter.name}`", f"`{parameter.name}=True`"):
                    message = message.replace(name, shown)
        return message


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvconvert")
def cli() -> None:
    """Convert Hugging Face models into bundles with quantized weights and a calibrated low-bit key-value cache.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 fidelity limit not met.
    """


for command in (calibrate, export, evaluate, bench, generate, inspect, verify):
    cli.add_command(command)


def _terminate(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


def main() -> None:
    """Entry point: a terminated process cleans up like an interrupted one."""
    # Read when torch loads. Waiting threads that spin make small models ten times slower on a machine with other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGTERM, _terminate)
    cli(prog_name="kvconvert")


if __name__ == "__main__":
    main()
