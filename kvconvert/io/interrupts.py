"""Ctrl-C before a command begins. It has to be provided for first, so this imports what every interpreter has."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

INTERRUPTED = 130  # 128 + SIGINT


def exit_interrupted(signum: int, frame: object) -> NoReturn:
    """Ctrl-C while modules are imported, some of which abort on KeyboardInterrupt; nothing is left then."""
    os.write(2, b"Error: Interrupted before anything was begun; run the same command again.\n")
    os._exit(INTERRUPTED)
