"""What a cache holds, in figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds, measured from its tensors.

    Attributes:
        tokens: tokens stored by the longest layer, over all sequences.
        residual_tokens: how many of them are in full precision (sink tokens and residual window).
        pages: pages in use over all layers.
        flushes: pages quantized so far.
        clamped_rows: query rows for which CalibQuant's shift had to make different scores of a span equal, so far.
        fallbacks: calls that a slower path served than the one meant for the device, over all layers; a warning gives
            the reason of the first. Always 0 on a CPU, which has one path.
        values: keys and values that the model's own cache would hold of these sequences, over all layers.
        bytes_used, bytes_allocated: of pages with their metadata and of full-precision tokens, over all layers.
        other_layers: layers that keep transformers' own cache (linear attention and the like), not counted above.
    """

    tokens: int
    residual_tokens: int
    pages: int
    flushes: int
    clamped_rows: int
    fallbacks: int
    values: int
    bytes_used: int
    bytes_allocated: int
    other_layers: int

    @property
    def bits_per_value(self) -> float:
        """Bits of a key or value at the present length, metadata and full-precision tokens included."""
        return 8 * self.bytes_used / self.values if self.values else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token over all layers."""
        return self.bytes_used / self.tokens if self.tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values."""
        return asdict(self) | {"bits_per_value": self.bits_per_value, "bytes_per_token": self.bytes_per_token}
