"""Inputs of decoder layers: their capture, and where they are kept, on the disk or on a GPU that has room.

The model's own forward runs with recorders in the place of its layers. Embeddings and their scales, learned positions,
vision towers, masks and rotary embeddings are thereby the model's own, for every architecture. The recorders return
zeros, so that a later layer's input is exactly what the model itself adds between the layers (as Qwen3-VL adds image
features).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvconvert.calibration.activations import same_arguments
from kvconvert.convert.work_files import disk_errors
from kvconvert.errors import NumericError, UnsupportedModelError
from kvconvert.io import disk
from kvconvert.io.tensorfile import Mapped
from kvconvert.kernels.quantizer import all_finite

_UNSET = -(2**31) + 1  # stands in integer buffers that the model has not filled


@dataclass(frozen=True)
class CalibrationInputs:
    """The model's inputs, sample by sample.

    Attributes:
        ids: int64 [samples, length].
        extras: for each sample the model's further inputs (pixel values, token types), as for a batch of that sample
            alone; empty where there are none.
        visual: which tokens stand for images, bool [samples, length], or None.
        mapped: where to keep what the model adds between layers; None keeps it in memory.
        random: how many of the last samples are random tokens, for weights that are corrected and nothing else.
    """

    ids: Tensor
    extras: tuple[dict[str, Tensor], ...] = ()
    visual: Tensor | None = None
    mapped: Mapped | None = None
    random: int = 0

    @property
    def text(self) -> int:
        """How many samples come before those."""
        return len(self.ids) - self.random

    def sample(self, index: int) -> dict[str, Tensor]:
        """Arguments of the model's forward for one sample."""
        extra = self.extras[index] if self.extras else {}
        return {"input_ids": self.ids[index : index + 1], **extra}


