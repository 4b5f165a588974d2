"""`KVScheme`: what one layer's key-value cache looks like, composed of the methods' parts.

Recipes and manifests have flat names; in memory a scheme is also read as two sides, keys and values, and what becomes
of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass as validated_dataclass

from kvconvert.arguments import checked
from kvconvert.errors import RecipeError, did_you_mean
from kvconvert.methods.calibquant import CalibQuant, TauSearch
from kvconvert.methods.keys import ErrorFeedback, KeyCenter, KeyRoundingSearch, KeyTreatmentSearch, WindowWidth
from kvconvert.methods.kitty import Kitty
from kvconvert.methods.kivi import Kivi
from kvconvert.methods.kvzip import KVzip
from kvconvert.methods.minikv import MiniKV
from kvconvert.methods.oscar import Oscar
from kvconvert.methods.part import STRICT, LayerShape, Part, PlanTensor
from kvconvert.methods.scales import PRESET_STATES, ClipRatio, ClipRatioSearch, ScaleBits, StateBits, StaticScales


@dataclass(frozen=True)
class SchemeSide:
    """How keys or values are stored; the fields are those of `KVScheme` behind `key_` or `value_`.

    Attributes:
        name: which of the two.
        bits: of a code, 16 for the model's own dtype.
        group_size: tokens of a key channel, or channels of a value token, that share a scale.
        scale_bits: of a group's scale, and of its zero point.
        recent_tokens: newest tokens in full precision besides the page being filled.
        clip_ratio: factor by which a group's (min, max) shrinks.
        static: whether calibration has fixed the scales of what is quantized.
    """

    name: Literal["key", "value"]
    bits: int
    group_size: int
    scale_bits: int
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


_FLAT = ("bits", "group_size", "scale_bits", "recent_tokens", "clip_ratio")


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
    """A complete prompt is reduced to its sink tokens, heavy hitters and newest tokens (MiniKV, KVzip); these go to
    pages.

    Attributes:
        heavy_ratio, recent_ratio: shares of the prompt.
        selection: by what heavy hitters are chosen, see `KVzip`.
    """

    heavy_ratio: float
    recent_ratio: float
    selection: str = "attention"
    modality = "all"

    @property
    def heads_apart(self) -> bool:
        """Whether all heads share a budget."""
        return self.selection != "attention"

    def budget(self, tokens: int) -> tuple[int, int]:
        """Heavy hitters and newest tokens that each KV head keeps of a prompt; halves are rounded to even."""
        return round(self.heavy_ratio * tokens), round(self.recent_ratio * tokens)

    def shared_pages(self, tokens: int, heads: int, sink_tokens: int, page_size: int) -> int:
        """Pages of one head that a layer of `heads` KV heads keeps of a prompt on average, where heads share a budget.

        Every head keeps its sink tokens and the newest ones; none keeps all, or a page that is not full. 0 for a prompt
        of a page, of which nothing is evicted.
        """
        whole = max(0, tokens - 1) // page_size
        always = min(whole, -(-(sink_tokens + self.budget(tokens)[1]) // page_size))
        wanted = int((self.heavy_ratio + self.recent_ratio) * tokens * heads / page_size)
        return min(heads * whole, max(heads * always, wanted))


def prompt_of(scheme: Any) -> Pages | Spans | Evict:
    """The treatment of a prompt, from a scheme's flat fields."""
    if scheme.is_span:
        return Spans(scheme.span_tokens, scheme.modality)
    return Evict(scheme.heavy_ratio, scheme.recent_ratio, scheme.selection) if scheme.evicts else Pages()


PARTS: tuple[type[Part], ...] = (
    Kivi,
    Oscar,
    Kitty,
    CalibQuant,
    MiniKV,
    KVzip,
    StaticScales,
    ScaleBits,
    ClipRatio,
    ErrorFeedback,
    KeyCenter,
    StateBits,
)
SEARCHES = (KeyTreatmentSearch, ClipRatioSearch, KeyRoundingSearch, TauSearch, WindowWidth)
_FROM_CALIBRATION = tuple(part.from_calibration for part in PARTS if part.from_calibration is not None)


# Python collects a dataclass's fields from its last base to its first.
@validated_dataclass(frozen=True, config=STRICT)
class _Fields(
    StateBits,
    KeyCenter,
    ErrorFeedback,
    ClipRatio,
    ScaleBits,
    StaticScales,
    KVzip,
    MiniKV,
    CalibQuant,
    Kitty,
    Oscar,
    Kivi,
):
    """The fields of all parts."""

    def __post_init__(self) -> None:
        for part in PARTS:
            part.check(self)


