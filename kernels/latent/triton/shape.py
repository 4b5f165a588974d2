"""All that a specialisation of the latent decode kernel is made for, and what follows from it at compile time."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from kvconvert.kernels.pages.formats import PAGE_SIZE


@dataclass(frozen=True)
class LatentShape:
    """The constants of one specialisation. Offsets are in units of 2 bytes within a page's record.

    Attributes:
        bits: of a latent's codes; 16 for latents and RoPE parts of the model's dtype.
        rank, rope: channels of a latent and of a RoPE part.
        heads: query heads; block: of one program.
        chunk: channels that are multiplied at a time.
        rows: of a page's scores; tile: full-precision tokens of a step.
        record, rope_record: sizes of records.
        scale, zero_point: of latents; rope_scale, rope_zero_point: of RoPE parts.
        stages: chunks of words whose loads are on their way; at 16 bits steps of tokens.
        compiled: False under the interpreter.
    """

    bits: int
    rank: int
    rope: int
    heads: int
    block: int
    chunk: int
    rows: int
    tile: int
    record: int
    rope_record: int
    scale: int
    zero_point: int
    rope_scale: int
    rope_zero_point: int
    stages: int
    compiled: bool


@triton.constexpr_function
def chunk_channels(shape):
    """Channels of a chunk."""
    return shape.chunk


@triton.constexpr_function
def block_heads(shape):
    """Query heads of a program."""
    return shape.block


@triton.constexpr_function
def chunk_count(shape):
    """Chunks of a latent, the last of which may have fewer channels."""
    return -(-shape.rank // shape.chunk)


@triton.constexpr_function
def page_rows(shape):
    """Rows of a page's scores."""
    return shape.rows


@triton.constexpr_function
def row_fields(shape):
    """Fields of a word that belong to one row."""
    return PAGE_SIZE // shape.rows


@triton.constexpr_function
def step_tokens(shape):
    """Full-precision tokens of a step."""
    return shape.tile


@triton.constexpr_function
def lanes(shape):
    """Words of a page for each channel."""
    return PAGE_SIZE * shape.bits // 16


@triton.constexpr_function
def power_of_two(size):
    """The power of two that is no less than a size."""
    return triton.next_power_of_2(size)
