"""What one layer's key-value cache looks like: `KVScheme`, its rules, and the presets named after papers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from kvconvert.errors import RecipeError

BITS = (1, 2, 4, 8, 16)
GROUP_SIZES = (16, 32, 64, 128)
CHOICES = {
    "key_granularity": ("group", "span"),
    "value_granularity": ("token", "span"),
    "rotate_keys": ("none", "hadamard"),
    "rotate_values": ("none", "folded", "online"),
    "token_norm": ("none", "joint", "per_head"),
    "token_norm_measure": ("l2", "mean_abs"),
    "boost_select": ("dynamic", "calibrated"),
    "static_scales": ("none", "calibrated"),
    "allocation": ("uniform", "pyramid", "var_prop", "var_inv", "calibrated"),
    "modality": ("all", "visual", "audio"),
}


@dataclass(frozen=True)
class KVScheme:
    """How one attention layer stores keys and values once they leave full precision.

    Two families. Page methods quantize every 128 tokens: keys per channel over groups of `key_group_size` tokens,
    values per token over groups of channels. Whole-prompt methods wait until the prompt is complete (`KVCache.seal`):
    with span granularity the whole prompt, or what it holds of one `modality`, is quantized per channel and later
    tokens stay in full precision (CalibQuant); with `heavy_ratio` each KV head keeps only some of the prompt's tokens,
    which then go to pages (MiniKV). Sixteen bits mean unquantized. All counts are tokens per sequence.

    Attributes:
        key_bits, value_bits: width of a stored code: 1, 2, 4, 8, or 16 for the model's own dtype.
        key_granularity: "group" or "span" of tokens; value_granularity: "token" or "span". Both are spans or neither.
        key_group_size: tokens that share one scale and minimum of a key channel: 16, 32, 64 or 128; divides
            `page_size`.
        value_group_size: channels that share one scale and minimum of a value token; see `value_group_for` for head
            sizes that it does not divide.
        rotate_keys: "hadamard" multiplies q and k by the head's orthonormal Hadamard matrix after RoPE (OScaR, section
            4.2).
        rotate_values: "folded" says that W_V and W_O carry the rotation; "online" rotates V on write and rotates the
            attention output back; "none".
        token_norm: "joint" divides each key token by one RMS over all KV heads before quantization (OScaR's omni-token
            scaling); "per_head" takes one RMS per head; "none".
        token_norm_measure: "l2" (root mean square) or "mean_abs" (OScaR, table 10).
        boost_fraction: share of each head's key channels that get twice the bits (Kitty); 0 for none.
        boost_select: "dynamic" ranks the channels of each page by mean |K| (Kitty); "calibrated" takes fixed channels
            per layer and head from the KV plan.
        static_scales: "calibrated" takes one scale and minimum for each key and each value channel of the layer from
            the KV plan, so that pages hold codes alone and the group sizes mean nothing; 4 or 8 bits, or 16 on one
            side.
        sink_tokens: first tokens of a sequence that stay in full precision.
        key_recent_tokens, value_recent_tokens: newest tokens guaranteed to stay in full precision besides the page
            being filled.
        heavy_ratio, recent_ratio: shares of a sequence's unpadded prompt that each KV head keeps: tokens with the
            highest attention received, and the newest ones (MiniKV). None keeps everything.
        allocation: how `heavy_ratio`, the mean over layers, is spread: uniform; pyramid with `pyramid_depth`; in
            proportion (var_prop) or inverse proportion (var_inv) to the variance of attention received; or calibrated,
            from the measured curve of lost attention. The last three need calibration.
        pyramid_depth: layer 0 gets 2x - x/depth, the last layer x/depth.
        tau1, tau2: CalibQuant's shift of a span's smallest and largest score before the softmax.
        key_clip_ratio, value_clip_ratio: shrink each group's (min, max) about its midpoint by this factor before quantizing.
        modality: which tokens of a prompt go to its span: all; visual, those of images and videos; or audio. The others
            stay in full precision (CalibQuant compresses visual tokens). Spans only.
        page_size: tokens flushed together.
    """

    key_bits: int = 2
    value_bits: int = 2
    key_granularity: Literal["group", "span"] = "group"
    value_granularity: Literal["token", "span"] = "token"
    key_group_size: int = 32
    value_group_size: int = 32
    rotate_keys: Literal["none", "hadamard"] = "none"
    rotate_values: Literal["none", "folded", "online"] = "none"
    token_norm: Literal["none", "joint", "per_head"] = "none"
    token_norm_measure: Literal["l2", "mean_abs"] = "l2"
    boost_fraction: float = 0.0
    boost_select: Literal["dynamic", "calibrated"] = "dynamic"
    static_scales: Literal["none", "calibrated"] = "none"
    sink_tokens: int = 0
    key_recent_tokens: int = 0
    value_recent_tokens: int = 0
    heavy_ratio: float | None = None
    recent_ratio: float | None = None
    allocation: Literal["uniform", "pyramid", "var_prop", "var_inv", "calibrated"] = "uniform"
    pyramid_depth: float = 7.0
    tau1: float = 0.0
    tau2: float = 0.0
    key_clip_ratio: float = 1.0
    value_clip_ratio: float = 1.0
    modality: Literal["all", "visual", "audio"] = "all"
    page_size: int = 128

    def __post_init__(self) -> None:
        self._check_values()
        self._check_combination()

    def _require(self, ok: bool, field: str, rule: str) -> None:
        if not ok:
            raise RecipeError(f"[kv] {field} = {getattr(self, field)!r} is not possible: {rule}.")

    def _check_values(self) -> None:
        require = self._require
        for field in ("key_bits", "value_bits"):
            require(type(getattr(self, field)) is int and getattr(self, field) in BITS, field, f"choose one of {BITS}")
        require(self.page_size == 128, "page_size", "pages hold 128 tokens in this version")
        for field in ("key_group_size", "value_group_size"):
            value = getattr(self, field)
            require(type(value) is int and value in GROUP_SIZES, field, f"choose one of {GROUP_SIZES}")
        for field, choices in CHOICES.items():
            require(getattr(self, field) in choices, field, f"choose {' or '.join(choices)}")
        for field in ("sink_tokens", "key_recent_tokens", "value_recent_tokens"):
            value = getattr(self, field)
            require(type(value) is int and value >= 0, field, "it is a number of tokens, 0 or more")
        for field in ("key_clip_ratio", "value_clip_ratio"):
            value = getattr(self, field)
            require(_is_number(value) and 0 < value <= 1, field, "choose a factor above 0 and at most 1")
        for field in ("heavy_ratio", "recent_ratio"):
            value = getattr(self, field)
            require(
                value is None or (_is_number(value) and 0 <= value <= 1), field, "it is a share of the prompt, 0 to 1"
            )
        require(
            _is_number(self.boost_fraction) and 0 <= self.boost_fraction <= 1,
            "boost_fraction",
            "it is a share of the channels, 0 to 1",
        )
        require(_is_number(self.pyramid_depth) and self.pyramid_depth >= 1, "pyramid_depth", "choose 1 or more")
        for field in ("tau1", "tau2"):
            value = getattr(self, field)
            require(_is_number(value) and abs(value) < 1e4, field, "it is a shift of scores")

    def _check_combination(self) -> None:
        require = self._require
        spans = self.is_span
        require(
            spans == (self.value_granularity == "span"),
            "value_granularity",
            "keys and values are both kept in spans, or neither is",
        )
        require(
            self.key_bits < 16 or self.token_norm == "none",
            "token_norm",
            "16-bit keys are stored as they are, so a norm would only add its own rounding",
        )
        require(
            (self.heavy_ratio is None) == (self.recent_ratio is None),
            "recent_ratio",
            "heavy_ratio and recent_ratio go together",
        )
        require(self.evicts or self.allocation == "uniform", "allocation", "it spreads a heavy_ratio, which is not set")
        require(
            not (self.evicts and self.token_norm == "joint"),
            "token_norm",
            "after eviction each KV head holds other tokens, so no norm is common to all heads; choose per_head",
        )
        require(
            self.boost_fraction == 0 or self.key_bits in (1, 2, 4),
            "boost_fraction",
            "boosted channels have twice the bits of 1-, 2- or 4-bit keys",
        )
        require(self.boost_fraction > 0 or self.boost_select == "dynamic", "boost_select", "no channel is boosted")
        if self.static_scales == "calibrated":
            self._check_static()
        shifts = self.tau1 != 0 or self.tau2 != 0
        require(spans or not shifts, "tau2" if self.tau2 else "tau1", "scores are shifted for spans only")
        require(
            spans or self.modality == "all",
            "modality",
            "pages take a sequence's tokens as they come; only spans hold those of one modality",
        )
        if spans:
            why = {
                "token_norm": "a span has scales per channel and nothing per token",
                "boost_fraction": "channels are ranked page by page, and a span has no pages",
                "heavy_ratio": "spans keep the whole prompt; evict with group granularity",
                "key_recent_tokens": "a span holds the whole prompt; later tokens stay in full precision anyway",
                "value_recent_tokens": "a span holds the whole prompt; later tokens stay in full precision anyway",
            }
            for field, reason in why.items():
                require(getattr(self, field) in ("none", 0, None), field, reason)
            for field in ("key_bits", "value_bits"):
                require(getattr(self, field) < 16, field, "a span is quantized; choose 1, 2, 4 or 8")

    def _check_static(self) -> None:
        require = self._require
        for field in ("key_bits", "value_bits"):
            require(
                getattr(self, field) in (4, 8, 16),
                field,
                "static_scales, which hold for all tokens, are too coarse for it; choose 4 or 8, or 16 on one side",
            )
        require(
            min(self.key_bits, self.value_bits) < 16,
            "static_scales",
            "keys and values of 16 bits have no scales at all",
        )
        require(
            not self.is_span, "static_scales", "a span takes its scales from its own tokens; keep group granularity"
        )
        require(self.token_norm == "none", "static_scales", "a norm is stored with each token; set token_norm to none")
        require(
            self.boost_fraction == 0,
            "static_scales",
            "channels of a static page all have one width; set boost_fraction to 0",
        )

    @property
    def is_span(self) -> bool:
        """Whether whole prompts are quantized per channel (CalibQuant)."""
        return self.key_granularity == "span"

    @property
    def evicts(self) -> bool:
        """Whether only some of the prompt's tokens are kept (MiniKV)."""
        return self.heavy_ratio is not None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> KVScheme:
        """Build a scheme from plain values; an unknown field is refused by name."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise RecipeError(f"[kv] {name} is not a field of a KV scheme; known are {', '.join(sorted(known))}.")
        return cls(**values)

    @classmethod
    def preset(cls, name: str) -> KVScheme:
        """The scheme that a paper describes, by its preset name."""
        if name not in PRESETS:
            raise RecipeError(f"[kv] preset {name!r} is not available; choose one of {', '.join(PRESETS)}.")
        return PRESETS[name]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for the manifest."""
        return asdict(self)

    def with_online_rotation(self) -> KVScheme:
        """The same scheme for a model whose weights carry no fold: values rotated on write, outputs rotated back."""
        return replace(self, rotate_values="online") if self.rotate_values == "folded" else self

    def value_group_for(self, head_dim: int) -> int:
        """Channels per value group for a head size: `value_group_size`, or the largest fitting divisor.

        A group cannot be larger than the head, and has to divide it. Where `value_group_size` does not, the largest
        multiple of 8 below it that divides the head size is taken (for instance 24 for head size 48 and a group of 32),
        because codes are packed eight to a 16-bit lane at 2 bits. The manifest records the result.
        """
        if head_dim <= self.value_group_size:
            return head_dim
        for size in range(self.value_group_size, 7, -1):
            if head_dim % size == 0 and size % 8 == 0:
                return size
        raise RecipeError(
            f"[kv] value_group_size = {self.value_group_size} does not suit a head size of {head_dim}: no multiple of "
            "8 up to it divides the head size; the model's cache cannot be quantized in groups."
        )

    def boosted_for(self, head_dim: int) -> int:
        """Boosted key channels of each head: the nearest whole number to the fraction."""
        return round(self.boost_fraction * head_dim)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


