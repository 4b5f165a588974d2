"""What one layer's key-value cache looks like: `KVScheme`, its rules, and the presets named after papers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from kvconvert.errors import RecipeError

BITS = (1, 2, 4, 8, 16)
GROUP_SIZES = (16, 32, 64, 128)

# Fields of later methods: named, so that a recipe which asks for one is told that it is not there rather than misspelt.
NOT_YET = (
    "key_granularity",
    "value_granularity",
    "static_scales",
    "boost_fraction",
    "boost_select",
    "heavy_ratio",
    "recent_ratio",
    "allocation",
    "tau1",
    "tau2",
    "modality",
)


@dataclass(frozen=True)
class KVScheme:
    """How one attention layer stores keys and values once they leave the full-precision residual.

    Keys are quantized per channel over groups of `key_group_size` tokens, values per token over groups of channels.
    Sixteen bits mean unquantized pages. All counts are tokens per sequence.

    Attributes:
        key_bits, value_bits: width of a stored code: 1, 2, 4, 8, or 16 for the model's own dtype.
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
        sink_tokens: first tokens of a sequence that stay in full precision.
        key_recent_tokens, value_recent_tokens: newest tokens guaranteed to stay in full precision besides the page
            being filled. They have to be equal in this version.
        key_range, value_range: shrink each group's (min, max) about its midpoint by this factor before quantizing.
        page_size: tokens flushed together.
    """

    key_bits: int = 2
    value_bits: int = 2
    key_group_size: int = 32
    value_group_size: int = 32
    rotate_keys: Literal["none", "hadamard"] = "none"
    rotate_values: Literal["none", "folded", "online"] = "none"
    token_norm: Literal["none", "joint", "per_head"] = "none"
    token_norm_measure: Literal["l2", "mean_abs"] = "l2"
    sink_tokens: int = 0
    key_recent_tokens: int = 0
    value_recent_tokens: int = 0
    key_range: float = 1.0
    value_range: float = 1.0
    page_size: int = 128

    def __post_init__(self) -> None:
        def require(ok: bool, field: str, rule: str) -> None:
            if not ok:
                raise RecipeError(f"[kv] {field} = {getattr(self, field)!r} is not possible: {rule}.")

        for field in ("key_bits", "value_bits"):
            require(type(getattr(self, field)) is int and getattr(self, field) in BITS, field, f"choose one of {BITS}")
        require(self.page_size == 128, "page_size", "pages hold 128 tokens in this version")
        for field in ("key_group_size", "value_group_size"):
            value = getattr(self, field)
            require(type(value) is int and value in GROUP_SIZES, field, f"choose one of {GROUP_SIZES}")
        require(self.rotate_keys in ("none", "hadamard"), "rotate_keys", "choose none or hadamard")
        require(self.rotate_values in ("none", "folded", "online"), "rotate_values", "choose none, folded or online")
        require(self.token_norm in ("none", "joint", "per_head"), "token_norm", "choose none, joint or per_head")
        require(self.token_norm_measure in ("l2", "mean_abs"), "token_norm_measure", "choose l2 or mean_abs")
        for field in ("sink_tokens", "key_recent_tokens", "value_recent_tokens"):
            value = getattr(self, field)
            require(type(value) is int and value >= 0, field, "it is a number of tokens, 0 or more")
        require(
            self.key_recent_tokens == self.value_recent_tokens,
            "value_recent_tokens",
            f"it has to equal key_recent_tokens ({self.key_recent_tokens}); separate windows for K and V are not "
            "available yet",
        )
        for field in ("key_range", "value_range"):
            value = getattr(self, field)
            require(isinstance(value, int | float) and 0 < value <= 1, field, "choose a factor above 0 and at most 1")
        require(
            self.key_bits < 16 or self.token_norm == "none",
            "token_norm",
            "16-bit keys are stored as they are, so a norm would only add its own rounding; set it to none",
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> KVScheme:
        """Build a scheme from plain values; an unknown field is refused by name."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name in NOT_YET:
                raise RecipeError(f"[kv] {name} belongs to a method that this version does not have yet; remove it.")
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
        multiple of 8 below it that divides the head size is taken (for instance 24 for head size 48 and a group of
        32), because codes are packed eight to a 16-bit lane at 2 bits. The manifest records the result.
        """
        if head_dim <= self.value_group_size:
            return head_dim
        for size in range(self.value_group_size, 7, -1):
            if head_dim % size == 0 and (size % 8 == 0):
                return size
        raise RecipeError(
            f"[kv] value_group_size = {self.value_group_size} does not suit a head size of {head_dim}: no multiple "
            "of 8 up to it "
            f"divides the head size; the model's cache cannot be quantized in groups."
        )


PRESETS: dict[str, KVScheme] = {
    "kivi": KVScheme(),
    "oscar": KVScheme(rotate_keys="hadamard", rotate_values="folded", token_norm="joint"),
    "oscar-g128": KVScheme(
        key_group_size=128, value_group_size=128, rotate_keys="hadamard", rotate_values="folded", token_norm="joint"
    ),
}
