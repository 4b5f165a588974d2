"""Key centers: the constant part of a head's keys, kept exactly and not quantized.

Before RoPE the mean of a head's keys holds most of their energy in many models (44% to 100% by layer in
Qwen2.5-Coder-0.5B, whose key projections have a bias; 64% to 90% in SmolLM2-135M, whose have none).
`kernels/pages/center.py` has the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from kvconvert.methods.part import PRESET_SINKS, STRICT, LayerShape, Part, PlanTensor, option


@dataclass(frozen=True, config=STRICT)
class KeyCenter(Part):
    """Whether pages hold keys, or what is left of them without their constant part."""

    method = "key centers"
    summary = "the mean of a head's keys before RoPE is kept exactly, and only the difference is quantized"
    source = "ours"
    # Widths alone: calibration chooses how each layer's keys are treated (methods/key_treatments.py), and until then
    # they are quantized as they are.
    presets = {
        "default": {
            "key_bits": 3,
            "key_group_size": 128,
            "value_group_size": 128,
            "rotate_values": "folded",
            "sink_tokens": PRESET_SINKS,
        }
    }
    plan_tensors = {
        "key_mean": "float32 [KV heads, D]: mean of the keys before RoPE, times the factor by which RoPE scales",
        "rope_frequencies": "float32 [D / 2]: radians per token of each pair of channels; 0 where RoPE turns nothing",
        "rope_pairs": "int32 [D / 2, 2]: the channels (a, b) of each pair",
    }

    from_calibration = ("key_center", ("calibrated",), "none")

    key_center: Literal["none", "calibrated"] = option(
        "none", "", "calibrated: the mean of keys before RoPE is kept apart, and attention adds its part of the scores"
    )

    @property
    def centers_keys(self) -> bool:
        """Whether a constant part of keys is kept apart."""
        return self.key_center != "none"

    def in_use(self) -> bool:
        """Whether a constant part is kept apart."""
        return self.centers_keys

    def check(self) -> None:
        """There has to be something quantized, in pages of consecutive tokens that have scales of their own."""
        if not self.centers_keys:
            return
        for ok, rule in (
            (self.key_bits < 16, "16-bit keys are stored as they are, so that there is nothing to keep apart"),
            (not self.is_span, "spans of a whole prompt are quantized per channel as they are; choose none"),
            (not self.evicts, "the tokens that survive an eviction do not follow one another; choose none"),
            (not self.is_static, "runtimes that read static scales know no centers; choose none"),
        ):
            self.require(ok, "key_center", rule)

    def clauses(self, shape: LayerShape) -> list[str]:
        """That the constant part is kept."""
        return ["constant part of keys kept exactly"]

    def required_tensors(self, shape: LayerShape) -> dict[str, PlanTensor]:
        """The mean, and what RoPE does to it."""

        def unpaired(pairs: list[list[int]]) -> str | None:
            every = sorted(channel for pair in pairs for channel in pair)
            return None if every == list(range(shape.head_dim)) else f"each of {shape.head_dim} channels once"

        why, pairs = 'key_center = "calibrated"', shape.head_dim // 2
        return {
            "key_mean": PlanTensor("F32", (shape.num_key_value_heads, shape.head_dim), why),
            "rope_frequencies": PlanTensor("F32", (pairs,), why),
            "rope_pairs": PlanTensor("I32", (pairs, 2), why, unpaired),
        }

    @classmethod
    def conventions(cls, layers: Sequence[tuple[Any, LayerShape]]) -> dict[str, Any]:
        """The constant that is subtracted, and what attention adds."""
        return {
            "key_center": {
                "constant": "c(t) = RoPE(t) mu for the token at position t of its sequence (0 for the first, padding "
                "not counted), mu = layers.{i}.key_mean of the KV plan; of each pair (a, b) of rope_pairs channel a of "
                "c is mu_a cos(t w) - mu_b sin(t w) and channel b is mu_b cos(t w) + mu_a sin(t w), with w of "
                "rope_frequencies; then rotated as keys are",
                "precision": "c is linear in [cos(t w), sin(t w)]; its matrix, after rotation, is rounded to float16",
                "pages": "hold k(t) - c(t), of which token norms are taken; q . c(t) is added to the dot product",
            }
        }
