"""Decoder layers of a checkpoint, one at a time: the model is built without weights, one layer filled, run, dropped.

`RunnerInputs` keeps what a layer's modules read in the source model, beside what they read in the model quantized so
far.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from kvconvert.calibration.attention_sample import RECORDING_ATTENTION
from kvconvert.convert.discovery import Architecture, discover
from kvconvert.convert.input_capture import (
    CalibrationInputs,
    HiddenPart,
    HiddenStates,
    InputCapture,
    compute_outer_buffers,
    fill,
    rows_as_looked_up,
)
from kvconvert.errors import CheckpointError, KvconvertError, NumericError, UnsupportedModelError, first_line
from kvconvert.io.tensorfile import Mapped
from kvconvert.kernels.device import tf32_products
from kvconvert.kernels.linear.awq_format import AwqWeight
from kvconvert.kernels.quantizer import all_finite
from kvconvert.models.configuration import bounded_modules, model_class, without_weights
from kvconvert.models.experts import expert_modules, split_fused
from kvconvert.models.formats import Packing
from kvconvert.models.source import SourceModel, wrong_count
from kvconvert.models.structure import LayerStructure

BATCH_TOKENS = 4096  # calibration tokens that run through a layer at once, at most
BATCH_BYTES = 400_000_000  # of their activations where these are in host memory
EXPERT_BYTES = 2_000_000_000  # of a layer's experts in float32 beyond which they are mapped from files


class PackedLinear(NamedTuple):
    """A Linear that the source has quantized: how, and its tensors in the layout of bundles."""

    packing: Packing
    weight: AwqWeight


class LayerRunner:
    """Builds a model without weights and materializes its decoder layers one by one.

    Args:
        source: the checkpoint.
        device: on which layers compute.
        discovers: find the structure of the layers, without which only the cache can be described, uncalibrated.

    Attributes:
        model: the model on the meta device; with its structure found, with separate experts.
        source: its checkpoint, with tensors named as in the model.
        architecture: what was found; None where nothing was sought.

    Raises:
        UnsupportedModelError: transformers builds no such model, or its layers cannot be run one by one.
    """

    def __init__(self, source: SourceModel, device: torch.device, discovers: bool = True) -> None:
        self.device = device
        self.model = build_without_weights(source.config, source.directory / "config.json", len(source.tensors))
        self.source = source.named_as(self.model)
        self.architecture: Architecture | None = None
        self._capture: InputCapture | None = None
        if discovers:
            with self._saying_what_is_left():
                self.architecture = discover(self.model)
                self._check_arrangement()

    @contextmanager
    def _saying_what_is_left(self) -> Iterator[None]:
        """Let a refusal of a model's weights say whether its cache can be converted alone."""
        try:
            yield
        except UnsupportedModelError as error:
            left = without_weights(self.source.config)
            raise UnsupportedModelError(f"{str(error).removesuffix('.')}; {left}.") from error

    def _check_arrangement(self) -> None:
        """Read layers' tensors as the model has them; refuse what cannot be. Experts are taken apart as needed."""
        inside = f"{self.architecture.layers}."
        left = [entry for entry in self.source.tensor_names.rearranged if not entry.is_complete]
        rearranged = min((n for entry in left for n in entry.before if n.startswith(inside)), default=None)
        if rearranged is not None:
            raise UnsupportedModelError(
                f"transformers rearranges {rearranged} as it loads {self.architecture.model_type} models, which "
                "reading them layer by layer does not."
            )
        self.source = self.source.arranged(self.model, inside)

    def check_headers(self) -> None:
        """Refuse (CheckpointError) a checkpoint whose headers do not fit the model; no weights are read."""
        check_headers(self.source, self.model, None if self.architecture is None else self.architecture.layers)

    def expert_modules(self) -> tuple[str, ...]:
        """Full name prefixes of the routed experts of all layers ("model.layers.3.mlp.experts.")."""
        if self.architecture is None:
            return ()
        structures = [(self.layer_name(index), self.structure(index).experts) for index in range(self.num_layers)]
        return tuple(f"{name}.{experts.module}." for name, experts in structures if experts is not None)

    def structure(self, index: int) -> LayerStructure | None:
        """Names of a decoder layer's parts; None where they were not sought."""
        return None if self.architecture is None else self.architecture.structures[index]

    @property
    def config(self) -> PretrainedConfig:
        """Configuration of the language model."""
        return self.model.config.get_text_config()

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.config.num_hidden_layers

    def layer_name(self, index: int) -> str:
        """Full name of a decoder layer; where structure was not sought, its number."""
        return f"layer {index}" if self.architecture is None else f"{self.architecture.layers}.{index}"

    def maps_experts(self, index: int) -> bool:
        """Whether a layer's experts are too large for host memory."""
        if self.device.type != "cpu":
            return False
        experts = expert_modules(self.model.get_submodule(self.layer_name(index)))
        names = [name for prefix in experts for name in self.source.names(f"{self.layer_name(index)}.{prefix}")]
        return sum(4 * math.prod(self.source.info_of(name).shape) for name in names) > EXPERT_BYTES

    def layer(self, index: int, mapped: Mapped | None = None) -> tuple[nn.Module, dict[str, torch.dtype]]:
        """A decoder layer with the source's weights in float32, and the dtype in which each parameter is stored.

        Args:
            index: the layer's index.
            mapped: where experts are kept that are too large for host memory; None keeps them in memory.

        Raises:
            CheckpointError: tensors missing, left over, or of another shape than the configuration says.
            NumericError: NaN or infinity in a tensor.
        """
        name = self.layer_name(index)
        layer = copy.deepcopy(self.model.get_submodule(name)).eval()
        stored = {key.removeprefix(f"{name}."): key for key in self.source.names(f"{name}.")}
        own = layer.state_dict().keys()
        stored = {key: full for key, full in stored.items() if key in own or not is_derived(self.model, full)}
        mapped = mapped if mapped is not None and self.maps_experts(index) else None
        if mapped is None:
            # Moved first and checked there: a GPU reads them sooner than they are read from memory once.
            tensors = dict(zip(stored, self.source.read_finite(stored.values(), self.device).values(), strict=True))
        else:
            tensors = self._read_mapped(stored, mapped)
        tensors = fitting(layer, name, tensors, self.model)
        dtypes = {key: tensor.dtype for key, tensor in tensors.items()}
        if mapped is not None:
            experts = expert_modules(layer)
            for key in tensors:
                if key.startswith(experts):
                    tensors[key] = mapped.copy(tensors[key], torch.float32)
        with self._saying_what_is_left():
            fill(layer, self._owner(name), tensors, self.device)
        return layer, dtypes

    def _read_mapped(self, stored: dict[str, str], mapped: Mapped) -> dict[str, Tensor]:
        """A layer's tensors; those that are decoded one at a time, each to a file."""
        decoded = [key for key, full in stored.items() if self.source.is_encoded(full)]
        plain = [key for key in stored if key not in set(decoded)]
        tensors = dict(zip(plain, self.source.read_finite([stored[key] for key in plain]).values(), strict=True))
        for key in decoded:
            tensors[key] = mapped.copy(self.source.read_finite([stored[key]])[stored[key]])
        return {key: tensors[key] for key in stored}

    def packed(self, index: int) -> dict[str, PackedLinear]:
        """A decoder layer's Linears that the source has quantized, by name within the layer."""
        prefix = f"{self.layer_name(index)}."
        return {
            name.removeprefix(prefix).removesuffix(".weight"): PackedLinear(packing, self.source.read_packed(name))
            for name, packing in self.source.packings(prefix).items()
        }

    def has_packed(self, index: int) -> bool:
        """Whether there are any."""
        return self.architecture is not None and bool(self.source.packings(f"{self.layer_name(index)}."))

    def _owner(self, name: str) -> PreTrainedModel:
        """The innermost model around a module."""
        while name:
            name = name.rpartition(".")[0]
            module = self.model.get_submodule(name)
            if isinstance(module, PreTrainedModel):
                break
        return module

    def begin(self, inputs: CalibrationInputs) -> None:
        """Set the calibration inputs; before `first_input` and `forward`."""
        self._capture = InputCapture(inputs, self.architecture.layers)

    def first_input(self) -> Iterator[Tensor]:
        """Input of the first layer, sample by sample: float32 [1, length, hidden]."""
        name = self.architecture.base
        base = copy.deepcopy(self.model.get_submodule(name))
        layers = self.architecture.layers.removeprefix(f"{name}.")
        outside = [key for key in base.state_dict() if not key.startswith(f"{layers}.")]
        merged = self.source.tensor_names.merged - self.source.tensor_names.stored.keys()
        absent = [key for key in outside if f"{name}.{key}" in merged]
        if absent and self._capture.inputs.extras:
            raise UnsupportedModelError(
                f"transformers rearranges {name}.{absent[0]} as it loads {self.architecture.model_type} models, which "
                "are therefore calibrated with text alone; give `data` without images."
            )
        outside = [key for key in outside if key not in absent]
        paths = {module: f"{path}.weight" for path, module in base.named_modules()}
        embedding = base.get_input_embeddings()
        with ExitStack() as stack:
            if isinstance(embedding, nn.Embedding) and paths[embedding] in outside:
                table = f"{name}.{paths[embedding]}"
                outside.remove(paths[embedding])
                rows = self.source.read([table])[table]  # a NaN among the rows shows in the layer's input
                stack.enter_context(rows_as_looked_up(embedding, rows, self.device))
            tensors = self.source.read_finite([f"{name}.{key}" for key in outside])
            with self._saying_what_is_left():
                fill(base, base, dict(zip(outside, tensors.values(), strict=True)), self.device)
                yield from self._capture.run(base, base.get_submodule(layers), self.device)

    def batch_size(self, length: int) -> int:
        """Samples that run through a layer together, where all have the same arguments."""
        tokens = BATCH_TOKENS
        if self.device.type == "cpu":
            sizes = (getattr(self.config, name, None) for name in ("hidden_size", "intermediate_size"))
            hidden, intermediate = (size if isinstance(size, int) else 0 for size in sizes)
            tokens = min(tokens, BATCH_BYTES // (4 * (4 * hidden + 3 * intermediate)))
        return max(1, tokens // length)

    def has_room(self, shape: tuple[int, int, int]) -> bool:
        """Whether a GPU can hold the inputs of two layers, float32 of this shape, besides what a search takes.

        Half of its memory has to be enough for them and four times the weights of a layer in float32.
        """
        if self.device.type != "cuda" or self.architecture is None:
            return False
        layers = (self.model.get_submodule(self.layer_name(index)) for index in range(self.num_layers))
        weights = max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers)
        total = torch.cuda.get_device_properties(self.device).total_memory
        return 4 * (2 * math.prod(shape) + 4 * weights) <= total // 2

    def forward(
        self, layer: nn.Module, inputs: HiddenStates | HiddenPart, index: int
    ) -> Iterator[tuple[Tensor, dict[str, Any], Tensor]]:
        """Run a layer over its inputs, batch by batch.

        Yields:
            the input, the layer's other arguments, and the next layer's input: the output and what the model adds.

        Raises:
            NumericError: an output is not finite.
        """
        for start, batch, arguments in self._batches(inputs, index):
            with tf32_products(self.device):
                output = layer(batch, **arguments)
            output = output[0] if isinstance(output, tuple) else output
            if not all_finite(output):
                place = f"{self.layer_name(index)}.{_first_overflow(layer, batch, arguments)}".rstrip(".")
                raise NumericError(
                    f"{place} computes NaN or infinity on the calibration data; check that the source model generates "
                    "sensible text."
                )
            yield batch, arguments, self._capture.add(index + 1, inputs.first + start, output)

    def inputs_of(
        self, layer: nn.Module, names: Sequence[str], inputs: HiddenStates | HiddenPart, index: int
    ) -> Iterator[dict[str, Tensor]]:
        """Yield inputs of a layer's modules, batch by batch; the layer runs as far as the last of them.

        Args:
            layer: decoder layer.
            names: names of modules that get one tensor, in the order in which they run.
            inputs, index: input states and index of the layer.
        """
        found: dict[str, Tensor] = {}
        with ExitStack() as hooks:
            for name in names:

                def record(module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                    found[name] = args[0]
                    if name == names[-1]:
                        raise _Reached

                hooks.callback(layer.get_submodule(name).register_forward_pre_hook(record).remove)
            for _, batch, arguments in self._batches(inputs, index):
                with suppress(_Reached), tf32_products(self.device):
                    layer(batch, **arguments)
                yield dict(found)

    def _batches(self, inputs: HiddenStates | HiddenPart, index: int) -> Iterator[tuple[int, Tensor, dict[str, Any]]]:
        """The first sample of each batch, of this process's (which begins with inputs.first); it; its arguments."""
        if not self._capture.complete:
            for _ in self.first_input():
                pass
        samples, length, _ = inputs.shape
        size = self.batch_size(length) if self._capture.shared(index) else 1
        text, start = self._capture.inputs.text - inputs.first, 0
        while start < samples:
            # Random tokens in batches of their own: runs over all samples then have the batches of runs over a part.
            stop = min(start + size, samples if start >= text else min(text, samples))
            batch = inputs.read(start, stop).to(self.device)
            yield start, batch, self._capture.arguments(index, inputs.first + start)
            start = stop


class _Reached(Exception):
    """Ends a forward pass at the last module of interest."""


def _first_overflow(layer: nn.Module, batch: Tensor, arguments: dict[str, Any]) -> str:
    """The first module of a layer whose output is not finite."""
    found: list[str] = []
    with ExitStack() as hooks:
        for name, module in layer.named_modules():

            def check(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                tensor = output[0] if isinstance(output, tuple) else output
                if not tensor.isfinite().all():
                    found.append(name)

            hooks.callback(module.register_forward_hook(check).remove)
        layer(batch, **arguments)
    return found[0]


def build_without_weights(
    config: PretrainedConfig, origin: Path | str = "its configuration", tensors: int | None = None
) -> PreTrainedModel:
    """The model of a configuration on the meta device, which records what its attention computes on.

    Args:
        config: left as it is.
        origin: where it is from, for messages.
        tensors: the number of the model's tensors, which bounds its number of modules; None for no bound.

    Raises:
        CheckpointError: it has far more modules than tensors.
        UnsupportedModelError: transformers builds none.
    """
    try:
        with torch.device("meta"), nullcontext() if tensors is None else bounded_modules(tensors, wrong_count):
            model = model_class(config).from_config(
                copy.deepcopy(config),
                dtype=torch.float32,
                attn_implementation=RECORDING_ATTENTION,
                trust_remote_code=False,
            )
    except KvconvertError:
        raise
    except Exception as error:  # models are built by code of many authors
        reason = first_line(error).rstrip(".")
        if "adding_idx" in reason:  # as torch says it, without the field's name
            text = config.get_text_config()
            reason = f"its pad_token_id, {text.pad_token_id}, is not among its {text.vocab_size:,} tokens"
        if RECORDING_ATTENTION in reason:
            raise UnsupportedModelError(
                f"{config.model_type} models compute attention in code of their own, which does not go through "
                "transformers' attention interface, so that kvconvert can neither calibrate nor serve their cache."
            ) from error
        raise UnsupportedModelError(
            f"transformers builds no causal language model from {origin} ({reason})."
        ) from error
    compute_outer_buffers(model)
    return model


def check_headers(source: SourceModel, model: PreTrainedModel, layers: str | None) -> None:
    """Refuse a checkpoint that does not hold the model's tensors in the model's shapes.

    Args:
        source: the checkpoint, named as in `model`.
        model: built from its configuration on the meta device; with `layers`, with separate experts.
        layers: name of the module that holds the decoder layers to be converted ("model.layers"), or None where none
            are: then only what transformers itself would miss is refused.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is an adapter's, or there are more decoder layers
            than `num_hidden_layers` says.
    """
    stored = source.tensor_names.stored
    if (adapted := next((name for name in source.tensors if ".lora_A." in name), None)) is not None:
        raise CheckpointError(
            f"The checkpoint holds {adapted} of an unmerged LoRA adapter; merge it (PEFT's merge_and_unload), save the "
            "model, and convert that."
        )
    shapes = {name: tuple(source.tensors[full].shape) for name, full in stored.items()}
    count = model.config.get_text_config().num_hidden_layers
    containers = [layers] if layers else [name for name, module in model.named_modules() if _holds(module, count)]
    for container in containers:
        _check_count(model, container, count, shapes)
    for index in range(count) if layers else ():
        prefix = f"{layers}.{index}."
        inside = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
        tensors = {name: torch.empty(shape, device="meta") for name, shape in inside.items()}
        fitting(model.get_submodule(prefix[:-1]), prefix[:-1], tensors, model)
    merged = source.tensor_names.merged
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    required = {name for name, _ in model.named_parameters()} - {*_tied(model)} - merged
    for name, shape in expected.items():
        if (layers and name.startswith(f"{layers}.")) or name in merged:
            continue
        if name not in shapes:
            if name in required and not _matches(name, model._keys_to_ignore_on_load_missing):
                raise _missing(name)
        elif shapes[name] != shape:
            raise _misshapen(name, shapes[name], shape)


def fitting(layer: nn.Module, name: str, tensors: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """A decoder layer's tensors by the names of its state dict, without those that models compute themselves.

    Args:
        layer: with separate experts.
        name: the name of the layer in `model`.
        tensors: the checkpoint's, by name within the layer; on the meta device where only shapes are of interest.
        model: that the layer belongs to.

    Raises:
        CheckpointError: one is missing, left over, or of another shape.
    """
    expected = {key: tuple(value.shape) for key, value in layer.state_dict().items()}
    kept = {key: value for key, value in tensors.items() if key in expected or not is_derived(model, f"{name}.{key}")}
    kept = split_fused(layer, kept, name)
    for key in sorted({*expected, *kept}):
        if key not in kept:
            raise _missing(f"{name}.{key}")
        if key not in expected:
            kind = model.config.get_text_config().model_type
            raise CheckpointError(f"The checkpoint holds {name}.{key}, which a {kind} model does not have.")
        if tuple(kept[key].shape) != expected[key]:
            raise _misshapen(f"{name}.{key}", tuple(kept[key].shape), expected[key])
    return kept


def is_derived(model: PreTrainedModel, name: str) -> bool:
    """Buffers that old checkpoints store although models compute them, and what a model says that it ignores."""
    return name.endswith(".rotary_emb.inv_freq") or _matches(name, model._keys_to_ignore_on_load_unexpected)


def _check_count(model: PreTrainedModel, container: str, count: int, names: Iterable[str]) -> None:
    """Layers for predicting several tokens may follow those of the model: its code or its configuration says so."""
    predicted = getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0
    for name in names:
        rest = name.removeprefix(f"{container}.")
        number = rest.partition(".")[0]
        if rest == name or not number.isdecimal() or int(number) < count + predicted:
            continue
        if not is_derived(model, name):
            raise CheckpointError(
                f"The checkpoint holds {name}, but config.json says num_hidden_layers = {count}, so that layers from "
                f"{count} on would be dropped; repair config.json."
            )


def _holds(module: nn.Module, count: int) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == count


def _tied(model: PreTrainedModel) -> dict[str, str]:
    return getattr(model, "all_tied_weights_keys", None) or {}


def _matches(name: str, patterns: Iterable[str] | None) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _missing(name: str) -> CheckpointError:
    return CheckpointError(f"The checkpoint lacks {name}; it does not fit its config.json.")


def _misshapen(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(f"{name} has shape {list(found)} where config.json expects {list(expected)}.")


T = TypeVar("T")


@dataclass
class RunnerInputs:
    """`kvconvert.calibration.protocol.PairedInputs` of a runner's layer.

    What a writer to the residual stream reads of the quantized model's data is kept, too, and then what it computes of
    it: later runs begin there, without the attention or the MLP before it.

    Attributes:
        runner: the runner of the model.
        index, structure: index and structure of the layer.
        quantized: its input in the model quantized so far.
        keep: puts a tensor where there is room for all tokens' inputs.
    """

    runner: LayerRunner
    index: int
    structure: LayerStructure
    quantized: HiddenStates | HiddenPart
    keep: Callable[[Tensor], Tensor]
    _kept: dict[str, list[Tensor]] = field(default_factory=dict)
    _read: dict[str, list[Tensor]] = field(default_factory=dict)  # by writers
    _written: dict[str, list[Tensor]] = field(default_factory=dict)
    _ends: dict[str, Callable[[Tensor], Any]] = field(default_factory=dict)
    _number: int = 0  # of the batch that runs

    @contextmanager
    def recording(self, layer: nn.Module, names: Sequence[str]) -> Iterator[None]:
        """Keep what these modules read, and under "" what the layer gives."""
        with ExitStack() as hooks:
            for name in filter(None, names):

                def record(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                    self._kept.setdefault(name, []).append(self.keep(args[0].detach()))

                hooks.callback(layer.get_submodule(name).register_forward_pre_hook(record).remove)

            def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                output = output[0] if isinstance(output, tuple) else output
                self._kept.setdefault("", []).append(self.keep(output.detach()))

            hooks.callback(layer.register_forward_hook(end).remove)
            for writer in self.structure.writers:
                hooks.enter_context(self._finding_end(layer, writer))
            yield

    @contextmanager
    def _finding_end(self, layer: nn.Module, writer: str) -> Iterator[None]:
        """Find out whether what a writer computes is what the module around it gives."""
        written: list[Tensor] = []

        def write(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            written[:] = [output]

        def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if output is written[0]:
                self._ends[writer] = lambda tensor: tensor
            elif isinstance(output, tuple) and output[0] is written[0] and not any(x is not None for x in output[1:]):
                self._ends[writer] = lambda tensor, others=output[1:]: (tensor, *others)
            else:
                self._ends.pop(writer, None)
            written.clear()

        hooks = (
            layer.get_submodule(writer).register_forward_hook(write),
            layer.get_submodule(writer.rpartition(".")[0]).register_forward_hook(end),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def of(self, layer: nn.Module, kept: str, names: Sequence[str]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield what was kept under a name and what modules read now, batch by batch."""
        last = names[-1]
        with self._resuming(layer):
            for found in self._counted(self.runner.inputs_of(layer, names, self.quantized, self.index)):
                if last in self._ends:
                    self._read.setdefault(last, []).append(self.keep(found[last]))
                yield self._kept[kept][self._number].to(found[last].device), found

    def outputs(self, layer: nn.Module) -> Iterator[Tensor]:
        """The input of the next layer in the quantized model, batch by batch; the layer is as `of` left it."""
        with self._resuming(layer):
            for *_, output in self._counted(self.runner.forward(layer, self.quantized, self.index)):
                yield output

    def release(self) -> None:
        """Give up what was kept of the source model."""
        self._kept.clear()

    def _counted(self, batches: Iterable[T]) -> Iterator[T]:
        self._number = 0
        for batch in batches:
            yield batch
            self._number += 1

    @contextmanager
    def _resuming(self, layer: nn.Module) -> Iterator[None]:
        """Let modules around writers whose inputs are known compute the writer alone."""
        replaced = []
        for name, batches in self._read.items():
            writer, module = layer.get_submodule(name), layer.get_submodule(name.rpartition(".")[0])
            written = self._written.setdefault(name, [])
            module.forward = partial(self._resume, writer, batches, written, self._ends[name])
            replaced.append(module)
        try:
            yield
        finally:
            for module in replaced:
                del module.forward

    def _resume(
        self,
        writer: nn.Module,
        read: list[Tensor],
        written: list[Tensor],
        end: Callable[[Tensor], Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the output of the module around a writer for the batch that runs."""
        number, device = self._number, writer.weight.device
        if number == len(written):
            written.append(self.keep(writer(read[number].to(device))))
            read[number] = written[number]  # its memory is no longer needed
        return end(written[number].to(device))
