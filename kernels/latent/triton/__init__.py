"""All that a specialisation of the latent decode kernel is made for, and what follows from it at compile time."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from kvconvert.kernels.decode.triton import block_of


@dataclass(frozen=True)
class LatentShape:
    """The constants of one specialisation. Offsets are in units of 2 bytes within a page's record.

    Attributes:
        bits: width of a latent's codes; 16 for latents and RoPE parts of the model's dtype.
        rank, rope: channels of a latent and of a RoPE part.
        heads: query heads; block: those of one program.
        dequantizes: whether codes are dequantized to the queries' dtype, or multiplied as they are.
        chunk: words of a token that are read at a time, at most, where codes are multiplied as they are.
        scale, offset: those of latents; rope_scale, rope_offset: those of RoPE parts.
        compiled: False under the interpreter.
    """

    bits: int
    rank: int
    rope: int
    heads: int
    block: int
    dequantizes: bool
    chunk: int
    scale: int
    offset: int
    rope_scale: int
    rope_offset: int
    compiled: bool


@triton.constexpr_function
def fields(shape):
    """Codes of a word of latents."""
    return 16 // shape.bits


@triton.constexpr_function
def columns(shape):
    """Words of a token; field f of word i is the code of channel f * columns + i."""
    return shape.rank * shape.bits // 16


@triton.constexpr_function
def column_tile(shape):
    """Words of a token, rounded up to what matrix products want."""
    return block_of(shape.rank * shape.bits // 16)


@triton.constexpr_function
def chunk_columns(shape):
    """Words of a token that are read at a time."""
    return min(shape.chunk, block_of(shape.rank * shape.bits // 16))


@triton.constexpr_function
def rope_tile(shape):
    """Words of a token's RoPE part, each of two codes, rounded up."""
    return block_of(shape.rope // 2)


@triton.constexpr_function
def field_place(field, bits):
    """The first bit of a field, once the upper half of a word was moved down for it."""
    return field * bits % 8


@triton.constexpr_function
def top_place(bits):
    """The highest `field_place`."""
    return 8 - bits
