"""Integers of 4 and 8 bits in groups with scales and zero points, in the layouts of three tools.

AutoAWQ's checkpoints of the layout "gemm" with 4 bits are copied byte for byte, for bundles have that layout.

GPTQ checkpoints of AutoGPTQ and GPTQModel, 4 or 8 bits: the same integers and scales, packed anew. A Linear is stored,
with n = 32 / bits codes in a word of which the first is lowest, as

    qweight int32 [in / n, out]   qzeros int32 [in / g, out / n]   scales [in / g, out]   g_idx int32 [in]

and g_idx names the group of each input. What `checkpoint_format` calls "gptq" holds z - 1 in place of z: whole words of
zeros had 1 subtracted in every field, and get it added again as whole words, so that the borrow of a zero returns.

llm-compressor's checkpoints: compressed-tensors of the format "pack-quantized", 4 or 8 bits in groups. A Linear is
stored, with n = 32 / bits codes in a word of which the first is lowest, as

    weight_packed int32 [out, in / n]   weight_scale [out, in / g]   weight_shape int64 [2]
    weight_zero_point int32 [out / n, in / g], packed along outputs; absent where all are the middle of the range

The same integers and scales are packed anew; z is 2^(bits - 1) where there are no zero points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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


def _is_width(stated: Any) -> bool:
    return type(stated) is int and stated in WIDTHS


class Awq(SourceFormat):
    """AWQ with zero points.

    Args:
        group_size: inputs that share one scale and zero.
    """

    method = "awq"

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    @classmethod
    def of(cls, directory: Path, quantization: Mapping[str, Any]) -> Awq:
        """From `version`, `bits`, `zero_point` and `group_size`, or the names that AutoAWQ gave them at first."""
        version = str(quantization.get("version", quantization.get("format", "gemm"))).lower()
        bits = quantization.get("bits", quantization.get("w_bit", 4))
        zeros = quantization.get("zero_point", not quantization.get("sym", False))
        size = quantization.get("group_size", quantization.get("q_group_size", 128))
        if version != "gemm" or bits != 4 or zeros is not True or type(size) is not int:
            raise CheckpointError(
                f"{directory} holds AWQ weights of version {version:.80} with {bits!s:.80} bits in groups of "
                f"{size!s:.80} and zero_point {zeros!s:.80}; those of version gemm with 4 bits and zero points are "
                "read, so convert the model that they were made from."
            )
        return cls(size)

    def describe(self) -> str:
        """For the manifest."""
        return f"AWQ (gemm), 4 bits in groups of {self.group_size}; kept as they are"

    def encoded(self, stored: Mapping[str, TensorInfo], dtype: torch.dtype, directory: Path) -> dict[str, Encoded]:
        """Every Linear that has a `qweight`."""
        found = {}
        for module in [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]:
            parts = tuple(f"{module}.{part}" for part in AwqWeight._fields)
            codes, zeros, scales = (require(directory, stored, name, parts[0]) for name in parts)
            inputs, outputs = codes.shape[0], scales.shape[-1]
            groups = inputs // self.group_size if self.group_size > 0 else 1
            expect(directory, parts[0], codes, ("I32",), [inputs, outputs // 8])
            expect(directory, parts[1], zeros, ("I32",), [groups, outputs // 8])
            expect(directory, parts[2], scales, SCALES, [groups, outputs])

            def pack(tensors: list[Tensor], name: str = parts[2]) -> AwqWeight:
                return AwqWeight(tensors[0], tensors[1], half_scales(directory, name, tensors[2]))

            found[f"{module}.weight"] = packed_linear(
                directory, module, (outputs, inputs), "awq", 4, self.group_size, parts, pack
            )
        return some(directory, found)


# A one in each field of a word.
_ONES = {4: 0x11111111, 8: 0x01010101}


class Gptq(SourceFormat):
    """GPTQ without act-order.

    Args:
        bits: 4 or 8.
        group_size: inputs that share one scale and zero.
        offset: whether zeros are stored less 1 ("gptq"; not "gptq_v2").
    """

    method = "gptq"

    def __init__(self, bits: int, group_size: int, offset: bool) -> None:
        self.bits, self.group_size, self.offset = bits, group_size, offset
        self._order: dict[str, str] = {}
        self._directory = Path()

    @classmethod
    def of(cls, directory: Path, quantization: Mapping[str, Any]) -> Gptq:
        """From `bits`, `group_size` and `checkpoint_format`."""
        layout = quantization.get("checkpoint_format", quantization.get("format", "gptq"))
        bits, size = quantization.get("bits"), quantization.get("group_size")
        if layout not in ("gptq", "gptq_v2") or not _is_width(bits) or type(size) is not int or size < 1:
            raise CheckpointError(
                f"{directory} holds GPTQ weights of checkpoint_format {layout!s:.80} with {bits!s:.80} bits in groups "
                f"of {size!s:.80}; gptq and gptq_v2 with 4 or 8 bits in groups of a fixed size are read, so convert "
                "the model that they were made from."
            )
        return cls(bits, size, layout == "gptq")

    def describe(self) -> str:
        """For the manifest."""
        return f"GPTQ, {self.bits} bits in groups of {self.group_size}; kept as they are"

    def encoded(self, stored: Mapping[str, TensorInfo], dtype: torch.dtype, directory: Path) -> dict[str, Encoded]:
        """Every Linear that has a `qweight`."""
        found, in_word = {}, 32 // self.bits
        self._directory = directory
        for module in [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]:
            parts = tuple(f"{module}.{part}" for part in AwqWeight._fields)
            codes, zeros, scales = (require(directory, stored, name, parts[0]) for name in parts)
            inputs, outputs = codes.shape[0] * in_word, codes.shape[-1]
            groups = -(-inputs // self.group_size)
            expect(directory, parts[0], codes, ("I32",), [inputs // in_word, outputs])
            expect(directory, parts[1], zeros, ("I32",), [groups, outputs // in_word])
            expect(directory, parts[2], scales, SCALES, [groups, outputs])
            order = f"{module}.g_idx"
            if order in stored:
                expect(directory, order, stored[order], ("I32",), [inputs])
                self._order[order] = module
            found[f"{module}.weight"] = packed_linear(
                directory,
                module,
                (outputs, inputs),
                "gptq",
                self.bits,
                self.group_size,
                parts,
                self._packer(directory, parts[2]),
            )
        return some(directory, found)

    def unused(self, stored: Mapping[str, TensorInfo]) -> set[str]:
        """The groups of inputs, once they are known to be in order."""
        return {name for name in stored if name.endswith(".g_idx")}

    def check(self, read: Callable[[Iterable[str]], dict[str, Tensor]]) -> None:
        """Refuse act-order, in which the inputs of a group do not lie side by side."""
        for name, module in self._order.items():
            groups = read([name])[name]
            if not torch.equal(groups.long(), torch.arange(len(groups)) // self.group_size):
                raise CheckpointError(
                    f"{self._directory} holds {module} with act-order (desc_act): the inputs of a group lie apart, "
                    "which a bundle cannot hold; convert the model that it was made from, or one with desc_act = false."
                )

    def _packer(self, directory: Path, name: str) -> Callable[[list[Tensor]], AwqWeight]:
        def pack(tensors: list[Tensor]) -> AwqWeight:
            words, zeros, scales = tensors
            if self.offset:
                zeros = zeros + _ONES[self.bits]
            return AwqWeight(
                pack_bits(unpack_words(words.T, self.bits).T, self.bits),
                pack_bits(unpack_words(zeros, self.bits), self.bits),
                half_scales(directory, name, scales),
            )

        return pack


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
        return f"format {form!s:.80}"
    if not groups or not all(isinstance(group.get("weights"), dict) for group in groups):
        return "no weights in their config_groups"
    if quantization.get("transform_config"):
        return "rotations at run time (transform_config)"
    sparsity = (quantization.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        return f"sparsity ({sparsity!s:.80})"
    for group in groups:
        weights = group["weights"]
        if group.get("input_activations") or group.get("output_activations"):
            return "quantized activations"
        if weights.get("type", "int") != "int" or not _is_width(weights.get("num_bits")):
            return f"{weights.get('type')!s:.80} numbers of {weights.get('num_bits')!s:.80} bits"
        size = weights.get("group_size")
        if weights.get("strategy") != "group" or type(size) is not int or size < 1:
            return f"strategy {weights.get('strategy')!s:.80} of group_size {size!s:.80}"
        for key in ("group_size", "symmetric"):
            if weights.get(key) != groups[0]["weights"].get(key):
                return f"groups that differ in {key}"
    return None
