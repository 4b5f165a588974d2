"""Where the parts of a page lie in memory.

All fields of a page lie in one record of 16-bit units, so that one base pointer and one offset address everything a
kernel reads of it:

    key record   = of each head: [codes | high | scale | zero_point | norm (per head) | channels], then [norm (joint)]
    value record = of each head: [codes | scale | zero_point]

A scale and a zero point of 8 bits share a unit, so that `zero_point` begins where `scale` does. Every field begins at
a multiple of 8 units (16 bytes), and so does every record. Codes lie lane after lane, scales and zero points group
after group, so that what one step of a product needs of all channels (of keys) or tokens (of values) is read at once;
at 3 bits a lane is followed by its lane of the second plane (`kernels/packing.py`). Pages of 16 bits have no record:
they are tensors of the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from kvconvert.errors import UsageError
from kvconvert.kernels.packing import CODE_BITS, field_bits, packed_rows
from kvconvert.kernels.pages.formats import KeyFormat, TokenNorm, ValueFormat

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
        offsets["zero_point"] = offsets["scale"]
    return offsets, end


@dataclass(frozen=True)
class KeyLayout:
    """The record of a key page; offsets and sizes in units of 2 bytes.

    Attributes:
        heads: H.
        lanes, rows: codes of one head are int16 [lanes, rows]: [P * bits / 16, D], [P / 8, D / 2] at 1 bit, [P / 8,
            3 D / 2] at 3 bits; [P, D * bits / 16] where codes of a token share words.
        high_rows: the upper bits of boosted channels are int16 [lanes, high_rows]: as many rows as boosted channels, at
            1 bit half as many, rounded up.
        groups: scale and zero point of one head are float16 [groups, D], or both int16 [groups, D]; 0 where pages have
            none.
        codes, high, scale, zero_point, norm, channels: offsets within a head's part, -1 of what pages have not. `norm`
            float16 [P] is there with norms per head, `channels` uint8 [boosted] where they are stored.
        head_stride: from one head's part to the next.
        joint_norm: offset of the joint norm float16 [P] within the record, or -1.
        record: size of the record.
    """

    heads: int
    lanes: int
    rows: int
    high_rows: int
    groups: int
    codes: int
    high: int
    scale: int
    zero_point: int
    norm: int
    channels: int
    head_stride: int
    joint_norm: int
    record: int

    @staticmethod
    @lru_cache
    def of(f: KeyFormat) -> KeyLayout:
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
        rows, high_rows = packed_rows(f.head_dim, f.bits), packed_rows(f.boosted, f.bits)
        lanes = f.page_size * field_bits(f.bits) // 16
        if f.by_token:
            if f.bits not in (2, 4) or f.boosted:
                raise UsageError(
                    f"Codes of {f.bits} bits with {f.boosted} boosted channels are not packed by token; choose 2 or 4 "
                    "bits and boost no channel."
                )
            lanes, rows = f.page_size, f.head_dim * f.bits // 16
        groups = 0 if f.static else f.page_size // f.group_size
        sizes = {
            "codes": rows * lanes,
            "high": high_rows * lanes,
            "scale": f.head_dim * groups,
            "zero_point": f.head_dim * groups if f.scale_bits == 16 else 0,
            "norm": f.page_size if f.token_norm is TokenNorm.PER_HEAD else 0,
            "channels": 0 if f.fixed_channels else -(-f.boosted // 2),
        }
        offsets, head_stride = _offsets(sizes, f.scale_bits)
        joint_norm = f.heads * head_stride if f.token_norm is TokenNorm.JOINT else -1
        return KeyLayout(
            heads=f.heads,
            lanes=lanes,
            rows=rows,
            high_rows=high_rows,
            groups=groups,
            **offsets,
            head_stride=head_stride,
            joint_norm=joint_norm,
            record=f.heads * head_stride + (_align(f.page_size) if f.token_norm is TokenNorm.JOINT else 0),
        )

    def fields(self, record: torch.Tensor, f: KeyFormat) -> dict[str, torch.Tensor]:
        """The fields that the format has, views of records int16 [N, record] in the shapes that `KeyPages` states."""
        heads = _heads(record, self.heads, self.head_stride)
        found = {"codes": heads[..., : self.rows * self.lanes].unflatten(2, (self.lanes, self.rows))}
        if self.groups:
            found |= _grid(heads, (self.scale, self.zero_point), f.head_dim, self.groups)
        if f.token_norm is TokenNorm.PER_HEAD:
            found["norm"] = heads[..., self.norm : self.norm + f.page_size].view(torch.float16)
        elif f.token_norm is TokenNorm.JOINT:
            joint = record[:, None, self.joint_norm : self.joint_norm + f.page_size]
            found["norm"] = joint.view(torch.float16)
        if f.boosted:
            high = heads[..., self.high : self.high + self.high_rows * self.lanes]
            found["high"] = high.unflatten(2, (self.lanes, self.high_rows))
            if not f.fixed_channels:
                found["channels"] = heads[..., self.channels :].view(torch.uint8)[..., : f.boosted]
        return found


@dataclass(frozen=True)
class ValueLayout:
    """The record of a value page; offsets and sizes in units of 2 bytes.

    Attributes:
        heads: H.
        lanes, rows: codes of one head are int16 [lanes, rows]: [E * bits / 16, P], [E / 8, P / 2] at 1 bit, [E / 8,
            3 P / 2] at 3 bits.
        groups: scale and zero point of one head are float16 [groups, P], or both int16 [groups, P]; 0 where pages have
            none.
        codes, scale, zero_point: offsets within a head's part, -1 of what pages have not.
        head_stride: from one head's part to the next.
        record: size of the record.
    """

    heads: int
    lanes: int
    rows: int
    groups: int
    codes: int
    scale: int
    zero_point: int
    head_stride: int
    record: int

    @staticmethod
    @lru_cache
    def of(f: ValueFormat) -> ValueLayout:
        """The layout of a format of 8 bits or fewer.

        Raises:
            UsageError: another number of bits.
        """
        rows, lanes = packed_rows(f.page_size, f.bits), f.head_dim * field_bits(f.bits) // 16
        groups = 0 if f.static else f.head_dim // f.group_size
        scales = f.page_size * groups
        sizes = {"codes": rows * lanes, "scale": scales, "zero_point": scales if f.scale_bits == 16 else 0}
        offsets, head_stride = _offsets(sizes, f.scale_bits)
        return ValueLayout(
            heads=f.heads,
            lanes=lanes,
            rows=rows,
            groups=groups,
            **offsets,
            head_stride=head_stride,
            record=f.heads * head_stride,
        )

    def fields(self, record: torch.Tensor, f: ValueFormat) -> dict[str, torch.Tensor]:
        """The fields that the format has, views of records int16 [N, record] in the shapes that `ValuePages` states."""
        heads = _heads(record, self.heads, self.head_stride)
        found = {"codes": heads[..., : self.rows * self.lanes].unflatten(2, (self.lanes, self.rows))}
        if self.groups:
            found |= _grid(heads, (self.scale, self.zero_point), f.page_size, self.groups)
        return found


def _heads(record: torch.Tensor, heads: int, stride: int) -> torch.Tensor:
    """Every head's part: int16 [N, heads, stride]."""
    return record[:, : heads * stride].unflatten(1, (heads, stride))


def _grid(heads: torch.Tensor, offsets: tuple[int, int], rows: int, groups: int) -> dict[str, torch.Tensor]:
    """Scale and zero point, float16 [N, heads, rows, groups], which lie group after group at offsets of each head's
    part; where they lie at one, both as int16."""
    found = {}
    for name, offset in zip(("scale", "zero_point"), offsets, strict=True):
        field = heads[..., offset : offset + rows * groups].unflatten(2, (groups, rows)).transpose(2, 3)
        found[name] = field.view(torch.float16)
    if offsets[0] == offsets[1]:
        return {"grid": found["scale"].view(torch.int16)}
    strides = (*heads.stride()[:2], offsets[1] - offsets[0], rows, 1)
    both = heads.as_strided((*heads.shape[:2], 2, groups, rows), strides, heads.storage_offset() + offsets[0])
    return found | {"scales": both.view(torch.float16)}
