"""What an Engine says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """What an engine is doing and has done.

    Attributes:
        waiting: requests in the queue.
        running: requests that have a row, those whose prompt is being read included.
        finished, cancelled, failed, refused: requests so far that ended by themselves, were cancelled, were lost when
            the model failed, and were refused by `add`.
        pages_reserved: pages of a layer set aside for the requests that have a row.
        pages_free: pages of a layer that hold nothing; None where the cache grows as needed.
        prompt_tokens, generated_tokens: read and generated so far.
        steps: so far.
        seconds: spent in them.
    """

    waiting: int
    running: int
    finished: int
    cancelled: int
    failed: int
    refused: int
    pages_reserved: int
    pages_free: int | None
    prompt_tokens: int
    generated_tokens: int
    steps: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of stepping, reading prompts included."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0
