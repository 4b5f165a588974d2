"""Writing a bundle: into a sibling temporary directory, synced to disk, renamed into place; never half written."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from kvconvert.bundle.locate import BUNDLE, MANIFEST_NAME, WRITTEN, check_output, kind_of
from kvconvert.bundle.manifest import Manifest
from kvconvert.errors import KvconvertError
from kvconvert.io import disk
from kvconvert.io.records import FileInfo, TensorInfo
from kvconvert.io.regular import files_below, folders_below
from kvconvert.io.tensorfile import write_tensors
from kvconvert.io.tensorheader import nbytes

# Loading hashes several files at a time.
MAX_SHARD_BYTES = 1_000_000_000
INDEX_NAME = "model.safetensors.index.json"


@contextmanager
def replacing(output: Path, force: bool, kind: str = BUNDLE) -> Iterator[Path]:
    """A temporary directory beside `output` that becomes `output` when the block ends without an exception.

    On success every file is synced, then the directory is renamed. What `force` replaces is first renamed
    aside and removed only after the new one is in place. After any exception, interruption included, the temporary
    directory is gone and what was at `output` is untouched.

    Raises:
        UsageError: see `check_output`.
        KvconvertError: the disk is full, or the place cannot be written.
    """
    output = Path(os.path.realpath(output))  # of a link to itself, too, which is refused below
    created: list[Path] = []
    temporary: Path | None = None
    try:
        if output.parent.is_dir():
            recover(output)
        check_output(output, force, kind)
        created = disk.make_directory(output.parent)
        temporary = disk.make_temporary_directory(f".{output.name}.partial-", output.parent)
        with locked(temporary):
            yield temporary
            _sync(temporary)
            check_output(output, force, kind)
            _put_in_place(temporary, output)
        created.clear()
    except OSError as error:
        if error.errno is None:  # not the system's: libraries use the class for their own messages
            raise
        place = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
        raise KvconvertError(
            f"{output} could not be written ({place}); nothing was left behind and nothing was replaced, so "
            "make room or choose another place, and export again."
        ) from error
    finally:
        with suppress(OSError):  # the first error is the one to report; the next one removes what is left
            if temporary is not None:
                disk.remove_tree(temporary)
            for folder in created:  # deepest first
                if folder.is_dir() and not any(folder.iterdir()):
                    disk.remove_directory(folder)


@contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """Hold a lock on a directory, which the system releases however the process ends; False where it cannot be had."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except OSError:  # held by another process, or a file system without locks
            held = False
        yield held
    finally:
        os.close(descriptor)


def is_own_directory(path: Path) -> bool:
    """Whether a path is a directory that this user made, and no link to one: in a folder that is shared, others can put
    something else where kvconvert looks for what it left there itself.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def recover(output: Path) -> None:
    """Tidy up after killed exports and pulls to the same place; one still at work holds the locks of its directories.

    What was set aside for something that never came goes back to its place.
    """
    name = glob.escape(output.name)
    left = [*output.parent.glob(f".{name}.partial-*"), *output.parent.glob(f".{name}.replaced-*")]
    for directory in filter(is_own_directory, left):
        with locked(directory) as held:
            if not held:
                continue
            whole = directory.name.startswith(f".{output.name}.replaced-") and kind_of(directory) in WRITTEN
            if whole and not output.exists():
                disk.rename(directory, output)
            else:
                disk.remove_tree(directory)


def _put_in_place(temporary: Path, output: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    disk.set_mode(temporary, 0o777 & ~mask)  # temporary directories are private
    with ExitStack() as locks:
        aside: Path | None = None
        if output.exists() and any(output.iterdir()):
            locks.enter_context(locked(output))  # the lock stays with the directory under its other name
            aside = disk.make_temporary_directory(f".{output.name}.replaced-", output.parent)
            locks.enter_context(locked(aside))
            disk.rename(output, aside)  # replaces the empty directory
        try:
            disk.rename(temporary, output)
        except BaseException:
            if aside is not None:
                disk.rename(aside, output)
            raise
        disk.sync_directory(output.parent)
        if aside is not None:
            with suppress(OSError):  # the new bundle is in place; the next one removes what is left
                disk.remove_tree(aside)


def put_in_place(prepared: Path, output: Path, force: bool) -> None:
    """Let a complete directory that lies beside `output` become `output`, after waiting until all of it is on the disk.

    Raises:
        UsageError: see `check_output`.
    """
    for path in files_below(prepared):
        if path.is_file():
            disk.sync_file(path)
    _sync(prepared)
    check_output(output, force)
    _put_in_place(prepared, output)


def _sync(directory: Path) -> None:
    """Wait for the names in a directory and its folders; every file was synced when it was written."""
    for folder, _ in folders_below(directory):
        disk.sync_directory(folder)


def write_weights(
    directory: Path,
    infos: Mapping[str, TensorInfo],
    read: Callable[[str], Tensor],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> dict[str, FileInfo]:
    """Write the weight files: `model.safetensors`, or shards and their index.

    Args:
        directory: where to.
        infos: type and shape of every tensor by name, in the order of the shards.
        read: gives a tensor by name.
        max_shard_bytes: no shard's tensors take more, unless a single tensor does.

    Returns:
        Size and hash of each file written, by name.
    """
    shards: list[dict[str, TensorInfo]] = [{}]
    filled = 0
    for name, info in infos.items():
        if shards[-1] and filled + nbytes(info) > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = info
        filled += nbytes(info)
    if len(shards) == 1:
        return {"model.safetensors": write_tensors(directory / "model.safetensors", shards[0], read)}
    weight_map: dict[str, str] = {}
    files = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        files[file] = write_tensors(directory / file, shard, read)
        weight_map.update(dict.fromkeys(shard, file))
    index = {
        "metadata": {"total_size": sum(map(nbytes, infos.values()))},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return files | {INDEX_NAME: write_json(directory / INDEX_NAME, index)}


def write_json(path: Path, value: Any) -> FileInfo:
    """Write JSON the way Hugging Face's own files look; equal values give equal bytes."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> FileInfo:
    """Write UTF-8 text; gives the file's size and hash."""
    return _info(disk.write_bytes(path, text.encode()))


def copy_file(source: Path, target: Path) -> FileInfo:
    """Copy a file into the bundle; gives its size and hash."""
    disk.make_directory(target.parent)
    return _info(disk.copy_file(source, target))


def _info(file: disk.OutputFile) -> FileInfo:
    return FileInfo(size=file.size, sha256=file.sha256())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `kvconvert.json`, sealed."""
    disk.write_bytes(directory / MANIFEST_NAME, manifest.to_bytes())
