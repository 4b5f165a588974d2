"""Scales: how far the range of a group is shrunk, how wide its scale is, and scales that calibration fixes.

The best uniform quantizer of 1 or 2 bits does not reach to the extremes (`calibration/scales.py`). CalibQuant's
released code multiplies min and max themselves by 0.5 (keys) and 0.3 (values) at 1 bit, which moves both towards zero
and so also moves a midpoint that is not zero; shrinking about the midpoint, by a ratio calibrated for every scheme and
layer, is ours.

Codes are computed from what is stored, so that a scale or zero point of 8 bits moves a group's grid and adds no error
of its own. At 1 and 2 bits that is hardly worse, and the bytes saved buy wider codes elsewhere.

Rows of recurrent states have scales, too: linear attention and state-space layers keep states instead of keys and
values, all with the smallest width that a scheme of the model's layers with keys and values says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from kvconvert.methods.part import STRICT, LayerShape, Part, PlanTensor, one_of, option, stated

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


STATE_BITS = (12, 16)
# Of every preset but those that are a paper's: nothing measured is lost (benchmarks/RESULTS.md).
PRESET_STATES = {"state_bits": 12}


@dataclass(frozen=True, config=STRICT)
class StateBits(Part):
    """Width of recurrent states."""

    method = "states of 12 bits"
    summary = "recurrent states are stored as 8-bit codes and 4 bits of their rounding errors"
    source = "ours; vLLM issue 55196 discusses it"

    state_bits: Annotated[int, AfterValidator(one_of(STATE_BITS))] = option(
        16,
        "choose 12, or 16 for the dtype that the model computes them in",
        "width of a number of recurrent states, where a model has them",
    )

    def in_use(self) -> bool:
        """Whether states have 12 bits."""
        return self.state_bits < 16

    @classmethod
    def conventions(cls, layers: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
        """The form in which a runtime stores states."""
        return {
            "state_bits": {
                "rounding": "after a pass, code = round(x / scale), ties to even, scale = max |x| / 2047 of a row, the "
                "last axis of a float32 state",
                "bytes": "bits 4 to 11 of a code as an int8; bits 0 to 3 of numbers i and i + N / 2 of a row in a byte",
            }
        }
