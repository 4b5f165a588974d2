"""KIVI (arXiv 2402.02750): keys quantized per channel over groups of tokens, values per token over groups of channels.

The quantizer that every other method builds on, and what it leaves in full precision: the first tokens of a sequence
(attention sinks) and the newest ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from kvconvert.errors import RecipeError, counted
from kvconvert.methods.part import PRESET_SINKS, STRICT, LayerShape, Part, one_of, option, stated

BITS = (1, 2, 3, 4, 8, 16)
GROUP_SIZES = (16, 32, 64, 128)
PAGE_SIZES = (128,)

# Of latent attention (MLA), whose latents are stored as keys and RoPE parts as values (benchmarks/RESULTS.md).
_LATENT = {"key_group_size": 128, "value_bits": 8, "value_group_size": 64, "sink_tokens": PRESET_SINKS}

_Bits = Annotated[int, AfterValidator(one_of(BITS))]
_GroupSize = Annotated[int, AfterValidator(one_of(GROUP_SIZES))]


@dataclass(frozen=True, config=STRICT)
class Kivi(Part):
    """Widths, groups and windows."""

    method = "KIVI"
    summary = "keys per channel, values per token, in groups with a scale each; newest and first tokens exact"
    source = "arXiv 2402.02750"
    presets = {
        "kivi": {"sink_tokens": PRESET_SINKS},
        "latent-4bit": _LATENT | {"key_bits": 4},
        "latent-2bit": _LATENT | {"key_bits": 2, "key_clip_ratio": 0.85},
    }
    paper_presets = {"kivi-paper": {"value_recent_tokens": 128}}

    key_bits: _Bits = option(2, stated(BITS), "width of a stored key's code; 16 is the model's own dtype")
    value_bits: _Bits = option(2, stated(BITS), "the same for values")
    key_group_size: _GroupSize = option(
        32, stated(GROUP_SIZES), "tokens that share one scale and zero point of a key channel"
    )
    value_group_size: _GroupSize = option(
        32,
        stated(GROUP_SIZES),
        "channels that share one scale and zero point of a value token; fitted to head sizes that it does not divide",
    )
    sink_tokens: int = option(
        0,
        "it is a number of tokens, 0 to 127: fewer than a page's",
        "first tokens of a sequence that stay in full precision",
        ge=0,
        lt=128,
    )
    key_recent_tokens: int = option(
        0,
        "it is a number of tokens, 0 to 16,777,216",
        "newest tokens whose keys stay in full precision besides the page being filled",
        ge=0,
        le=2**24,
    )
    value_recent_tokens: int = option(
        0, "it is a number of tokens, 0 to 16,777,216", "the same for values", ge=0, le=2**24
    )
    page_size: Annotated[int, AfterValidator(one_of(PAGE_SIZES))] = option(
        128, "choose 128, for pages hold 128 tokens in this version", "tokens that are quantized together"
    )

    @property
    def quantizes(self) -> bool:
        """Whether keys or values are stored in fewer than 16 bits."""
        return min(self.key_bits, self.value_bits) < 16

    def value_group_for(self, head_dim: int) -> int:
        """Channels per value group for a head size: `value_group_size`, or the largest fitting divisor.

        A group cannot be larger than the head, and has to divide it. Where `value_group_size` does not, the largest
        multiple of 8 below it that divides the head size is taken (for instance 24 for head size 48 and a group of 32),
        because codes are packed eight to a 16-bit lane at 2 bits. The manifest records the result.

        Raises:
            RecipeError: no such size exists.
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

    def clauses(self, shape: LayerShape) -> list[str]:
        """Widths and groups, unless another method says it; sinks and windows."""
        said = []
        if self.group_scales:
            said = [
                f"{self.key_bits}-bit keys in groups of {self.key_group_size} tokens",
                f"{self.value_bits}-bit values in groups of {shape.value_group_size} channels",
            ]
        if self.sink_tokens:
            said.append(f"first {counted(self.sink_tokens, 'token')} in full precision")
        for side, recent in (("keys", self.key_recent_tokens), ("values", self.value_recent_tokens)):
            if recent:
                said.append(f"{side} of the last {counted(recent, 'token')} in full precision")
        return said

    @classmethod
    def conventions(cls, layers: Sequence[tuple[Any, LayerShape]]) -> dict[str, Any]:
        """Quantizer, groups and packing."""
        return {
            "kv": {
                "keys_stored": "after q/k norm, RoPE and rotation; in full precision until their page is complete",
                "quantizer": "scale = (max - min) / (2^bits - 1), zero_point = min, code = round((x - zero_point) / "
                "scale), x = code * scale + zero_point; scale and zero_point are float16, codes are computed from the "
                "stored float16 values; scale 0 gives code 0",
                "key_groups": "per channel, over key_group_size consecutive tokens of a page",
                "value_groups": "per token, over value_group_size consecutive channels of a head",
                "lanes": "int16; of N fields of w bits along the packed axis (tokens for keys, channels for values) "
                "lane l holds in its bits j*w to j*w+w-1 field j*L + l, with L = N*w/16",
                "fields": "a code of 2, 4 or 8 bits is a field of w = bits; codes of 1 bit are paired to fields of w = "
                "2: of M rows across the packed axis (channels for keys, tokens for values, an odd number completed by "
                "zeros) bit 0 belongs to row i and bit 1 to row i + M/2; codes of 3 bits have in each lane M rows of "
                "their upper two bits, packed as codes of 2 bits, and behind them M/2 rows of their lowest bits, as "
                "codes of 1 bit",
            }
        }
