"""mxfp4 experts, as gpt-oss checkpoints have them (OCP Microscaling formats: e2m1 numbers in blocks of 32).

The experts' weights NAME [experts, in, out] are stored as NAME_blocks, uint8 [experts, out, in / 32, 16] with two
numbers in each byte, the first in the lower half, and NAME_scales, uint8 [experts, out, in / 32], exponents of two
plus 127. Everything else is stored in the model's own type.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvconvert.errors import CheckpointError
from kvconvert.io.records import TensorInfo
from kvconvert.io.tensorfile import DTYPE_NAMES
from kvconvert.models.formats.format import Encoded, SourceFormat, require

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
