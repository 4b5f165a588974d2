"""Every change that `calibrate` and `export` make to files: created, written, synced, renamed, removed.

Nothing else in kvconvert changes a working directory or a bundle. Each single operation is announced to `observe`
before it happens, so that a test can stop a run, or fill the disk, at every one of them. Writes go to the system at
once, not to a buffer of the process, so that what an operation wrote is what a kill after it leaves.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvconvert.errors import MissingError, UsageError
from kvconvert.io.regular import folders_below, open_regular

TEMPORARY = ".partial"
_HASHED_ASIDE = 2**22  # bytes
STATE_NAME, LOCK_NAME = "state.json", "lock"  # what tells a working directory of `calibrate` from others
MANIFEST_NAME = "kvconvert.json"  # and a bundle
GENAI_NAME = "genai_config.json"  # and an export for ONNX Runtime
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")  # and a model of images
_FULL = (errno.ENOSPC, errno.EDQUOT)


def observe(operation: str, path: Path) -> None:
    """Called before each operation with its name and its path; tests replace it."""


@contextmanager
def _operation(name: str, path: Path, size: int | None = None) -> Iterator[None]:
    """An operation whose errors name the path, and the size that the file was to have where the disk is full."""
    try:
        observe(name, path)
        yield
    except OSError as error:
        if error.errno is None:
            raise
        needed = f", {size:,} bytes are needed for this file" if size is not None and error.errno in _FULL else ""
        raise OSError(error.errno, f"{os.strerror(error.errno)}{needed}", str(path)) from error


def is_full(error: OSError) -> bool:
    """Whether an error says that there is no room, on the disk or in the user's quota."""
    return error.errno in _FULL


