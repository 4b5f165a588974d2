"""A scheme in memory: keys, values, and what becomes of a prompt. Recipes and manifests have flat names for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class SchemeSide:
    """How keys or values are stored; the fields are those of `KVScheme` behind `key_` or `value_`.

    Attributes:
        name: which of the two.
        bits: of a code, 16 for the model's own dtype.
        group_size: tokens of a key channel, or channels of a value token, that share a scale.
        recent_tokens: newest tokens in full precision besides the page being filled.
        clip_ratio: factor by which a group's (min, max) shrinks.
        static: whether calibration has fixed the scales of what is quantized.
    """

    name: Literal["key", "value"]
    bits: int
    group_size: int
    recent_tokens: int
    clip_ratio: float
    static: bool

    @classmethod
    def of(cls, scheme: Any, name: Literal["key", "value"]) -> SchemeSide:
        """One side of a scheme, from its flat fields."""
        flat = {field: getattr(scheme, f"{name}_{field}") for field in _FLAT}
        return cls(name, **flat, static=scheme.is_static and flat["bits"] < 16)

    @property
    def quantized(self) -> bool:
        """Whether codes have fewer than 16 bits."""
        return self.bits < 16


_FLAT = ("bits", "group_size", "recent_tokens", "clip_ratio")


@dataclass(frozen=True)
class Pages:
    """Prompts are like all tokens: complete pages are quantized as they come."""

    modality = "all"


@dataclass(frozen=True)
class Spans:
    """A complete prompt is quantized per channel (CalibQuant).

    Attributes:
        tokens: of a span, in the order of the prompt; 0 for one span of all.
        modality: which tokens go to spans.
    """

    tokens: int
    modality: str


@dataclass(frozen=True)
class Evict:
    """A complete prompt is reduced to its sink tokens, heavy hitters and newest tokens (MiniKV); these go to pages.

    Attributes:
        heavy_ratio, recent_ratio: shares of the prompt.
    """

    heavy_ratio: float
    recent_ratio: float
    modality = "all"

    def budget(self, tokens: int) -> tuple[int, int]:
        """Heavy hitters and newest tokens that each KV head keeps of a prompt; halves are rounded to even."""
        return round(self.heavy_ratio * tokens), round(self.recent_ratio * tokens)


def prompt_of(scheme: Any) -> Pages | Spans | Evict:
    """What becomes of a prompt, from a scheme's flat fields."""
    if scheme.is_span:
        return Spans(scheme.span_tokens, scheme.modality)
    return Evict(scheme.heavy_ratio, scheme.recent_ratio) if scheme.evicts else Pages()
