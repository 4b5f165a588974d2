"""Checkpoints whose weights are stored in another form than they are computed in, and how each tensor is read.

`FORMATS` gives the form of a configuration's `quantization_config`; a form is added by writing its class (see
`format.SourceFormat`) and listing it here and, by its name, in `kvconvert.models.QUANTIZED`. GGUF files are no
safetensors files: `gguf` opens them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvconvert.errors import CheckpointError, first_line
from kvconvert.models import check_quantization
from kvconvert.models.formats.floats import BlockScaledFp8, Mxfp4
from kvconvert.models.formats.format import Encoded, Packing, SourceFormat
from kvconvert.models.formats.integers import Awq, CompressedTensors, Gptq

__all__ = ["FORMATS", "Encoded", "Packing", "SourceFormat", "find_format"]

FORMATS: dict[str, type[SourceFormat]] = {
    kind.method: kind for kind in (BlockScaledFp8, Mxfp4, Awq, Gptq, CompressedTensors)
}


def find_format(directory: Path, quantization: Mapping[str, Any]) -> SourceFormat:
    """The form of a checkpoint's weights, from its `quantization_config`.

    Raises:
        CheckpointError: a quantization that is not read, or settings of it that are not.
    """
    method = quantization.get("quant_method")
    check_quantization(directory, method)
    try:
        return FORMATS[method].of(directory, quantization)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a setting of another type than it has
        raise CheckpointError(
            f"{directory} has settings of {method} weights that cannot be read ({first_line(error)}); fetch the model "
            "again."
        ) from error
