"""The files of a bundle: those that the manifest lists, as it says, and beside them none that loaders might read.

Files of JSON hold no settings that would make a loader run code, fetch something, or read files that nobody verified.
transformers and its relatives follow such settings while they read a configuration, a tokenizer or a processor. The
exporter leaves them out, the reader refuses them, at any depth of any file. An entry that is null, false or empty asks
for nothing and is accepted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from kvconvert.bundle.locate import FORMER_PLAN_NAME, MANIFEST_NAME, PLAN_NAME
from kvconvert.bundle.manifest import Manifest
from kvconvert.errors import BundleError
from kvconvert.io.records import FileInfo
from kvconvert.io.tensorfile import mismatch

# Files of these kinds are read by model and tokenizer loaders when they merely lie in the directory, so an unlisted one
# could replace what was verified.
_LOADED_SUFFIXES = {
    ".json",
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".pkl",
    ".pickle",
    ".ckpt",
    ".py",
    ".jinja",
    ".model",
    ".tiktoken",
    ".gguf",
    ".h5",
    ".msgpack",
}
# Of these, the ones that run code when they are loaded; a bundle holds none, listed or not.
_CODE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".py"}
_LOADED_NAMES = {"vocab.txt", "merges.txt"}
# Files that make loaders take weights, or a whole model, from elsewhere.
_REDIRECTIONS = {"adapter_config.json", "audio_tokenizer_config.json"}


def check_names(directory: Path, manifest: Manifest) -> None:
    """That of the files in the manifest, looking at none of them."""
    for name in (*manifest.files, *manifest.informative):
        _check_name(name)
        if Path(name).suffix in _CODE_SUFFIXES:
            raise BundleError(
                f"{MANIFEST_NAME} lists {name}: expected safetensors, JSON and text only, found a file that loading "
                "could execute; do not use this bundle."
            )
        if Path(name).name in _REDIRECTIONS:
            raise BundleError(
                f"{MANIFEST_NAME} lists {name}: expected a bundle's own files, found one that names a model elsewhere; "
                "do not use this bundle."
            )
    if FORMER_PLAN_NAME in manifest.files:
        raise BundleError(
            f"The bundle {directory} has its KV plan in {FORMER_PLAN_NAME}, where an earlier kvconvert wrote it and "
            "other engines take it for weights; export the bundle again."
        )
    for required in ("config.json", PLAN_NAME):
        if required not in manifest.files:
            raise mismatch(MANIFEST_NAME, "files", f"an entry for {required}", "none")


def check_files(directory: Path, manifest: Manifest, full: bool) -> None:
    """Listed files, see `check_file`, and none beside them that loaders might read or run (BundleError)."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        # Hashes are computed side by side; what is wrong with the first of several files is raised.
        for _ in pool.map(lambda item: check_file(directory, item[0], item[1], full), manifest.files.items()):
            pass
    for folder, folders, names in os.walk(directory):
        # Programs' own folders (.git, .cache) are no part of the bundle; links to folders are not followed.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if Path(folder) != directory and Path(name).suffix in _CODE_SUFFIXES:
                raise BundleError(
                    f"{Path(folder, name).relative_to(directory)} lies in the bundle {directory}, and loading could "
                    "execute it; remove it."
                )
    known = own_files(manifest)
    for path in sorted(
        [*directory.iterdir(), *directory.glob("additional_chat_templates/*"), *directory.glob("kvconvert/*")]
    ):
        name = path.relative_to(directory).as_posix()
        if name not in known and may_be_loaded(name):
            raise BundleError(
                f"{name} lies in the bundle {directory} but is not listed in {MANIFEST_NAME}, and loaders might read "
                "it; remove it."
            )


def own_files(manifest: Manifest) -> set[str]:
    """Names of all files of a bundle; informative ones may be absent."""
    return {*manifest.files, *manifest.informative, MANIFEST_NAME}


def may_be_loaded(name: str) -> bool:
    """Whether loaders might read a file for its name alone, so that a bundle may hold it only if it is listed."""
    return Path(name).suffix in _LOADED_SUFFIXES or name in _LOADED_NAMES


def _check_name(name: str) -> None:
    parts = name.split("/")
    unsafe = any(part in ("", ".", "..") for part in parts) or not re.fullmatch(r"[\w.+@ -]+(/[\w.+@ -]+)*", name)
    if unsafe or name == MANIFEST_NAME:
        raise BundleError(
            f"{MANIFEST_NAME} lists the file name {name!r}: expected a plain relative name inside the bundle, found "
            "one that is not; do not use this bundle."
        )


def check_regular(path: Path, name: str) -> None:
    """Refuse (BundleError) what is not a regular file; links within the Hub's own cache are followed."""
    if not os.path.lexists(path):
        raise mismatch(name, "the file", "present", "no such file")
    mode = path.stat().st_mode if _is_hub_blob(path) else path.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise BundleError(
            f"{name} does not fit the bundle: the file should be a regular file, found a symbolic link; copy the "
            "bundle with links followed (cp -rL)."
        )
    if not stat.S_ISREG(mode):
        raise mismatch(name, "the file", "a regular file", "something else")


def _is_hub_blob(path: Path) -> bool:
    """Whether a link is one of the Hub's cache: from snapshots/{commit} to blobs of the same repository."""
    if not path.is_symlink():
        return False
    # Unlike Path.resolve, realpath gives an answer for links that lead in a circle: a path that is still a link.
    target = Path(os.path.realpath(path))
    parents = Path(os.path.realpath(path.parent)).parents
    snapshots = next((parent for parent in parents if parent.name == "snapshots"), None)
    return snapshots is not None and target.parent == snapshots.parent / "blobs" and not target.is_symlink()


