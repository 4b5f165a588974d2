"""One process at a time changes a working directory; `export` only reads it, so that several may."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvconvert.errors import UsageError
from kvconvert.io import disk

LOCK_NAME = "lock"
logger = logging.getLogger(__name__)


@contextmanager
def work_lock(work: Path, shared: bool = False) -> Iterator[None]:
    """Hold an existing working directory; the system releases it however the process ends.

    Args:
        work: the directory; the lock is on an empty file in it, which stays there.
        shared: for reading, which others may do too.

    Raises:
        UsageError: another run holds it.
    """
    file = work / LOCK_NAME
    try:
        descriptor = disk.open_lock_file(file)
    except OSError as error:
        if not shared or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        # Whoever may not write here may still read, and hold the lock if there is one.
        if not file.exists():
            yield
            return
        descriptor = os.open(file, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"Another calibrate or export is using {work}; wait until it has ended, or choose another `work`."
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            logger.warning("The file system of %s has no locks; do not use it from two processes at once.", work)
        yield
    finally:
        os.close(descriptor)


def check_free(work: Path) -> None:
    """Refuse a working directory that another run holds at this moment; nothing is created."""
    if (work / LOCK_NAME).exists():
        with work_lock(work):
            pass
