"""The working directory of a calibration: its inputs, the layers that are done, and how a killed run resumes.

    WORK/state.json                      inputs, their fingerprint, and whether all layers are done
    WORK/layers/00000.safetensors        a layer's tensors under their final checkpoint names
    WORK/layers/00000.plan.safetensors   its KV-plan tensors, named layers.{i}.{what}
    WORK/layers/00000.json               its record; written last: where it is, the layer is committed;
                                         once all are, it is replaced where decisions on all layers change it
    WORK/auto/NAME.json                  measurements of a search over the layers' schemes, and what it chose
    WORK/hidden/00000.f32                input of a layer, raw float32 [samples, length, hidden], while it is needed;
                                         00000.8-16.f32: of samples 8 to 15, where several processes share them;
                                         where a GPU holds inputs, one a minute is written, and a resume computes
                                         those that follow it again
    WORK/lock                            empty; locked while a command uses the directory (`work_lock`)

Every file is written under a temporary name, flushed to the disk and renamed, so that after a kill at any moment each
file is either absent or complete. JSON files carry their own checksums, and a layer's record those of its tensors'
files: a layer that was damaged since is computed again, or refused by an export. Inputs of layers have none. Equal
inputs give equal bytes (on one machine with one number of threads).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field
from safetensors.torch import load_file
from torch import Tensor

from kvconvert.bundle.manifest import LayerPlan, ModuleCoverage
from kvconvert.convert.input_capture import HiddenStates, HiddenWriter
from kvconvert.convert.work_files import (
    REPEAT,
    STATE_NAME,
    check_begun,
    check_place,
    disk_errors,
    layer_path,
    read_sealed,
    sealed_json,
    unfinished,
    work_lock,
)
from kvconvert.errors import CheckpointError, MissingError, UsageError, first_line, printable, unreadable
from kvconvert.io import disk
from kvconvert.io.checksums import known_sha256, remember
from kvconvert.io.json_text import read_json
from kvconvert.io.records import MAX_LAYERS, DataInfo, Facts, Record, SourceInfo, TensorInfo
from kvconvert.io.tensorfile import Mapped, replace_tensors
from kvconvert.io.tensorheader import read_header

WORK_FORMAT = 2


class WorkState(Record):
    """Inputs of a calibration.

    Attributes:
        format: the format version of the working directory.
        fingerprint: SHA-256 over `inputs()`.
        versions: the versions of kvconvert and the libraries that shape its results.
        recipe: as plain values.
        source, data: fingerprints of the model and of the calibration tokens.
        model: the model as it was named, and `directory` where it was found; neither enters the fingerprint.
        seed, device: seed and device of the calibration.
        num_layers: decoder layers.
        adapter: model type, or None where the structure of the layers is not known.
        kept_tensors: source tensors that no layer file replaces: an exporter copies them as they are.
        kept_modules: coverage of the modules that own them.
        transforms: changes to the weights, in the order in which they are applied.
        complete: every layer is committed.
    """

    format: int = WORK_FORMAT
    fingerprint: str = ""
    versions: dict[str, str]
    recipe: Facts
    source: SourceInfo
    model: str
    directory: str
    data: DataInfo
    seed: int
    device: str
    num_layers: int = Field(ge=0, le=MAX_LAYERS)
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


class LayerRecord(LayerPlan):
    """One decoder layer: its plan as the bundle will hold it, and the rest of what calibration made of it.

    Attributes:
        modules: coverage of every module of the layer that owns tensors.
        files: SHA-256 of the layer's files of tensors by suffix, filled in by `WorkDir.commit_layer`.
    """

    modules: list[ModuleCoverage]
    files: dict[str, str] = Field(default_factory=dict)

    def plan(self) -> LayerPlan:
        """The layer's entry in the manifest."""
        return LayerPlan(**{name: getattr(self, name) for name in LayerPlan.model_fields})


logger = logging.getLogger(__name__)

SAVED_EVERY_S = 60.0  # inputs of layers that are in memory: about what a kill costs at most

_TENSOR_FILES = ("safetensors", "plan.safetensors")


