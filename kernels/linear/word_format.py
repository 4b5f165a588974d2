"""Codes of 4 or 8 bits in int32 words, the first of them lowest: how GPTQ and compressed-tensors checkpoints pack."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last dimension.

    Args:
        codes: integers [..., n] from 0 to 2^bits - 1, n a multiple of 32 / bits.
        bits: 4 or 8.

    Returns:
        int32 [..., n bits / 32]; code i of a word lies in its bits `bits` i to `bits` (i + 1) - 1.
    """
    fields = codes.unflatten(-1, (-1, 32 // bits)).to(torch.int32)
    words = torch.zeros_like(fields[..., 0])
    for field in range(fields.shape[-1]):
        words |= fields[..., field] << (bits * field)
    return words


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The exact inverse of `pack_words`: int32 [..., m] to uint8 codes [..., m 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1).bitwise_right_shift(shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)
