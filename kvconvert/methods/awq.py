"""AWQ (arXiv 2306.00978), GPTQ (arXiv 2210.17323) and rounding: what becomes of a model's Linears."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

GROUP_SIZES = (16, 32, 64, 128, 256)
# What "auto" chooses from, the largest first.
AUTO_GROUP_SIZES = (128, 64, 32)
# Of a quantized module; "none" besides, of a recipe.
QuantizedBy = Literal["awq", "gptq", "awq+gptq", "rtn"]
Method = Literal[QuantizedBy, "none"]


class WeightsRecipe(BaseModel):
    """How Linears are quantized.

    Attributes:
        method: "awq" searches scales and clips, "gptq" makes up for each column's rounding error in the columns after
            it, "awq+gptq" does so on the scaled weights, "rtn" rounds to nearest, "none" keeps every weight.
        bits: of a stored weight; means nothing with "none".
        group_size: inputs that share one scale and zero point, or "auto", which becomes the largest of
            `AUTO_GROUP_SIZES` that divides the inputs of every Linear to be quantized once the model is known; means
            nothing with "none".
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: Method = "awq"
    bits: int = 4
    group_size: int | Literal["auto"] = "auto"

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

    def fault(self) -> str | None:
        """Why bundles cannot hold such weights, as the end of a sentence about a recipe, or None."""
        if not self.quantizes:
            return None
        if self.bits != 4:
            return (
                f"asks for [weights] bits = {self.bits}, but bundles hold 4-bit weights in this version: kvconvert's "
                "own layout for other widths is not available yet; set bits = 4"
            )
        if self.group_size != "auto" and self.group_size not in GROUP_SIZES:
            return (
                f'asks for [weights] group_size = {self.group_size}, which is not possible; choose "auto" or one of '
                f"{', '.join(map(str, GROUP_SIZES))}"
            )
        return None

    def transforms(self) -> tuple[str, ...]:
        """Changes to the weights before they are quantized, as a manifest lists them."""
        return ("awq_scale", "awq_clip") * self.scales + ("gptq",) * self.compensates


def describe(method: Method) -> str:
    """What a card says of a bundle's weights."""
    return {
        "awq": "AWQ-quantized weights (4 bits)",
        "gptq": "GPTQ-quantized weights (4 bits)",
        "awq+gptq": "weights scaled by AWQ and quantized by GPTQ (4 bits)",
        "rtn": "weights rounded to nearest (4 bits)",
        "none": "weights in their original width",
    }[method]


def tags(method: Method) -> list[str]:
    """What the Hub calls such weights."""
    return [] if method == "none" else ["awq", "4-bit"]


def conventions(method: Method) -> dict[str, Any]:
    """What is open to interpretation, as data for the manifest."""
    if method == "none":
        return {}
    return {
        "weights": {
            "layout": "awq gemm: qweight [in, out/8], qzeros [in/group, out/8], scales [in/group, out]",
            "value": "w = (q - z) * s, q and z integers 0 to 15",
            "nibbles": "bits 4i to 4i+3 of the int32 in column c hold output channel 8c + [0,2,4,6,1,3,5,7][i]",
        }
    }
