"""The working directory of a calibration: its inputs, the layers that are done, and how a killed run resumes.

    WORK/state.json                      inputs, their fingerprint, and whether all layers are done
    WORK/layers/00000.safetensors        a layer's tensors under their final checkpoint names
    WORK/layers/00000.plan.safetensors   its KV-plan tensors, named layers.{i}.{what}
    WORK/layers/00000.json               its record; written last: where it is, the layer is committed;
                                         once all are, it is replaced where decisions on all layers change it
    WORK/auto/NAME.json                  measurements of a search over the layers' schemes, and what it chose
    WORK/hidden/00000.f32                input of a layer, raw float32 [samples, length, hidden], while it is needed

Every file is written under a temporary name, flushed to the disk and renamed, so that after a kill at any moment each
file is either absent or complete. Equal inputs give equal bytes (on one machine with one number of threads).
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvconvert.bundle.manifest import DataInfo, ModuleCoverage, SourceInfo
from kvconvert.errors import KvconvertError, UsageError

logger = logging.getLogger(__name__)

WORK_FORMAT = 0
_STATE = "state.json"
_FOLDERS = ("layers", "hidden")
_TEMPORARY = ".partial"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkState(_Record):
    """What a calibration was started from.

    Attributes:
        format: of the working directory.
        fingerprint: SHA-256 over `inputs()`.
        versions: of kvconvert and the libraries that shape its results.
        recipe: as plain values.
        source, data: fingerprints of the model and of the calibration tokens.
        model: the model as it was named, and `directory` where it was found; neither enters the fingerprint.
        seed, device: of the calibration.
        num_layers: decoder layers.
        adapter: model type of the adapter, or None for an architecture without one.
        kept_tensors: source tensors that no layer file replaces: an exporter copies them as they are.
        kept_modules: coverage of the modules that own them.
        transforms: changes to the weights, in the order in which they are applied.
        complete: every layer is committed.
    """

    format: int = WORK_FORMAT
    fingerprint: str = ""
    versions: dict[str, str]
    recipe: dict[str, Any]
    source: SourceInfo
    model: str
    directory: str
    data: DataInfo
    seed: int
    device: str
    num_layers: int
    adapter: str | None
    kept_tensors: list[str]
    kept_modules: list[ModuleCoverage]
    transforms: list[str]
    complete: bool = False

    def inputs(self) -> dict[str, Any]:
        """Everything that the result depends on, flattened, with readable keys."""
        inputs: dict[str, Any] = {"the model's config.json": self.source.config_sha256}
        inputs |= {f"the model's {file}": digest for file, digest in self.source.weights_sha256.items()}
        inputs |= {
            "the number of samples": self.data.samples,
            "the sample length": self.data.length,
            "the seed": self.seed,
            "the calibration data": self.data.sha256,
            "the device": self.device,
        }
        inputs |= {f"the version of {name}": version for name, version in self.versions.items()}
        for table, values in self.recipe.items():
            if isinstance(values, dict):
                inputs |= {f"the recipe's {table}.{key}": value for key, value in values.items()}
            else:
                inputs[f"the recipe's {table}"] = values
        return inputs

    def sealed(self) -> WorkState:
        """The same state with its fingerprint computed."""
        text = json.dumps(self.inputs(), sort_keys=True)
        return self.model_copy(update={"fingerprint": hashlib.sha256(text.encode()).hexdigest()})


class LayerRecord(_Record):
    """What happened to one decoder layer.

    Attributes:
        index: number of the layer.
        modules: coverage of every module of the layer that owns tensors.
        scheme: fields of the layer's `KVScheme` with rotations resolved, or None where the cache is left alone.
        head_dim, num_key_value_heads, value_group_size: resolved numbers of the scheme; value_group_size is
            `KVScheme.value_group_for(head_dim)`.
        rotation: the Hadamard convention, or None without rotation.
        reason: why the scheme differs from the recipe's, or "".
        statistics: what the passes measured, by pass.
    """

    index: int
    modules: list[ModuleCoverage]
    scheme: dict[str, Any] | None
    head_dim: int | None = None
    num_key_value_heads: int | None = None
    value_group_size: int | None = None
    rotation: str | None = None
    reason: str = ""
    statistics: dict[str, Any] = {}


class WorkDir:
    """A working directory; made by `create`, read by `open`."""

    def __init__(self, path: Path, state: WorkState) -> None:
        self.path, self.state = path, state

    @classmethod
    def open(cls, path: Path | str) -> WorkDir:
        """A finished working directory; UsageError where it is not one, or not finished."""
        path = Path(path)
        if not (path / _STATE).is_file():
            raise UsageError(f"{path} is not a working directory of kvconvert; make it with kvconvert calibrate first.")
        work = cls(path, _read_state(path))
        if not work.state.complete:
            raise UsageError(
                f"The calibration in {path} stopped after {work.first_uncommitted()} of {work.state.num_layers} "
                "layers; calibrate again with the same arguments, which goes on from there."
            )
        return work

    @staticmethod
    def check_place(path: Path | str) -> None:
        """Refuse a place where nothing can be written, before a model is opened; UsageError."""
        path = Path(path)
        existing = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
        if not existing.is_dir():
            raise UsageError(f"{existing} is no directory, so `work` cannot be {path}; choose another place.")
        if not os.access(existing, os.W_OK | os.X_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
            raise UsageError(f"Nothing can be written in {existing}; choose another place for `work`.")

    @classmethod
    def create(cls, path: Path | str, state: WorkState, restart: bool = False) -> WorkDir:
        """Begin a working directory, or take up one that was begun from the same inputs.

        Args:
            path: absent, empty, or a working directory.
            state: what is to be calibrated.
            restart: throw away what an earlier calibration left there.

        Raises:
            UsageError: the directory holds other files, or a calibration from other inputs.
        """
        path, state = Path(path), state.sealed()
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file; `work` has to be a directory.")
        begun = (path / _STATE).exists()
        # A kill before the first state.json leaves nothing but its temporary file.
        if path.exists() and not begun and any(not entry.name.endswith(_TEMPORARY) for entry in path.iterdir()):
            raise UsageError(f"{path} holds files that are not kvconvert's; `work` has to be a new or empty directory.")
        if begun and not restart:
            previous = _read_state(path)
            if previous.fingerprint != state.fingerprint:
                raise UsageError(
                    f"{_changes(previous, state)}; calibrate {path} anew with `restart=True`, or choose another `work`."
                )
            state = previous
        with _disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            if begun and restart:
                cls._set_aside(path)
            if restart or not begun:
                _write_text(path / _STATE, _to_json(state))
            shutil.rmtree(path / f"layers{_TEMPORARY}", ignore_errors=True)
            for folder in () if state.complete else ("layers", "hidden"):
                (path / folder).mkdir(exist_ok=True)
        return cls(path, state)

    @staticmethod
    def _set_aside(path: Path) -> None:
        """Undo an earlier calibration in steps, each of which leaves a consistent state."""
        shutil.rmtree(path / "hidden", ignore_errors=True)
        shutil.rmtree(path / "auto", ignore_errors=True)
        try:
            previous = _read_state(path)
        except UsageError:
            logger.warning("%s cannot be read; starting anew.", path / _STATE)
        else:
            _write_text(path / _STATE, _to_json(previous.model_copy(update={"complete": False})))
        shutil.rmtree(path / f"layers{_TEMPORARY}", ignore_errors=True)
        if (path / "layers").exists():
            os.replace(path / "layers", path / f"layers{_TEMPORARY}")

    def is_committed(self, index: int) -> bool:
        """Whether a layer's result is complete."""
        return self._layer(index, "json").exists()

    def first_uncommitted(self) -> int:
        """Index of the first layer to do; the number of layers when all are done."""
        return next((i for i in range(self.state.num_layers) if not self.is_committed(i)), self.state.num_layers)

    def commit_layer(
        self, index: int, tensors: dict[str, Tensor], plan: dict[str, Tensor], record: LayerRecord
    ) -> None:
        """Write a layer's result; once this returns it survives a kill."""
        with _disk_errors(self.path):
            for suffix, content in (("safetensors", tensors), ("plan.safetensors", plan)):
                with _replacing(self._layer(index, suffix)) as partial:
                    save_file({name: content[name].contiguous() for name in sorted(content)}, partial, {"format": "pt"})
            _write_text(self._layer(index, "json"), _to_json(record))

    def replace_record(self, index: int, record: LayerRecord) -> None:
        """Write a committed layer's record again, if it changed."""
        if record != self.layer_record(index):
            with _disk_errors(self.path):
                _write_text(self._layer(index, "json"), _to_json(record))

    def layer_tensors(self, index: int) -> dict[str, Tensor]:
        """A committed layer's tensors by checkpoint name; the first call for a layer reads its file."""
        return self._load(self._layer(index, "safetensors"))

    def layer_plan(self, index: int) -> dict[str, Tensor]:
        """A committed layer's KV-plan tensors, named layers.{index}.{what}."""
        return self._load(self._layer(index, "plan.safetensors"))

    def layer_record(self, index: int) -> LayerRecord:
        """A committed layer's record."""
        file = self._layer(index, "json")
        try:
            return LayerRecord.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            raise UsageError(
                f"{file} cannot be read ({_first_line(error)}); calibrate again with `restart=True`."
            ) from error

    def searched_for(self, state: WorkState) -> None:
        """Check that this directory's search measured what a calibration of `state` would measure.

        Raises:
            UsageError: it was begun from other inputs, but for the budget, or nothing was searched there.
        """
        here, there = self.state.inputs(), state.sealed().inputs()
        budget = {f"the recipe's auto.{name}" for name in ("kv_bits", "kv_bytes_per_token", "repairs")}
        changed = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
        changed = [key for key in changed if key not in budget]
        searched = (self.path / "auto").is_dir()
        if changed or not searched:
            why = f"{changed[0]} differs" if changed else "nothing was searched there"
            raise UsageError(
                f"Measurements of {self.path} cannot be used: {why}; leave `auto_from` out, or name a directory of the "
                "same search with another budget."
            )

    def adopt_measurements(self, other: WorkDir) -> None:
        """Take the measurements of single layers from another search."""
        for name in (f"layer-{index:05d}" for index in range(self.state.num_layers)):
            found = other.measurement(name)
            if found is not None and self.measurement(name) is None:
                self.commit_measurement(name, found)

    def measurement(self, name: str) -> dict[str, Any] | None:
        """A measurement of the search that an earlier run committed, or None."""
        file = self.path / "auto" / f"{name}.json"
        try:
            return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{file} cannot be read ({_first_line(error)}); calibrate again with `restart=True`."
            ) from error

    def commit_measurement(self, name: str, values: dict[str, Any]) -> None:
        """Write a measurement of the search; once this returns it survives a kill."""
        with _disk_errors(self.path):
            (self.path / "auto").mkdir(exist_ok=True)
            _write_text(self.path / "auto" / f"{name}.json", json.dumps(values, indent=1) + "\n")

    def finish(self) -> None:
        """Mark the calibration complete and remove what only a resume would need."""
        self.state = self.state.model_copy(update={"complete": True})
        with _disk_errors(self.path):
            _write_text(self.path / _STATE, _to_json(self.state))
        shutil.rmtree(self.path / "hidden", ignore_errors=True)

    def hidden(self, index: int, hidden_size: int) -> HiddenStates:
        """The input of layer `index`, which may or may not be there."""
        shape = (self.state.data.samples, self.state.data.length, hidden_size)
        return HiddenStates(self.path / "hidden" / f"{index:05d}.f32", shape)

    def _layer(self, index: int, suffix: str) -> Path:
        return self.path / "layers" / f"{index:05d}.{suffix}"

    def _load(self, file: Path) -> dict[str, Tensor]:
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"{file} cannot be read ({_first_line(error)}); calibrate again with `restart=True`."
            ) from error


