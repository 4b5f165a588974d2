"""The command line."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import signal
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

from kvconvert.commands import DEVICES, DTYPES
from kvconvert.commands.bench import bench
from kvconvert.commands.calibrate import calibrate, convert
from kvconvert.commands.completion import completion
from kvconvert.commands.doctor import doctor
from kvconvert.commands.evaluate import evaluate
from kvconvert.commands.export import export
from kvconvert.commands.generate import generate
from kvconvert.commands.hub import list_bundles, pull, push, rm
from kvconvert.commands.inspect import inspect, report, verify
from kvconvert.commands.plan import plan
from kvconvert.commands.recipes import recipes
from kvconvert.commands.serve import serve
from kvconvert.commands.warm import warm
from kvconvert.errors import FROM_THE_LAST_LAYER, KvconvertError, UsageError, printable
from kvconvert.io.interrupts import INTERRUPTED, exit_interrupted
from kvconvert.io.logs import log_as_text
from kvconvert.io.process import ended_at_once
from kvconvert.version import __version__

# What other programs call what is here.
_ELSEWHERE = {
    **dict.fromkeys(("quantize", "quantise", "compress"), "kvconvert convert quantizes a model."),
    "version": "kvconvert --version says it.",
    "help": "kvconvert --help lists those that there are, and kvconvert COMMAND --help describes one.",
    "auto": "kvconvert convert MODEL BUNDLE --recipe auto chooses the widths.",
    **dict.fromkeys(("compare", "evaluate"), "kvconvert eval compares a bundle with its source."),
    "run": "kvconvert generate answers a prompt, and kvconvert serve clients.",
    "chat": "kvconvert generate BUNDLE --chat is a conversation.",
    **dict.fromkeys(("show", "info"), "kvconvert inspect says what a bundle holds."),
    "card": "kvconvert export writes a bundle's card, README.md in it, and kvconvert eval --write its figures.",
    **dict.fromkeys(("benchmark", "perf"), "kvconvert bench measures speed, and kvconvert eval what is lost."),
    "upload": "kvconvert push shares a bundle on the Hub.",
    "download": "kvconvert pull fetches a bundle from the Hub.",
    **dict.fromkeys(("remove", "delete"), "kvconvert rm removes a bundle that was pulled."),
    "ls": "kvconvert list shows the bundles that were pulled.",
}
# What other programs call options, or all arguments of a command.
_OPTIONS_ELSEWHERE = {
    "--recipe": ("--quant", "--quantize", "--quantization", "--method", "--scheme", "--preset", "--config", "-q"),
    "--against": ("--model", "--source", "--baseline", "--reference", "-m"),
    "--seq-len": ("--max-length", "--max-seq-length", "--max-seq-len", "--context-length"),
    "--max-new-tokens": ("--max-length", "--length", "-n"),
    "--max-prompt-tokens": ("--max-model-len", "--context-length", "--ctx-size", "-c"),
    "--prompt": ("-p",),
    "--port": ("-p",),
    "--device": ("--gpu", "--cuda", "--cpu"),
    "--force": ("--overwrite", "-f"),
    "--restart": ("--overwrite", "--force", "-f"),
    "--json": ("--format", "--output-format"),
    "--output": ("--out", "--output-dir", "--out-dir", "--work"),
    "MODEL BUNDLE": ("--output", "--out", "--output-dir", "--out-dir", "--model", "-o", "-m"),
    "MODEL": ("--model", "-m"),
    "BUNDLE": ("--model", "--bundle", "-m"),
}
# What an argument too many may be.
_EXTRA = {
    "generate": "Put a prompt of several words in quotes.",
    **dict.fromkeys(("eval", "bench"), "Name the model to compare with by --against."),
}
_STEPS = """\
From a model to a bundle in five steps, where MODEL is a directory or a Hub id:

  kvconvert plan MODEL                    what converting takes, and what fits
  kvconvert convert MODEL BUNDLE          calibrate, and write the bundle
  kvconvert eval BUNDLE --against MODEL   how far it departs from the model
  kvconvert generate BUNDLE TEXT          what it says; or serve BUNDLE, for OpenAI's clients
  kvconvert push BUNDLE USER/NAME         share it on the Hub

kvconvert --help lists all commands, and kvconvert recipes what a bundle may be."""
# What the same command does after an interruption, where it does not repeat everything.
_RESUMED = {
    **dict.fromkeys(("calibrate", "convert"), f"go on {FROM_THE_LAST_LAYER}"),
    "pull": "go on with the files that are missing",
}
_LONGEST_MESSAGE = 2000
# ENOENT: moved or removed while a command runs, which checked before that it is there.
_PATH_ERRORS = (
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.ENOENT, errno.ESTALE),
)
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT, errno.EBADF)


def _drop_output() -> None:
    """Leave nothing for the interpreter to write when it ends: it would fail again, with a traceback."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _end_unwritten(ctx: click.Context, error: OSError) -> NoReturn:
    """End with one sentence about what could not be printed; what commands read and write has errors of its own."""
    if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
        raise error
    _drop_output()
    click.echo(f"Error: The output could not be written ({error.strerror}); make room, or send it elsewhere.", err=True)
    ctx.exit(1)