class WorkDir:
    """A working directory; made by `create`, read by `open`; `writing` and `reading` also hold its lock."""

    def __init__(self, path: Path, state: WorkState) -> None:
        self.path, self.state = path, state
        self._verified: set[int] = set()
        self._samples: tuple[int, int] | None = None
        self._held: dict[int, Tensor] = {}
        self._saved = time.monotonic()

    @classmethod
    @contextmanager
    def writing(cls, path: Path | str, state: WorkState, restart: bool = False) -> Iterator[WorkDir]:
        """`create`, as the only process that uses the directory until the block ends."""
        path = Path(path)
        check_place(path)
        with ExitStack() as stack:
            with disk_errors(path):
                disk.make_directory(path)
                stack.enter_context(work_lock(path))
            yield cls.create(path, state, restart)

    @classmethod
    @contextmanager
    def reading(cls, path: Path | str) -> Iterator[WorkDir]:
        """`open`, for a block in which no process changes the directory."""
        path = Path(path)
        check_begun(path)
        with ExitStack() as stack:
            with disk_errors(path, REPEAT):
                stack.enter_context(work_lock(path, shared=True))
            yield cls.open(path)

    @classmethod
    def open(cls, path: Path | str) -> WorkDir:
        """A finished working directory; UsageError where it is not one, or not finished."""
        path = Path(path)
        check_begun(path)
        work = cls(path, _read_state(path))
        if not work.state.complete:
            raise unfinished(path, work.state.num_layers)
        return work

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
        begun = (path / STATE_NAME).exists()
        if begun and not restart:
            previous = _read_state(path)
            if previous.fingerprint != state.fingerprint:
                raise UsageError(
                    f"{_changes(previous, state)}; calibrate {path} anew with `restart=True`, or choose another `work`."
                )
            place = {} if os.path.exists(previous.directory) else {"model": state.model, "directory": state.directory}
            state = previous.model_copy(update=place)  # an export reads the model, too
        with disk_errors(path):
            if begun and restart:
                cls._set_aside(path)
            if restart or not begun or state != previous:
                _write(path / STATE_NAME, _to_json(state))
            disk.remove_tree(path / f"layers{disk.TEMPORARY}")
            for left in [*path.glob(f"*{disk.TEMPORARY}"), *path.glob(f"*/*{disk.TEMPORARY}")]:
                disk.remove(left)
            work = cls(path, state)
            if state.complete:
                disk.remove_tree(path / "hidden")
                if work.uncommitted() or work.damaged_measurements():  # damaged since, and to be computed again
                    work.state = state.model_copy(update={"complete": False})
                    _write(path / STATE_NAME, _to_json(work.state))
            for folder in () if work.state.complete else ("layers", "hidden"):
                disk.make_directory(path / folder)
        return work

    @staticmethod
    def _set_aside(path: Path) -> None:
        """Undo an earlier calibration in steps, each of which leaves a consistent state."""
        try:
            previous = _read_state(path)
        except UsageError:
            logger.warning("%s cannot be read; starting anew.", path / STATE_NAME)
        else:
            _write(path / STATE_NAME, _to_json(previous.model_copy(update={"complete": False})))
        disk.remove_tree(path / "hidden")
        disk.remove_tree(path / "auto")
        disk.remove_tree(path / f"layers{disk.TEMPORARY}")
        if (path / "layers").exists():
            disk.rename(path / "layers", path / f"layers{disk.TEMPORARY}")

    def damaged_layers(self) -> dict[int, str]:
        """Layers whose record is there, but that are not what was written, with the reason; reads all their files."""
        damaged = {}
        for index in range(self.state.num_layers):
            if self._layer(index, "json").exists():
                try:
                    self._verify(index)
                except UsageError as error:
                    damaged[index] = str(error)
        return damaged

    def damaged_measurements(self) -> list[Path]:
        """Files of the search that are not what was written."""
        damaged = []
        for file in sorted((self.path / "auto").glob("*.json")):
            try:
                read_sealed(file)
            except (OSError, ValueError):
                damaged.append(file)
        return damaged

    def uncommitted(self) -> list[int]:
        """Layers to do: those that are not there, or damaged."""
        damaged = self.damaged_layers()
        return [i for i in range(self.state.num_layers) if i in damaged or not self._layer(i, "json").exists()]

    def commit_layer(
        self, index: int, tensors: dict[str, Tensor], plan: dict[str, Tensor], record: LayerRecord
    ) -> None:
        """Write a layer's result; once this returns it survives a kill."""
        with disk_errors(self.path):
            disk.remove(self._layer(index, "json"))  # a damaged layer's: what follows is not what it describes
            files = {
                suffix: replace_tensors(self._layer(index, suffix), content)
                for suffix, content in zip(_TENSOR_FILES, (tensors, plan), strict=True)
            }
            _write(self._layer(index, "json"), _to_json(record.model_copy(update={"files": files})))
        for suffix, checksum in files.items():  # an export by this process need not read them for it
            remember(self._layer(index, suffix), checksum)
        self._verified.add(index)

    def replace_record(self, index: int, record: LayerRecord) -> None:
        """Write a committed layer's record again, if it changed."""
        if record != self.layer_record(index):
            with disk_errors(self.path):
                _write(self._layer(index, "json"), _to_json(record))

    def layer_tensors(self, index: int) -> dict[str, Tensor]:
        """A committed layer's tensors by checkpoint name."""
        return self._load(index, "safetensors")

    def layer_infos(self, index: int) -> dict[str, TensorInfo]:
        """Types and shapes of a committed layer's tensors, without reading them: their file is not verified."""
        return self._header(index, "safetensors")

    def layer_plan(self, index: int) -> dict[str, Tensor]:
        """A committed layer's KV-plan tensors, named layers.{index}.{what}."""
        return self._load(index, "plan.safetensors")

    def _header(self, index: int, suffix: str) -> dict[str, TensorInfo]:
        def refuse(file: str, field: str, expected: object, found: object) -> UsageError:
            return _damaged(self._layer(index, suffix), f"{field} should be {expected}, found {found}")

        try:
            return read_header(self._layer(index, suffix), refuse)
        except OSError as error:
            raise _damaged(self._layer(index, suffix), first_line(error)) from error

    def _load(self, index: int, suffix: str) -> dict[str, Tensor]:
        self._verify(index)
        return load_file(self._layer(index, suffix))

    def layer_record(self, index: int) -> LayerRecord:
        """A committed layer's record."""
        file = self._layer(index, "json")
        try:
            return LayerRecord.model_validate(read_sealed(file))
        except (OSError, ValueError) as error:
            raise _damaged(file, first_line(error)) from error

    def _verify(self, index: int) -> None:
        """Compare a layer's files with their checksums, once; UsageError where one differs."""
        if index in self._verified:
            return
        record = self.layer_record(index)
        for suffix in _TENSOR_FILES:
            file = self._layer(index, suffix)
            self._header(index, suffix)  # whoever wrote the record may have written any file, of any length
            try:
                found = known_sha256([file])[file]
            except CheckpointError as error:
                raise _damaged(file, first_line(error.__cause__ or error)) from error
            if found != record.files.get(suffix):
                raise _damaged(file, "its content does not fit its checksum")
        self._verified.add(index)

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
            return read_sealed(file) if file.exists() else None
        except (OSError, ValueError) as error:
            if not self.state.complete:  # measured again
                logger.warning("%s is damaged (%s); it is measured again.", file, first_line(error))
                return None
            raise _damaged(file, first_line(error)) from error

    def commit_measurement(self, name: str, values: dict[str, Any]) -> None:
        """Write a measurement of the search; once this returns it survives a kill."""
        with disk_errors(self.path):
            disk.make_directory(self.path / "auto")
            _write(self.path / "auto" / f"{name}.json", sealed_json(values))

    def finish(self) -> None:
        """Mark the calibration complete and remove what only a resume would need."""
        self.state = self.state.model_copy(update={"complete": True})
        with disk_errors(self.path):
            _write(self.path / STATE_NAME, _to_json(self.state))
            disk.remove_tree(self.path / "hidden")

    def share_samples(self, first: int, stop: int) -> None:
        """Keep hidden states of some samples only, in files of their own: those of one process among several."""
        self._samples = first, stop

    def remove_other_hidden(self, shares: Sequence[tuple[int, int]]) -> None:
        """Remove hidden states that a run with another number of processes left."""
        kept = {self._hidden_name(share) for share in shares}
        with disk_errors(self.path):
            for file in (self.path / "hidden").glob("*.f32"):
                if file.name.partition(".")[2] not in kept:
                    disk.remove(file)

    def _hidden_name(self, share: tuple[int, int] | None) -> str:
        everything = (0, self.state.data.samples)
        return "f32" if share in (None, everything) else f"{share[0]}-{share[1]}.f32"

    def hidden(self, index: int, hidden_size: int, models: int = 1) -> HiddenStates:
        """The input of layer `index`, in one or two models one after another, which may or may not be there."""
        first, stop = self._samples or (0, self.state.data.samples)
        shape = (models * (stop - first), self.state.data.length, hidden_size)
        name = f"{index:05d}.{self._hidden_name(self._samples)}"
        return HiddenStates(self.path / "hidden" / name, shape, first, self._held.get(index))

    @contextmanager
    def writing_hidden(
        self, index: int, hidden_size: int, hold: torch.device | None, models: int = 1
    ) -> Iterator[HiddenWriter]:
        """Write the input of layer `index`, which appears with `commit_hidden`.

        Args:
            index: the layer's index.
            hidden_size: numbers of a token.
            models: whose inputs are written one after another.
            hold: device that has room for it; its file is then written only if the last one is `SAVED_EVERY_S` old.
        """
        file = hold is None or time.monotonic() - self._saved >= SAVED_EVERY_S
        with self.hidden(index, hidden_size, models).writing(hold, file) as writer:
            yield writer

    def commit_hidden(self, index: int, writer: HiddenWriter) -> None:
        """Take what was written as the input of layer `index`; those of the layers before are no longer needed."""
        writer.commit()
        if writer.held is not None:
            self._held[index] = writer.held
        if writer.has_file:
            self._saved = time.monotonic()
        self.drop_hidden(index - 1, keep_files=not writer.has_file)

    def drop_hidden(self, index: int, keep_files: bool = False) -> None:
        """Remove the inputs of layers up to `index`; their files stay where a resume has no later one."""
        self._held = {layer: held for layer, held in self._held.items() if layer > index}
        own = f"?????.{self._hidden_name(self._samples)}"
        files = () if keep_files else sorted((self.path / "hidden").glob(own))
        with disk_errors(self.path):
            for file in files:
                if int(file.name.partition(".")[0]) <= index:
                    disk.remove(file)

    def mapped(self) -> Mapped:
        """Room beside the inputs of layers for what memory does not hold."""
        return Mapped(self.path / "hidden")

    def _layer(self, index: int, suffix: str) -> Path:
        return layer_path(self.path, index, suffix)