class HiddenStates:
    """One layer's input on disk: float32 [samples, length, hidden], read and written a few sequences at a time.

    Plain reads rather than a mapping of the file: the process's memory stays bounded by what it holds at the moment.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int]) -> None:
        self.path, self.shape = path, shape

    def exists(self) -> bool:
        """Whether the file is there and complete."""
        samples, length, width = self.shape
        return self.path.exists() and self.path.stat().st_size == samples * length * width * 4

    def read(self, start: int, stop: int) -> Tensor:
        """Sequences start to stop, float32 [stop - start, length, hidden]."""
        _, length, width = self.shape
        count = (stop - start) * length * width
        values = np.fromfile(self.path, dtype="<f4", count=count, offset=start * length * width * 4)
        return torch.from_numpy(values).view(stop - start, length, width)

    @contextmanager
    def writing(self) -> Iterator[HiddenWriter]:
        """Append sequences in order; the file appears only when `HiddenWriter.commit` is called."""
        partial = self.path.with_name(self.path.name + _TEMPORARY)
        with _disk_errors(self.path), partial.open("wb") as stream:
            yield HiddenWriter(self, partial, stream)

    def remove(self) -> None:
        """Delete the file, if it is there."""
        self.path.unlink(missing_ok=True)


class HiddenWriter:
    """See `HiddenStates.writing`."""

    def __init__(self, target: HiddenStates, partial: Path, stream: Any) -> None:
        self._target, self._partial, self._stream = target, partial, stream

    def append(self, sequences: Tensor) -> None:
        """Write float32 [n, length, hidden]."""
        self._stream.write(sequences.detach().cpu().contiguous().numpy().astype("<f4", copy=False).data)

    def commit(self) -> None:
        """Let the file appear, complete."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        os.replace(self._partial, self._target.path)
        _sync_directory(self._target.path.parent)