def _shortened(message: str) -> str:
    """A message without the middle of a text or a list that it quotes from a file, where that is very long."""
    half = _LONGEST_MESSAGE // 2
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:half]} ... {message[-half:]}"


def _unwritable(error: UnicodeEncodeError) -> str:
    return (
        f"The output has a character that {error.encoding} cannot write; set PYTHONIOENCODING=utf-8 and run it again."
    )


def _check_dashes(ctx: click.Context, words: list[str]) -> None:
    """Refuse (NoSuchOption) a long option with one dash, which would be read as letters that are options each, and
    one that is called otherwise, and (BadOptionUsage) a short one with a sign of equality, which would be part of its
    value.
    """
    parameters = ctx.command.get_params(ctx)
    options = [option for option in parameters if isinstance(option, click.Option)]
    places = " ".join(each.human_readable_name for each in parameters if isinstance(each, click.Argument))
    names = {name: option for option in options for name in (*option.opts, *option.secondary_opts)}
    before = None
    for word in itertools.takewhile(lambda word: word != "--", words):
        valued = before is not None and not (before.is_flag or before.count)
        before = names.get(word)
        name = word.partition("=")[0]
        if valued:
            continue
        if re.fullmatch(r"-[a-z][a-z0-9-]+", name):
            possible = [f"-{name}"] if f"-{name}" in names else names
            if name[:2] not in names or len(possible) == 1:
                raise click.NoSuchOption(name, possibilities=possible, ctx=ctx)
        elif name in names and len(name) == 2 and name != word:
            raise click.BadOptionUsage(
                name, f"Option {name!r} takes a space, not an equals sign, before its value.", ctx
            )
        elif name not in names and name.startswith("-"):
            if name == "--resume" and "--restart" in names:
                raise click.NoSuchOption(
                    name, "No such option '--resume'. The same command without it goes on where it stopped.", ctx=ctx
                )
            if name.startswith("--") and (possible := [known for known in names if known.startswith(name)]):
                raise click.NoSuchOption(name, possibilities=possible, ctx=ctx)
            for own, others in _OPTIONS_ELSEWHERE.items():
                if name in others and (own in names or own == places):
                    advice = f"Write {own} without an option." if own == places else f"Did you mean {own!r}?"
                    raise click.NoSuchOption(name, f"No such option {name!r}. {advice}", ctx=ctx)


_PATHS = ("model", "bundle", "work", "data", "against", "tasks", "recipe")  # or ids on the Hub


def _possible(name: str | None) -> Iterable[str]:
    """What a parameter may be, besides paths; read when a shell asks."""
    if name == "recipe":
        from kvconvert.recipes.recipe import preset_names

        return preset_names()
    if name == "only":
        from kvconvert.fidelity import PARTS

        return PARTS
    values = {"dtype": DTYPES, "device": DEVICES, "weights": ("auto", "awq", "gptq", "awq+gptq", "rtn", "none")}
    return values.get(name or "", ())


class _Text(StringParamType):
    """Any text; a shell completes it to paths where it is a model, a bundle or data, and to the values that it has."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Paths, which the shell lists itself, first: bash forgets what it was given before one."""
        paths = [CompletionItem(incomplete, type="file")] if param.name in _PATHS else []
        before, comma, begun = incomplete.rpartition(",") if param.name == "only" else ("", "", incomplete)
        known = (value for value in _possible(param.name) if value.startswith(begun) and value not in before.split(","))
        return [*paths, *(CompletionItem(f"{before}{comma}{value}") for value in known)]


