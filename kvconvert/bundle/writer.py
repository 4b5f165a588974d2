"""Writing a bundle: into a sibling temporary directory, synced to disk, renamed into place; never half written."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from kvconvert.bundle.manifest import MANIFEST_NAME, FileInfo, Manifest, TensorInfo
from kvconvert.bundle.tensorfile import nbytes, write_tensors
from kvconvert.errors import KvconvertError, UsageError

MAX_SHARD_BYTES = 5_000_000_000
INDEX_NAME = "model.safetensors.index.json"


def check_output(output: Path, force: bool, marker: str = MANIFEST_NAME) -> None:
    """Refuse an output that exists, before any work is done.

    An empty directory may be filled. With `force` an earlier result of the same kind may be replaced, which the file
    `marker` tells: a bundle by default.

    Raises:
        UsageError: the output exists and may not be replaced.
    """
    if not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output.is_dir() and (output / marker).is_file()):
        kind = "a bundle" if marker == MANIFEST_NAME else f"an earlier export with a {marker}"
        raise UsageError(f"The output {output} exists and is not {kind}, so it is not replaced; choose another path.")
    if not force:
        raise UsageError(f"The output {output} exists; choose another path, or replace it with `force=True`.")


@contextmanager
def replacing(output: Path, force: bool, marker: str = MANIFEST_NAME) -> Iterator[Path]:
    """A temporary directory beside `output` that becomes `output` when the block ends without an exception.

    On success every file is synced, then the directory is renamed. A bundle that `force` replaces is first renamed
    aside and removed only after the new one is in place. After any exception, interruption included, the temporary
    directory is gone and what was at `output` is untouched.

    Raises:
        UsageError: see `check_output`.
        KvconvertError: the disk is full, or the place cannot be written.
    """
    check_output(output, force, marker)
    output = output.resolve()
    created = [folder for folder in (output.parent, *output.parent.parents) if not folder.exists()]
    temporary: Path | None = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(output)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
        with _locked(temporary):
            yield temporary
            _sync(temporary)
            check_output(output, force, marker)
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
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        for folder in created:  # deepest first
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Hold a lock on a directory, which the system releases however the process ends; False where it cannot be had."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except OSError:  # held by another process, or a file system without locks
            held = False
        yield held
    finally:
        os.close(descriptor)


def _remove_abandoned(output: Path) -> None:
    """Remove temporary directories that killed exports to the same place left; one still at work holds its lock."""
    for directory in output.parent.glob(f".{glob.escape(output.name)}.partial-*"):
        with _locked(directory) as held:
            if held:
                shutil.rmtree(directory, ignore_errors=True)


def _put_in_place(temporary: Path, output: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    temporary.chmod(0o777 & ~mask)  # mkdtemp's directories are private
    aside: Path | None = None
    if output.exists() and any(output.iterdir()):
        aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.replaced-", dir=output.parent))
        os.rename(output, aside)  # replaces the empty directory
    try:
        os.rename(temporary, output)
    except BaseException:
        if aside is not None:
            os.rename(aside, output)
        raise
    _sync_path(output.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def _sync(directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        for file in files:
            _sync_path(Path(folder, file))
        _sync_path(Path(folder))


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_weights(
    directory: Path,
    infos: Mapping[str, TensorInfo],
    read: Callable[[str], Tensor],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write the weight files: `model.safetensors`, or shards and their index.

    Args:
        directory: where to.
        infos: type and shape of every tensor by name, in the order of the shards.
        read: gives a tensor by name.
        max_shard_bytes: no shard's tensors take more, unless a single tensor does.

    Returns:
        Names of the files written.
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
        write_tensors(directory / "model.safetensors", shards[0], read)
        return ["model.safetensors"]
    weight_map: dict[str, str] = {}
    files = []
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(directory / file, shard, read)
        weight_map.update(dict.fromkeys(shard, file))
        files.append(file)
    index = {
        "metadata": {"total_size": sum(map(nbytes, infos.values()))},
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_json(directory / INDEX_NAME, index)
    return [*files, INDEX_NAME]


def write_json(path: Path, value: Any) -> None:
    """Write JSON the way Hugging Face's own files look; equal values give equal bytes."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def describe_files(directory: Path, names: list[str]) -> dict[str, FileInfo]:
    """Size and SHA-256 of each named file, in the order of their names."""
    described = {}
    for name in sorted(names):
        with (directory / name).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        described[name] = FileInfo(size=(directory / name).stat().st_size, sha256=digest)
    return described


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `kvconvert.json`, sealed."""
    (directory / MANIFEST_NAME).write_bytes(manifest.to_bytes())
