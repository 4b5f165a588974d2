"""AWQ (arXiv 2306.00978), GPTQ (arXiv 2210.17323) and rounding: what becomes of a model's Linears."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

GROUP_SIZES = (16, 32, 64, 128, 256)
# What "auto" chooses from, the largest first. Smaller models lose more: groups of 32 take a quarter off the KL of those
# of 64 at 4% more bytes, and 64 half of that of 128 at 2 to 4% (benchmarks/WEIGHTS.md).
AUTO_GROUP_SIZES = (128, 64, 32)
SMALL_HIDDEN_SIZE = 2048  # of models below it, whose weights are given more bytes and calibration text by default


def auto_group_sizes(hidden_size: int) -> tuple[int, ...]:
    """Group sizes that "auto" chooses from for a model, the largest first."""
    largest = 128 if hidden_size >= 3584 else 64 if hidden_size >= SMALL_HIDDEN_SIZE else 32
    return tuple(size for size in AUTO_GROUP_SIZES if size <= largest)


def auto_kept_share(hidden_size: int) -> float:
    """How much larger a bundle becomes by default for the Linears that lose most, see `WeightsRecipe.kept_share`."""
    return 0.1 if hidden_size < SMALL_HIDDEN_SIZE else 0.0


# What a recipe can ask for.
Method = Literal["auto", "awq", "gptq", "awq+gptq", "rtn", "none"]
# Of a quantized module; "source" where the source has quantized it and does not tell how.
QuantizedBy = Literal["awq", "gptq", "awq+gptq", "rtn", "source"]
# Of a bundle's weights.
StoredMethod = Literal[QuantizedBy, "none"]
NIBBLES = "bits 4i to 4i+3 of the int32 in column c hold output channel 8c + [0,2,4,6,1,3,5,7][i]"
# Widths of a stored weight. AWQ's own layout has 4 bits, kvconvert's the others.
BITS = (2, 3, 4, 8)
AWQ_BITS = (4,)
KEPT_BITS = 16  # of a rule: these Linears are not quantized


class WeightsRule(BaseModel):
    """Linears whose weights have another width, an entry of [[weights.modules]].

    Attributes:
        match: pattern of module names as in the loaded model ("*.down_proj"); * stands for anything, dots included.
        index: numbers of the decoder layers that are meant; None for all.
        bits: the number of bits of their weights; 16 leaves them as they are.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    match: str = Field(default="*", min_length=1)
    index: list[int] | None = Field(default=None, min_length=1)
    bits: int

    def applies(self, name: str, layer: int) -> bool:
        """Whether a Linear of this name and decoder layer is meant."""
        return fnmatchcase(name, self.match) and (self.index is None or layer in self.index)

    def __str__(self) -> str:
        where = "" if self.index is None else f", index = {self.index}"
        return f'[[weights.modules]] match = "{self.match}"{where}'


