"""kvconvert completion SHELL."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_VARIABLE = "_KVCONVERT_COMPLETE"  # by which click asks a program what fits
# zsh completes nothing before this was called, which a short ~/.zshrc may not do; its first line stays a comment.
_FIRST = {"zsh": "#compdef kvconvert\n(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n"}


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what makes SHELL complete kvconvert's commands and options.

    \b
    bash, in ~/.bashrc:                   eval "$(kvconvert completion bash)"
    zsh, in ~/.zshrc:                     eval "$(kvconvert completion zsh)"
    fish, in ~/.config/fish/config.fish:  kvconvert completion fish | source
    """
    completer = get_completion_class(shell)
    assert completer is not None
    source = completer(ctx.find_root().command, {}, "kvconvert", _VARIABLE).source()
    # For fish: values may have commas of their own, as in --only kl,cache.
    click.echo(_FIRST.get(shell, "") + source.replace('string split ","', 'string split --max 1 ","'))
