"""OScaR: keys rotated by a Hadamard matrix and divided by one norm per token, values rotated in the weights.

Not to be confused with OSCAR (arXiv 2605.17757), another method, of offline covariance rotations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic.dataclasses import dataclass

from kvconvert.methods.part import PRESET_SINKS, STRICT, LayerShape, Part, option

_OSCAR = {"rotate_keys": "hadamard", "rotate_values": "folded", "token_norm": "joint"}
_PAPER = {"oscar": _OSCAR, "oscar-g128": _OSCAR | {"key_group_size": 128, "value_group_size": 128}}


@dataclass(frozen=True, config=STRICT)
class Oscar(Part):
    """Rotations and token norms."""

    method = "OScaR"
    summary = "a Hadamard rotation spreads outlier channels, a norm per token evens out tokens of different size"
    source = "Su et al., OScaR: The Occam's Razor for Extreme KV Cache Quantization in LLMs and Beyond, section 4.2"
    presets = {name: fields | {"sink_tokens": PRESET_SINKS} for name, fields in _PAPER.items()}
    paper_presets = {f"{name}-paper": fields for name, fields in _PAPER.items()}
    plan_tensors = {
        "key_norm_imbalance": "float32 [3, KV heads]: (max |k| - min |k|)^2 / mean |k|^2 within a group of tokens",
        "key_channel_range": "float32 [3, KV heads]: sum of squared channel ranges / mean |k|^2 within a group",
        "key_norm_max_over_median": "float32 [3, KV heads]: largest token norm of a sequence over their median",
        "key_norm_min_over_median": "float32 [3, KV heads]: smallest over median",
    }

    rotate_keys: Literal["none", "hadamard"] = option(
        "none", "", "queries and keys of every head times its orthonormal Hadamard matrix, after RoPE"
    )
    rotate_values: Literal["none", "folded", "online"] = option(
        "none", "", "folded: W_V and W_O carry the rotation; online: values and attention outputs at run time"
    )
    token_norm: Literal["none", "joint", "per_head"] = option(
        "none", "", "each key token is divided by one norm over all KV heads, or by one per head"
    )
    token_norm_measure: Literal["l2", "mean_abs"] = option("l2", "", "root mean square, or mean magnitude")

    def check(self) -> None:
        """A norm needs keys that are quantized."""
        self.require(
            self.key_bits < 16 or self.token_norm == "none",
            "token_norm",
            "16-bit keys are stored as they are, so a norm would only add its own rounding",
        )

    def in_use(self) -> bool:
        """Whether anything is rotated or normalised."""
        return self.rotates or self.token_norm != "none"

    @property
    def rotates(self) -> bool:
        """Whether keys or values are rotated."""
        return self.rotate_keys != "none" or self.rotate_values != "none"

    @property
    def folds_values(self) -> bool:
        """Whether the model's weights have to carry the rotation of values."""
        return self.rotate_values == "folded"

    def with_online_rotation(self) -> Self:
        """The same scheme for a model whose weights carry no fold: values rotated on write, outputs rotated back."""
        return replace(self, rotate_values="online") if self.folds_values else self

    def transforms(self) -> tuple[str, ...]:
        """The fold."""
        return ("fold_value_rotation",) if self.folds_values else ()

    def clauses(self, shape: LayerShape) -> list[str]:
        """Rotations and norm."""
        said = []
        if self.rotate_keys != "none":
            said.append(f"keys rotated ({self.rotate_keys})")
        if self.rotate_values != "none":
            said.append(f"values rotated ({self.rotate_values})")
        if self.token_norm != "none":
            said.append(f"{self.token_norm} token norm ({self.token_norm_measure})")
        return said

    @classmethod
    def conventions(cls, layers: Sequence[tuple[Any, LayerShape]]) -> dict[str, Any]:
        """How matrices are built and applied, and what a norm is."""
        known: dict[str, Any] = {}
        rotated = [shape for scheme, shape in layers if scheme.rotates]
        matrices = {str(shape.head_dim): shape.rotation for shape in rotated}
        matrices |= {str(shape.value_head_dim): shape.value_rotation for shape in rotated if shape.value_rotation}
        if matrices:
            known["rotation"] = {
                "matrix": matrices,
                "form": "row vectors, x' = x H with H orthonormal; queries and keys by the same H",
                "folded_values": "W_V of each KV head became W_V H (as row vectors), W_O of each query head H^T W_O",
            }
        if any(scheme.token_norm != "none" for scheme, _ in layers):
            known["token_norm"] = {
                "joint": "one norm over all KV heads and channels of a token",
                "per_head": "one norm for each KV head of a token",
                "l2": "root mean square",
                "mean_abs": "mean of magnitudes",
                "use": "taken after rotation when a page is quantized; keys are divided by it, scores multiplied; "
                "float16; a token of norm zero stores zeros",
            }
        return known
