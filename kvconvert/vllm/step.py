"""What one forward pass does to the cache, planned once for all layers from lengths that the host knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvconvert.vllm.blocks import BlockLayout


@dataclass(frozen=True)
class Request:
    """One request's part of a forward pass.

    Attributes:
        row: of the block table.
        first: index of its first new token among those of the pass.
        stored: tokens stored before.
        length: new tokens, at least one.
    """

    row: int
    first: int
    stored: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens once the pass is over."""
        return self.stored + self.length


@dataclass(frozen=True)
class StepPlan:
    """A forward pass.

    Attributes:
        layout: of every layer's blocks.
        requests: in the order of their tokens.
        block_table: int32 [rows, entries] on the device.
    """

    layout: BlockLayout
    requests: Sequence[Request]
    block_table: torch.Tensor

    @cached_property
    def decodes(self) -> list[Request]:
        """Requests with one new token."""
        return [request for request in self.requests if request.length == 1]

    @cached_property
    def prompts(self) -> list[Request]:
        """Requests with more."""
        return [request for request in self.requests if request.length > 1]

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        return self.block_table.device

    def pages(self, request: Request, begin: int, end: int) -> torch.Tensor:
        """Blocks of a request's pages begin..end-1, int64."""
        first = self.layout.first_page
        return self.block_table[request.row, first + begin : first + end].long()

    def places(self, request: Request, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks and slots of a request's full-precision tokens at positions begin..end-1."""
        places = self.layout.places(torch.arange(begin, end, device=self.device))
        return self.block_table[request.row, places.entries].long(), places.slots

    def sinks(self, request: Request, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of its sink tokens."""
        places = self.layout.sinks(torch.arange(begin, end, device=self.device))
        return self.block_table[request.row, places.entries].long(), places.slots

    def settled(self, request: Request) -> Iterator[tuple[bool, int, int]]:
        """Of keys (True) and values: the pages that the tokens before a pass's last one complete, from begin to end.

        A page that the last token completes is quantized when the request's next pass begins (`pending`).
        """
        sides = zip((True, False), *map(self.layout.quantized, (request.stored, request.tokens - 1)), strict=True)
        return ((is_key, begin, end) for is_key, begin, end in sides if begin < end)

    def pending(self) -> Iterator[tuple[Request, bool, int]]:
        """Pages, of keys (True) or values, that the last token stored before this pass has completed."""
        for request in self.requests:
            if request.stored:
                before, now = map(self.layout.quantized, (request.stored - 1, request.stored))
                for is_key, begin, end in zip((True, False), before, now, strict=True):
                    if begin < end:
                        yield request, is_key, begin


def plan_step(
    layout: BlockLayout, starts: Sequence[int], lengths: Sequence[int], block_table: torch.Tensor
) -> StepPlan:
    """The plan of a pass.

    Args:
        layout: of every layer's blocks.
        starts: where each request's tokens begin among those of the pass, and their number at the end.
        lengths: tokens of each request once the pass is over.
        block_table: int32 [rows, entries].
    """
    requests = []
    for row, (first, end, tokens) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if end > first:
            requests.append(Request(row, first, tokens - (end - first), end - first))
    return StepPlan(layout, requests, block_table)
