"""Clip ratios: each group's (min, max), shrunk about its midpoint before the scale is computed.

The best uniform quantizer of 1 or 2 bits does not reach to the extremes (`calibration/clip_ratios.py`). CalibQuant's
released code multiplies min and max themselves by 0.5 (keys) and 0.3 (values) at 1 bit, which moves both towards zero
and so also moves a midpoint that is not zero; shrinking about the midpoint, by a ratio calibrated for every scheme and
layer, is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from kvconvert.methods.part import STRICT, LayerShape, Part, option

_VALUES = "choose a factor above 0 and at most 1"


@dataclass(frozen=True, config=STRICT)
class ClipRatio(Part):
    """How far the range of each group is shrunk."""

    method = "clip ratios"
    summary = "each group's (min, max) is shrunk about its midpoint, as far as calibration finds best for the layer"
    source = "ours; CalibQuant's released code multiplies min and max by constants"
    plan_tensors = {
        "clip_ratio_grid": "float32 [n]: the clip ratios that were tried",
        "key_clip_ratio_error": "float32 [n]: error of the attention output with each, keys quantized",
        "value_clip_ratio_error": "float32 [n]: the same, values quantized",
    }
    searched_fields = ("key_clip_ratio", "value_clip_ratio")

    key_clip_ratio: float = option(
        1.0, _VALUES, "factor by which the (min, max) of a group of keys shrinks about its midpoint", gt=0, le=1
    )
    value_clip_ratio: float = option(1.0, _VALUES, "the same for values", gt=0, le=1)

    def in_use(self) -> bool:
        """Whether any range is shrunk."""
        return (self.key_clip_ratio, self.value_clip_ratio) != (1, 1)

    def clauses(self, shape: LayerShape) -> list[str]:
        """The two ratios."""
        return [f"clip ratios {self.key_clip_ratio} (keys) and {self.value_clip_ratio} (values)"]

    @classmethod
    def conventions(cls, layers: Sequence[tuple[Any, LayerShape]]) -> dict[str, Any]:
        """Where the ratio enters."""
        return {
            "clip_ratio": "(min, max) shrink about their midpoint by key_clip_ratio and value_clip_ratio before scale "
            "is computed"
        }


@dataclass(frozen=True, config=STRICT)
class ClipRatioSearch:
    """The part of it that calibration chooses."""

    calibrate_clip_ratios: bool = option(True, "true or false", "choose both clip ratios of each layer")

    # Calibration knows keys and values per head, no latents.
    presets = {name: {"calibrate_clip_ratios": False} for name in ("latent-4bit", "latent-2bit")}
    # No paper chooses them.
    paper = {"calibrate_clip_ratios": False}

    def searches_clip_ratio(self, side: Literal["key", "value"]) -> bool:
        """Whether the clip ratio of keys or values is to be chosen."""
        return self.calibrate_clip_ratios and f"{side}_clip_ratio" not in self.given

    def searched(self, scheme: Any) -> list[str]:
        """The fields that are to be chosen, for messages."""
        return [f"{side}_clip_ratio" for side in ("key", "value") if self.searches_clip_ratio(side)]
