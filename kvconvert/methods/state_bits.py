"""States in 12 bits: what linear attention and state-space layers keep instead of keys and values.

All states of a model have the smallest width that a scheme of its layers with keys and values says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from kvconvert.methods.part import STRICT, Part, one_of, option

STATE_BITS = (12, 16)
# Of every preset but those that are a paper's: nothing measured is lost (benchmarks/RESULTS.md).
PRESET_STATES = {"state_bits": 12}


@dataclass(frozen=True, config=STRICT)
class StateBits(Part):
    """Width of recurrent states."""

    method = "states of 12 bits"
    summary = "recurrent states are stored as 8-bit codes and 4 bits of their rounding errors"
    source = "ours; vLLM issue 55196 discusses it"

    state_bits: Annotated[int, AfterValidator(one_of(STATE_BITS))] = option(
        16,
        "choose 12, or 16 for the dtype that the model computes them in",
        "width of a number of recurrent states, where a model has them",
    )

    def in_use(self) -> bool:
        """Whether states have 12 bits."""
        return self.state_bits < 16

    @classmethod
    def conventions(cls, layers: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
        """The form in which a runtime stores states."""
        return {
            "state_bits": {
                "rounding": "after a pass, code = round(x / scale), ties to even, scale = max |x| / 2047 of a row, the "
                "last axis of a float32 state",
                "bytes": "bits 4 to 11 of a code as an int8; bits 0 to 3 of numbers i and i + N / 2 of a row in a byte",
            }
        }
