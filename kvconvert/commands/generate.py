"""kvconvert generate BUNDLE."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from kvconvert.commands.quiet import quiet
from kvconvert.errors import UsageError


@click.command()
@click.argument("bundle")
@click.option("--prompt", metavar="TEXT", help="Text to continue.")
@click.option("--chat", is_flag=True, help="Converse, one line of input a turn.")
@click.option(
    "--image",
    "images",
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Image that the prompt, or the first turn, is about; may be given again.",
)
@click.option(
    "--max-new-tokens", metavar="N", type=click.IntRange(min=1), default=256, show_default=True, help="At most."
)
@click.option("--device", metavar="D", help="cpu or cuda; a GPU by default if there is one.")
def generate(
    bundle: str, prompt: str | None, chat: bool, images: tuple[Path, ...], max_new_tokens: int, device: str | None
) -> None:
    """Generate text with BUNDLE and its low-bit cache.

    With --image the prompt goes through the model's chat template, if it has one. In a conversation with a
    vision-language model, a line `/image FILE` gives an image to the next line.
    """
    if chat == (prompt is not None):
        raise UsageError("kvconvert generate needs either --prompt TEXT or --chat, and not both.")
    _require_text(prompt or "", "--prompt")
    quiet()
    from kvconvert.console import Console

    console = Console(bundle, max_new_tokens, device)
    if prompt is not None:
        console.complete(prompt, images)
    else:
        console.chat(_lines(), images)


def _lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            _require_text(line, "The standard input")
            yield line
    except UnicodeDecodeError as error:
        raise UsageError(f"The standard input is not {error.encoding} text; convert it first.") from error


def _require_text(text: str, where: str) -> None:
    """Refuse bytes of the command line that are no text in its encoding, which Python passes on as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where} is not UTF-8 text; convert it first.") from error
