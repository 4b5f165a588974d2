"""Narrow floats with a scale for each block.

Block-scaled fp8, as DeepSeek-V3 and Qwen3's FP8 checkpoints have it: a weight NAME [..., out, in] is stored as fp8
numbers, with NAME_scale_inv [..., ceil(out / m), ceil(in / n)] beside it: one factor for each block of m x n weights
(`weight_block_size`, 128 x 128), or a single factor for all of them.

mxfp4 experts, as gpt-oss checkpoints have them (OCP Microscaling formats: e2m1 numbers in blocks of 32): the experts'
weights NAME [experts, in, out] are stored as NAME_blocks, uint8 [experts, out, in / 32, 16] with two numbers in each
byte, the first in the lower half, and NAME_scales, uint8 [experts, out, in / 32], exponents of two plus 127. Everything
else is stored in the model's own type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvconvert.errors import CheckpointError
from kvconvert.io.records import TensorInfo
from kvconvert.io.tensorfile import DTYPE_NAMES
from kvconvert.models.formats.format import Encoded, SourceFormat, require

SCALE = "_scale_inv"
# Scales of activations that were measured beforehand; nothing is left to scale once weights are dequantized.
_ACTIVATION_SCALES = (".activation_scale", ".input_scale")
_FP8 = ("F8_E4M3", "F8_E5M2")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")


def dequantize_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int] | None, dtype: torch.dtype) -> Tensor:
    """weight[i, j] * scale[i // m, j // n].

    Args:
        weight: fp8 [..., out, in].
        scale: [..., ceil(out / m), ceil(in / n)], or one number; uint8 and float8_e8m0fnu hold exponents of two.
        block: (m, n), or None with one number.
        dtype: the dtype of the result.
    """
    factors = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
    if block is not None:
        rows, columns = weight.shape[-2:]
        # A block may be far larger than the weight.
        factors = factors.repeat_interleave(min(block[0], rows), -2)[..., :rows, :]
        factors = factors.repeat_interleave(min(block[1], columns), -1)[..., :columns]
    return weight.float().mul_(factors).to(dtype)


class BlockScaledFp8(SourceFormat):
    """fp8 weights with a factor for each block.

    Args:
        block: rows and columns of a block, or None for one factor in all.
    """

    method = "fp8"

    def __init__(self, block: tuple[int, int] | None) -> None:
        self.block = block

    @classmethod
    def of(cls, directory: Path, quantization: Mapping[str, Any]) -> BlockScaledFp8:
        """From `weight_block_size`."""
        block = quantization.get("weight_block_size")
        if block is None:
            return cls(None)
        if not (isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
            raise CheckpointError(
                f"{directory / 'config.json'} has weight_block_size {block!r:.80}, which should be two positive "
                "numbers; fetch the model again."
            )
        return cls(tuple(block))

    def describe(self) -> str:
        """For the manifest."""
        return "fp8, one scale for " + (
            "each tensor" if self.block is None else "each {} x {} weights".format(*self.block)
        )

    def encoded(self, stored: Mapping[str, TensorInfo], dtype: torch.dtype, directory: Path) -> dict[str, Encoded]:
        """Every tensor that has a scale; scales of activations belong to the scaled tensor beside them."""
        found = {}
        for scale_name in stored:
            if not scale_name.endswith(SCALE):
                continue
            name = scale_name.removesuffix(SCALE)
            weight, scale = require(directory, stored, name, scale_name), stored[scale_name]
            if weight.dtype not in _FP8 or scale.dtype not in _SCALE_DTYPES:
                raise CheckpointError(
                    f"{directory} stores {name} as {weight.dtype} with scales of {scale.dtype}; fp8 checkpoints are "
                    f"read with weights of {' or '.join(_FP8)}, so give the model in full precision."
                )
            if not self._fits(weight.shape, scale.shape):
                raise CheckpointError(
                    f"{directory} holds {name} of shape {weight.shape} with scales of shape {scale.shape}, which do "
                    f"not fit the weight_block_size {self.block} of its config.json; fetch the model again."
                )
            block = self.block if math.prod(scale.shape) > 1 else None

            def decode(parts: list[Tensor], block: tuple[int, int] | None = block) -> Tensor:
                return dequantize_blocks(parts[0], parts[1], block, dtype)

            info = TensorInfo(dtype=DTYPE_NAMES[dtype], shape=weight.shape)
            found[name] = Encoded(info, (name, scale_name), decode)
        return found

    def unused(self, stored: Mapping[str, TensorInfo]) -> set[str]:
        """Scales of activations."""
        return {name for name in stored if name.endswith(_ACTIVATION_SCALES)}

    def _fits(self, weight: list[int], scale: list[int]) -> bool:
        if self.block is None or math.prod(scale) == 1:
            return math.prod(scale) == 1 and (self.block is None or all(map(int.__le__, weight[-2:], self.block)))
        if len(weight) < 2:
            return False
        grid = [-(-size // step) for size, step in zip(weight[-2:], self.block, strict=True)]
        return scale == [*weight[:-2], *grid]


BLOCKS, SCALES = "_blocks", "_scales"
_BYTES = 16  # of one block: 32 numbers


class Mxfp4(SourceFormat):
    """Experts in mxfp4."""

    method = "mxfp4"

    @classmethod
    def of(cls, directory: Path, quantization: Mapping[str, Any]) -> Mxfp4:
        """It has no settings that matter here."""
        return cls()

    def describe(self) -> str:
        """For the manifest."""
        return "mxfp4 experts"

    def encoded(self, stored: Mapping[str, TensorInfo], dtype: torch.dtype, directory: Path) -> dict[str, Encoded]:
        """Every pair of blocks and scales."""

        def decode(parts: list[Tensor]) -> Tensor:
            from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # and with it its models

            return convert_moe_packed_tensors(*parts, dtype=dtype)

        found = {}
        for blocks_name in stored:
            if not blocks_name.endswith(BLOCKS):
                continue
            name = blocks_name.removesuffix(BLOCKS)
            blocks = stored[blocks_name]
            scales = require(directory, stored, f"{name}{SCALES}", blocks_name)
            experts_and_rows = blocks.shape[:2]
            fits = len(blocks.shape) == 4 and blocks.shape[3] == _BYTES and scales.shape == blocks.shape[:3]
            if not fits or (blocks.dtype, scales.dtype) != ("U8", "U8"):
                raise CheckpointError(
                    f"{directory} holds {blocks_name} ({blocks.dtype} {blocks.shape}) and {name}{SCALES} "
                    f"({scales.dtype} {scales.shape}), which are no mxfp4 weights; fetch the model again."
                )
            experts, rows = experts_and_rows
            info = TensorInfo(dtype=DTYPE_NAMES[dtype], shape=[experts, 2 * _BYTES * blocks.shape[2], rows])
            found[name] = Encoded(info, (blocks_name, f"{name}{SCALES}"), decode)
        return found