def _changes(previous: WorkState, state: WorkState) -> str:
    """The beginning of the message: which inputs differ."""
    before, now = previous.inputs(), state.inputs()
    changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]

    def value(values: dict[str, Any], name: str) -> str:
        found = values.get(name)
        text = "absent" if found is None else str(found)
        return text if len(text) < 40 else f"{text[:12]}..."

    listed = [f"{name} ({value(before, name)} to {value(now, name)})" for name in changed[:3]]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"The calibration was begun with other inputs: changed are {', '.join(listed)}{more}"


def _read_state(path: Path) -> WorkState:
    file = path / STATE_NAME
    try:
        values = read_json(file)
        if isinstance(values, dict) and values.get("format") != WORK_FORMAT:
            found = printable(str(values.get("format"))[:40])
            raise UsageError(
                f"{path} was written by another version of kvconvert (working format {found}, this is {WORK_FORMAT}); "
                "calibrate again with `restart=True`."
            )
        return WorkState.model_validate(read_sealed(file))
    except (OSError, ValueError) as error:
        raise MissingError(unreadable(file, error, "calibrate again with `restart=True`")) from error


def _damaged(file: Path, reason: str) -> UsageError:
    return UsageError(
        f"{file} is damaged ({reason}); calibrate again with the same arguments, which computes this part anew."
    )


def _to_json(record: BaseModel) -> str:
    return sealed_json(json.loads(json.dumps(record.model_dump(mode="json"), sort_keys=True)))


def _write(file: Path, text: str) -> None:
    disk.replace_bytes(file, text.encode())
