"""AutoAWQ's checkpoints of the layout "gemm" with 4 bits, which is the one that bundles have: copied byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvconvert.errors import CheckpointError
from kvconvert.io.records import TensorInfo
from kvconvert.kernels.linear.awq_format import AwqWeight
from kvconvert.models.formats.format import Encoded, SourceFormat, expect, half_scales, packed_linear, require, some

SCALES = ("F16", "BF16", "F32")


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
        if "kvconvert" in quantization:
            raise CheckpointError(
                f"{directory} is a kvconvert bundle, not a model; give the model that it was made from."
            )
        version = str(quantization.get("version", quantization.get("format", "gemm"))).lower()
        bits = quantization.get("bits", quantization.get("w_bit", 4))
        zeros = quantization.get("zero_point", not quantization.get("sym", False))
        size = quantization.get("group_size", quantization.get("q_group_size", 128))
        if version != "gemm" or bits != 4 or zeros is not True or type(size) is not int:
            raise CheckpointError(
                f"{directory} holds AWQ weights of version {version} with {bits} bits in groups of {size} and "
                f"zero_point {zeros}; those of version gemm with 4 bits and zero points are read, so convert the model "
                "that they were made from."
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
