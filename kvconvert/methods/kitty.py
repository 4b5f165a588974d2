"""Kitty (MLSys 2026): twice the bits for the key channels that need them most."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from kvconvert.methods.part import STRICT, LayerShape, Part, PlanTensor, option

# The paper has sinks of its own.
_KITTY = {
    "key_group_size": 128,
    "value_group_size": 128,
    "boost_fraction": 0.125,
    "sink_tokens": 32,
    "value_recent_tokens": 128,
}


@dataclass(frozen=True, config=STRICT)
class Kitty(Part):
    """Mixed-precision key channels."""

    method = "Kitty"
    summary = "a share of each head's key channels has twice the bits: low halves in one plane, high halves in another"
    source = "MLSys 2026"
    presets = {"kitty": _KITTY, "kitty-pro": _KITTY | {"boost_fraction": 0.25}}
    paper_presets = {f"{name}-paper": fields for name, fields in presets.items()}
    plan_tensors = {
        "key_mean_abs": "float32 [KV heads, D]: mean magnitude of each key channel",
        "key_range": "float32 [KV heads, D]: mean range of each key channel within a page",
        "query_mean_abs": "float32 [KV heads, D]: mean magnitude of each query channel",
        "key_sensitivity": "float32 [KV heads, D]: query_mean_abs * key_range",
        "boosted_channels": "int32 [KV heads, n], ascending: the key channels with twice the bits, if fixed",
    }
    from_calibration = ("boost_select", ("calibrated",), "dynamic")

    boost_fraction: float = option(
        0.0,
        "it is a share of the channels, 0 to 1",
        "share of each head's key channels with twice the bits",
        ge=0,
        le=1,
    )
    boost_select: Literal["dynamic", "calibrated"] = option(
        "dynamic", "", "ranked in each page by mean magnitude, or fixed for each layer and head by calibration"
    )

    def check(self) -> None:
        """Boosted channels need room above `key_bits`, and a choice needs something to choose."""
        self.require(
            self.boost_fraction == 0 or self.key_bits in (1, 2, 4),
            "boost_fraction",
            "boosted channels have twice the bits of 1-, 2- or 4-bit keys",
        )
        self.require(self.boost_fraction > 0 or self.boost_select == "dynamic", "boost_select", "no channel is boosted")

    def in_use(self) -> bool:
        """Whether any channel is boosted."""
        return self.boost_fraction > 0

    def boosted_for(self, head_dim: int) -> int:
        """Boosted key channels of each head: the nearest whole number to the fraction."""
        return round(self.boost_fraction * head_dim)

    def clauses(self, shape: LayerShape) -> list[str]:
        """How many channels, and who chooses them."""
        channels = f"{self.boosted_for(shape.head_dim)} key channels of each head"
        return [f"{channels} at {2 * self.key_bits} bits ({self.boost_select})"]

    def required_tensors(self, shape: LayerShape) -> dict[str, PlanTensor]:
        """The fixed channels."""
        count = self.boosted_for(shape.head_dim)
        if self.boost_select != "calibrated" or not count:
            return {}

        def fault(heads: list[list[int]]) -> str | None:
            inside = all(0 <= channel < shape.head_dim for head in heads for channel in head)
            ascending = all(first < second for head in heads for first, second in pairwise(head))
            expected = f"channels 0 to {shape.head_dim - 1}, ascending in each head"
            return None if inside and ascending else expected

        wanted = PlanTensor("I32", (shape.num_key_value_heads, count), 'boost_select = "calibrated"', fault)
        return {"boosted_channels": wanted}

    @classmethod
    def conventions(cls, layers: Sequence[tuple[Any, LayerShape]]) -> dict[str, Any]:
        """Which channels, and where their bits lie."""
        return {
            "boost": {
                "count": "boosted channels of a head = round(boost_fraction * head_dim), halves to even",
                "dynamic": "of each page and head, those with the largest mean |k| over the page's tokens, after "
                "rotation and token norm; ties to the lower index",
                "calibrated": "layers.{i}.boosted_channels of the KV plan, per KV head",
                "code": "2 * key_bits bits on the channel's own grid: low half with everybody's codes, high half in a "
                "second plane of the boosted channels in ascending order",
            }
        }
