"""CalibQuant (arXiv 2502.14882): whole prompts, or their visual tokens, at one scale per channel; shifted scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from kvconvert.methods.part import PRESET_SINKS, STRICT, LayerShape, Part, option

_SHIFT = "it is a shift of scores"
SPAN_BLOCK = 128  # tokens whose codes are packed together
_SPAN = {"key_granularity": "span", "value_granularity": "span"}
_TWO_BIT = _SPAN | {"tau2": 3.0}
_ONE_BIT = _TWO_BIT | {"key_bits": 1, "value_bits": 1}
_VISUAL = {"modality": "visual"}
_PAPER = {
    "calibquant-1bit": _ONE_BIT,
    "calibquant-2bit": _TWO_BIT,
    "calibquant-1bit-visual": _ONE_BIT | _VISUAL,
    "calibquant-2bit-visual": _TWO_BIT | _VISUAL,
}
# What calibration chooses has these values until then. For visual tokens at one bit, the constants by which the
# released code multiplies min and max, which is the same where these are opposite numbers; for text what was best on
# novels.
_RELEASED = {"key_clip_ratio": 0.5, "value_clip_ratio": 0.3}
# A channel's range over a long text serves none of its parts.
_TEXT = {"span_tokens": 256, "tau2": 0.0}
_OURS = {
    "calibquant-1bit": _TEXT | {"key_clip_ratio": 0.3, "value_clip_ratio": 0.3},
    "calibquant-2bit": _TEXT | {"key_clip_ratio": 0.6, "value_clip_ratio": 0.6},
    "calibquant-1bit-visual": _RELEASED,
    "calibquant-2bit-visual": {},
}


def _whole_blocks(tokens: int) -> int:
    """Refuse spans that end within a block of codes."""
    if tokens % SPAN_BLOCK:
        raise ValueError(f"choose a multiple of {SPAN_BLOCK}")
    return tokens


@dataclass(frozen=True, config=STRICT)
class CalibQuant(Part):
    """Spans of a prompt, tau and modality."""

    method = "CalibQuant"
    summary = "a complete prompt, or its visual tokens, becomes a span with one scale per channel; scores are shifted"
    source = "arXiv 2502.14882"
    presets = {name: fields | {"sink_tokens": PRESET_SINKS} | _OURS[name] for name, fields in _PAPER.items()}
    paper_presets = {f"{name}-paper": fields for name, fields in _PAPER.items()}
    plan_tensors = {
        "tau_grid": "float32 [n]: the values of tau1 and of tau2 that were tried",
        "tau_error": "float32 [n, n]: error of the attention weights with each pair and its best key clip ratio",
        "tau_output_error": "float32 [n, n]: the same of the attention output",
        "tau_key_clip_ratio": "float32 [n, n]: that key clip ratio",
        "tau_clip_ratio_grid": "float32 [r]: the key clip ratios that were tried",
        "tau_clip_ratio_error": "float32 [r, n, n]: error of the attention weights with every clip ratio and pair",
    }
    searched_fields = ("tau1", "tau2")

    key_granularity: Literal["group", "span"] = option(
        "group", "", "what shares a key channel's scale: a group of tokens in a page, or a whole prompt"
    )
    value_granularity: Literal["token", "span"] = option(
        "token", "", "what shares a value scale: channels of one token, or a channel of a whole prompt"
    )
    tau1: float = option(0.0, _SHIFT, "shift of a span's smallest score before the softmax", gt=-1e4, lt=1e4)
    tau2: float = option(0.0, _SHIFT, "shift of its largest score", gt=-1e4, lt=1e4)
    span_tokens: Annotated[int, AfterValidator(_whole_blocks)] = option(
        0,
        "it is a multiple of 128 tokens, or 0",
        "tokens of a prompt that share a span's scales, in the order of the prompt; 0 for all",
        ge=0,
    )
    modality: Literal["all", "visual", "audio"] = option(
        "all", "", "which tokens of a prompt go to its span: all, those of images and videos, or of audio"
    )

    @property
    def is_span(self) -> bool:
        """Whether whole prompts are quantized per channel."""
        return self.key_granularity == "span"

    def in_use(self) -> bool:
        """Whether there are spans."""
        return self.is_span

    def check(self) -> None:
        """Both sides are spans or neither is, and spans take no part in what pages have."""
        spans = self.is_span
        self.require(
            spans == (self.value_granularity == "span"),
            "value_granularity",
            "keys and values are both kept in spans, or neither is",
        )
        shifts = self.tau1 != 0 or self.tau2 != 0
        self.require(spans or not shifts, "tau2" if self.tau2 else "tau1", "scores are shifted for spans only")
        self.require(
            spans or self.modality == "all",
            "modality",
            "pages take a sequence's tokens as they come; only spans hold those of one modality",
        )
        self.require(
            spans or not self.span_tokens, "span_tokens", "pages have groups of tokens: set key_group_size instead"
        )
        if not spans:
            return
        later = "a span holds the whole prompt; later tokens stay in full precision anyway"
        why = {
            "token_norm": "a span has scales per channel and nothing per token",
            "boost_fraction": "channels are ranked page by page, and a span has no pages",
            "heavy_ratio": "spans keep the whole prompt; evict with group granularity",
            "key_recent_tokens": later,
            "value_recent_tokens": later,
        }
        for field, reason in why.items():
            self.require(getattr(self, field) in ("none", 0, None), field, reason)
        for field in ("key_bits", "value_bits"):
            self.require(getattr(self, field) < 16, field, "a span is quantized; choose 1, 2, 3, 4 or 8")

    def stores_group_scales(self) -> bool:
        """Scales are per channel of the whole span: none per token."""
        return not self.is_span

    def compresses_prompts(self) -> bool:
        """A complete prompt becomes a span."""
        return self.is_span

    def only_tokens(self) -> str | None:
        """Those of one modality."""
        return None if self.modality == "all" else self.modality

    def clauses(self, shape: LayerShape) -> list[str]:
        """Tokens that go to spans, their width, and the shift."""
        what = "prompts" if self.modality == "all" else f"{self.modality} tokens of prompts"
        length = f"spans of {self.span_tokens:,} tokens" if self.span_tokens else "spans"
        said = [f"{what} as {length}, {self.key_bits}-bit keys and {self.value_bits}-bit values per channel"]
        if self.tau1 or self.tau2:
            said.append(f"scores shifted by tau1 = {self.tau1:g}, tau2 = {self.tau2:g}")
        return said

    def cautions(self) -> list[str]:
        """Spans that hold text."""
        if not self.is_span or self.modality != "all":
            return []
        sentence = (
            "Spans of prompts are a poor choice for text, whose values have no channels that keep their range: pages "
            "of about the same size lose less, such as oscar-g128; for prompts that are mostly images take a scheme "
            'with modality = "visual", which leaves text exact.'
        )
        return [sentence]

    @classmethod
    def conventions(cls, layers: Sequence[tuple[Any, LayerShape]]) -> dict[str, Any]:
        """Tokens, groups and shift of a span."""
        shorter = {
            "shorter_spans": "where span_tokens is not 0, a prompt's tokens that go to spans are divided into spans of "
            "span_tokens in their order, the last one shorter"
        }
        return {
            "span": (shorter if any(scheme.span_tokens for scheme, _ in layers) else {})
            | {
                "tokens": "a whole prompt after its sinks, per sequence; later tokens stay in full precision",
                "modality": "visual: of these only the tokens whose id is config.json's image_token_id or "
                "video_token_id (or image_token_index, video_token_index), audio: audio_token_id or audio_token_index; "
                "all others stay in full precision",
                "groups": "keys and values per channel over all tokens of the span",
                "tau": "a query's span scores x (after scaling) become (x - g) * max(0, 1 - (tau2 - tau1) / (d - g)) + "
                "g - tau1, g and d being their minimum and maximum over all spans; x - tau1 where d = g",
            }
        }


@dataclass(frozen=True, config=STRICT)
class TauSearch:
    """The part of it that calibration chooses."""

    tau_grid: list[Annotated[float, Field(gt=-1e4, lt=1e4)]] = Field(
        default_factory=lambda: [0.0, 1.0, 2.0, 3.0],
        min_length=1,
        description="values to try for tau1 and tau2 of spans",
        json_schema_extra={"values": "a list of shifts of scores"},
    )
    tau_per_layer: bool = option(False, "true or false", "one pair (tau1, tau2) for each layer instead of one for all")

    # The paper searches both, once for all layers.
    paper = {}
    # Options of the whole model, which a single layer cannot have.
    whole_model = ("tau_grid", "tau_per_layer")

    @property
    def searches_tau(self) -> bool:
        """Whether tau1 and tau2 are to be chosen."""
        return not {*CalibQuant.searched_fields} & {*self.given}

    def searched(self, scheme: Any) -> list[str]:
        """The fields that are to be chosen, for messages."""
        return ["tau1 and tau2"] if scheme is not None and scheme.is_span and self.searches_tau else []

    @classmethod
    def unused(cls, layers: Sequence[tuple[Any, Any]]) -> str | None:
        """Why none of these layers (scheme, search) looks at the options, or None where one does."""
        spans = [search.searches_tau for scheme, search in layers if scheme is not None and scheme.is_span]
        if any(spans):
            return None
        return "tau1 or tau2 is given" if spans else "scores are shifted for spans only"
