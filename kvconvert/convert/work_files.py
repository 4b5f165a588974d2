"""The files of a working directory: one process at a time changes them, JSON carries a checksum of itself, so that a
damaged file is not taken for another result, and the system's refusal to write becomes one sentence.

`export` only reads a working directory, so that several may.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconvert.bundle.locate import MANIFEST_NAME, check_outside
from kvconvert.errors import FROM_THE_LAST_LAYER, KvconvertError, MissingError, UsageError, counted, printable
from kvconvert.io import disk
from kvconvert.io.disk import LOCK_NAME, STATE_NAME
from kvconvert.io.json_text import read_json

if TYPE_CHECKING:
    from kvconvert.recipes.recipe import Recipe

_FILES = (LOCK_NAME, STATE_NAME)
logger = logging.getLogger(__name__)


_kept: ContextVar[tuple[ExitStack, set[Path], Callable[[Path], None]] | None] = ContextVar("kept locks", default=None)


@contextmanager
def keeping_locks(locked: Callable[[Path], None] = lambda work: None) -> Iterator[None]:
    """Hold each lock that `work_lock` takes in the block until the block ends, over several uses of a directory.

    Args:
        locked: called with each directory once its lock is held, to refuse what another run has changed until then.
    """
    with ExitStack() as stack:
        token = _kept.set((stack, set(), locked))
        try:
            yield
        finally:
            _kept.reset(token)


@contextmanager
def work_lock(work: Path, shared: bool = False) -> Iterator[None]:
    """Hold an existing working directory; the system releases it however the process ends.

    Args:
        work: the directory; the lock is on an empty file in it, which stays there.
        shared: for reading, which others may do too.

    Raises:
        UsageError: another run holds it.
    """
    if (kept := _kept.get()) is None:
        with _locked(work, shared):
            yield
        return
    stack, places, locked = kept
    if (place := work.resolve()) not in places:
        stack.enter_context(_locked(work, shared))
        places.add(place)
        locked(work)
    yield


@contextmanager
def _locked(work: Path, shared: bool) -> Iterator[None]:
    used = UsageError(
        f"Another calibrate or export is using {work}; wait until it has ended, or choose another `work`."
    )
    file = work / LOCK_NAME
    try:
        descriptor = disk.open_lock_file(file)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(f"{file} is a link, which leads out of the working directory; remove it.") from error
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
            raise used from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            logger.warning("The file system of %s has no locks; do not use it from two processes at once.", work)
        if not os.fstat(descriptor).st_nlink:  # who held it has just removed the directory
            raise used
        yield
    finally:
        os.close(descriptor)


def remove_work(work: Path) -> None:
    """Remove a working directory whose lock is held; a kill at any moment leaves one that can be taken up again."""
    folders, files = [], []
    for entry in work.iterdir():
        (folders if entry.is_dir() else files).append(entry)
    for folder in folders:
        disk.remove_tree(folder)
    for file in sorted(files, key=lambda file: file.name == LOCK_NAME):
        disk.remove(file)
    with suppress(OSError):  # without its lock the directory is free, and another run may have taken it
        disk.remove_directory(work)


def check_entries(work: Path) -> None:
    """Refuse (UsageError) a working directory with anything in it but files and directories, of which none is a link:
    they would lead elsewhere, or never end.
    """
    folders = [work]
    while folders:
        with suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:  # another process may remove its own
            for entry in entries:
                folder = entry.is_dir(follow_symlinks=False)
                if not (folder or entry.is_file(follow_symlinks=False)) or (folder and entry.name in _FILES):
                    raise UsageError(
                        f"{printable(entry.path)} is no file of kvconvert's; remove it, or what it leads to."
                    )
                if folder:
                    folders.append(Path(entry.path))


def check_free(work: Path) -> None:
    """Refuse a working directory that another run holds at this moment; nothing is created."""
    if (work / LOCK_NAME).exists():
        with work_lock(work):
            pass


def check_place(path: Path | str) -> None:
    """Refuse, before anything is computed, a place where `create` could not begin.

    Raises:
        UsageError: a file, a directory of something else, one that cannot be written to, or one in use.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; `work` has to be a directory.")
    # A kill before the first state.json leaves nothing but its temporary file, and the lock.
    if path.exists() and not (path / STATE_NAME).exists():
        names = [entry.name for entry in path.iterdir()]
        if MANIFEST_NAME in names:
            raise UsageError(f"{path} is a bundle; `work` has to be another directory, from which `export` writes it.")
        if any(name != LOCK_NAME and not name.endswith(disk.TEMPORARY) for name in names):
            raise UsageError(f"{path} holds files that are not kvconvert's; `work` has to be a new or empty directory.")
    if path.exists():
        check_entries(path)
    check_outside(path)
    disk.check_writable(path, "work")
    check_free(path)


def check_begun(path: Path) -> None:
    """Refuse what is no working directory (UsageError)."""
    if not os.path.isfile(path / STATE_NAME):  # which takes any name, however long
        if os.path.isfile(path / MANIFEST_NAME):
            raise MissingError(f"{path} is a bundle already; give the working directory that it was exported from.")
        raise MissingError(f"{path} is not a working directory of kvconvert; make it with kvconvert calibrate first.")
    check_entries(path)


def layer_path(work: Path, layer: int, suffix: str) -> Path:
    """A file of a layer; the record of a finished one ends in json."""
    return work / "layers" / f"{layer:05d}.{suffix}"


def unfinished(work: Path, layers: int) -> UsageError:
    """The error for a calibration that stopped before the last of its layers."""
    done = next((layer for layer in range(layers) if not layer_path(work, layer, "json").exists()), layers)
    return UsageError(
        f"The calibration in {work} stopped after {done} of {counted(layers, 'layer')}; calibrate again with the same "
        "arguments, which goes on from there."
    )


def check_finished(path: Path) -> None:
    """Refuse what is no working directory, or one of an unfinished calibration (UsageError), before torch is imported.

    What is damaged or of another version is left to whoever reads all of it.
    """
    check_begun(path)
    with work_lock(path, shared=True):
        try:
            state = read_json(path / STATE_NAME)
            layers = state["num_layers"] if state["complete"] is False else None
        except (OSError, ValueError, KeyError, TypeError):
            return
        if isinstance(layers, int):
            raise unfinished(path, layers)


def check_measured(path: str | Path, recipe: Recipe) -> None:
    """Refuse a working directory whose measurements a recipe has no use for, and what is none (UsageError)."""
    if recipe.auto is None:
        raise UsageError(
            f"`auto_from` means nothing for the recipe {recipe.name}, which searches nothing; leave it out."
        )
    check_begun(Path(path))


_CHECKSUM = "checksum"


def sealed_json(values: dict[str, Any]) -> str:
    """The text of a JSON object with its checksum in front; equal values in equal order give equal text."""
    plain = json.loads(json.dumps(values))  # keys are text from here on, as in the file
    return json.dumps({_CHECKSUM: _checksum(plain), **plain}, indent=1) + "\n"


def read_sealed(file: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is not what was written.
    """
    values = read_json(file)
    if not isinstance(values, dict) or values.pop(_CHECKSUM, None) != _checksum(values):
        raise ValueError("its content does not fit its checksum")
    return values


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


GO_ON = f"calibrate again with the same arguments once that is mended, which goes on {FROM_THE_LAST_LAYER}"
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
