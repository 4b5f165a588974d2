"""What the host knows of one sequence: how many tokens lie where. The same for all layers of a group."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvconvert.runtime.cache.token_positions import TokenPositions


@dataclass(frozen=True)
class Side:
    """Keys or values of one sequence.

    Attributes:
        buffered: tokens in the full-precision buffer: the sink tokens, then the tokens after the last page.
        pages: their numbers in the pools, oldest first.
    """

    buffered: int = 0
    pages: tuple[int, ...] = ()


@dataclass(frozen=True)
class SpanTokens:
    """One prompt that was compressed as a whole: how many tokens, and their positions."""

    tokens: int
    positions: TokenPositions


@dataclass(frozen=True)
class Sequence:
    """Where the tokens of one sequence lie: [sink tokens | dropped pages | pages | residual window], and spans.

    Never changed, only replaced: a layer that has not come to a forward pass yet keeps the state before it.

    Attributes:
        keys, values: pages and buffered tokens of each; their residual windows may differ.
        sink_tokens: sink tokens at the beginning of both buffers.
        dropped: pages that left a sliding window for good.
        kept: tokens that survived an eviction. They come first, and each layer knows their positions by KV head.
        evicted: tokens that a prompt was reduced by.
        kept_before: a position that all kept tokens are below.
        positions: of all other sink tokens, pages and residual tokens, dropped pages included; ascending.
        spans: whole prompts.
        open_from: buffer index at which a prompt begins that is not sealed yet; None when there is none.
        modality_runs: of the open prompt, (position, how many) of the tokens whose modality goes to spans.
        occupied: whether the row takes part in forward passes; rows that wait for a sequence do not.
    """

    keys: Side = field(default_factory=Side)
    values: Side = field(default_factory=Side)
    sink_tokens: int = 0
    dropped: int = 0
    kept: int = 0
    evicted: int = 0
    kept_before: int = 0
    positions: TokenPositions = field(default_factory=TokenPositions)
    spans: tuple[SpanTokens, ...] = ()
    open_from: int | None = None
    modality_runs: tuple[tuple[int, int], ...] = ()
    occupied: bool = True

    @property
    def untouched(self) -> bool:
        """Whether all tokens are still in the buffers, in the order of their arrival."""
        return not (self.keys.pages or self.values.pages or self.dropped or self.spans or self.evicted)

    @property
    def pages(self) -> int:
        """Pages that exist for keys or for values."""
        return max(len(self.keys.pages), len(self.values.pages))

    @property
    def buffered(self) -> int:
        """Tokens whose key or value is in full precision."""
        return max(self.keys.buffered, self.values.buffered)

    def __len__(self) -> int:
        """Tokens in sink, pages (dropped ones included) and residual window; spans are apart."""
        return self.kept + len(self.positions)

    def stored(self, page_size: int) -> int:
        """Tokens stored; one whose key is in a page and whose value is not counts once."""
        return len(self) - self.dropped * page_size + sum(span.tokens for span in self.spans)

    @property
    def seen(self) -> int:
        """Tokens that were ever stored, evicted and dropped ones included."""
        return len(self) + self.evicted + sum(span.tokens for span in self.spans)

    def residual(self, page_size: int) -> int:
        """Sink tokens and tokens after the last page of either side."""
        return self.keys.buffered - (self.pages - len(self.keys.pages)) * page_size

    def page_position(self, page: int, page_size: int) -> int:
        """How many tokens came before page `page`, 0 being the first one that is not dropped."""
        return self.sink_tokens + (self.dropped + page) * page_size

    def before(self, position: int) -> int:
        """How many tokens have a position below `position`; kept ones all count."""
        return self.kept + self.positions.before(position)

    def position(self, index: int) -> int:
        """The position of token `index`; of a kept one the largest that it can be in any layer and head."""
        if index < self.kept:
            return self.kept_before - self.kept + index
        return self.positions.position(index - self.kept)

    def shift(self, by: int) -> Sequence:
        """The same tokens at positions that are all `by` further."""
        spans = tuple(SpanTokens(span.tokens, span.positions.shift(by)) for span in self.spans)
        return replace(self, positions=self.positions.shift(by), spans=spans, kept_before=self.kept_before + by)

    def without_newest(self) -> Sequence:
        """Without the newest token, which has to be in full precision."""
        keys, values = (replace(side, buffered=side.buffered - 1) for side in (self.keys, self.values))
        return replace(self, keys=keys, values=values, positions=self.positions.part(0, len(self.positions) - 1))

    def crop(self, length: int) -> Sequence:
        """Without the tokens from position `length` on, which have to be in full precision."""
        removed = len(self) - self.before(length)
        keys, values = (replace(side, buffered=side.buffered - removed) for side in (self.keys, self.values))
        return replace(
            self,
            keys=keys,
            values=values,
            sink_tokens=min(self.sink_tokens, keys.buffered),
            positions=self.positions.part(0, len(self.positions) - removed),
            modality_runs=tuple((p, min(n, length - p)) for p, n in self.modality_runs if p < length),
        )

    def extend(self, runs: list[tuple[int, int]], sink_tokens: int) -> Sequence:
        """With new tokens at runs of (first position, how many); the sequence's first ones become sink tokens."""
        count, positions = sum(n for _, n in runs), self.positions
        for first, n in runs:
            positions = positions.append(first, n)
        keys, values = (replace(side, buffered=side.buffered + count) for side in (self.keys, self.values))
        sink_tokens = min(sink_tokens, keys.buffered) if self.untouched else self.sink_tokens
        return replace(self, keys=keys, values=values, positions=positions, sink_tokens=sink_tokens)
