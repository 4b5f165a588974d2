"""kvconvert doctor."""

from __future__ import annotations

import click

from kvconvert.errors import KvconvertError
from kvconvert.version import __version__


@click.command()
def doctor() -> None:
    """Show what this machine has of what kvconvert needs; fails if something that is needed is broken."""
    from kvconvert.doctor import examine, report

    findings = examine()
    click.echo(f"kvconvert {__version__}\n{report(findings)}")
    problems = [finding.problem for finding in findings if finding.problem]
    if problems:
        raise KvconvertError(f"{'; '.join(problems)}.")
