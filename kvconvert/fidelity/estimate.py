"""How long an evaluation will take, from the time of one page and one step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvconvert.fidelity.scoring import Decoder, feed
from kvconvert.kernels.pages import PAGE_SIZE


@dataclass(frozen=True)
class Work:
    """Rows that source and bundle read, and continue token by token.

    Attributes:
        rows: sequences.
        tokens: that each reads.
        steps: single tokens after that.
        batch: rows at a time.
    """

    rows: int
    tokens: int
    steps: int = 0
    batch: int = 1


def estimate_seconds(decoders: Sequence[Decoder], ids: torch.Tensor, work: Sequence[Work]) -> float:
    """Seconds for all of the work, after two pages and a few steps of each decoder.

    A CPU takes as long for two rows as for two times one; a GPU, whose time is that of launches, as long as for one.
    """
    page = ids[:1, :PAGE_SIZE]
    seconds = 0.0
    for decoder in decoders:
        reading, stepping = _times(decoder, page)
        for part in work:
            rows = part.rows if decoder.model.device.type == "cpu" else -(-part.rows // part.batch)
            seconds += rows * (part.tokens / page.shape[1] * reading + part.steps * stepping)
    return seconds


def words(seconds: float) -> str:
    """A duration as a person says it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@torch.no_grad()
def _times(decoder: Decoder, page: torch.Tensor) -> tuple[float, float]:
    """Seconds of a page after a stored one, and of a step; the first pass compiles whatever there is to."""
    cache = decoder.new_cache()
    feed(decoder, cache, page, logits_to_keep=1)
    feed(decoder, cache, page[:, :1], logits_to_keep=1)
    begun = _now(decoder)
    feed(decoder, cache, page)
    read = _now(decoder)
    for _ in range(2):
        feed(decoder, cache, page[:, :1], logits_to_keep=1)
    return read - begun, (_now(decoder) - read) / 2


def _now(decoder: Decoder) -> float:
    if decoder.model.device.type == "cuda":
        torch.cuda.synchronize(decoder.model.device)
    return time.perf_counter()
