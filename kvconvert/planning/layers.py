"""Sizes of a model's decoder layers and of what calibration makes of them, exactly, from headers and configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.io.records import TensorInfo
from kvconvert.io.tensorheader import nbytes
from kvconvert.methods.awq import WeightsRecipe
from kvconvert.models.experts import expert_modules
from kvconvert.models.structure import LayerStructure


@dataclass(frozen=True)
class LayerSizes:
    """One decoder layer.

    Attributes:
        structure: names of its parts.
        parameters: numbers in it.
        linears: (outputs, inputs) of each Linear, by its name within the layer.
        stored_bytes: of the tensors that calibration makes of it.
        mapped_parameters, mapped_stored_bytes: what of them is experts' and kept in files, see
            `LayerRunner.maps_experts`.
    """

    structure: LayerStructure
    parameters: int
    linears: Mapping[str, tuple[int, int]]
    stored_bytes: int
    mapped_parameters: int = 0
    mapped_stored_bytes: int = 0

    @property
    def layer_bytes(self) -> int:
        """Of its weights in float32, as they are calibrated; those in files left out."""
        return 4 * (self.parameters - self.mapped_parameters)

    @classmethod
    def of(cls, runner: LayerRunner, index: int, weights: WeightsRecipe) -> LayerSizes:
        """Of a layer of a model on the meta device."""
        structure = runner.structure(index)
        name = runner.layer_name(index)
        layer = runner.model.get_submodule(name)
        linears = {
            linear: tuple(layer.get_submodule(linear).weight.shape)
            for linear in structure.linears
            if isinstance(layer.get_submodule(linear), nn.Module)
        }
        copied = () if weights.quantizes else expert_modules(layer)
        stored = mapped_stored = 0
        mapped = expert_modules(layer) if runner.maps_experts(index) else ()
        for key, tensor in layer.state_dict().items():
            module, _, part = key.rpartition(".")
            if key.startswith(copied):
                continue
            if weights.quantizes and part == "weight" and module in linears:
                bits = weights.bits_of(f"{name}.{module}", index)
                size = packed_bytes(*linears[module], bits, weights.group_size)
                mapped_stored += size if key.startswith(mapped) else 0
            else:
                size = tensor.numel() * _itemsize(runner, f"{name}.{key}")
            stored += size
        numbers = {key: parameter.numel() for key, parameter in layer.named_parameters()}
        in_files = sum(number for key, number in numbers.items() if key.startswith(mapped))
        return cls(structure, sum(numbers.values()), linears, stored, in_files, mapped_stored)


def packed_bytes(outputs: int, inputs: int, bits: int, group_size: int) -> int:
    """Bytes of a Linear's codes, zeros and float16 scales; see `kvconvert.kernels.linear.awq_format`."""
    groups = inputs // group_size
    return (inputs + groups) * outputs * bits // 8 + 2 * groups * outputs


def kept_bytes(runner: LayerRunner, kept: list[str]) -> int:
    """Bytes of tensors that a bundle takes over from the source as they are."""
    return sum(nbytes(runner.source.tensors[name]) for name in kept)


def _itemsize(runner: LayerRunner, name: str) -> int:
    """Bytes per number of a tensor in the source."""
    source = runner.source
    stored = source.tensor_names.stored.get(name)
    info = source.tensors[stored] if stored is not None else next(iter(source.tensors.values()))
    return nbytes(TensorInfo(dtype=info.dtype, shape=[1]))