class _Commands(click.Group):
    """Commands in the order of their use; kvconvert's own errors become one sentence and their exit code."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command, whose plain text a shell completes."""
        for parameter in cmd.params:
            if parameter.type is click.STRING:
                parameter.type = _Text()
        super().add_command(cmd, name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _check_dashes(ctx, args[:1])
        try:
            return super().parse_args(ctx, args)
        except OSError as error:  # --help and --version print here
            _end_unwritten(ctx, error)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] in _ELSEWHERE:
            raise UsageError(f"There is no command {args[0]}; {_ELSEWHERE[args[0]]}")
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            _check_dashes(click.Context(command, ctx, info_name=name), rest)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            # Output that waits in a buffer is part of the command, and so is its failure.
            sys.stdout.flush()
            return result
        except click.UsageError as error:
            if "unexpected extra argument" in error.message and ctx.invoked_subcommand in _EXTRA:
                raise click.UsageError(f"{error.message}. {_EXTRA[ctx.invoked_subcommand]}", error.ctx) from error
            raise
        except KvconvertError as error:
            message = self._with_options(_shortened(str(error)), ctx.invoked_subcommand)
            click.echo(f"Error: {message}", err=True)
            ctx.exit(error.exit_code)
        except UnicodeEncodeError as error:
            click.echo(f"Error: {_unwritable(error)}", err=True)
            ctx.exit(1)
        except OSError as error:
            if error.filename is None:
                _end_unwritten(ctx, error)
            if error.errno in _PATH_ERRORS:
                remedy = "check the path and its permissions"
            elif error.errno in _OUTPUT_ERRORS:
                remedy = "make room or check the disk, and run it again"
            else:
                raise
            path = os.fsdecode(error.filename)
            if not os.access(folder := os.path.dirname(path) or ".", os.X_OK) and os.path.isdir(folder):
                path = folder  # which may not be looked into
            name = printable(path)
            shown = name if len(name) <= 200 else f"{name[:200]}..."
            click.echo(f"Error: {shown} cannot be used ({error.strerror}); {remedy}.", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            again = _RESUMED.get(ctx.invoked_subcommand or "", "repeat it")
            message = f"Interrupted; nothing half written was left behind: run the same command again to {again}."
            click.echo(f"Error: {message}", err=True)
            ctx.exit(INTERRUPTED)

    def _with_options(self, message: str, invoked: str | None) -> str:
        """A message in which options stand for the arguments that the library names: `restart=True` is --restart.

        The invoked command's options come first, for its `work` may be another's -o.
        """
        if invoked == "convert":  # which names its working directory itself
            message = message.replace("choose another `work`", "choose another BUNDLE").replace("`work`", "BUNDLE-work")
        for command in sorted(self.commands.values(), key=lambda command: command.name != invoked):
            for parameter in command.params:
                argument = isinstance(parameter, click.Argument)
                shown = parameter.human_readable_name if argument else parameter.opts[0]
                for name in (f"`{parameter.name}`", f"`{parameter.name}=True`"):
                    message = message.replace(name, shown)
        return message


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvconvert")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Convert Hugging Face models into bundles with quantized weights and a calibrated low-bit key-value cache.

    Exit codes: 0 done, 1 failed or not found, 2 wrong usage, 3 fidelity limit not met, 130 interrupted.
    """
    if ctx.invoked_subcommand is None:
        click.echo(_STEPS)
        return
    _check_environment()
    if ctx.invoked_subcommand not in ("doctor", "completion"):
        import kvconvert.models  # noqa: F401, refuses a version of transformers that was not tried
    processes = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if processes > 1 and ctx.invoked_subcommand != "calibrate":
        if os.environ["RANK"] != "0":
            ctx.exit(UsageError.exit_code)
        raise UsageError(
            f"torchrun started {processes} processes, and kvconvert {ctx.invoked_subcommand} runs in one; start it "
            "without torchrun. Only kvconvert calibrate shares its work."
        )


for command in (
    plan,
    convert,
    calibrate,
    export,
    evaluate,
    bench,
    generate,
    serve,
    warm,
    inspect,
    report,
    verify,
    push,
    pull,
    list_bundles,
    rm,
    recipes,
    doctor,
    completion,
):
    cli.add_command(command)


# Which torchrun sets, and what the Hub's client reads when it is imported.
_LAUNCHED, _NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK"), ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT")


def _check_environment() -> None:
    """Refuse (UsageError) a current directory that is gone, with which libraries end otherwise, and variables of the
    environment that have to be whole numbers, and are none.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("The current directory was removed; change to one that exists, and run it again.") from error
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    for name in (*_LAUNCHED, *_NUMBERS) if launched else _NUMBERS:
        value = os.environ.get(name)
        if (name in _LAUNCHED) if value is None else not re.fullmatch(r"\s*\d{1,9}\s*", value, re.ASCII):
            said = "not set" if value is None else f"{value[:40]!r}"
            remedy = "start with torchrun again" if name in _LAUNCHED else "unset it"
            raise UsageError(f"The environment variable {name} is {said}, and has to be a whole number; {remedy}.")


def _terminate(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Ctrl-C: KeyboardInterrupt, but not within the import of torch, which aborts on it."""
    if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        exit_interrupted(signum, frame)
    signal.default_int_handler(signum, frame)


def main() -> None:
    """Entry point: a terminated process cleans up like an interrupted one."""
    # It would read the entry points of every installed package, longer than it takes to refuse a recipe.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    log_as_text()
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, exit_interrupted):  # and not ignored
        signal.signal(signal.SIGINT, _interrupt)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, it stays open
    with ended_at_once():
        cli(prog_name="kvconvert")


if __name__ == "__main__":
    main()
