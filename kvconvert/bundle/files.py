"""The files of a bundle: those that the manifest lists, as it says, and beside them none that loaders might read.

Files of JSON hold no settings that would make a loader run code, fetch something, or read files that nobody verified.
transformers and its relatives follow such settings while they read a configuration, a tokenizer or a processor. The
exporter leaves them out, the reader refuses them, at any depth of any file. An entry that is null, false or empty asks
for nothing and is accepted.

Weight files are compared with the manifest by their headers, their index, their numbers, and what layers' schemes need.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from kvconvert.bundle.locate import FORMER_PLAN_NAME, MANIFEST_NAME, PLAN_NAME
from kvconvert.bundle.manifest import LayerPlan, Manifest
from kvconvert.errors import BundleError, printable
from kvconvert.io.json_text import MAX_JSON, parse_json
from kvconvert.io.records import FileInfo, TensorInfo
from kvconvert.io.regular import open_regular, open_tensors, read_regular
from kvconvert.io.tensorheader import mismatch, nbytes, read_header
from kvconvert.methods import PLAN_TENSORS
from kvconvert.methods.scheme import FORMER_PLAN_TENSORS

# Files of these kinds run code when they are loaded; a bundle holds none, listed or not.
_CODE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".py", ".pyc", ".so"}
# Of these, loaders take what merely lies in the directory, whatever its name.
_LOADED_SUFFIXES = _CODE_SUFFIXES | {
    *(".json", ".safetensors", ".jinja", ".model", ".tiktoken", ".gguf", ".h5", ".msgpack"),
}
# All that loaders do not look for, and that a bundle may therefore hold without a hash.
_FOR_PEOPLE = {".md", ".txt", ".html", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp"}
_VOCABULARY_TEXT = re.compile(r"(vocab|merges|dict).*\.txt", re.IGNORECASE | re.DOTALL)
_TEMPLATE = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_LICENSE = re.compile(r"(LICEN[SC]E|NOTICE|USE_POLICY|COPYING).*", re.IGNORECASE | re.DOTALL)
# Files that make loaders take weights, or a whole model, from elsewhere.
_REDIRECTIONS = {"adapter_config.json", "audio_tokenizer_config.json"}


def is_for_people(name: str) -> bool:
    """Whether no loader reads a file of this name: a card, a report, a picture, a license, notes."""
    path = PurePosixPath(name)
    if _LICENSE.fullmatch(path.name):
        return path.suffix.lower() not in _LOADED_SUFFIXES
    return path.suffix.lower() in _FOR_PEOPLE and not _VOCABULARY_TEXT.fullmatch(path.name)


def may_be_loaded(name: str) -> bool:
    """Whether a bundle may hold a file only if it is listed with its hash; programs' own (.git, .cache) are not."""
    return not is_for_people(name) and not _is_hidden(name)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def own_files(manifest: Manifest) -> set[str]:
    """Names of all files of a bundle; informative ones may be absent."""
    return {*manifest.files, *manifest.informative, MANIFEST_NAME}


