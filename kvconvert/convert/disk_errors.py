"""What a working directory says when the system refuses to write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvconvert.errors import KvconvertError
from kvconvert.io import disk

GO_ON = "calibrate again with the same arguments once that is mended, which goes on from the last finished layer"
REPEAT = "nothing was left behind; repeat this once that is mended"


@contextmanager
def disk_errors(path: Path, remedy: str = GO_ON) -> Iterator[None]:
    """Turn the system's refusal to write into one sentence, which says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        what = "The disk is full" if disk.is_full(error) else "Writing failed"
        raise KvconvertError(
            f"{what}: {error.filename or path} could not be written ({error.strerror}); {remedy}."
        ) from error