def check_file(directory: Path, name: str, info: FileInfo, full: bool) -> None:
    """Refuse (BundleError) a file of another size than listed or, with `full`, of other contents."""
    path = directory / name
    for part in [*path.relative_to(directory).parents][:-1]:
        if (directory / part).is_symlink():
            raise mismatch(name, "its directory", "a directory", "a symbolic link")
    check_regular(path, name)
    size = path.stat().st_size
    if size != info.size:
        raise mismatch(name, "size", f"{info.size} bytes", f"{size} bytes")
    if full:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != info.sha256:
            raise mismatch(name, "sha256", info.sha256, digest)


# Larger files are refused before they are read.
MAX_JSON = 256_000_000


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: of the file; messages call it by its name.

    Raises:
        BundleError: the file is too large, no JSON, or no object, or a name occurs twice in one of its objects: of two
            values programs take the first or the last.
    """
    size = path.stat().st_size
    if size > MAX_JSON:
        raise mismatch(path.name, "its length", f"at most {MAX_JSON} bytes", f"{size} bytes")
    return parse_object(path.name, path.read_bytes())


def read_settings(path: Path) -> Any:
    """The JSON value in a file that is copied from the source as it is, whose reader is Python's like this one.

    Raises:
        BundleError: the file is too large or no JSON.
    """
    size = path.stat().st_size
    if size > MAX_JSON:
        raise mismatch(path.name, "its length", f"at most {MAX_JSON} bytes", f"{size} bytes")
    try:
        return json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise mismatch(path.name, "its content", "valid JSON", error) from error


def parse_object(file: str, content: bytes, finite: bool = False) -> dict[str, Any]:
    """The JSON object in a file's bytes; see `read_object`.

    `finite` refuses NaN, infinity and numbers beyond float64, too; configs of some models hold infinities.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise mismatch(file, f"the name {repeated[:80]!r}", "given once", "given more than once")
        return found

    def number(text: str) -> float:
        value = float(text)
        if finite and not math.isfinite(value):
            raise mismatch(file, "its numbers", "finite", text[:80])
        return value

    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=unique, parse_float=number, parse_constant=number)
    except (ValueError, RecursionError) as error:
        raise mismatch(file, "its content", "valid JSON", error) from error
    if not isinstance(value, dict):
        raise mismatch(file, "its content", "a JSON object", type(value).__name__)
    return value


# Implementations that transformers itself brings. Every other name is a kernel that it fetches and runs, those of
# flash attention included where the package is not installed.
ATTENTION = ("eager", "sdpa", "flex_attention")
EXPERTS = ("eager", "batched_mm", "grouped_mm")

_CHOICES = {
    "attn_implementation": ATTENTION,
    "_attn_implementation": ATTENTION,
    "_attn_implementation_internal": ATTENTION,
    "experts_implementation": EXPERTS,
    "_experts_implementation": EXPERTS,
    "_experts_implementation_internal": EXPERTS,
}

_FORBIDDEN = {
    # code
    "auto_map",
    "custom_generate",
    "custom_pipelines",
    "trust_remote_code",
    "use_kernels",
    "kernel_config",
    # another model or tokenizer, by path or Hub id
    "audio_tokenizer",
    "audio_tokenizer_name_or_path",
    "base_model_name_or_path",
    # files that take the place of those that were verified
    "configuration_files",
    "fast_tokenizer_files",
    "gguf_file",
    "init_inputs",
    "transformers_weights",
    # quantizers with settings of their own; the one of config.json is compared with the manifest
    "compression_config",
    "quantization_config",
}

# Model names of timm that are addresses.
_ADDRESS = re.compile(r"\s*(hf[-_]hub|local[-_]dir)\s*:", re.IGNORECASE)

# Files with tokens by name and nothing else; some are large.
_VOCABULARIES = re.compile(r"(tokenizer|vocab.*|added_tokens|tekken|model\.safetensors\.index)\.json")


def is_settings(name: str) -> bool:
    """Whether a file of a bundle, by its name there, is JSON that loaders follow."""
    return name.endswith(".json") and _VOCABULARIES.fullmatch(PurePosixPath(name).name) is None


def unsafe_settings(value: Any, at: str = "") -> Iterator[tuple[str, str, Any]]:
    """Entries that a bundle must not hold: (dotted path, what is allowed there, what was found).

    Args:
        value: a JSON value; of config.json without its own `quantization_config`.
        at: path of `value`.
    """
    if isinstance(value, dict):
        for key, entry in value.items():
            path = f"{at}.{key}" if at else key
            if (allowed := _allowed(key, entry)) is not None:
                yield path, allowed, entry
            else:
                yield from unsafe_settings(entry, path)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from unsafe_settings(entry, f"{at}[{index}]")


def safe_settings(value: Any) -> Any:
    """A copy of a JSON value without the entries that `unsafe_settings` finds."""
    if isinstance(value, dict):
        return {key: safe_settings(entry) for key, entry in value.items() if _allowed(key, entry) is None}
    return [safe_settings(entry) for entry in value] if isinstance(value, list) else value


def _allowed(key: str, value: Any) -> str | None:
    """What an entry may be, if it is not that."""
    if key in _CHOICES:
        names = value.values() if isinstance(value, dict) else [value]
        fine = all(name is None or (isinstance(name, str) and name in _CHOICES[key]) for name in names)
        return None if fine else f"absent or one of {', '.join(_CHOICES[key])}"
    if key in _FORBIDDEN and value:
        return "absent (bundles carry no code and name no other files)"
    if key.endswith(("_file", "_files")) and any("/" in name or "\\" in name for name in _texts(value)):
        return "the name of a file in the bundle"
    if isinstance(value, str | list) and any(_ADDRESS.match(text) for text in _texts(value)):
        return "no address"
    return None


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]
