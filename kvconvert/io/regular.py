"""Finding and opening files that another program may replace or remove between a look at them and their reading."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def folders_below(directory: Path) -> Iterator[tuple[Path, list[str]]]:
    """A directory and the folders in it, outer ones first, each with the names of what is no folder in it: `os.walk`
    and `Path.rglob` recurse, and fail with a thousand folders in each other. Links are not followed; a folder that
    cannot be read, or is removed meanwhile, has none.
    """
    folders = [directory]
    while folders:
        folder, names = folders.pop(), []
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                else:
                    names.append(entry.name)
        yield folder, names


def files_below(directory: Path) -> list[Path]:
    """All files in a directory and its folders, see `folders_below`, sorted."""
    paths = (folder / name for folder, names in folders_below(directory) for name in names)
    return sorted(path for path in paths if not os.path.isdir(path))


@contextmanager
def open_tensors(path: Path, framework: str = "pt") -> Iterator[Any]:
    """What `safetensors.safe_open` gives of a file (OSError: as `open_regular`; SafetensorError)."""
    from safetensors import safe_open

    # By its descriptor: the name may have become that of a pipe.
    with open_regular(path) as file, safe_open(f"/dev/fd/{file.fileno()}", framework=framework) as stream:
        yield stream
