"""kvconvert generate BUNDLE."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from kvconvert.commands import (
    AnyWhole,
    Number,
    Place,
    count_option,
    device_option,
    dtype_option,
    head_option,
    quiet,
    seed_option,
)
from kvconvert.errors import UsageError

_MOST_INPUT = 2**24  # characters of standard input, which may have no end


@click.command()
@click.argument("bundle")
@click.argument("text", metavar="[PROMPT]", required=False)
@click.option("--prompt", metavar="TEXT", help="The same as PROMPT.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--chat", is_flag=True, help="Converse, one line of input a turn.")
@click.option("--system", metavar="TEXT", help="System message, for models with a chat template.")
@click.option(
    "--image",
    "images",
    metavar="FILE",
    multiple=True,
    type=Place(),
    help="Image that the prompt, or the first turn, is about; may be given again.",
)
@count_option("--max-new-tokens", default=256, show_default=True, help="Tokens to generate at most.")
@click.option("--temperature", metavar="T", type=Number(), help="Divides the logits; 0 takes the most likely token.")
@click.option("--top-p", metavar="P", type=Number(), help="Draw among the most likely tokens that sum up to P.")
@click.option("--top-k", metavar="K", type=AnyWhole(), help="Draw among the K most likely tokens; 0 allows all.")
@seed_option(help="The same seed draws the same tokens.")
@click.option("--stop", metavar="TEXT", multiple=True, help="End an answer before this text; may be given again.")
@click.option("--parse-special", is_flag=True, help="Read special tokens that messages spell as such, and not as text.")
@device_option()
@dtype_option("what the bundle loads in")
@head_option()
def generate(
    bundle: str,
    text: str | None,
    prompt: str | None,
    raw: bool,
    chat: bool,
    images: tuple[Path, ...],
    **options: Any,
) -> None:
    """Generate text with BUNDLE and its low-bit cache.

    A model with a chat template answers PROMPT, or what standard input holds where it is - or left out; any other, or
    --raw, continues it.
    Without a sampling option tokens are chosen as the model's generation_config.json says, and greedily where it says
    nothing.

    In a conversation, `/help` lists what else a line may be: Ctrl-C ends an answer, `/reset` forgets what was said,
    `/bye` ends it, and with a vision-language model `/image FILE` gives an image to the next line.
    """
    given = [_decoded(each, "PROMPT") for each in (text, prompt) if each is not None]
    if len(given) + chat > 1:
        raise UsageError("kvconvert generate takes one of PROMPT, --prompt TEXT or --chat; leave the others out.")
    if chat and raw:
        raise UsageError("--raw is for a PROMPT; a conversation goes through the model's chat template if it has one.")
    if raw and (images or options["system"] is not None):
        raise UsageError(
            "--raw continues the text as it is, which has no place for an image or a --system message; leave one of "
            "them out."
        )
    if given == [""]:
        raise UsageError("The prompt has no tokens; give some text.")
    options["system"] = None if options["system"] is None else _decoded(options["system"], "--system")
    options["stop"] = tuple(_decoded(each, "--stop") for each in options["stop"])
    from kvconvert.choice import Choice

    choice = Choice(**{field.name: options.pop(field.name) for field in fields(Choice)})
    from kvconvert.bundle.locate import check_images, check_place, check_seed, check_system
    from kvconvert.data.images import read_image

    check_place(bundle)
    if options["system"] is not None:
        check_system(bundle)
    if choice.seed is not None and choice.temperature is None and choice.top_p is None and choice.top_k is None:
        check_seed(bundle)
    for image in images:
        read_image(image, None, "`images`")
    if images:
        check_images(bundle)
    if given in ([], ["-"]) and not chat:
        given = [_whole_input()]
    if sys.stderr.isatty():
        print(f"Loading {bundle} ...", file=sys.stderr, flush=True)
    quiet()
    from kvconvert.console import Console

    console = Console(bundle, choice=choice, **options)
    if given:
        console.complete(given[0], images, raw)
    else:
        console.chat(_lines(), images)


def _whole_input() -> str:
    """The prompt that standard input holds (UsageError: there is none)."""
    text = ""
    if not sys.stdin.isatty():
        lines, length = [], 0
        for line in _lines():
            lines.append(line)
            length += len(line)
            _check_input(length)
        text = "".join(lines).removesuffix("\n")
    if not text:
        raise UsageError(
            "kvconvert generate needs a prompt: give it after BUNDLE, with --prompt TEXT or --chat, or as input."
        )
    return text


def _check_input(length: int) -> None:
    """Refuse (UsageError) standard input that may have no end."""
    if length > _MOST_INPUT:
        raise UsageError(f"The standard input has more than {_MOST_INPUT:,} characters; give a shorter prompt.")


def _lines() -> Iterator[str]:
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  gives `input` editing and a history
        with suppress(EOFError):
            while True:
                yield input("> ") + "\n"
        return
    try:
        while line := sys.stdin.readline(_MOST_INPUT + 1):
            _check_input(len(line))
            yield _decoded(line, "The standard input")
    except UnicodeDecodeError as error:
        raise UsageError(f"The standard input is not {error.encoding} text; convert it first.") from error


def _decoded(text: str, where: str) -> str:
    """Text from the command line, of which Python passes on as surrogates what the locale's encoding does not have:
    UTF-8 in a locale of ASCII, or no text (UsageError).
    """
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        try:
            return os.fsencode(text).decode()
        except UnicodeError as error:
            raise UsageError(f"{where} is not UTF-8 text; convert it first.") from error