def check_names(directory: Path, manifest: Manifest) -> None:
    """Check the manifest's statements about its files, looking at none of them (BundleError)."""
    for name in own_files(manifest) - {MANIFEST_NAME}:
        if PurePosixPath(name).suffix.lower() in _CODE_SUFFIXES:
            raise BundleError(
                f"{MANIFEST_NAME} lists {name}: expected safetensors, JSON and text only, found a file that loading "
                "could execute; do not use this bundle."
            )
        if PurePosixPath(name).name.lower() in _REDIRECTIONS:
            raise BundleError(
                f"{MANIFEST_NAME} lists {name}: expected a bundle's own files, found one that names a model elsewhere; "
                "do not use this bundle."
            )
        if "/" in name and name != PLAN_NAME and not _TEMPLATE.fullmatch(name):
            raise mismatch(MANIFEST_NAME, "files", "none in other folders than formats have", repr(name))
    if MANIFEST_NAME in (*manifest.files, *manifest.informative):
        raise mismatch(MANIFEST_NAME, "files", "other files than itself", repr(MANIFEST_NAME))
    for name in manifest.informative:
        if not is_for_people(name):
            raise BundleError(
                f"{MANIFEST_NAME} lists {name} as informative: expected a file that loaders never read, such as "
                "README.md or LICENSE, found one that they might; do not use this bundle."
            )
    if FORMER_PLAN_NAME in manifest.files:
        raise BundleError(
            f"The bundle {directory} has its KV plan in {FORMER_PLAN_NAME}, where an earlier kvconvert wrote it and "
            "other engines take it for weights; export the bundle again."
        )
    for required in ("config.json", PLAN_NAME):
        if required not in manifest.files:
            raise mismatch(MANIFEST_NAME, "files", f"an entry for {required}", "none")


_Stamp = tuple[int, ...]


class BundleFiles:
    """The files that lie in a bundle's directory, and what they were when they were verified.

    Links are not followed, wherever they lead: nothing outside of the directory is read, hashed or uploaded. Those of
    the Hub's cache are, from snapshots/COMMIT to files in the folder `blobs` beside `snapshots`. A file without a hash
    that has further names, hard links, counts as one.

    Args:
        directory: of the bundle; a path that leads to it may have links.

    Attributes:
        names: the names of the files, none of them behind a link to a folder.
        links: names of links in place of files that only people read. To everything here these files are absent.

    Raises:
        BundleError: any other file is a link, or something is neither a file nor a directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        root = Path(os.path.realpath(directory))
        self._blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
        self.names: set[str] = set()
        self.links: set[str] = set()
        self._stamps: dict[str, _Stamp] = {}
        folders = [""]
        while folders:
            folder = folders.pop()
            if not _is_hidden(folder):
                self._stamps[folder] = _stamp(os.stat(directory / folder))
            with os.scandir(directory / folder) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}".lstrip("/")
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(name)
                        continue
                    if self._is_own(entry, name):
                        self.names.add(name)
                    else:
                        self.links.add(name)

    def _is_own(self, entry: os.DirEntry[str], name: str) -> bool:
        """Whether a file lies in the bundle or in the Hub's cache, and not behind a link (BundleError)."""
        is_loaded = not is_for_people(name) or _is_hidden(name)
        if entry.is_file(follow_symlinks=False):
            # What people read has no hash: under a further name, a hard link, it may be any file of the user's.
            return is_loaded or entry.stat(follow_symlinks=False).st_nlink <= 1
        if not entry.is_symlink():
            raise mismatch(name, "the file", "a regular file", "something else")
        # Unlike Path.resolve, realpath gives an answer for links that lead in a circle: a path that is still a link.
        target = Path(os.path.realpath(entry.path))
        if self._blobs is not None and target.parent == self._blobs:
            status = os.lstat(target)
            if stat.S_ISREG(status.st_mode):
                return is_loaded or status.st_nlink <= 1
        if is_loaded:
            raise BundleError(
                f"{printable(name)} of the bundle {self.directory} is a symbolic link, which could lead to files that "
                "are none of the bundle's; remove it, or put what you meant in its place."
            )
        return False

    def check_listed(self, manifest: Manifest, full: bool) -> None:
        """See `check_file`."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            # Hashes are computed side by side; what is wrong with the first of several files is raised.
            for _ in pool.map(lambda item: self.check_file(item[0], item[1], full), manifest.files.items()):
                pass

    def check_others(self, manifest: Manifest) -> None:
        """Refuse (BundleError) files beside the listed ones that loaders might read or run."""
        for name in sorted(self.names - own_files(manifest)):
            if may_be_loaded(name):
                raise BundleError(
                    f"{printable(name)} lies in the bundle {self.directory} but is not listed in {MANIFEST_NAME}, and "
                    "loaders might read it; remove it."
                )

    def check_file(self, name: str, info: FileInfo, full: bool) -> None:
        """Refuse (BundleError) a file of another size than listed or, with `full`, of other contents."""
        if name not in self.names:
            behind = self.links & {name, *map(str, PurePosixPath(name).parents)}
            raise mismatch(name, "the file", "present", "a link" if behind else "no such file")
        if info.size > MAX_JSON and not name.endswith(".safetensors"):  # which loaders read as a whole
            raise mismatch(name, "size", f"at most {MAX_JSON:,} bytes", f"{info.size:,} bytes")
        with open_regular(self.directory / name) as stream:
            before = os.fstat(stream.fileno())
            if before.st_size != info.size:
                raise mismatch(name, "size", f"{info.size:,} bytes", f"{before.st_size:,} bytes")
            if full:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                if digest != info.sha256:
                    raise mismatch(name, "sha256", info.sha256, digest)
        self._stamps[name] = _stamp(before)

    def read(self, name: str) -> bytes:
        """The content of a file of at most `MAX_JSON` bytes (BundleError)."""
        path = self.directory / name
        self._stamps[name] = _stamp(path.stat())
        return _content(path)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Have the files read again within the block; see `check_unchanged`, also of what fails there."""
        try:
            yield
        finally:
            self.check_unchanged()

    def check_unchanged(self) -> None:
        """Refuse (BundleError) a bundle that is not what was verified: a file or a folder of it changed since.

        Compared are the file itself, its size and the times of its last changes, of which a program can set one but not
        the other; nothing is read again. What a program changes within one tick of the system's clock (some
        milliseconds) after a file was verified, and then leaves alone, may pass.
        """
        for name, before in self._stamps.items():
            try:
                same = _stamp(os.stat(self.directory / name)) == before
            except OSError:
                same = False
            if not same:
                raise BundleError(
                    f"{printable(name) or 'A file'} of the bundle {self.directory} changed after it was verified; load "
                    "it again when nothing writes there."
                )


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _content(path: Path) -> bytes:
    content = read_regular(path, MAX_JSON)
    if content is None:
        raise mismatch(path.name, "its length", f"at most {MAX_JSON:,} bytes", f"{path.stat().st_size:,} bytes")
    return content


