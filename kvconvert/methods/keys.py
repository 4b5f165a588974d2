"""What becomes of keys before they are quantized: their constant part, error feedback, and the choice among treatments.

Before RoPE the mean of a head's keys holds most of their energy in many models (44% to 100% by layer in
Qwen2.5-Coder-0.5B, whose key projections have a bias; 64% to 90% in SmolLM2-135M, whose have none). It can be kept
exactly and not quantized; `kernels/pages/center.py` has the formula.

With error feedback channels of a key are rounded one after another, each making up for the errors of those before.
QuIP (arXiv 2307.13304) and GPTQ (arXiv 2210.17323) round weights so; `kernels/pages/reference.py` has the formula and
`calibration/keys.py` what it is fed. At 4 bits and more there is little error to make up for.

No single treatment is right for every model family (docs/choosing.md), so that the preset `default` states widths and
leaves the treatment to measurement, at equal bytes or nearly. What stands in the scheme until then is the one that no
family suffers from: keys as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass as checked_dataclass

from kvconvert.methods.part import PRESET_SINKS, STRICT, LayerShape, Part, PlanTensor, one_of, option


@checked_dataclass(frozen=True, config=STRICT)
class KeyCenter(Part):
    """Whether pages hold keys, or what is left of them without their constant part."""

    method = "key centers"
    summary = "the mean of a head's keys before RoPE is kept exactly, and only the difference is quantized"
    source = "ours"
    # Widths alone: calibration chooses how each layer's keys are treated (`treatments`), and until then
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


CHOSEN_BITS = (1, 2, 3)  # widths of keys at which calibration chooses error feedback


@checked_dataclass(frozen=True, config=STRICT)
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


@checked_dataclass(frozen=True, config=STRICT)
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
        return is_open and scheme.key_bits in CHOSEN_BITS and not harms and not scheme.heads_apart

    def searched(self, scheme: Any) -> list[str]:
        """The fields that are to be chosen, for messages."""
        return ["key_rounding"] if scheme is not None and self.chooses_error_feedback(scheme) else []


# What a recipe that states it keeps calibration from choosing.
TREATED_FIELDS = ("rotate_keys", "token_norm", "key_center", "boost_fraction")
# Where channels are boosted, fewer bits or larger groups pay for it: of (bits, group size), what costs as much or less.
BOOSTED_INSTEAD = {(3, 128): (2, 128, 0.5), (2, 32): (2, 128, 0.375), (2, 64): (2, 128, 0.125)}
_FORMS = (
    ("plain", "none", "none"),
    ("rotated", "hadamard", "none"),
    ("rotated, normalized", "hadamard", "joint"),
    ("normalized", "none", "joint"),
)


@dataclass(frozen=True)
class Treatment:
    """One way to store keys.

    Attributes:
        name: for statistics and tables.
        fields: the fields of the `KVScheme`.
    """

    name: str
    fields: Mapping[str, Any] = field(hash=False)

    @property
    def centers(self) -> bool:
        """Whether the constant part of keys is kept apart."""
        return self.fields["key_center"] != "none"

    def over(self, scheme: Any) -> Any:
        """The scheme with keys stored so."""
        return replace(scheme, **self.fields)


def treatments(scheme: Any, head_dim: int) -> list[Treatment]:
    """Treatments that keys of a scheme may get, the plainest first: it wins where nothing is gained.

    Args:
        scheme: whose widths and groups count; a treatment may not take more bits than these and a norm per token.
        head_dim: D, even where a constant can be kept.
    """
    boosted = {}
    # Smaller scales save less of these than of smaller groups'.
    pays = scheme.key_scale_bits == 16 or scheme.key_group_size == 128
    if pays and (scheme.key_bits, scheme.key_group_size) in BOOSTED_INSTEAD and not scheme.boost_fraction:
        bits, group, share = BOOSTED_INSTEAD[scheme.key_bits, scheme.key_group_size]
        boosted = {"key_bits": bits, "key_group_size": group, "boost_fraction": share}
    found = []
    for center in ("none", "calibrated") if head_dim % 2 == 0 else ("none",):
        before = "centered, " if center == "calibrated" else ""
        for name, rotation, norm in _FORMS:
            fields = {"rotate_keys": rotation, "token_norm": norm, "key_center": center}
            found.append(Treatment(before + name, fields))
        if boosted:
            plain = {"rotate_keys": "none", "token_norm": "none", "key_center": center}
            found.append(Treatment(before + "boosted", plain | boosted))
    return found


@checked_dataclass(frozen=True, config=STRICT)
class KeyTreatmentSearch:
    """The part of it that calibration chooses."""

    # No paper compares them; the preset `default` does.
    paper = {"calibrate_keys": False}
    presets = {"default": {"calibrate_keys": True}}

    calibrate_keys: bool = option(
        False,
        "true or false",
        "compare treatments of keys ([constant part kept or not] x [plain, rotated, boosted] x [norm or not]) by the "
        "error of each layer's output, and take the best; off where rotate_keys, token_norm, key_center or "
        "boost_fraction is stated",
    )

    def chooses_treatment(self, scheme: Any) -> bool:
        """Whether calibration is to choose how the keys of a scheme are stored."""
        pages = not (scheme.compresses_prompts() or scheme.is_static)
        return self.calibrate_keys and pages and scheme.key_bits < 16

    def searched(self, scheme: Any) -> list[str]:
        """The fields that are to be chosen, for messages."""
        return ["rotate_keys", "token_norm", "key_center"] if scheme and self.chooses_treatment(scheme) else []


WINDOW_BITS = (0, 2, 3, 4, 8)


@checked_dataclass(frozen=True, config=STRICT)
class WindowWidth:
    """Minimum width of the cache of layers with short sliding windows, whose size does not grow with the text."""

    paper = {"window_bits": 0}
    presets = {"default": {"window_bits": 4}}

    window_bits: Annotated[int, AfterValidator(one_of(WINDOW_BITS))] = option(
        0,
        "0, 2, 3, 4 or 8",
        "least width of keys and values in layers whose sliding window has at most 1,024 tokens, beside layers of full "
        "attention; off where key_bits or value_bits is stated",
    )

    def of_window(self, scheme: Any) -> Any:
        """The scheme of a layer with a short window."""
        return replace(scheme, **{f: max(getattr(scheme, f), self.window_bits) for f in ("key_bits", "value_bits")})

    def searched(self, scheme: Any) -> list[str]:
        """None: it is stated."""
        return []