def _changes(previous: WorkState, state: WorkState) -> str:
    """The beginning of the message: which inputs differ."""
    before, now = previous.inputs(), state.inputs()
    changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]

    def value(values: dict[str, Any], name: str) -> str:
        text = str(values.get(name, "absent"))
        return text if len(text) < 40 else f"{text[:12]}..."

    listed = [f"{name} ({value(before, name)} to {value(now, name)})" for name in changed[:3]]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"The calibration was begun with other inputs: changed are {', '.join(listed)}{more}"


def _read_state(path: Path) -> WorkState:
    try:
        values = json.loads((path / _STATE).read_text(encoding="utf-8"))
        if isinstance(values, dict) and values.get("format") != WORK_FORMAT:
            raise UsageError(
                f"{path} was written by another version of kvconvert (working format {values.get('format')}, this is "
                f"{WORK_FORMAT}); calibrate again with `restart=True`."
            )
        return WorkState.model_validate(values)
    except (OSError, ValueError, ValidationError) as error:
        raise UsageError(
            f"{path / _STATE} cannot be read ({_first_line(error)}); calibrate again with `restart=True`."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


def _to_json(record: BaseModel) -> str:
    return json.dumps(record.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"


def _write_text(file: Path, text: str) -> None:
    with _replacing(file) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    """A temporary name to write to; renamed to `file` when complete and on the disk."""
    partial = file.with_name(file.name + _TEMPORARY)
    yield partial
    with partial.open("rb+") as stream:
        os.fsync(stream.fileno())
    os.replace(partial, file)
    _sync_directory(file.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk into one sentence; safetensors reports it as an error of its own."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        if not full:
            raise
        raise KvconvertError(
            f"The disk is full while writing to {path}; free some space and calibrate again with the same arguments, "
            "which goes on from the last finished layer."
        ) from error
