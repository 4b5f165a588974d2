"""`auto`: what each layer's cache is to be, found by measuring; the options of the search, and what it may choose from.

Every layer takes one way to store keys and one to store values from the tables below, as fields over the recipe's own
scheme. A new method takes part as soon as it has a row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFAULT_CONTEXT = 4096
LONGEST_CONTEXT = 2**24


def stated_context(positions: int | None) -> int:
    """The tokens that a cache's size is stated at unless others are asked for: as many as fit a model's positions."""
    return min(DEFAULT_CONTEXT, positions or DEFAULT_CONTEXT)


@dataclass(frozen=True)
class Candidate:
    """One way to store a layer's keys or values.

    Attributes:
        name: short, for tables.
        side: which of the two.
        fields: fields of the `KVScheme` that differ from the recipe's scheme; of layers whose treatment of keys is
            measured, that as well (`kvconvert.methods.keys`). Candidates of one name are the same choice.
    """

    name: str
    side: Literal["key", "value"]
    fields: dict[str, Any] = field(compare=False)

    @property
    def exact(self) -> bool:
        """Whether nothing is quantized."""
        return self.fields[f"{self.side}_bits"] == 16


def _keys(name: str, bits: int, group_size: int = 128, **fields: Any) -> Candidate:
    own = {"key_bits": bits, "key_group_size": group_size, "boost_fraction": 0.0}
    return Candidate(name, "key", own | {"key_scale_bits": 8 if "s8" in name else 16} | fields)


def _values(name: str, bits: int, group_size: int = 128, **fields: Any) -> Candidate:
    own = {"value_bits": bits, "value_group_size": group_size}
    return Candidate(name, "value", own | {"value_scale_bits": 8 if "s8" in name else 16} | fields)


# Groups of keys are tokens, groups of values channels; s8: scales and zero points of 8 bits; +: share of key channels
# with twice the bits.
KEY_CANDIDATES: tuple[Candidate, ...] = (
    _keys("K1g128s8", 1),
    _keys("K1g32s8", 1, 32),
    _keys("K2g128s8", 2),
    _keys("K2g64s8", 2, 64),
    _keys("K2g32s8", 2, 32),
    _keys("K3g128s8", 3),
    _keys("K3g32s8", 3, 32),
    _keys("K2+12%s8", 2, boost_fraction=0.125),
    _keys("K2+25%s8", 2, boost_fraction=0.25),
    _keys("K4g128", 4),
    _keys("K8g128", 8),
    _keys("K16", 16, token_norm="none", rotate_keys="none", key_rounding="nearest", key_center="none"),
)
VALUE_CANDIDATES: tuple[Candidate, ...] = (
    _values("V1g128s8", 1),
    _values("V1g32s8", 1, 32),
    _values("V2g128s8", 2),
    _values("V2g32s8", 2, 32),
    _values("V3g128s8", 3),
    _values("V4g128s8", 4),
    _values("V8g128", 8),
    _values("V16", 16),
)


def stores_keys(fields: Mapping[str, Any]) -> bool:
    """Whether the fields of a candidate are of keys."""
    return "key_bits" in fields


# Fields that every candidate has, and the plan's: what a recipe says of them would be replaced.
WINDOW_FIELDS = ("key_recent_tokens", "value_recent_tokens")
CHOSEN_FIELDS = frozenset({*KEY_CANDIDATES[0].fields, *VALUE_CANDIDATES[0].fields, *WINDOW_FIELDS})


class AutoSearch(BaseModel):
    """The [auto] table of a recipe.

    Attributes:
        kv_bits: the budget: bits per key or value of a sequence of `context` tokens, in the mean over how full the last
            page is, with everything in it: scales, norms, sink tokens and windows.
        kv_bytes_per_token: the same budget in bytes per token over all layers; one of the two has to be given.
        context: tokens of the sequence that the budget is for; None takes 4,096, or the model's positions if fewer.
        tokens: held-out calibration tokens on which candidates are measured; None takes 16,384 on a GPU and 1,024 on
            a CPU.
        repairs: plans of the whole model that may be measured to improve on the sum of single measurements.
        windows: how many of the newest tokens all layers may keep in full precision, one of these: that with the best
            first plan. The plugin for vLLM shares no prefixes of caches with a window.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kv_bits: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    kv_bytes_per_token: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    context: int | None = Field(default=None, ge=1, le=LONGEST_CONTEXT)
    tokens: int | None = Field(default=None, ge=256)
    repairs: int = Field(default=24, ge=0)
    windows: list[Annotated[int, Field(ge=0)]] = Field(default=[0, 16], min_length=1)

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.kv_bits is not None and self.kv_bytes_per_token is not None:
            raise ValueError("`kv_bits` and `kv_bytes_per_token` are two ways to say one budget; give one of them")
        return self

    @property
    def has_budget(self) -> bool:
        """Whether it is said how large the cache may be."""
        return self.kv_bits is not None or self.kv_bytes_per_token is not None
