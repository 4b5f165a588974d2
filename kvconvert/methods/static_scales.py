"""Static scales: one grid per channel of a layer for all its tokens, fixed by calibration, as int8 engines use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from kvconvert.methods.part import STRICT, LayerShape, Part, PlanTensor, option

# Names of a scale and an offset in the tensors of a KV plan.
SCALE_NAMES = ("scale", "zero_point")


@dataclass(frozen=True, config=STRICT)
class StaticScales(Part):
    """Scales from the KV plan instead of each page's own."""

    method = "static scales"
    summary = "one scale and zero point per channel for all tokens, from calibration; pages hold codes alone"
    source = "usual in engines with int8 or fp8 caches"
    plan_tensors = {
        f"static_{side}_{part}": f"float16 [KV heads, channels]: {part.replace('_', ' ')} of each {side} channel"
        for side in ("key", "value")
        for part in SCALE_NAMES
    }
    from_calibration = ("static_scales", ("calibrated",), None)

    static_scales: Literal["none", "calibrated"] = option(
        "none", "", "one scale and zero point for each channel of the layer; group sizes then mean nothing"
    )

    @property
    def is_static(self) -> bool:
        """Whether scales are static."""
        return self.static_scales == "calibrated"

    def in_use(self) -> bool:
        """Whether scales are static."""
        return self.is_static

    def check(self) -> None:
        """Widths that one grid can serve, and nothing that a page would have to store."""
        if not self.is_static:
            return
        for field in ("key_bits", "value_bits"):
            self.require(
                getattr(self, field) in (4, 8, 16),
                field,
                "static_scales, which hold for all tokens, are too coarse for it; choose 4 or 8, or 16 on one side",
            )
        self.require(self.quantizes, "static_scales", "keys and values of 16 bits have no scales at all")
        self.require(
            not self.is_span, "static_scales", "a span takes its scales from its own tokens; keep group granularity"
        )
        self.require(
            self.token_norm == "none", "static_scales", "a norm is stored with each token; set token_norm to none"
        )
        self.require(
            self.boost_fraction == 0,
            "static_scales",
            "channels of a static page all have one width; set boost_fraction to 0",
        )

    def stores_group_scales(self) -> bool:
        """Pages hold codes alone."""
        return not self.is_static

    def clauses(self, shape: LayerShape) -> list[str]:
        """Widths."""
        return [f"{self.key_bits}-bit keys and {self.value_bits}-bit values with static scales per channel"]

    def required_tensors(self, shape: LayerShape) -> dict[str, PlanTensor]:
        """Scale and zero point of the sides that are quantized."""
        heads, *channels = shape.sizes
        sizes = {side.name: (heads, count) for side, count in zip(self.sides, channels, strict=True)}

        def negative(heads: list[list[float]]) -> str | None:
            return "scales of 0 or more" if any(scale < 0 for head in heads for scale in head) else None

        return {
            f"static_{side.name}_{part}": PlanTensor(
                "F16", sizes[side.name], 'static_scales = "calibrated"', negative if part == "scale" else None
            )
            for side in self.sides
            for part in SCALE_NAMES
            if side.quantized
        }

    @classmethod
    def conventions(cls, layers: Sequence[tuple[Any, LayerShape]]) -> dict[str, Any]:
        """Where the scales are."""
        return {
            "static_scales": {
                "place": "layers.{i}.static_key_scale, static_key_zero_point, static_value_scale and "
                "static_value_zero_point of the KV plan, float16 [KV heads, channels], clip ratios included; pages "
                "hold codes alone",
                "use": "x = code * scale + zero_point for every token of the channel, keys after RoPE and rotation; "
                "codes are packed as elsewhere; numbers outside are clamped to the first or last code",
            }
        }
