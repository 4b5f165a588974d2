"""Scales of 8 bits: what groups store beside their codes, in half the bytes.

Codes are computed from what is stored, so that a coarser scale or zero point moves a group's grid and adds no error of
its own. At 1 and 2 bits that is hardly worse, and the bytes saved buy wider codes elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from kvconvert.methods.part import STRICT, LayerShape, Part, one_of, option, stated

SCALE_BITS = (8, 16)
WIDEST_CODES = 4

_ScaleBits = Annotated[int, AfterValidator(one_of(SCALE_BITS))]


@dataclass(frozen=True, config=STRICT)
class ScaleBits(Part):
    """Widths of scales and zero points."""

    method = "scales of 8 bits"
    summary = "a group's scale and zero point take one byte each: a short float, and a number of quarters of it"
    source = "ours; double quantization of QLoRA (arXiv 2305.14314), there for weights"

    key_scale_bits: _ScaleBits = option(16, stated(SCALE_BITS), "width of a key group's scale, and of its zero point")
    value_scale_bits: _ScaleBits = option(16, stated(SCALE_BITS), "the same for values")

    def check(self) -> None:
        """Groups need scales of their own, and a grid that coarse bounds can serve."""
        for side in self.sides:
            if self._width(side.name) == 16:
                continue
            field = f"{side.name}_scale_bits"
            self.require(self.group_scales, field, "it is for pages whose groups have scales of their own")
            widest = side.bits * (2 if side.name == "key" and self.boost_fraction else 1)
            self.require(
                widest <= WIDEST_CODES, field, f"codes of more than {WIDEST_CODES} bits need scales of 16; choose 16"
            )

    def _width(self, side: str) -> int:
        return getattr(self, f"{side}_scale_bits")

    def in_use(self) -> bool:
        """Whether any scale has 8 bits."""
        return 8 in (self.key_scale_bits, self.value_scale_bits)

    def clauses(self, shape: LayerShape) -> list[str]:
        """Which sides have them."""
        sides = " and ".join(f"{side}s" for side in ("key", "value") if self._width(side) == 8)
        return [f"scales of 8 bits for {sides}"]

    @classmethod
    def conventions(cls, layers: Sequence[tuple[Any, LayerShape]]) -> dict[str, Any]:
        """Meaning of the bytes."""
        return {
            "scale_bits": {
                "unit": "one int16 per group in the place of its float16 scale; no zero points follow the scales",
                "scale": "bits 7 to 14 are those bits of the float16 scale, whose others are 0",
                "zero_point": "bits 0 to 6 are its size in quarters of the scale, bit 15 its sign",
                "rounding": "scale to nearest, ties up, once raised to |zero_point| * 9 / 256 where it is smaller; "
                "zero_point to nearest, ties to even; both before codes are computed",
            }
        }
