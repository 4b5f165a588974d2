"""What a form of stored weights is: which tensors of the model it makes from which stored ones."""

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
from kvconvert.kernels.linear.awq_format import AwqWeight
from kvconvert.methods.awq import QuantizedBy


@dataclass(frozen=True)
class Packing:
    """How a bundle holds a Linear's weight that its source has quantized: the same values, in the bundle's own layout.

    Attributes:
        method: by which it was quantized.
        bits, group_size: of its codes.
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
        packing: of a weight that a bundle holds as it is; None where it has to be dequantized.
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
            directory: of the checkpoint, for messages.

        Raises:
            CheckpointError: tensors that do not belong together.
        """

    def unused(self, stored: Mapping[str, TensorInfo]) -> set[str]:
        """Stored tensors that mean nothing once the others are read."""
        return set()

    def check(self, read: Callable[[Iterable[str]], dict[str, Tensor]]) -> None:  # noqa: B027 - most have nothing to check
        """Refuse (CheckpointError) what only the contents of stored tensors tell, which `read` gives by their names."""


def require(directory: Path, stored: Mapping[str, TensorInfo], name: str, owner: str) -> TensorInfo:
    """A stored tensor without which `owner` cannot be read."""
    if name not in stored:
        raise CheckpointError(f"{directory} holds {owner} without {name}, which it needs; fetch the model again.")
    return stored[name]