def read_object(path: Path, bounded: bool = False) -> dict[str, Any]:
    """The JSON object in a file, in which no name occurs twice; `bounded` as for `parse_json` (BundleError)."""
    return parse_object(path.name, _content(path), bounded)


def read_settings(path: Path) -> Any:
    """The JSON value in a file that is copied from the source as it is, whose reader is Python's like this one.

    Raises:
        BundleError: the file is too large or no JSON.
    """
    content = _content(path)
    try:
        return parse_json(content)
    except ValueError as error:
        raise mismatch(path.name, "its content", "valid JSON", error) from error


def parse_object(file: str, content: bytes, bounded: bool = False) -> dict[str, Any]:
    """The JSON object in a file's bytes; see `read_object`. Configs of some models hold infinities."""
    try:
        value = parse_json(content, unique=True, bounded=bounded)
    except ValueError as error:
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
    "checkpoint_path",
    "class_info_file",
    # options of programs that processors and tokenizers start or link: such options name files to read and to write
    "mecab_option",
    "tesseract_config",
    # files that take the place of those that were verified
    "configuration_files",
    "fast_tokenizer_files",
    "gguf_file",
    "init_inputs",
    "sudachi_config_path",
    "sudachi_resource_dir",
    "transformers_weights",
    # quantizers with settings of their own; the one of config.json is compared with the manifest
    "compression_config",
    "quantization_config",
}

