"""Decoder layers of a checkpoint, one at a time: the model is built without weights, one layer filled, run, dropped."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from kvconvert.adapters import Adapter
from kvconvert.calibration.protocol import RECORDING_ATTENTION, LayerStructure
from kvconvert.errors import CheckpointError, NumericError, UnsupportedModelError
from kvconvert.experts import separate_experts, split_fused
from kvconvert.runtime.experts import ExpertRoles
from kvconvert.runtime.load import model_class
from kvconvert.source import SourceModel
from kvconvert.workdir import HiddenStates

BATCH_TOKENS = 4096  # calibration tokens that run through a layer at once


class LayerRunner:
    """Builds a model without weights and materialises its decoder layers one by one.

    Attributes:
        model: the model on the meta device.
        source: its checkpoint, asked by the model's names.
    """

    def __init__(self, source: SourceModel, adapter: Adapter | None, device: torch.device) -> None:
        self.adapter, self.device = adapter, device
        self.model = _build_without_weights(source)
        self.source = source.named_as(self.model)
        self._arguments: list[dict[str, Any]] | None = None
        if adapter is not None:
            self._separate_experts()
            adapter.check(self.model)

    def _separate_experts(self) -> None:
        """Give every routed expert of the model Linears of its own, by the names in the layers' structures."""
        for index in range(self.num_layers):
            experts = self.structure(index).experts
            if experts is not None:
                roles = ExpertRoles(experts.gate, experts.up, experts.down)
                separate_experts(self.model.get_submodule(self.layer_name(index)), roles)

    def expert_modules(self) -> tuple[str, ...]:
        """Full name prefixes of the routed experts of all layers ("model.layers.3.mlp.experts.")."""
        if self.adapter is None:
            return ()
        structures = [(self.layer_name(index), self.structure(index).experts) for index in range(self.num_layers)]
        return tuple(f"{name}.{experts.module}." for name, experts in structures if experts is not None)

    def structure(self, index: int) -> LayerStructure | None:
        """Names of a decoder layer's parts; None without an adapter."""
        return None if self.adapter is None else self.adapter.structure(self.model.config, index)

    @property
    def config(self) -> PretrainedConfig:
        """Configuration of the language model."""
        return self.model.config.get_text_config()

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.config.num_hidden_layers

    def layer_name(self, index: int) -> str:
        """Full name of a decoder layer."""
        return f"{self.adapter.layers}.{index}"

    def layer(self, index: int) -> tuple[nn.Module, dict[str, torch.dtype]]:
        """A decoder layer with the source's weights in float32, and the dtype in which each parameter is stored.

        Raises:
            CheckpointError: tensors missing, left over, or of another shape than the configuration says.
            NumericError: NaN or infinity in a tensor.
        """
        name = self.layer_name(index)
        layer = copy.deepcopy(self.model.get_submodule(name)).eval()
        expected = {key: tuple(value.shape) for key, value in layer.state_dict().items()}
        stored = {key.removeprefix(f"{name}."): key for key in self.source.names(f"{name}.") if not _is_derived(key)}
        tensors = dict(zip(stored, self.source.read_finite(stored.values()).values(), strict=True))
        tensors = split_fused(layer, tensors, name)
        for key in sorted({*expected, *tensors}):
            if key not in tensors:
                raise CheckpointError(f"The checkpoint lacks {name}.{key}; it does not fit its config.json.")
            if key not in expected:
                raise CheckpointError(
                    f"The checkpoint holds {name}.{key}, which a {self.config.model_type} model does not have."
                )
        for key, tensor in tensors.items():
            if tuple(tensor.shape) != expected[key]:
                raise CheckpointError(
                    f"{name}.{key} has shape {list(tensor.shape)} where config.json asks for {list(expected[key])}."
                )
        dtypes = {key: tensor.dtype for key, tensor in tensors.items()}
        layer.load_state_dict({key: t.to(self.device, torch.float32) for key, t in tensors.items()}, assign=True)
        return layer.requires_grad_(False), dtypes

    def embed(self, ids: Tensor) -> Iterator[Tensor]:
        """Input of the first layer, in batches of sequences: float32 [n, length, hidden]."""
        name = "model.embed_tokens.weight"
        weight = self.source.read_finite([name])[name]
        for start, stop in _batches(*ids.shape):
            yield nn.functional.embedding(ids[start:stop], weight).float().to(self.device)

    def arguments(self, index: int, length: int) -> dict[str, Any]:
        """What the model itself passes to a decoder layer besides hidden states: mask, rotary embeddings, positions.

        Found by running the model's own forward once with recorders in the place of its layers, for one sequence; every
        tensor broadcasts over a batch.
        """
        if self._arguments is None:
            base = copy.deepcopy(self.model.get_submodule(self.adapter.base))
            within = len(self.adapter.base) + 1
            recorders = nn.ModuleList([_ArgumentRecorder() for _ in range(self.num_layers)])
            _set_module(base, self.adapter.layers[within:], recorders)
            _set_module(base, "norm", nn.Identity())
            rotary = base.get_submodule("rotary_emb")
            _set_module(base, "rotary_emb", type(rotary)(config=base.config).to(self.device))
            with torch.no_grad():
                base(inputs_embeds=torch.zeros(1, length, self.config.hidden_size, device=self.device), use_cache=False)
            self._arguments = [recorder.kwargs for recorder in recorders]
        return self._arguments[index]

    def forward(self, layer: nn.Module, inputs: HiddenStates, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Input and output of a layer, batch by batch; NumericError where an output is not finite."""
        samples, length, _ = inputs.shape
        arguments = self.arguments(index, length)
        for start, stop in _batches(samples, length):
            batch = inputs.read(start, stop).to(self.device)
            output = layer(batch, **arguments)
            if not output.isfinite().all():
                place = f"{self.layer_name(index)}.{_first_overflow(layer, batch, arguments)}".rstrip(".")
                raise NumericError(
                    f"{place} computes NaN or infinity on the calibration data; "
                    "check that the source model generates sensible text."
                )
            yield batch, output


class _ArgumentRecorder(nn.Module):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.kwargs = kwargs
        return hidden_states


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


def _build_without_weights(source: SourceModel) -> nn.Module:
    try:
        with torch.device("meta"):
            return model_class(source.config).from_config(
                copy.deepcopy(source.config),
                dtype=torch.float32,
                attn_implementation=RECORDING_ATTENTION,
                trust_remote_code=False,
            )
    except (ValueError, KeyError, AttributeError, ImportError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise UnsupportedModelError(
            f"transformers has no causal language model for {source.directory / 'config.json'} ({reason})."
        ) from error


def _batches(samples: int, length: int) -> Iterator[tuple[int, int]]:
    size = max(1, BATCH_TOKENS // length)
    return ((start, min(start + size, samples)) for start in range(0, samples, size))


def _is_derived(name: str) -> bool:
    """Buffers that old checkpoints store although models compute them."""
    return name.endswith(".rotary_emb.inv_freq")


def _set_module(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, module)
