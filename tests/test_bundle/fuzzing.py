"""Hostile bundles by the thousand: files of a small valid bundle, changed with knowledge of their structure.

What a change breaks is described anew (hashes, sizes, the seal), so that it reaches the checks behind those.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import random
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvconvert.bundle.locate import MANIFEST_NAME, PLAN_NAME

ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 7, 2**31, 2**53 + 1, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, 1e-320),
    *(
        float("nan"),
        float("inf"),
        "",
        " ",
        "x" * 3000,
        "../x",
        "/etc/passwd",
        "a\nb",
        "\0",
        "|",
        "---",
        "`",
        "é",
        "\ud800",
    ),
    *("F64", "F17", "model", "kept", "awq", "layers.0.key_mean_abs", "someone/kernel", "0" * 64),
    *("x" * 256, "a." * 500, "tokenizer.json", json.loads("[" * 150 + "]" * 150)),
    *(
        [],
        [[]],
        {},
        {"": {}},
        {"x": 1.0},
        [0],
        [-1, 2],
        [2**62, 2**62],
        [1.5],
        ["x"],
        {"auto_map": {"AutoModel": "e.M"}},
    ),
]
NUMBERS = [0, -1, 2**64, 10**400, -(10**400), 1e308, True]
CASE_SECONDS = 5  # of processor time
# Names that transformers reads where they merely lie in the directory.
LOADED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("generation_config.json", "preprocessor_config.json", "chat_template.json", "vocab.txt", "merges.txt"),
    *("source.spm", "bpe.codes", "tokenizer.model", "adapter_config.json", "modeling.py", "pytorch_model.bin"),
    *("additional_chat_templates/x.jinja", "decoder_tokenizer/tokenizer.json", "Tokenizer_Config.JSON"),
)

DATA = {"source": "books", "samples": 1, "length": 8, "seed": 0, "images": 0, "sha256": "3" * 64}
SEARCH = {"measured_kl": 0.25, "data": DATA, "dtype": "float32"}
# What a manifest says besides where searches and a measurement were made, of the bundle in `tiny.bundle`.
MEASURED: dict[str, Any] = {
    "fidelity": {
        "measured_on": "0" * 64,
        "report": {
            "kl": {"mean": 0.1, "p99": 1, "mean_interval": [0.1, 0.2]},
            "perplexity": {"source": 3.0, "bundle": 3.1, "increase": 0.03},
            "retrieval": {"source": 1, "bundle": 0.5, "by_length": {"100": [1, 0.5], "200": [1, 0.5]}},
            "probes": {"copy": {"ability": "copies", "source": 1, "bundle": 0.9, "loss_interval": [0, 0.1]}},
            "text": {"samples": {"source": "books"}, "scored_tokens": 100},
            "kv": {"source_bytes_per_token": 10, "bytes_per_token": 3.5, "context": 4096, "bits_per_value": 2.5},
            "verdict": "fit for much",
            "device": "cpu",
            "compute_dtype": "float32",
        },
        "limits": {"max_kl": 0.05},
        "missed": ["the mean KL divergence is 0.1, max_kl is 0.05"],
    },
    "allocation": {
        "context": 4096,
        "budget_bytes_per_token": 100.0,
        "bytes_per_token": 63.3404,
        "bits_per_value": 3.95877,
        "candidates": {"K2g128s8": {"key_bits": 2}, "V2g128s8": {"value_bits": 2}},
        "layers": [
            {"index": i, "keys": "K2g128s8", "values": "V2g128s8", "kl": {"K2g128s8": 0.1, "V2g128s8": 0}}
            | {"clip_ratios": {"K2g128s8": 0.9}, "treatments": {"K2g128s8": {"rotate_keys": "hadamard"}}}
            for i in range(2)
        ],
        "predicted_kl": 0.2,
        "plans": 3,
        **SEARCH,
    },
    "weight_allocation": {
        "budget_bits_per_weight": 5.5,
        "bits_per_weight": 5.25,
        "units": [{"layer": 0, "linears": ["model.layers.0.q_proj"], "bits": 4, "kl": {"2": 1, "4": 0.1}}],
        "predicted_kl": 0.1,
        "allocations": 4,
        **SEARCH,
    },
}


def mutated(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one entry changed, removed, repeated, renamed or exchanged for another."""
    value = copy.deepcopy(value)
    places = [*_places(value)]
    if not places:
        return rng.choice(ODD)
    # Shallow entries are few and matter most.
    depth = rng.choice([place[2] for place in places])
    container, key, _ = rng.choice([place for place in places if place[2] == depth])
    action = rng.randrange(7)
    if action <= 2:
        container[key] = copy.deepcopy(rng.choice(ODD))
    elif action == 3:
        other, at, _ = rng.choice(places)
        container[key] = copy.deepcopy(other[at])
    elif action == 4:
        del container[key]
    elif action == 5 and type(container[key]) is int:
        container[key] += rng.choice([-8, -1, 1, 8, 2**32])
    elif isinstance(container, dict):
        container[rng.choice(["x", "../x", "a\nb", *container])] = container[key]
    else:
        container.insert(key, copy.deepcopy(container[key]))
    return value