# Of a tokenizer; as text they are the path of a file.
_ENTRIES = {"vocab", "merges"}
# Entries whose texts are names of files, as those of `vocab_file` are, or parts of such names.
_FILE_NAMES = re.compile(r".*_files?|font|ocr_lang")
# Model names of timm that are addresses.
_ADDRESS = re.compile(r"\s*(hf[-_]hub|local[-_]dir)\s*:", re.IGNORECASE)

# Files with tokens by name and nothing else; some are large.
_VOCABULARIES = re.compile(r"(tokenizer|vocab.*|added_tokens|tekken|model\.safetensors\.index)\.json")


def is_settings(name: str) -> bool:
    """Whether a file of a bundle, by its name there, is JSON that loaders follow."""
    return name.lower().endswith(".json") and _VOCABULARIES.fullmatch(PurePosixPath(name).name) is None


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
    if key in _ENTRIES and isinstance(value, str) and value:
        return "absent, or the entries themselves"
    if _FILE_NAMES.fullmatch(key) and any("/" in name or "\\" in name for name in _texts(value)):
        return "the name of a file in the bundle"
    if isinstance(value, str | list) and any(_ADDRESS.match(text) for text in _texts(value)):
        return "no address"
    return None


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


INDEX_NAME = "model.safetensors.index.json"
_WEIGHT_FILE = re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")


def check_tensors(directory: Path, manifest: Manifest) -> dict[str, Path]:
    """The file of each weight tensor, after comparing all headers and the index with the manifest (BundleError)."""
    files = manifest.weight_files()
    for name in files:
        if "/" in name:
            raise mismatch(MANIFEST_NAME, f"files: {name}", "weights beside config.json", "a file in a folder")
        if not _WEIGHT_FILE.fullmatch(name):
            raise mismatch(MANIFEST_NAME, f"files: {name}", "model.safetensors, or shards", name)
    if INDEX_NAME not in manifest.files and files != ["model.safetensors"]:
        raise mismatch(
            MANIFEST_NAME, "files", f"model.safetensors alone, or shards with {INDEX_NAME}", ", ".join(files)
        )
    found: dict[str, TensorInfo] = {}
    where: dict[str, Path] = {}
    for file in files:
        for name, info in read_header(directory / file).items():
            if not name.isprintable():  # transformers shows names that it does not know
                raise mismatch(file, "the name of a tensor", "printable", name)
            if name in found:
                raise mismatch(file, f"tensor {name}", "in one file", f"also in {where[name].name}")
            found[name] = info
            where[name] = directory / file
    if INDEX_NAME in manifest.files:
        _check_index(directory, found, where)
    compare("The weights", manifest.tensors, found)
    return where


def _check_index(directory: Path, found: dict[str, TensorInfo], where: dict[str, Path]) -> None:
    index = read_object(directory / INDEX_NAME)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise mismatch(INDEX_NAME, "weight_map", "files by tensor name", repr(weight_map)[:80])
    for name in sorted(weight_map.keys() | where.keys()):
        file = where[name].name if name in where else "no such tensor"
        if weight_map.get(name) != file:
            raise mismatch(INDEX_NAME, f"weight_map of {name}", file, weight_map.get(name, "no entry"))
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total != sum(map(nbytes, found.values())):
        raise mismatch(INDEX_NAME, "metadata.total_size", sum(map(nbytes, found.values())), total)


def compare(file: str, expected: dict[str, TensorInfo], found: dict[str, TensorInfo]) -> None:
    """Refuse (BundleError) tensors of `file` that are missing, left over, or of another type or shape."""
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise mismatch(file, f"tensor {name}", "present", "missing")
        if name not in expected:
            raise mismatch(file, f"tensor {name}", "absent", "an extra tensor")
        if expected[name] != found[name]:
            raise mismatch(file, f"tensor {name}", words(expected[name]), words(found[name]))


def words(info: TensorInfo) -> str:
    """A tensor's type and shape as messages show them."""
    return f"{info.dtype} {info.shape}"