class WeightsRecipe(BaseModel):
    """How Linears are quantized.

    Attributes:
        method: "awq" searches scales and clips, "gptq" makes up for each column's rounding error in the columns after
            it, "awq+gptq" does so on the scaled weights, "rtn" rounds to nearest, "none" keeps every weight. "auto"
            becomes "awq+gptq" once the model is known, or "awq" where it has routed experts, for each of which GPTQ
            would keep sums.
        bits: the number of bits of a stored weight, 2, 3, 4 or 8; means nothing with "none".
        group_size: inputs that share one scale and zero point, or "auto", which becomes the largest of
            `auto_group_sizes` that divides the inputs of every Linear to be quantized once the model is known; means
            nothing with "none".
        average_bits: stored bits per quantized weight, scales and zero points included, that are spent by measuring;
            `bits` and `modules` then say nothing and have to be left out.
        modules: Linears of another width; where several entries apply to one, the last of them counts.
        kept_share: share of the bundle's bytes that may be added to leave the Linears as they are that lose most at 4
            bits, by measuring; half of the weights at most. None becomes what `auto_kept_share` says for a dense model
            where the method is "auto" and all widths are 4 bits; it means 0 elsewhere.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: Method = "auto"
    bits: int = 4
    group_size: int | Literal["auto"] = "auto"
    average_bits: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    modules: list[WeightsRule] = []
    kept_share: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)

    @field_validator("group_size", mode="plain")
    @classmethod
    def _size_or_auto(cls, value: Any) -> Any:
        if value != "auto" and type(value) is not int:
            raise ValueError(f'choose "auto" or one of {", ".join(map(str, GROUP_SIZES))}')
        return value

    @property
    def quantizes(self) -> bool:
        """Whether any weight is quantized."""
        return self.method != "none"

    @property
    def scales(self) -> bool:
        """Whether AWQ's scales and clips are searched."""
        return self.method in ("awq", "awq+gptq")

    @property
    def compensates(self) -> bool:
        """Whether GPTQ finds the codes."""
        return self.method in ("gptq", "awq+gptq")

    @property
    def plain(self) -> bool:
        """Whether every quantized Linear has 4 bits, so that any engine that reads AWQ reads the weights."""
        widths = {self.bits, *(rule.bits for rule in self.modules)} - {KEPT_BITS}
        return self.quantizes and self.average_bits is None and widths <= {*AWQ_BITS}

    def fault(self) -> str | None:
        """Why bundles cannot hold such weights, as the end of a sentence about a recipe, or None."""
        if self.kept_share and (self.modules or not self.plain):
            return "has [weights] kept_share beside widths that are not all 4 bits; remove one of them"
        if self.average_bits is not None:
            if not self.quantizes:
                return 'has [weights] average_bits beside method = "none"; remove one of them'
            if self.modules or self.bits != WeightsRecipe().bits:
                return "has [weights] average_bits, which chooses every width, beside stated ones; remove one of them"
        if not self.quantizes:
            return None if not self.modules else 'has [[weights.modules]] beside method = "none"; remove one of them'
        for place, bits in [("[weights]", self.bits), *((str(rule), rule.bits) for rule in self.modules)]:
            if bits not in BITS and (bits != KEPT_BITS or place == "[weights]"):
                kept = "" if place == "[weights]" else ", or 16 to keep them"
                return f"asks for {place} bits = {bits}, which no layout holds; choose one of 2, 3, 4 and 8{kept}"
        if self.group_size != "auto" and self.group_size not in GROUP_SIZES:
            return (
                f'asks for [weights] group_size = {self.group_size}, which is not possible; choose "auto" or one of '
                f"{', '.join(map(str, GROUP_SIZES))}"
            )
        return None

    def bits_of(self, name: str, layer: int) -> int:
        """Width of the weights of a Linear, by its name in the loaded model and the number of its decoder layer."""
        return next((rule.bits for rule in reversed(self.modules) if rule.applies(name, layer)), self.bits)

    def transforms(self) -> tuple[str, ...]:
        """Changes to the weights before they are quantized, as a manifest lists them."""
        return ("awq_scale", "awq_clip") * self.scales + ("gptq",) * self.compensates


def describe(method: StoredMethod | Method, widths: Collection[int]) -> str:
    """Words for a bundle's or a recipe's weights, with all the widths that quantized Linears have."""
    bits = " and ".join(filter(None, [", ".join(map(str, sorted(widths)[:-1])), str(max(widths, default=""))]))
    return {
        "auto": f"weights scaled by AWQ and quantized by GPTQ, in mixtures of experts by AWQ ({bits} bits)",
        "awq": f"AWQ-quantized weights ({bits} bits)",
        "gptq": f"GPTQ-quantized weights ({bits} bits)",
        "awq+gptq": f"weights scaled by AWQ and quantized by GPTQ ({bits} bits)",
        "rtn": f"weights rounded to nearest ({bits} bits)",
        "source": f"its quantized weights ({bits} bits) as they are",
        "none": "weights in their original width",
    }[method]


def tags(method: StoredMethod, widths: Collection[int]) -> list[str]:
    """The Hub's tags for such weights."""
    stored = ["awq"] if {*widths} == {*AWQ_BITS} else []
    return [] if method == "none" else [*stored, *(f"{bits}-bit" for bits in sorted(widths))]


def conventions(method: StoredMethod, widths: Collection[int]) -> dict[str, Any]:
    """Conventions that are open to interpretation, as data for the manifest."""
    if method == "none":
        return {}
    if {*widths} <= {*AWQ_BITS}:
        return {
            "weights": {
                "layout": "awq gemm: qweight [in, out/8], qzeros [in/group, out/8], scales [in/group, out]",
                "value": "w = (q - z) * s, q and z integers 0 to 15",
                "nibbles": NIBBLES,
            }
        }
    fields = {
        2: "bits 2j and 2j+1 of byte c hold output channel 4c + j",
        3: "out/4 bytes with the upper two bits, as at 2 bits, then out/8 bytes, of which bit j of byte c holds the "
        "lowest bit of output channel 8c + j",
        4: f"I32 [rows, out/8]: {NIBBLES}",
        8: "byte c holds output channel c",
    }
    return {
        "weights": {
            "layout": "qweight U8 [in, out*bits/8], qzeros U8 [in/group, out*bits/8], scales [in/group, out]; bits of "
            "each module in modules",
            "value": "w = (q - z) * s, q and z integers 0 to 2^bits - 1",
            "fields": {str(bits): fields[bits] for bits in sorted(widths)},
        }
    }
