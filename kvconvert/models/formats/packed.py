"""Linears whose weights other programs quantized, in groups of inputs, so that a bundle can hold them exactly.

Each is read as AWQ's gemm layout has it (`kernels.linear.awq_format`): the same integers q and z and the same scale of
each group, packed another way where the source packs another way. Calibration computes with (q - z) scale in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvconvert.errors import CheckpointError
from kvconvert.io.records import TensorInfo
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight
from kvconvert.methods.awq import GROUP_SIZES, QuantizedBy
from kvconvert.models.formats.format import Encoded, Packing


def packed_linear(
    directory: Path,
    module: str,
    shape: tuple[int, int],
    method: QuantizedBy,
    bits: int,
    group_size: int,
    parts: tuple[str, ...],
    pack: Callable[[list[Tensor]], AwqWeight],
) -> Encoded:
    """A Linear's weight, read as float32 [out, in].

    Args:
        directory: of the checkpoint, for messages.
        module: name of the Linear.
        shape: its outputs and inputs.
        method, bits, group_size: as its coverage will say.
        parts: names of its stored tensors.
        pack: makes the stored form of a bundle from them.

    Raises:
        CheckpointError: groups or outputs that bundles cannot hold.
    """
    outputs, inputs = shape
    if group_size not in GROUP_SIZES or inputs % group_size or outputs % 8:
        raise CheckpointError(
            f"{directory} holds {module} with {outputs} outputs and {inputs} inputs in groups of {group_size}, which a "
            f"bundle cannot hold (groups of {', '.join(map(str, GROUP_SIZES))} inputs, outputs in eights); convert the "
            "model that it was made from."
        )

    def checked(tensors: list[Tensor]) -> AwqWeight:
        found = pack(tensors)
        if not bool((found.scales.isfinite() & (found.scales > 0)).all()):
            raise CheckpointError(
                f"{directory} holds {module} with a scale that is not a finite number above zero, which a bundle "
                "cannot hold; convert the model that it was made from."
            )
        return found

    return Encoded(
        TensorInfo(dtype="F32", shape=[outputs, inputs]),
        parts,
        lambda tensors: dequantize_weight(checked(tensors)),
        Packing(method, bits, group_size, checked),
    )


def half_scales(directory: Path, name: str, scales: Tensor) -> Tensor:
    """Scales as fp16, in which bundles hold them; CheckpointError where that would round one."""
    halves = scales.to(torch.float16)
    if not torch.equal(halves.double(), scales.double()):
        raise CheckpointError(
            f"{directory} holds {name} as {str(scales.dtype).removeprefix('torch.')} numbers that fp16, the type of "
            "scales in bundles, does not hold exactly; convert the model that it was made from."
        )
    return halves


def expect(directory: Path, name: str, found: TensorInfo, dtypes: tuple[str, ...], shape: list[int]) -> None:
    """Refuse (CheckpointError) a stored tensor of another type or shape than its config.json implies."""
    if found.dtype not in dtypes or found.shape != shape:
        raise CheckpointError(
            f"{directory} holds {name} as {found.dtype} {found.shape} where the quantization_config of its config.json "
            f"implies {' or '.join(dtypes)} {shape}; convert the model that it was made from."
        )


def some(directory: Path, found: dict[str, Encoded]) -> dict[str, Encoded]:
    """The weights that were found; CheckpointError if there are none, though config.json says that there are."""
    if not found:
        raise CheckpointError(
            f"{directory} holds no quantized weights, though its config.json has a quantization_config; fetch the "
            "model again."
        )
    return found
