"""An embedding, or a head, whose row for each token of the vocabulary has 8 bits for a channel and one scale."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvconvert.kernels import device as devices

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (*KERNEL_DTYPES, torch.float32)
CPU_CHANNELS = 16  # of whose multiples torch's product is sound: others end the process in bfloat16, or are wrong
LARGEST = 127  # of a code, either way
BLOCK_WEIGHTS = 1 << 24  # that the slower path dequantizes at a time


class VocabularyRows(NamedTuple):
    """Rows of weights as codes times scales.

    Attributes:
        codes: int8 [V, D].
        scales: float32 [V].
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> VocabularyRows:
        """Weights [V, D], each rounded to the nearest of 255 values that the largest of its row spans."""
        codes = torch.empty_like(weight, dtype=torch.int8)
        scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        for rows in _blocks(weight):
            part = weight[rows].float()
            scales[rows] = part.abs().amax(1) / LARGEST
            codes[rows] = (part / scales[rows, None].clamp(min=1e-30)).round()
        return cls(codes, scales)

    def embeddings(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows of tokens: [*ids.shape, D]."""
        # An index would take -1 for the last token.
        codes, scales = functional.embedding(ids, self.codes), functional.embedding(ids, self.scales[:, None])
        return (codes.float() * scales).to(dtype)

    def logits(self, x: Tensor) -> Tensor:
        """x [..., D] times all rows: [..., V] in the dtype of `x`, summed in float32."""
        rows = x.reshape(-1, x.shape[-1])
        if devices.runs_triton(x.device) and x.dtype in KERNEL_DTYPES:
            from kvconvert.kernels.vocabulary import triton as launch

            found = launch.logits(rows.contiguous(), *self)
        elif x.device.type == "cpu" and x.dtype in CPU_DTYPES and x.shape[-1] % CPU_CHANNELS == 0:
            found = torch._weight_int8pack_mm(rows.contiguous(), self.codes, self.scales.to(x.dtype))
        else:
            found = self.reference(rows)
        return found.view(*x.shape[:-1], len(self.codes))

    def reference(self, rows: Tensor) -> Tensor:
        """`logits` of rows [n, D] as it is defined, on every device and in every dtype."""
        dtype = torch.promote_types(rows.dtype, torch.float32)
        parts = [rows.to(dtype) @ self.codes[part].T.to(dtype) * self.scales[part] for part in _blocks(self.codes)]
        return torch.cat(parts, 1).to(rows.dtype)


def _blocks(weight: Tensor) -> list[slice]:
    step = max(1, BLOCK_WEIGHTS // weight.shape[1])
    return [slice(begin, begin + step) for begin in range(0, len(weight), step)]