def read_arrays(files: dict[str, Path], names: list[str], framework: str = "numpy") -> Iterator[tuple[str, Any]]:
    """Arrays one at a time, by name, file after file; with "pt" tensors, of types that NumPy does not have, too."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    for path, inside in by_file.items():
        with open_tensors(path, framework) as stream:
            for name in inside:
                yield name, stream.get_tensor(name)


def check_finite(files: dict[str, Path], names: list[str]) -> None:
    """Refuse (BundleError) floating-point tensors with NaN or infinity, with little memory beside each."""
    import torch

    for name, tensor in read_arrays(files, names, "pt"):
        for part in tensor.reshape(-1).split(2**22):
            if not bool(torch.isfinite(part if part.element_size() > 1 else part.float()).all()):
                raise mismatch(files[name].name, f"tensor {name}", "finite values", "NaN or infinity")


def check_scales(file: str, name: str, scales: np.ndarray) -> None:
    """Refuse (BundleError) a scale that is not finite and above zero, by its index."""
    for wrong, expected in ((~np.isfinite(scales), "a finite scale"), (scales <= 0, "a scale above zero")):
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            raise mismatch(file, f"{name}[{row}, {column}]", expected, scales[row, column].item())


def check_plan_header(directory: Path, manifest: Manifest) -> None:
    """Names, types and shapes of the plan's tensors are those in the manifest (BundleError)."""

    def refuse(_: str, field: str, expected: object, found: object) -> BundleError:
        return mismatch(PLAN_NAME, field, expected, found)

    compare(PLAN_NAME, manifest.plan, read_header(directory / PLAN_NAME, refuse))


def read_plan(directory: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """The arrays of the KV plan by name, finite, with all that the layers' schemes need.

    Raises:
        BundleError: naming the tensor.
    """
    plan: dict[str, np.ndarray] = {}
    for name, info in manifest.plan.items():
        if info.dtype.startswith(("BF", "F8")):  # types that NumPy does not have
            raise mismatch(PLAN_NAME, f"tensor {name}", "F16, F32, or whole numbers", words(info))
    for name, array in read_arrays(dict.fromkeys(manifest.plan, directory / PLAN_NAME), list(manifest.plan)):
        match = re.fullmatch(r"layers\.([0-9]{1,4})\.(\w+)", name)
        if match is None or int(match[1]) >= len(manifest.layers):
            raise mismatch(PLAN_NAME, f"tensor {name}", f"a name layers.0 to layers.{len(manifest.layers) - 1}", name)
        if match[2] not in (*PLAN_TENSORS, *FORMER_PLAN_TENSORS):
            raise mismatch(PLAN_NAME, f"tensor {name}", f"one of {', '.join(PLAN_TENSORS)}", match[2])
        if not np.isfinite(array).all():
            raise mismatch(PLAN_NAME, f"tensor {name}", "finite values", "NaN or infinity")
        plan[name] = array
    for layer in manifest.layers:
        _check_required(layer, manifest, plan)
    return plan


def _check_required(layer: LayerPlan, manifest: Manifest, plan: dict[str, np.ndarray]) -> None:
    """The tensors without which the layer's scheme cannot be served."""
    scheme = layer.scheme()
    wanted = {} if scheme is None else scheme.required_tensors(layer.shape())
    for what, rule in wanted.items():
        name = f"layers.{layer.index}.{what}"
        if name not in plan:
            raise mismatch(PLAN_NAME, f"tensor {name}", f"present ({rule.why})", "missing")
        info = manifest.plan[name]
        if (info.dtype, tuple(info.shape)) != (rule.dtype, rule.shape):
            raise mismatch(PLAN_NAME, f"tensor {name}", f"{rule.dtype} {[*rule.shape]}", words(info))
        if rule.fault is None:
            continue
        values = plan[name].tolist()
        expected = rule.fault(values)
        if expected is not None:
            raise mismatch(PLAN_NAME, f"tensor {name}", expected, repr(values)[:80])