_OSCAR = KVScheme(rotate_keys="hadamard", rotate_values="folded", token_norm="joint")
_KITTY = KVScheme(
    key_group_size=128, value_group_size=128, boost_fraction=0.125, sink_tokens=32, value_recent_tokens=128
)
_SPAN = KVScheme(key_granularity="span", value_granularity="span")
_ONE_BIT_SPAN = replace(_SPAN, key_bits=1, value_bits=1, tau2=3.0, key_clip_ratio=0.5, value_clip_ratio=0.3)
_MINIKV = KVScheme(key_group_size=16, value_group_size=16, heavy_ratio=0.25, recent_ratio=0.25)
PRESETS: dict[str, KVScheme] = {
    "kivi": KVScheme(key_recent_tokens=0, value_recent_tokens=0),
    "oscar": _OSCAR,
    "oscar-g128": replace(_OSCAR, key_group_size=128, value_group_size=128),
    "kitty": _KITTY,
    "kitty-pro": replace(_KITTY, boost_fraction=0.25),
    "calibquant-1bit": _ONE_BIT_SPAN,
    "calibquant-2bit": replace(_SPAN, tau2=3.0),
    "calibquant-1bit-visual": replace(_ONE_BIT_SPAN, modality="visual"),
    "calibquant-2bit-visual": replace(_SPAN, tau2=3.0, modality="visual"),
    "minikv": _MINIKV,
    "minikv-pyramid": replace(_MINIKV, allocation="pyramid"),
}