class KVScheme(_Fields):
    """How one attention layer stores keys and values once they leave full precision.

    Two families. Page methods quantize every 128 tokens: keys per channel over groups of `key_group_size` tokens,
    values per token over groups of channels. Whole-prompt methods wait until the prompt is complete (`KVCache.seal`):
    with span granularity the whole prompt, or what it holds of one `modality`, is quantized per channel and later
    tokens stay in full precision (CalibQuant); with `heavy_ratio` each KV head keeps only some of the prompt's tokens,
    which then go to pages (MiniKV). All counts are tokens per sequence.

    Args:
        fields: those of the parts in `kvconvert.methods`, by name; docs/bundle.md has a table of them all. What is not
            given keeps its default, with which a method is not used.

    Raises:
        RecipeError: an unknown field, a value or a combination that is not possible, with the rule that it breaks.
    """

    if not TYPE_CHECKING:  # editors and type checkers know the fields from the dataclass

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise _refusal(error) from error

    @classmethod
    @checked
    def from_dict(cls, values: Mapping[str, Any]) -> KVScheme:
        """Build a scheme from plain values; an unknown field is refused by name."""
        return cls(**values)

    @classmethod
    @checked
    def preset(cls, name: Annotated[str, "a preset's name"]) -> KVScheme:
        """The scheme of a preset: `NAME`, or for comparison `NAME-paper`, what the paper describes to the letter."""
        refuse_renamed(name)
        if name in RECIPES:
            raise RecipeError(
                f"{name!r} is a recipe, from which `kvconvert convert` makes a bundle, and a KV scheme is asked for: "
                f"{RECIPES[name]}."
            )
        if name not in PRESETS:
            raise RecipeError(f"[kv] preset {name!r} is not available; {did_you_mean(name, PRESETS, RECIPES)}")
        return PRESETS[name]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for the manifest."""
        return asdict(self)

    @cached_property
    def keys(self) -> SchemeSide:
        """How keys are stored."""
        return SchemeSide.of(self, "key")

    @cached_property
    def values(self) -> SchemeSide:
        """How values are stored."""
        return SchemeSide.of(self, "value")

    @property
    def sides(self) -> tuple[SchemeSide, SchemeSide]:
        """Keys and values."""
        return self.keys, self.values

    @property
    def exact_tokens(self) -> int:
        """Sink tokens and the longer window of newest tokens, which stay in full precision."""
        return self.sink_tokens + max(side.recent_tokens for side in self.sides)

    @cached_property
    def prompt(self) -> Pages | Spans | Evict:
        """The treatment of a complete prompt."""
        return prompt_of(self)

    def parts(self) -> list[type[Part]]:
        """The parts in use; first the one that decides what scales there are."""
        used = [part for part in PARTS if part.in_use(self)]
        return sorted(used, key=lambda part: part.stores_group_scales(self))

    @property
    def group_scales(self) -> bool:
        """Whether pages hold a scale and zero point for each group."""
        return all(part.stores_group_scales(self) for part in PARTS)

    @property
    def fits_latents(self) -> bool:
        """Whether latent attention (MLA) can be stored so: latents as keys, and RoPE parts as values of 8 bits or more.

        Nothing of it may follow from calibration, which knows keys and values per head.
        """
        calibrated = not self.group_scales or self.needs_calibration() is not None
        return (
            self.value_bits >= 8
            and not self.boost_fraction
            and self.token_norm == "none"
            and not calibrated
            and not self.compresses_prompts()
        )

    def compresses_prompts(self) -> bool:
        """Whether prompts are treated as a whole when they are complete, instead of page by page."""
        return any(part.compresses_prompts(self) for part in PARTS)

    def clauses(self, shape: LayerShape) -> list[str]:
        """Clauses that describe the scheme, method by method."""
        return [clause for part in self.parts() for clause in part.clauses(self, shape)]

    def cautions(self) -> list[str]:
        """Known weaknesses of the scheme, one sentence each."""
        return [sentence for part in PARTS for sentence in part.cautions(self)]

    def only_tokens(self) -> str | None:
        """Which tokens alone are compressed, or None where all are."""
        return next((tokens for part in PARTS if (tokens := part.only_tokens(self)) is not None), None)

    def transforms(self) -> tuple[str, ...]:
        """Changes that the model's weights have to carry."""
        return tuple(change for part in PARTS for change in part.transforms(self))

    def needs_calibration(self) -> str | None:
        """A field whose value follows from calibration alone, or None."""
        return next((field for field, values, _ in _FROM_CALIBRATION if getattr(self, field) in values), None)

    def uncalibrated(self) -> KVScheme:
        """The scheme as it stands until calibration has measured what it needs."""
        return replace(self, **{field: before for field, _, before in _FROM_CALIBRATION if before is not None})

    def required_tensors(self, shape: LayerShape) -> dict[str, PlanTensor]:
        """The KV plan's tensors without which the scheme cannot be served, by their names within a layer."""
        return {name: wanted for part in self.parts() for name, wanted in part.required_tensors(self, shape).items()}


def _refusal(error: ValidationError) -> RecipeError:
    """The first thing that pydantic found, in one sentence."""
    first = error.errors()[0]
    name = str(first["loc"][0])
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return RecipeError(f"[kv] {name} is not a field of a KV scheme; {did_you_mean(name, sorted(FIELDS))}")
    return RecipeError(f"[kv] {name} = {first['input']!r} is not possible: {FIELDS[name].rule}.")


