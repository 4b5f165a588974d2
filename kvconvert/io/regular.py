"""Finding and opening files that another program may replace or remove between a look at them and their reading."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any


def open_regular(path: Path) -> BufferedReader:
    """A file to read (OSError: it cannot be opened, or is none): opening a pipe would wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most: int) -> bytes | None:
    """The content of a file (OSError: as `open_regular`); None where it has more than `most` bytes."""
    with open_regular(path) as stream:
        if os.fstat(stream.fileno()).st_size > most:
            return None
        content = stream.read(most + 1)
    return content if len(content) <= most else None


def files_below(directory: Path) -> list[Path]:
    """All files in a directory and its folders, sorted; a folder that cannot be read, or is removed meanwhile, has
    none.
    """
    return sorted(Path(folder, name) for folder, _, names in os.walk(directory) for name in names)


@contextmanager
def open_tensors(path: Path, framework: str = "pt") -> Iterator[Any]:
    """What `safetensors.safe_open` gives of a file (OSError: as `open_regular`; SafetensorError)."""
    from safetensors import safe_open

    # By its descriptor: the name may have become that of a pipe.
    with open_regular(path) as file, safe_open(f"/dev/fd/{file.fileno()}", framework=framework) as stream:
        yield stream
