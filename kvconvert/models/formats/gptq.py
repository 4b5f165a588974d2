"""GPTQ checkpoints of AutoGPTQ and GPTQModel, 4 or 8 bits: the same integers and scales, packed anew.

A Linear is stored, with n = 32 / bits codes in a word of which the first is lowest, as

    qweight int32 [in / n, out]   qzeros int32 [in / g, out / n]   scales [in / g, out]   g_idx int32 [in]

and g_idx names the group of each input. What `checkpoint_format` calls "gptq" holds z - 1 in place of z: whole words of
zeros had 1 subtracted in every field, and get it added again as whole words, so that the borrow of a zero returns.
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
        if layout not in ("gptq", "gptq_v2") or bits not in WIDTHS or type(size) is not int or size < 1:
            raise CheckpointError(
                f"{directory} holds GPTQ weights of checkpoint_format {layout} with {bits} bits in groups of {size}; "
                "gptq and gptq_v2 with 4 or 8 bits in groups of a fixed size are read, so convert the model that they "
                "were made from."
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