@dataclass(frozen=True)
class FieldInfo:
    """A field, for messages and documentation.

    Attributes:
        name: of the field.
        method: of the part that it belongs to.
        default: its value without the method.
        rule: what is possible.
        meaning: one clause.
    """

    name: str
    method: str
    default: Any
    rule: str
    meaning: str


def _describe_fields() -> dict[str, FieldInfo]:
    found = {}
    for part in PARTS:
        for name, info in part.__pydantic_fields__.items():
            literal = getattr(info.annotation, "__args__", ())
            rule = (info.json_schema_extra or {})["values"] or f"choose {' or '.join(map(str, literal))}"
            found[name] = FieldInfo(name, part.method, info.default, rule, info.description)
    return found


FIELDS: dict[str, FieldInfo] = _describe_fields()
PRESETS: dict[str, KVScheme] = {
    name: KVScheme(**PRESET_STATES | values) for part in PARTS for name, values in part.presets.items()
}
PAPER_PRESETS: dict[str, KVScheme] = {
    name: KVScheme(**values) for part in PARTS for name, values in part.paper_presets.items()
}
PRESETS |= PAPER_PRESETS
# What a layer without a scheme holds when its neighbors have one: pages of the model's own dtype.
UNQUANTIZED = KVScheme(key_bits=16, value_bits=16)
_RENAMED = {f"{name}-paper": f"{name}-plain" for name in MiniKV.presets}
# Every tensor that some method may leave in the KV plan of a layer, with its meaning.
PLAN_TENSORS: dict[str, str] = {name: meaning for part in PARTS for name, meaning in part.plan_tensors.items()}
# In plans of earlier versions; nothing reads them.
FORMER_PLAN_TENSORS = ("attention_variance",)
# Fields that calibration chooses unless a recipe states them.
SEARCHED_FIELDS: tuple[str, ...] = tuple(field for part in PARTS for field in part.searched_fields)


@validated_dataclass(frozen=True, config=STRICT)
class KVCalibration(WindowWidth, TauSearch, KeyRoundingSearch, ClipRatioSearch, KeyTreatmentSearch):
    """Options of calibration for the cache; they are no part of a `KVScheme`, which describes the outcome alone.

    Attributes:
        given: those of `SEARCHED_FIELDS` that the recipe states, which are therefore not searched.
    """

    given: list[str] = Field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The options as plain values."""
        return asdict(self)

    def searched(self, scheme: KVScheme | None) -> list[str]:
        """The fields of a scheme that are to be chosen, for messages."""
        return [field for search in SEARCHES for field in search.searched(self, scheme)]


# Presets of recipes that are none of a cache, and what to give for their cache.
RECIPES = dict.fromkeys(("kv-only", "rtn"), "give 'default', whose cache it has") | {
    "auto": "convert the model and load the bundle, for it chooses widths by measuring the model, or give 'default'",
    "weights-only": "leave the cache out, for it changes none",
}


def refuse_renamed(preset: str | None) -> None:
    """Say what a preset of an earlier version is called now (RecipeError)."""
    if preset in _RENAMED:
        raise RecipeError(
            f"The preset {preset} is called {_RENAMED[preset]}, for it is not the paper's to the letter: it leaves up "
            "to 127 of the kept prompt tokens in full precision, the paper up to 15."
        )


def preset_calibration(name: str) -> KVCalibration:
    """Options of calibration for a preset; for one of `PAPER_PRESETS` those that some paper has."""
    if name not in PAPER_PRESETS:
        own = {
            option: value
            for search in SEARCHES
            for option, value in getattr(search, "presets", {}).get(name, {}).items()
        }
        return KVCalibration(**own)
    return KVCalibration(**{option: value for search in SEARCHES for option, value in search.paper.items()})


OPTIONS: tuple[str, ...] = tuple(field.name for field in fields(KVCalibration) if field.name != "given")
# Options of the whole model, each with the search that it belongs to.
WHOLE_MODEL_OPTIONS: dict[str, Any] = {
    name: search for search in SEARCHES for name in getattr(search, "whole_model", ())
}


def layer_conventions(layers: Sequence[tuple[KVScheme, LayerShape]]) -> dict[str, Any]:
    """Conventions of the schemes of a model's layers that are open to interpretation, as data for the manifest."""
    known: dict[str, Any] = {}
    for part in PARTS:
        using = [(scheme, shape) for scheme, shape in layers if part.in_use(scheme)]
        if using:
            known |= part.conventions(using)
    return known


def check_layers(schemes: Sequence[KVScheme]) -> str | None:
    """Why these different schemes cannot be those of one model's layers, as the end of a sentence, or None."""
    return next((reason for part in PARTS if (reason := part.check_layers(schemes)) is not None), None)
