"""llm-compressor's checkpoints: compressed-tensors of the format "pack-quantized", 4 or 8 bits in groups.

A Linear is stored, with n = 32 / bits codes in a word of which the first is lowest, as

    weight_packed int32 [out, in / n]   weight_scale [out, in / g]   weight_shape int64 [2]
    weight_zero_point int32 [out / n, in / g], packed along outputs; absent where all are the middle of the range

The same integers and scales are packed anew; z is 2^(bits - 1) where there are no zero points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvconvert.errors import CheckpointError
from kvconvert.io.records import TensorInfo
from kvconvert.kernels.linear.awq_format import AwqWeight, pack_bits
from kvconvert.kernels.packing import unpack_words
from kvconvert.models.formats.format import Encoded, SourceFormat, expect, half_scales, packed_linear, require, some

SCALES = ("F16", "BF16", "F32")
WIDTHS = (4, 8)
# Scales of a key-value cache of another kind.
_CACHE = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point")


class CompressedTensors(SourceFormat):
    """pack-quantized weights in groups of one size, of one or two widths.

    Args:
        bits: all widths that the configuration names.
        group_size: inputs that share one scale.
        symmetric: whether there are no zero points.
    """

    method = "compressed-tensors"

    def __init__(self, bits: tuple[int, ...], group_size: int, symmetric: bool) -> None:
        self.bits, self.group_size, self.symmetric = bits, group_size, symmetric

    @classmethod
    def of(cls, directory: Path, quantization: Mapping[str, Any]) -> CompressedTensors:
        """From `config_groups`."""
        groups = list((quantization.get("config_groups") or {}).values())
        fault = _fault(quantization, groups)
        if fault is not None:
            raise CheckpointError(
                f"{directory} holds compressed-tensors weights with {fault}; pack-quantized integers of 4 or 8 bits in "
                "groups of one size are read, so convert the model that they were made from."
            )
        weights = [group["weights"] for group in groups]
        bits = tuple(sorted({entry["num_bits"] for entry in weights}))
        return cls(bits, weights[0]["group_size"], weights[0].get("symmetric", True))

    def describe(self) -> str:
        """For the manifest."""
        widths = " and ".join(map(str, self.bits))
        return f"compressed-tensors (pack-quantized), {widths} bits in groups of {self.group_size}; kept as they are"

    def encoded(self, stored: Mapping[str, TensorInfo], dtype: torch.dtype, directory: Path) -> dict[str, Encoded]:
        """Every Linear that has a `weight_packed`."""
        found = {}
        for name in [name for name in stored if name.endswith(".weight_packed")]:
            module = name.removesuffix(".weight_packed")
            if f"{module}.weight_g_idx" in stored:
                raise CheckpointError(
                    f"{directory} holds {module} with act-order (weight_g_idx): the inputs of a group lie apart, which "
                    "a bundle cannot hold; convert the model that it was made from."
                )
            parts = [name, f"{module}.weight_scale", f"{module}.weight_shape"]
            codes, scales, shape = (require(directory, stored, part, name) for part in parts)
            outputs, inputs = scales.shape[0], scales.shape[-1] * self.group_size
            bits = 32 * codes.shape[-1] // inputs
            if bits not in self.bits:
                widths = " or ".join(map(str, self.bits))
                raise CheckpointError(
                    f"{directory} holds {name} of shape {codes.shape} beside scales of shape {scales.shape}, "
                    f"which is not {widths} bits in groups of {self.group_size}; fetch the model again."
                )
            expect(directory, name, codes, ("I32",), [outputs, inputs * bits // 32])
            expect(directory, parts[1], scales, SCALES, [outputs, inputs // self.group_size])
            expect(directory, parts[2], shape, ("I64", "I32"), [2])
            if not self.symmetric:
                parts.append(f"{module}.weight_zero_point")
                zeros = require(directory, stored, parts[3], name)
                expect(directory, parts[3], zeros, ("I32",), [outputs * bits // 32, inputs // self.group_size])
            found[f"{module}.weight"] = packed_linear(
                directory,
                module,
                (outputs, inputs),
                "source",
                bits,
                self.group_size,
                tuple(parts),
                _packer(directory, bits, parts[1]),
            )
        return some(directory, found)

    def unused(self, stored: Mapping[str, TensorInfo]) -> set[str]:
        """Scales of a key-value cache of 8 bits, which the KV plan replaces."""
        return {name for name in stored if name.endswith(_CACHE)}


def _packer(directory: Path, bits: int, name: str) -> Callable[[list[Tensor]], AwqWeight]:
    def pack(tensors: list[Tensor]) -> AwqWeight:
        words, scales, _, *packed_zeros = tensors
        middle = torch.full((scales.shape[1], scales.shape[0]), 2 ** (bits - 1), dtype=torch.uint8)
        zeros = unpack_words(packed_zeros[0].T, bits) if packed_zeros else middle
        return AwqWeight(
            pack_bits(unpack_words(words, bits).T, bits),
            pack_bits(zeros, bits),
            half_scales(directory, name, scales.T.contiguous()),
        )

    return pack


def _fault(quantization: Mapping[str, Any], groups: list[dict[str, Any]]) -> str | None:
    """The setting of a configuration that cannot be read, or None."""
    form = quantization.get("format")
    if form != "pack-quantized":
        return f"format {form}"
    if not groups or not all(isinstance(group.get("weights"), dict) for group in groups):
        return "no weights in their config_groups"
    if quantization.get("transform_config"):
        return "rotations at run time (transform_config)"
    sparsity = (quantization.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        return f"sparsity ({sparsity})"
    for group in groups:
        weights = group["weights"]
        if group.get("input_activations") or group.get("output_activations"):
            return "quantized activations"
        if weights.get("type", "int") != "int" or weights.get("num_bits") not in WIDTHS:
            return f"{weights.get('type')} numbers of {weights.get('num_bits')} bits"
        size = weights.get("group_size")
        if weights.get("strategy") != "group" or type(size) is not int or size < 1:
            return f"strategy {weights.get('strategy')} of group_size {size}"
        for key in ("group_size", "symmetric"):
            if weights.get(key) != groups[0]["weights"].get(key):
                return f"groups that differ in {key}"
    return None