def _renumbered(value: Any, number: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with another number in place of most, and names of numbers that are none."""
    if isinstance(value, dict):
        named = {"x" if rng.random() < 0.1 else key: _renumbered(entry, number, rng) for key, entry in value.items()}
        return named or {"x": number}
    if isinstance(value, list):
        return [_renumbered(entry, number, rng) for entry in value]
    return number if isinstance(value, int | float) and rng.random() < 0.7 else value


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any, int]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key, depth
        yield from _places(value[key], depth + 1)


class Fuzzer:
    """Changes a bundle in its directory, one case after another.

    Args:
        directory: of a valid bundle, which belongs to the fuzzer.
        seed: of all cases; case n depends on it and on n alone.
        measured: what a manifest says besides where searches and a measurement were made, by field.
    """

    def __init__(self, directory: Path, seed: int, measured: dict[str, Any] | None = None):
        self.directory, self.seed, self.measured = directory, seed, measured or {}
        self.outside = directory.parent / "outside"
        self.outside.mkdir()
        (self.outside / "secret").write_text("{}")
        names = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
        self.pristine = {name: (directory / name).read_bytes() for name in sorted(names)}
        self.written: dict[str, bytes | Path] = dict(self.pristine)
        self.manifest = json.loads(self.pristine[MANIFEST_NAME])
        self.weights = [name for name in names if name.endswith(".safetensors") and name != PLAN_NAME]

    def case(self, number: int) -> str:
        """Write case `number`; returns what was done."""
        rng = random.Random(self.seed * 1_000_003 + number)
        files: dict[str, bytes | Path] = dict(self.pristine)
        manifest = copy.deepcopy(self.manifest)
        done = []
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            change = rng.choices(
                [
                    *(self._manifest, self._measured, self._settings, self._header, self._length, self._data),
                    *(self._bytes, self._kinds, self._link, self._added),
                ],
                [8, 8, 4, 5, 2, 2, 2, 3, 2, 2],
            )[0]
            done.append(change.__name__)
            manifest = change(files, manifest, rng)
        if rng.random() < 0.95:
            for name, info in manifest["files"].items() if isinstance(manifest.get("files"), dict) else ():
                if isinstance(files.get(name), bytes) and isinstance(info, dict):
                    info |= {"size": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
        if isinstance(manifest.get("fidelity"), dict) and rng.random() < 0.95:
            manifest["fidelity"]["measured_on"] = _digest(manifest)
        if isinstance(files[MANIFEST_NAME], bytes):
            files[MANIFEST_NAME] = _sealed(manifest, rng)
        self._write(files)
        return " ".join(done)

    def restore(self) -> None:
        """Write the valid bundle again."""
        self._write(dict(self.pristine))

    def _write(self, files: dict[str, bytes | Path]) -> None:
        # What is there is not written again: it is slow where the file system writes a truncated file out at once.
        changed = [name for name in {**self.written, **files} if self.written.get(name) != files.get(name)]
        for name in changed:
            path = self.directory / name
            if path.is_symlink() or (name not in files and path.exists()):
                path.unlink()
                with contextlib.suppress(OSError):  # other files lie there, or the folder is the bundle
                    path.parent.rmdir()
        for name in changed:
            path, content = self.directory / name, files.get(name)
            if content is not None:
                path.parent.mkdir(exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif content is not None:
                path.unlink(missing_ok=True)
                path.symlink_to(content)
        self.written = files

    def _measured(self, files: dict[str, Any], manifest: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        """What searches and a measurement found, which few bundles have, changed in most cases."""
        field = rng.choice([*self.measured]) if self.measured else None
        if field is None:
            return manifest
        value = copy.deepcopy(self.measured[field])
        if rng.random() < 0.5:
            key = rng.choice([*value])
            return manifest | {field: value | {key: _renumbered(value[key], rng.choice(NUMBERS), rng)}}
        for _ in range(rng.choice([0, 1, 1, 2])):
            if isinstance(value, dict):
                value = mutated(value, rng)
        return manifest | {field: value}

    def _kinds(self, files: dict[str, Any], manifest: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        """A file that is critical and called informative, or the reverse; its content is changed, too."""
        listed, informative = manifest.get("files"), manifest.get("informative")
        if not isinstance(listed, dict) or not isinstance(informative, list) or not listed:
            return manifest
        listed, informative = dict(listed), list(informative)
        if rng.random() < 0.8:
            name = rng.choice([*listed])
            listed.pop(name)
            informative.append(name)
            if isinstance(files.get(name), bytes):
                files[name] = files[name].replace(b"a", b"b")
        elif informative:
            name = informative.pop()
            listed[name if isinstance(name, str) else "x"] = {"size": 0, "sha256": ""}
        return manifest | {"files": listed, "informative": informative}

    def _link(self, files: dict[str, Any], manifest: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        """A link in the place of a file, or beside the others, that leads out, to nothing, in a circle, or inside."""
        name = rng.choice([*files, *files, "README.md", "LICENSE", ".hidden", "notes.txt", "assets", *LOADED])
        inside = rng.choice([*self.pristine])
        files[name] = rng.choice(
            [self.outside / "secret", self.outside, Path("missing"), Path(name).name, self.directory / inside]
        )
        files[name] = Path(files[name])
        return manifest

    def _added(self, files: dict[str, Any], manifest: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        """A file that loaders read, beside the listed ones or called informative."""
        name = rng.choice(LOADED)
        files.setdefault(name, b"{}")
        if rng.random() < 0.3 and isinstance(manifest.get("informative"), list):
            return manifest | {"informative": [*manifest["informative"], name]}
        return manifest

    def _manifest(self, files: dict[str, Any], manifest: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        # One field at a time: among all entries those of tensors and modules would be nearly all.
        field = rng.choice([*manifest, None])
        if field is None:
            changed = mutated(manifest, rng)
            return changed if isinstance(changed, dict) else manifest
        return manifest | {field: mutated(manifest[field], rng)}

    def _settings(self, files: dict[str, Any], manifest: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        name = rng.choice([n for n in _contents(files) if n.endswith(".json") and n != MANIFEST_NAME])
        with contextlib.suppress(ValueError, RecursionError):  # changed before, and no JSON now, or nested too deeply
            files[name] = _text(mutated(json.loads(files[name]), rng), rng)
        return manifest

    def _header(self, files: dict[str, Any], manifest: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        """Entries of a safetensors header; in half of the cases the manifest then says the same."""
        name = rng.choice([*self.weights, PLAN_NAME])
        if not isinstance(files[name], bytes):
            return manifest
        try:
            (length,) = struct.unpack("<Q", files[name][:8])
            header = mutated(json.loads(files[name][8 : 8 + length]), rng)
        except (struct.error, ValueError, RecursionError):  # changed before, as above
            return manifest
        text = _text(header, rng)
        files[name] = struct.pack("<Q", len(text)) + text + files[name][8 + length :]
        if isinstance(header, dict) and rng.random() < 0.5:
            entries = {tensor: entry for tensor, entry in header.items() if isinstance(entry, dict)}
            entries = {tensor: {key: entry.get(key) for key in ("dtype", "shape")} for tensor, entry in entries.items()}
            entries.pop("__metadata__", None)
            where = "plan" if name == PLAN_NAME else "tensors"
            if name == PLAN_NAME:
                manifest[where] = entries
            elif isinstance(manifest.get(where), dict):
                manifest[where] = manifest[where] | entries
        return manifest

    def _length(self, files: dict[str, Any], manifest: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        """What a safetensors file says of its header's length, or where the file ends."""
        name = rng.choice([*self.weights, PLAN_NAME])
        if not isinstance(files[name], bytes):
            return manifest
        claims = [0, 1, 7, 2**20, 2**31, 2**40, 2**60, 2**63, 2**64 - 1, len(files[name]), len(files[name]) - 8]
        files[name] = rng.choice(
            [
                struct.pack("<Q", rng.choice(claims)) + files[name][8:],
                files[name][: rng.randrange(len(files[name]))],
                files[name] + bytes(rng.randrange(1, 64)),
            ]
        )
        return manifest

    def _data(self, files: dict[str, Any], manifest: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        """Numbers of the plan or the weights: infinities, NaN, zeros, large and negative ones."""
        name = rng.choice([*self.weights, PLAN_NAME])
        if not isinstance(files[name], bytes):
            return manifest
        content = bytearray(files[name])
        begin = rng.randrange(len(content) // 2, len(content) + 1)
        size = rng.choice([2, 4, 64])
        content[begin : begin + size] = (rng.choice([b"\0", b"\xff", b"\x7f", b"\x80", b"\x7c"]) * size)[
            : len(content) - begin
        ]
        files[name] = bytes(content)
        return manifest

    def _bytes(self, files: dict[str, Any], manifest: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        name = rng.choice([name for name in _contents(files) if name != MANIFEST_NAME])
        content = bytearray(files[name] or b"\0")
        for _ in range(rng.choice([1, 3, 30])):
            content[rng.randrange(len(content))] = rng.randrange(256)
        files[name] = bytes(content)
        return manifest


def _contents(files: dict[str, Any]) -> list[str]:
    return [name for name, content in files.items() if isinstance(content, bytes)]


def _digest(manifest: dict[str, Any]) -> str:
    files = manifest.get("files")
    entries = files.items() if isinstance(files, dict) else ()
    lines = [f"{n} {i.get('size')} {i.get('sha256')}\n" for n, i in sorted(entries) if isinstance(i, dict)]
    return hashlib.sha256("".join(lines).encode(errors="replace")).hexdigest()


def _text(value: Any, rng: random.Random) -> bytes:
    text = json.dumps(value)
    if rng.random() < 0.1 and text.startswith("{") and len(text) > 2:
        text = "{" + text[1:-1] + "," + text[1:]  # every name twice
    if rng.random() < 0.02:
        text = '{"a":' * 50_000 + text
    return text.encode()


def _sealed(manifest: dict[str, Any], rng: random.Random) -> bytes:
    manifest = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
    content = _text(manifest | {"manifest_sha256": "0" * 64}, rng)
    head, zeros, tail = content.rpartition(b"0" * 64)
    return head + hashlib.sha256(content).hexdigest().encode() * bool(zeros) + tail


class Hang(BaseException):
    """A case took more than its time; no `except Exception` may take it for an error of the bundle."""


@contextlib.contextmanager
def time_limit(seconds: float = CASE_SECONDS) -> Iterator[None]:
    """Raise `Hang` in the block after so many seconds of processor time."""

    def stop(*_: object) -> None:
        raise Hang

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


_observers: list[Callable[[str, Any], None]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        for observer in _observers:
            observer(arguments[0], arguments[2])


sys.addaudithook(_audit)  # cannot be removed; does nothing without observers


@contextlib.contextmanager
def opened_files() -> Iterator[list[tuple[str, bool]]]:
    """Paths of the files that Python opens in the block, and whether for writing; Python's own modules left out."""
    found: list[tuple[str, bool]] = []

    def observe(path: Any, flags: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            text = os.path.realpath(os.fsdecode(path))
            if not text.endswith((".py", ".pyc", ".so")):
                found.append((text, bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))))

    _observers.append(observe)
    try:
        yield found
    finally:
        _observers.remove(observe)
