"""Error feedback: channels of a key are rounded one after another, each making up for the errors of those before.

QuIP (arXiv 2307.13304) and GPTQ (arXiv 2210.17323) round weights so; `kernels/pages/reference.py` has the formula and
`calibration/error_feedback.py` what it is fed. At 4 bits and more there is little error to make up for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from kvconvert.methods.part import STRICT, LayerShape, Part, PlanTensor, option

CHOSEN_BITS = (1, 2, 3)  # widths of keys at which calibration chooses error feedback


@dataclass(frozen=True, config=STRICT)
class ErrorFeedback(Part):
    """How keys are rounded to their codes."""

    method = "error feedback"
    summary = (
        "channels of a key are rounded one after another, and later ones make up for the error that queries would see"
    )
    source = "ours; LDLQ of QuIP (arXiv 2307.13304), there for weights"
    plan_tensors = {
        "key_feedback": "float16 [KV heads, D, D], upper triangular, diagonal 1: what part of the error of a channel "
        "(row) is subtracted from each later one (column)"
    }
    searched_fields = ("key_rounding",)
    from_calibration = ("key_rounding", ("error_feedback",), "nearest")

    key_rounding: Literal["nearest", "error_feedback"] = option(
        "nearest", "", "each number of a key to its nearest code, or channel by channel with feedback of the error"
    )

    @property
    def feeds_errors_back(self) -> bool:
        """Whether the rounding of keys needs the plan's `key_feedback`."""
        return self.key_rounding == "error_feedback"

    def in_use(self) -> bool:
        """Whether errors are fed back."""
        return self.feeds_errors_back

    def check(self) -> None:
        """There have to be codes to round to."""
        self.require(
            self.key_bits < 16 or not self.feeds_errors_back,
            "key_rounding",
            "16-bit keys are stored as they are, so that nothing is rounded; choose nearest",
        )

    def clauses(self, shape: LayerShape) -> list[str]:
        """That errors are fed back."""
        return ["keys rounded with error feedback"]

    def required_tensors(self, shape: LayerShape) -> dict[str, PlanTensor]:
        """The matrix of each KV head."""

        def fault(heads: list[list[list[float]]]) -> str | None:
            triangular = all(row[i] == 1 and not any(row[:i]) for head in heads for i, row in enumerate(head))
            return None if triangular else "upper triangular matrices with a diagonal of ones"

        size = (shape.num_key_value_heads, shape.head_dim, shape.head_dim)
        return {"key_feedback": PlanTensor("F16", size, 'key_rounding = "error_feedback"', fault)}

    @classmethod
    def conventions(cls, layers: Sequence[tuple[Any, LayerShape]]) -> dict[str, Any]:
        """How a page is written; readers need none of it."""
        return {
            "key_rounding": {
                "error_feedback": "scales and zero points are taken first, as for rounding to nearest; then for "
                "channel i = 0, 1, ... the code of w_i is its nearest, e = w_i - (code * scale + zero_point), and "
                "w_j -= e * F_ij for every j > i; w begins as the key, after rotation and token norm",
                "matrix": "F = layers.{i}.key_feedback of the KV plan, per KV head",
                "reading": "codes mean what they mean without it",
            }
        }


@dataclass(frozen=True, config=STRICT)
class KeyRoundingSearch:
    """The part of it that calibration chooses."""

    # Calibration knows keys and values per head, no latents.
    presets = {name: {"calibrate_key_rounding": False} for name in ("latent-4bit", "latent-2bit")}
    # No paper has it.
    paper = {"calibrate_key_rounding": False}

    calibrate_key_rounding: bool = option(
        True,
        "true or false",
        "round keys of 1 to 3 bits with error feedback, but for 1-bit keys of images and selection by reconstruction, "
        "unless key_rounding is given",
    )

    def chooses_error_feedback(self, scheme: Any) -> bool:
        """Whether calibration is to choose error feedback for the keys of a scheme that leaves it open."""
        is_open = self.calibrate_key_rounding and "key_rounding" not in self.given
        # It does harm to drawings at one bit (benchmarks/RESULTS.md).
        harms = scheme.key_bits == 1 and scheme.modality == "visual"
        return is_open and scheme.key_bits in CHOSEN_BITS and not harms and not scheme.reconstructs

    def searched(self, scheme: Any) -> list[str]:
        """The fields that are to be chosen, for messages."""
        return ["key_rounding"] if scheme is not None and self.chooses_error_feedback(scheme) else []
