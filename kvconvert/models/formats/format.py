"""The interface of a form of stored weights: which tensors of the model it makes from which stored ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvconvert.errors import CheckpointError
from kvconvert.io.records import TensorInfo
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight
from kvconvert.methods.awq import GROUP_SIZES, QuantizedBy


@dataclass(frozen=True)
class Packing:
    """How a bundle holds a Linear's weight that its source has quantized: the same values, in the bundle's own layout.

    Attributes:
        method: by which it was quantized.
        bits, group_size: bits and group size of its codes.
        pack: makes the bundle's tensors from the stored ones.
    """

    method: QuantizedBy
    bits: int
    group_size: int
    pack: Callable[[list[Tensor]], AwqWeight]


@dataclass(frozen=True)
class Encoded:
    """One tensor of the model that a checkpoint stores in another form.

    Attributes:
        info: type and shape in which it is read.
        parts: names of the stored tensors that it is made from.
        decode: makes it from them, in that order.
        packing: the packing of a weight that a bundle holds as it is; None where it has to be dequantized.
    """

    info: TensorInfo
    parts: tuple[str, ...]
    decode: Callable[[list[Tensor]], Tensor]
    packing: Packing | None = None


class SourceFormat(ABC):
    """A form of stored weights.

    Attributes:
        method: `quant_method` in the configuration of such checkpoints.
    """

    method: ClassVar[str]

    @classmethod
    @abstractmethod
    def of(cls, directory: Path, quantization: Mapping[str, Any]) -> SourceFormat:
        """The form that a `quantization_config` describes; CheckpointError where it is not read."""

    @abstractmethod
    def describe(self) -> str:
        """The form in a few words, for the manifest and the card."""

    @abstractmethod
    def encoded(self, stored: Mapping[str, TensorInfo], dtype: torch.dtype, directory: Path) -> dict[str, Encoded]:
        """The tensors of a checkpoint that are in this form, by name.

        Args:
            stored: type and shape of every tensor in the files.
            dtype: in which to read.
            directory: the directory of the checkpoint, for messages.

        Raises:
            CheckpointError: tensors that do not belong together.
        """

    def unused(self, stored: Mapping[str, TensorInfo]) -> set[str]:
        """Stored tensors that mean nothing once the others are read."""
        return set()

    def check(self, read: Callable[[Iterable[str]], dict[str, Tensor]]) -> None:  # noqa: B027 - most have nothing to check
        """Refuse (CheckpointError) what only the contents of stored tensors tell, which `read` gives by their names."""


def require(directory: Path, stored: Mapping[str, TensorInfo], name: str, owner: str) -> TensorInfo:
    """A stored tensor without which `owner` cannot be read; it has at least one dimension, and numbers."""
    if name not in stored:
        raise CheckpointError(f"{directory} holds {owner} without {name}, which it needs; fetch the model again.")
    shape = stored[name].shape
    if not shape or 0 in shape:
        raise CheckpointError(f"{directory} holds {name} of shape {shape}, which no weight has; fetch the model again.")
    return stored[name]


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
        directory: the directory of the checkpoint, for messages.
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
            f"{directory} holds {module} with {outputs} outputs and {inputs:,} inputs in groups of {group_size}, which "
            f"a bundle cannot hold (groups of {', '.join(map(str, GROUP_SIZES))} inputs, outputs in eights); convert "
            "the model that it was made from."
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