class InputCapture:
    """Records the input of the first layer and the arguments of every layer.

    Args:
        inputs: the calibration inputs of the model.
        name: the name of the module that holds the layers, for messages.
    """

    def __init__(self, inputs: CalibrationInputs, name: str) -> None:
        self.inputs, self.name = inputs, name
        self._layers_return_tuples = False
        self._arguments: list[list[dict[str, Any]]] = []  # per layer: one for all samples, or one for each
        # Per layer, by sample: tokens to which the model adds something, and what [tokens, hidden].
        self._added: list[dict[int, tuple[Tensor, Tensor]]] = []

    @torch.no_grad()
    def run(self, base: nn.Module, layers: nn.ModuleList, device: torch.device) -> Iterator[Tensor]:
        """The input of the first layer for one sample after another, float32 [1, length, hidden].

        Args:
            base: the model without its head, everything but its layers filled; its layers are given up to recorders.
            layers: the layers of `base`.
            device: the device of `base`.

        Raises:
            NumericError: NaN or infinity in the input of a layer.
        """
        captured: list[tuple[Tensor, dict[str, Any]]] = []
        for layer in layers:
            layer.forward = self._recorder(inspect.signature(layer.forward), captured)
        arguments: list[list[dict[str, Any]]] = [[] for _ in layers]
        self._added = [{} for _ in layers]
        for index in range(len(self.inputs.ids)):
            captured.clear()
            arguments_of_sample = {key: value.to(device) for key, value in self.inputs.sample(index).items()}
            if not self._runs(base, arguments_of_sample, captured):
                self._layers_return_tuples = True
                captured.clear()
                base(**arguments_of_sample, use_cache=False)
            if len(captured) != len(layers):
                raise UnsupportedModelError(
                    f"The model ran {len(captured)} of {len(layers)} layers of {self.name} on the calibration data."
                )
            for layer, (hidden, kwargs) in enumerate(captured):
                if not all_finite(hidden):
                    raise NumericError(
                        f"The input of {self.name}.{layer} holds NaN or infinity on the calibration data; check the "
                        "source model's weights."
                    )
                if layer and hidden.any():
                    tokens = hidden[0].any(-1).nonzero()[:, 0]
                    added, mapped = hidden[0, tokens].float().cpu(), self.inputs.mapped
                    self._added[layer][index] = tokens, added if mapped is None else mapped.copy(added)
                _append(arguments[layer], kwargs, index)
            yield captured[0][0].float()
        self._arguments = arguments

    def _runs(
        self, base: nn.Module, arguments: dict[str, Tensor], captured: list[tuple[Tensor, dict[str, Any]]]
    ) -> bool:
        """Run the model; False where it unpacks a layer's output, as that of a layer that returns a tuple."""
        try:
            base(**arguments, use_cache=False)
        except (ValueError, TypeError, IndexError, AttributeError):
            if self._layers_return_tuples or not captured:
                raise
            return False
        return all(hidden.shape == captured[0][0].shape for hidden, _ in captured)

    def _recorder(self, signature: inspect.Signature, captured: list[tuple[Tensor, dict[str, Any]]]) -> Any:
        """A forward that records its arguments by name."""
        first, *_ = signature.parameters
        collected = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

        def record(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            arguments |= arguments.pop(collected, {})
            hidden = arguments.pop(first)
            captured.append((hidden, arguments))
            output = torch.zeros_like(hidden)
            return (output, None) if self._layers_return_tuples else output

        return record

    @property
    def complete(self) -> bool:
        """Whether `run` has finished."""
        return bool(self._arguments)

    def shared(self, layer: int) -> bool:
        """Whether all samples have the same arguments in a layer, so that they can run through it together."""
        return len(self._arguments[layer]) == 1

    def arguments(self, layer: int, sample: int) -> dict[str, Any]:
        """A layer's arguments other than hidden states, for a batch of one; they broadcast where shared."""
        recorded = self._arguments[layer]
        return recorded[0] if len(recorded) == 1 else recorded[sample]

    def add(self, layer: int, start: int, hidden: Tensor) -> Tensor:
        """The input of a layer from the output of the one before, for samples from `start`: [n, length, hidden]."""
        found = self._added[layer] if layer < len(self._added) else {}
        if not any(start <= sample < start + len(hidden) for sample in found):
            return hidden
        hidden = hidden.clone()
        for row in range(len(hidden)):
            if start + row in found:
                tokens, values = found[start + row]
                hidden[row, tokens] += values.to(hidden.device)
        return hidden


@contextmanager
def rows_as_looked_up(embedding: nn.Embedding, table: Tensor, device: torch.device) -> Iterator[None]:
    """Give an embedding without weights, call by call, those rows of its table that the call looks up, in float32.

    A table of 128,256 x 4,096 takes 2 GB in float32, and calibration looks up a few thousand rows of it.

    Args:
        embedding: any subclass of nn.Embedding that looks up its first argument.
        table: its weight [num_embeddings, embedding_dim] in any dtype, which may be mapped from a file.
        device: the device the rows are on.
    """

    def select(rows: Tensor) -> nn.Parameter:
        return nn.Parameter(table[rows.to(table.device)].to(device, torch.float32), requires_grad=False)

    def look_up(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        used, places = args[0].unique(return_inverse=True)
        module.weight = select(used)
        return places, *args[1:]

    embedding.padding_idx = None  # matters to gradients alone, and has to be a row of the weight
    embedding.weight = select(torch.zeros(0, dtype=torch.long))  # models ask for its device and dtype
    handle = embedding.register_forward_pre_hook(look_up)
    try:
        yield
    finally:
        handle.remove()


def _append(recorded: list[dict[str, Any]], arguments: dict[str, Any], sample: int) -> None:
    """Keep one set of arguments as long as all samples agree, and one for each sample from then on."""
    if not recorded:
        recorded.append(arguments)
    elif len(recorded) > 1 or not same_arguments(recorded[0], arguments):
        recorded.extend([recorded[0]] * (sample - len(recorded)))
        recorded.append(arguments)


@torch.no_grad()
def fill(module: nn.Module, owner: PreTrainedModel, tensors: dict[str, Tensor], device: torch.device) -> None:
    """Give a module of the meta device its tensors in float32; the model computes buffers that no checkpoint holds.

    Args:
        module: all of whose parameters and stored buffers are in `tensors`, but for those of modules left on meta.
        owner: the model that the module belongs to; computes buffers as when transformers loads it.
        tensors: by name within the module.
        device: on which to put them.

    Raises:
        UnsupportedModelError: a buffer that the model does not compute.
    """
    values = {k: t.to(device, torch.float32 if t.is_floating_point() else t.dtype) for k, t in tensors.items()}
    module.load_state_dict(values, strict=False, assign=True)
    module.requires_grad_(False)

    def refuse(name: str, buffer: Tensor) -> Tensor:
        raise UnsupportedModelError(
            f"transformers does not compute the buffer {name} of {type(owner).__name__}, which no checkpoint holds."
        )

    compute_buffers(module, owner, device, refuse)


@torch.no_grad()
def compute_buffers(
    module: nn.Module, owner: PreTrainedModel, device: torch.device, unknown: Callable[[str, Tensor], Tensor]
) -> None:
    """Give a module the buffers that its model computes, where they are on the meta device and parameters are not.

    Args:
        module: with parameters.
        owner: the model that the module belongs to; computes buffers as when transformers loads it.
        device: on which to put them.
        unknown: makes a buffer that the model does not compute, from its name and its form on the meta device.
    """
    for parameter in (*module.parameters(), *module.buffers()):
        # transformers initializes what does not carry this mark.
        parameter._is_hf_initialized = not parameter.is_meta
    for name, part in module.named_modules():
        empty = {key: buffer for key, buffer in part.named_buffers(recurse=False) if buffer.is_meta}
        for key, buffer in part.named_buffers(recurse=False):
            if not buffer.is_meta:
                part._buffers[key] = buffer.to(device)
        if not empty or any(parameter.is_meta for parameter in part.parameters(recurse=False)):
            continue
        for key, buffer in empty.items():
            part._buffers[key] = _unset(buffer, device)
        _owner_of(part, owner)._init_weights(part)
        for key, form in empty.items():
            if not _is_set(getattr(part, key)):
                part._buffers[key] = unknown(f"{name}.{key}", form)


@torch.no_grad()
def compute_outer_buffers(model: PreTrainedModel) -> None:
    """Give modules of a model on the meta device the buffers that the models around them compute, all at once."""
    forms = [
        (part, key, buffer)
        for part in model.modules()
        for key, buffer in part.named_buffers(recurse=False)
        if buffer.is_meta and key in part._non_persistent_buffers_set
    ]
    for part, key, form in forms:
        part._buffers[key] = _unset(form, torch.device("cpu"))
    for owner in [module for module in model.modules() if isinstance(module, PreTrainedModel)]:
        owner._init_weights(owner)
    for part, key, form in forms:
        if not _is_set(getattr(part, key)):
            part._buffers[key] = form


def _unset(form: Tensor, device: torch.device) -> Tensor:
    """A buffer of a form that shows whether it was computed."""
    unset = float("nan") if form.is_floating_point() else _UNSET if form.dtype.itemsize > 2 else 0
    return torch.full_like(form, unset, device=device)


def _is_set(buffer: Tensor) -> bool:
    return not ((buffer != buffer).any() or (buffer.dtype.itemsize > 2 and (buffer == _UNSET).any()))


def _owner_of(part: nn.Module, owner: PreTrainedModel) -> PreTrainedModel:
    """The innermost model that a module belongs to: each part of a composite model computes its own buffers."""
    inner = [m for m in owner.modules() if isinstance(m, PreTrainedModel) and any(part is c for c in m.modules())]
    return min(inner, key=lambda model: sum(1 for _ in model.modules())) if inner else owner


class HiddenStates:
    """One layer's input: float32 [samples, length, hidden], read and written a few sequences at a time.

    Of the samples from `first` on, where several processes share them; `read` counts from there.

    Plain reads of its file rather than a mapping: the process's memory stays bounded by what it holds at the moment.

    Attributes:
        held: all of it, where it is in memory, too.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int], first: int = 0, held: Tensor | None = None) -> None:
        self.path, self.shape, self.first, self.held = path, shape, first, held

    def exists(self) -> bool:
        """Whether it is in memory, or its file is there and complete."""
        if self.held is not None:
            return True
        return self.path.exists() and self.path.stat().st_size == 4 * math.prod(self.shape)

    def read(self, start: int, stop: int) -> Tensor:
        """Sequences start to stop, float32 [stop - start, length, hidden]."""
        if self.held is not None:
            return self.held[start:stop].clone()
        _, length, width = self.shape
        count = (stop - start) * length * width
        values = np.fromfile(self.path, dtype="<f4", count=count, offset=start * length * width * 4)
        return torch.from_numpy(values).view(stop - start, length, width)

    @contextmanager
    def writing(self, hold: torch.device | None = None, file: bool = True) -> Iterator[HiddenWriter]:
        """Append sequences in order; only `HiddenWriter.commit` lets the file appear.

        Args:
            hold: device on which `HiddenWriter.held` also keeps them; None keeps them in the file alone.
            file: whether to write the file.
        """
        writer = HiddenWriter(self, hold, file)
        try:
            yield writer
        finally:
            writer.close()


@dataclass(frozen=True)
class HiddenPart:
    """Some sequences of hidden states that follow one another: those of one of several models, or a part of them.

    Attributes:
        states: the hidden states of all samples.
        start, stop: the sequences.
        first: sample of the first one.
    """

    states: HiddenStates | HiddenPart
    start: int
    stop: int
    first: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Samples, tokens of a sample, and channels."""
        return self.stop - self.start, *self.states.shape[1:]

    def read(self, start: int, stop: int) -> Tensor:
        """See `HiddenStates.read`."""
        return self.states.read(self.start + start, self.start + stop)


class HiddenWriter:
    """See `HiddenStates.writing`."""

    def __init__(self, states: HiddenStates, hold: torch.device | None, file: bool) -> None:
        self._path, self._file, self._count = states.path, None, 0
        self.held = None if hold is None else torch.empty(states.shape, device=hold)
        if file:
            with disk_errors(self._path):
                self._file = disk.Replacement(self._path, 4 * math.prod(states.shape), hashed=False)

    @property
    def has_file(self) -> bool:
        """Whether a file is written."""
        return self._file is not None

    def append(self, sequences: Tensor) -> None:
        """Write float32 [n, length, hidden]."""
        if self.held is not None:
            self.held[self._count : self._count + len(sequences)] = sequences
            self._count += len(sequences)
        if self._file is not None:
            with disk_errors(self._path):
                self._file.write(sequences.detach().cpu().contiguous().numpy().astype("<f4", copy=False).data)

    def commit(self) -> None:
        """Let the file appear, complete."""
        if self._file is not None:
            with disk_errors(self._path):
                self._file.commit()

    def close(self) -> None:
        """Discard what was not committed."""
        if self._file is not None:
            self._file.discard()
