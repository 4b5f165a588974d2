"""Progress on stderr: a bar on a terminal, one line for each stage in a file or pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

# Of what may have been done before: its rate would be that of looking.
WITHOUT_RATE = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}]"


def progress_bar(
    items: Sequence[Any] | None = None, *, desc: str, unit: str, shown: bool, total: int | None = None, **options: Any
) -> tqdm:
    """tqdm's bar where stderr is a terminal; elsewhere the stage and its size are printed once.

    Args:
        items: to iterate over; or None, where `update` is called `total` times.
        desc: the stage.
        unit: one item, in the singular.
        shown: whether to print anything.
        total: how many items; None takes all of `items`.
        options: tqdm's own.
    """
    total = len(items or ()) if total is None else total
    on_terminal = sys.stderr.isatty()
    if shown and not on_terminal:
        scaled = options.get("unit_scale", False)
        size = tqdm.format_sizeof(total, unit) if scaled else f"{total:,} {unit}{'' if total == 1 else 's'}"
        print(f"{desc}: {size}", file=sys.stderr, flush=True)
    return tqdm(items, desc=desc, unit=unit, total=total, disable=not (shown and on_terminal), **options)
