"""The contribution of a method to a key-value scheme.

A `KVScheme` is composed of parts, one per paper: each brings its fields with their rules, its presets, the tensors of
the KV plan that are its own, and what a manifest, a card and the documentation say of it. Code that handles schemes
as a whole (recipes, calibration, bundles, summaries) iterates over the parts and names none of their fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict, Field

from kvconvert.errors import RecipeError, listed

# First tokens that presets leave in full precision wherever they quantize. Nearly all of what quantization does to a
# language model through them is gone with one token; the others cost next to nothing.
PRESET_SINKS = 4
# Of every dataclass that holds fields: unknown ones are refused, and numbers that are none or infinite; no type is
# converted into another.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


def option(default: Any, values: str, meaning: str, **constraints: Any) -> Any:
    """A field of a part.

    Args:
        default: its value without the method.
        values: what is possible, as messages and the documentation say it; "" for a `Literal`, which says it itself.
        meaning: one clause for the documentation.
        constraints: pydantic's bounds.
    """
    return Field(default=default, description=meaning, json_schema_extra={"values": values}, **constraints)


def stated(choices: Sequence[int]) -> str:
    """The possible values, for messages and the documentation."""
    return f"choose one of {listed(map(str, choices), 'or')}"


def one_of(choices: Sequence[int]) -> Callable[[int], int]:
    """A validator for a field of few numbers (a `Literal` would also take True for 1)."""

    def check(value: int) -> int:
        if value not in choices:
            raise ValueError(stated(choices))
        return value

    return check


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer's keys and values.

    Attributes:
        num_key_value_heads, head_dim, value_head_dim: KV heads, and channels of a head's keys and values.
        value_group_size: channels per value group, fitted to the head.
        rotation, value_rotation: how the rotation matrix of keys, and of values where these have another size, is
            built, for instance "sylvester(64)"; None without rotation.
    """

    num_key_value_heads: int
    head_dim: int
    value_head_dim: int
    value_group_size: int
    rotation: str | None = None
    value_rotation: str | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """KV heads, and channels of a head's keys and values."""
        return self.num_key_value_heads, self.head_dim, self.value_head_dim


@dataclass(frozen=True)
class PlanTensor:
    """A tensor of the KV plan that a runtime cannot do without.

    Attributes:
        dtype: in safetensors' words.
        shape: for the layer at hand.
        why: the setting that asks for it.
        fault: takes the values as nested lists, and returns what they should be, or None where they are.
    """

    dtype: str
    shape: tuple[int, ...]
    why: str
    fault: Callable[[list[Any]], str | None] | None = None


class Part:
    """One method's part of a scheme: a mixin of `KVScheme`, so that its methods read the fields of the whole scheme.

    Every hook is optional. `KVScheme` has the same hooks for all parts together.

    Attributes:
        method: name of the method.
        summary: what it does, in one line.
        source: paper or project that it comes from.
        presets: schemes under a name, as the fields that differ from a plain `KVScheme()`: the method with what every
            cache should have, `PRESET_SINKS` exact tokens and all that calibration chooses.
        paper_presets: what the method's source describes, for comparison; calibration chooses nothing of them that no
            paper has. Each is called `NAME-paper` where it is to the letter, and `NAME-plain` where it is not.
        plan_tensors: every tensor that the method may leave in the KV plan of a layer, with its meaning.
        searched_fields: fields that calibration chooses unless the recipe states them.
        from_calibration: a field, its values that follow from calibration alone, and what stands there until then
            (None: the same).
    """

    method: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    paper_presets: ClassVar[dict[str, dict[str, Any]]] = {}
    plan_tensors: ClassVar[dict[str, str]] = {}
    searched_fields: ClassVar[tuple[str, ...]] = ()
    from_calibration: ClassVar[tuple[str, tuple[str, ...], str | None] | None] = None

    def require(self, ok: bool, field: str, rule: str) -> None:
        """Refuse a field's value with the rule that it breaks, unless `ok`."""
        if not ok:
            raise RecipeError(f"[kv] {field} = {getattr(self, field)!r} is not possible: {rule}.")

    def check(self) -> None:
        """Refuse combinations that mean nothing (RecipeError); single values are checked already."""

    def in_use(self) -> bool:
        """Whether the scheme uses the method at all."""
        return True

    def stores_group_scales(self) -> bool:
        """Whether pages may hold a scale and zero point for each group; False where the method has others."""
        return True

    def compresses_prompts(self) -> bool:
        """Whether a prompt is treated as a whole when it is complete, instead of page by page."""
        return False

    def only_tokens(self) -> str | None:
        """Which tokens alone are compressed ("visual"), or None where all are."""
        return None

    def clauses(self, shape: LayerShape) -> list[str]:
        """Clauses that describe the scheme."""
        return []

    def cautions(self) -> list[str]:
        """Known weaknesses of the scheme, one sentence each."""
        return []

    def transforms(self) -> tuple[str, ...]:
        """Changes that the model's weights have to carry, as a manifest lists them."""
        return ()

    def required_tensors(self, shape: LayerShape) -> dict[str, PlanTensor]:
        """The tensors without which a scheme that uses the method cannot be served, by their names within a layer."""
        return {}

    @classmethod
    def check_layers(cls, schemes: Sequence[Any]) -> str | None:
        """Why these different schemes cannot be those of one model's layers, or None."""
        return None

    @classmethod
    def conventions(cls, layers: Sequence[tuple[Any, LayerShape]]) -> dict[str, Any]:
        """Conventions that are open to interpretation, as data for the manifest; `layers` use the method."""
        return {}