class OutputFile:
    """A new file, written from its beginning.

    Args:
        path: of the file; one that exists is overwritten.
        size: bytes that it will have, for the message where the disk is full.
        hashed: also compute the SHA-256 of what is written.
    """

    def __init__(self, path: Path, size: int | None = None, hashed: bool = True) -> None:
        self.path, self.expected_size, self.size = path, size, 0
        self._digest = hashlib.sha256() if hashed else None
        with _operation("create", path, size):
            self._descriptor = self._open(path)

    def _open(self, path: Path) -> int:
        # A link to somewhere else is not written through: everything here is named by kvconvert itself.
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`."""
        rest = memoryview(data).cast("B")
        self.size += len(rest)
        with self._hashing(rest), _operation("write", self.path, self.expected_size):
            while len(rest):  # the system takes at most 2 GiB at a time
                rest = rest[os.write(self._descriptor, rest) :]

    @contextmanager
    def _hashing(self, data: memoryview) -> Iterator[None]:
        """Hash data while the block runs, in a thread where that is worth one: both take about as long as the other."""
        if self._digest is None:
            yield
        elif len(data) < _HASHED_ASIDE:
            self._digest.update(data)
            yield
        else:
            thread = threading.Thread(target=self._digest.update, args=(data,))
            thread.start()
            try:
                yield
            finally:
                thread.join()

    def sha256(self) -> str:
        """Of everything written, hexadecimal; the file has to be a hashed one."""
        if self._digest is None:
            raise ValueError(f"{self.path} is written without a checksum")
        return self._digest.hexdigest()

    def sync(self) -> None:
        """Wait until the content is on the disk."""
        with _operation("sync", self.path, self.expected_size):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file, which does not sync it."""
        os.close(self._descriptor)


@contextmanager
def new_file(path: Path, size: int | None = None) -> Iterator[OutputFile]:
    """A file to write, synced when the block ends."""
    file = OutputFile(path, size)
    try:
        yield file
        file.sync()
    finally:
        file.close()


class Replacement(OutputFile):
    """A file that appears as `path`, complete and synced, on `commit`.

    Until then it has a temporary name, hidden, so that a bundle stays whole beside what a kill leaves.
    """

    def __init__(self, path: Path, size: int | None = None, hashed: bool = True) -> None:
        self._target, self._partial = path, path.with_name(f".{path.name}{TEMPORARY}")
        self._pending = True
        super().__init__(self._partial, size, hashed)

    def _open(self, path: Path) -> int:
        """Wait for whoever replaces the same file now: what both write would end up in one."""
        while True:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                with suppress(OSError):  # some file systems have no locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                        os.ftruncate(descriptor, 0)
                        return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the other one has given it its name

    def commit(self) -> None:
        """Let the file appear; once this returns it survives a kill."""
        self.sync()
        rename(self._partial, self._target)
        self._pending = False
        sync_directory(self._target.parent)

    def discard(self) -> None:
        """Close the file, and remove what was not committed."""
        try:
            if self._pending:
                with suppress(OSError):  # what stopped the writing is the error to report
                    remove(self._partial)
        finally:
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # of forked processes, too
            self.close()


@contextmanager
def replacement(path: Path, size: int | None = None, hashed: bool = True) -> Iterator[Replacement]:
    """A `Replacement` that is committed when the block ends without an exception."""
    file = Replacement(path, size, hashed)
    try:
        yield file
        file.commit()
    finally:
        file.discard()


def write_bytes(path: Path, content: bytes) -> OutputFile:
    """Write and sync a small file; gives its size and SHA-256."""
    with new_file(path, len(content)) as file:
        file.write(content)
    return file


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a small file, or replace one, in a single step."""
    with replacement(path, len(content), hashed=False) as file:
        file.write(content)


def copy_file(source: Path, target: Path) -> OutputFile:
    """Copy the content of a file, following links; gives its size and SHA-256."""
    with open_regular(source) as stream, new_file(target, source.stat().st_size) as file:
        while block := stream.read(2**22):
            file.write(block)
    return file


def open_lock_file(path: Path) -> int:
    """A descriptor of an empty file to lock, which is made if it is not there."""
    with _operation("create", path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def make_directory(path: Path) -> list[Path]:
    """Make a directory, and those that it lies in; returns the ones that were not there, deepest first."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with _operation("mkdir", folder):
            folder.mkdir(exist_ok=True)
    return missing


def make_temporary_directory(prefix: str, parent: Path) -> Path:
    """A new directory in `parent` that only this user can enter."""
    with _operation("mkdir", parent / prefix):
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def set_mode(path: Path, mode: int) -> None:
    """Set a file's permissions."""
    with _operation("chmod", path):
        path.chmod(mode)


def rename(old: Path, new: Path) -> None:
    """Rename, replacing a file or an empty directory at `new`."""
    with _operation("rename", new):
        os.rename(old, new)


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with _operation("remove", path):
        path.unlink(missing_ok=True)


def remove_directory(path: Path) -> None:
    """Remove an empty directory."""
    with _operation("remove", path):
        path.rmdir()


def remove_tree(path: Path) -> None:
    """Remove a directory, if it is there, with everything in it; links are removed, not followed."""
    for folder, names in reversed([*folders_below(path)]):
        for name in names:
            remove(folder / name)
        if folder != path or path.is_dir():
            remove_directory(folder)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    sync_file(path)


def sync_file(path: Path) -> None:
    """Wait until what others wrote is on the disk."""
    with _operation("sync", path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_writable(path: Path, argument: str, remedy: str | None = None) -> None:
    """Refuse a path below which nothing can be created; nothing is left there.

    Args:
        path: existing or not.
        argument: name of the argument that gives it, for the message.
        remedy: what to do where it cannot be written to; by default to choose another place.

    Raises:
        UsageError: with the system's reason, or because a file lies in the way.
    """
    path = path.absolute()
    existing = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not existing.is_dir():
        raise UsageError(f"{existing} is no directory, so `{argument}` cannot be {path}; choose another place.")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        if is_full(error):  # said where it matters, with the file and its size
            return
        remedy = remedy or f"choose another place as `{argument}`"
        raise MissingError(f"{existing} cannot be written to ({error.strerror}); {remedy}.") from error
