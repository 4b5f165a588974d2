"""How many bits a code takes where codes are packed (`kernels/packing.py`); no torch."""

from __future__ import annotations

from kvconvert.errors import UsageError

LANE_BITS = 16
CODE_BITS = (1, 2, 3, 4, 8)


def field_bits(bits: int) -> int:
    """Width of the bit-fields that hold codes of this width: their own, or 2 at 1 bit and in both planes of 3."""
    if bits not in CODE_BITS:
        raise UsageError(f"Codes of {bits} bits cannot be packed; choose 1, 2, 3, 4 or 8.")
    return {1: 2, 3: 2}.get(bits, bits)


def fields_per_lane(bits: int) -> int:
    """How many bit-fields of codes of this width share one 16-bit lane."""
    return LANE_BITS // field_bits(bits)


def packed_rows(count: int, bits: int) -> int:
    """How many rows of fields `count` rows of codes become: half as many at 1 bit, half as many more at 3."""
    return {1: -(-count // 2), 3: count - (-count // 2)}.get(bits, count)
