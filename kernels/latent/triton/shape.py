"""All that a specialisation of the latent decode kernel is made for, and what follows from it at compile time."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from kvconvert.kernels.decode.triton.shape import block_of

# Channels of a chunk's RoPE part at least: the depth of a matrix instruction.
FEWEST_CHANNELS = tl.constexpr(16)


@dataclass(frozen=True)
class LatentShape:
    """The constants of one specialisation. Offsets are in units of 2 bytes within a page's record.

    Attributes:
        bits: of a latent's codes; 16 for latents and RoPE parts of the model's dtype.
        rank, rope: channels of a latent and of a RoPE part.
        heads: query heads.
        chunks: of channels.
        record, rope_record: sizes of records.
        scale, zero_point: of latents; rope_scale, rope_zero_point: of RoPE parts.
        exact_query: whether what rounding queries and weights to fp16 leaves is multiplied too, for float32.
        compiled: False under the interpreter.
    """

    bits: int
    rank: int
    rope: int
    heads: int
    chunks: int
    record: int
    rope_record: int
    scale: int
    zero_point: int
    rope_scale: int
    rope_zero_point: int
    exact_query: bool
    compiled: bool


@triton.constexpr_function
def chunk_channels(shape):
    """Channels of a chunk, rounded up to a power of two."""
    return block_of(-(-shape.rank // shape.chunks))


@triton.constexpr_function
def rope_channels(shape):
    """Channels of a chunk's RoPE part, rounded up."""
    return max(FEWEST_CHANNELS.value, block_of(-(-shape.rope // shape.chunks)))


@triton.constexpr_function
def power_of_two(size):
    """The power of two that is no less than a size."""
    return triton.next_power_of_2(size)
