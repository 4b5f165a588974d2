"""Where the parts of a page lie in memory.

All fields of a page lie in one record of 16-bit units, so that one base pointer and one offset address everything a
kernel reads of it:

    key record   = of each head: [codes | high | scale | offset | norm (per head) | channels], then [norm (joint)]
    value record = of each head: [codes | scale | offset]

A scale and an offset of 8 bits share a unit, so that `offset` begins where `scale` does. Every field begins at
a multiple of 8 units (16 bytes), and so does every record. Codes lie lane after lane, scales and offsets group
after group, so that what one step of a product needs of all channels (of keys) or tokens (of values) is read at once;
at 3 bits a lane is followed by its lane of the second plane (`kernels/packing.py`). Pages of 16 bits have no record:
they are tensors of the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvconvert.errors import UsageError
from kvconvert.kernels.code_bits import CODE_BITS, field_bits, packed_rows
from kvconvert.kernels.page_formats import PageFormat, TokenNorm

# Units of 2 bytes: what one 16-byte load reads.
ALIGNMENT = 8


def _align(units: int) -> int:
    return -(-units // ALIGNMENT) * ALIGNMENT


def _offsets(sizes: dict[str, int], scale_bits: int) -> tuple[dict[str, int], int]:
    """Where fields of these sizes begin when they follow one another, -1 for empty ones; and where they end."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end if size else -1
        end += _align(size)
    if scale_bits == 8:
        offsets["offset"] = offsets["scale"]
    return offsets, end


@dataclass(frozen=True)
class PageLayout:
    """The record of a page; offsets and sizes in units of 2 bytes, offsets -1 of parts that pages lack.

    Attributes:
        heads: H.
        lanes, rows: codes of one head are int16 [lanes, rows]; of keys [P * bits / 16, D], [P / 8, D / 2] at 1 bit,
            [P / 8, 3 D / 2] at 3 bits, and [P, D * bits / 16] where codes of a token share words; of values with E in
            the place of P and P in that of D.
        high_rows: the upper bits of boosted channels are int16 [lanes, high_rows]: as many rows as boosted channels, at
            1 bit half as many, rounded up.
        groups, grid_rows: scale and offset of one head are float16 [groups, grid_rows], or both int16 [groups,
            grid_rows]; grid_rows is D of keys, P of values, and groups is 0 where pages have none.
        codes, high, scale, offset, norm, channels: offsets within a head's part. `norm` float16 [P] is there with
            norms per head, `channels` uint8 [boosted] where they are stored.
        head_stride: from one head's part to the next.
        joint_norm: offset of the joint norm float16 [P] within the record.
        record: size of the record.
    """

    heads: int
    lanes: int
    rows: int
    high_rows: int
    groups: int
    grid_rows: int
    codes: int
    high: int
    scale: int
    offset: int
    norm: int
    channels: int
    head_stride: int
    joint_norm: int
    record: int

    @staticmethod
    @lru_cache
    def of(f: PageFormat) -> PageLayout:
        """The layout of a format of 8 bits or fewer.

        Raises:
            UsageError: another number of bits, boosted channels of a width that has no double, or codes that are not
                packed by token.
        """
        if f.boosted and 2 * f.bits not in CODE_BITS:
            raise UsageError(
                f"Boosted channels have twice the bits, and codes of {2 * f.bits} bits cannot be stored; boost keys of "
                "1, 2 or 4 bits."
            )
        packed, grid_rows = (f.page_size, f.head_dim) if f.is_key else (f.head_dim, f.page_size)
        rows, high_rows = packed_rows(grid_rows, f.bits), packed_rows(f.boosted, f.bits)
        lanes = packed * field_bits(f.bits) // 16
        if f.by_token:
            if f.bits not in (2, 4) or f.boosted:
                raise UsageError(
                    f"Codes of {f.bits} bits with {f.boosted} boosted channels are not packed by token; choose 2 or 4 "
                    "bits and boost no channel."
                )
            lanes, rows = f.page_size, f.head_dim * f.bits // 16
        groups = 0 if f.static else packed // f.group_size
        sizes = {
            "codes": rows * lanes,
            "high": high_rows * lanes,
            "scale": grid_rows * groups,
            "offset": grid_rows * groups if f.scale_bits == 16 else 0,
            "norm": f.page_size if f.token_norm is TokenNorm.PER_HEAD else 0,
            "channels": 0 if f.fixed_channels else -(-f.boosted // 2),
        }
        offsets, head_stride = _offsets(sizes, f.scale_bits)
        joint_norm = f.heads * head_stride if f.token_norm is TokenNorm.JOINT else -1
        return PageLayout(
            heads=f.heads,
            lanes=lanes,
            rows=rows,
            high_rows=high_rows,
            groups=groups,
            grid_rows=grid_rows,
            **offsets,
            head_stride=head_stride,
            joint_norm=joint_norm,
            record=f.heads * head_stride + (_align(f.page_size) if f.token_norm is TokenNorm.JOINT else 0),
        )


def page_bytes(f: PageFormat, number_bytes: int) -> int:
    """Bytes of one page, the padding of its record included; `number_bytes` are those of the model's dtype, which pages
    of 16 bits hold.
    """
    if f.bits == 16:
        return f.heads * f.page_size * f.head_dim * number_bytes
    return 2 * PageLayout.of(f).record
