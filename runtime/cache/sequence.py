"""What the host knows of one sequence: how many tokens lie where, the same for all layers of a group, and the positions
of its tokens in the padded input. And how schemes treat whole prompts: as pages, as spans, or by eviction.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from kvconvert import methods
from kvconvert.errors import CacheError
from kvconvert.kernels.page_formats import PAGE_SIZE, span_lengths


class TokenPositions:
    """The positions of some tokens of one sequence, in ascending order; never changed, only replaced.

    A position is the token's index in the padded input, which masks and sliding windows refer to; padding is never
    stored, so positions skip it. Sequences almost always have one run, hence integers on the host instead of a tensor.
    """

    __slots__ = ("_count", "_runs")

    def __init__(self, runs: tuple[tuple[int, int], ...] = (), count: int = 0):
        self._runs, self._count = runs, count

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        return self._runs == other._runs if isinstance(other, TokenPositions) else NotImplemented

    __hash__ = None

    def append(self, position: int, count: int) -> TokenPositions:
        """These, then `count` tokens at consecutive positions from `position` on."""
        if count <= 0:
            return self
        runs, run = self._runs, (position, count)
        if runs and sum(runs[-1]) == position:
            runs, run = runs[:-1], (runs[-1][0], runs[-1][1] + count)
        return TokenPositions((*runs, run), self._count + count)

    def part(self, start: int, stop: int) -> TokenPositions:
        """Those of tokens start..stop-1."""
        found, begin = TokenPositions(), 0
        for position, count in self._runs:
            first, end = max(start, begin), min(stop, begin + count)
            found = found.append(position + first - begin, end - first)
            begin += count
        return found

    def extend(self, other: TokenPositions) -> TokenPositions:
        """These, then others."""
        joined = self
        for run in other._runs:
            joined = joined.append(*run)
        return joined

    def take(self, parts: list[tuple[int, int]]) -> tuple[TokenPositions, TokenPositions]:
        """Those of tokens start..stop-1 of each part (start, stop), ascending, and the rest."""
        at, taken, rest = 0, TokenPositions(), TokenPositions()
        for start, stop in parts:
            rest = rest.extend(self.part(at, start))
            taken = taken.extend(self.part(start, stop))
            at = stop
        return taken, rest.extend(self.part(at, self._count))

    def shift(self, by: int) -> TokenPositions:
        """All of them, `by` further."""
        return TokenPositions(tuple((position + by, count) for position, count in self._runs), self._count)

    def runs(self) -> list[tuple[int, int]]:
        """(first position, how many) of each run."""
        return list(self._runs)

    def position(self, index: int) -> int:
        """The position of token `index`."""
        for position, count in self._runs:
            if index < count:
                return position + index
            index -= count
        raise IndexError(f"there are {self._count:,} tokens")

    def before(self, position: int) -> int:
        """How many tokens have a position below `position`."""
        found = 0
        for first, count in self._runs:
            found += min(max(0, position - first), count)
        return found

    def slice(self, start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Positions of tokens start..stop-1: int64 [n]."""
        part = self.part(max(0, start), max(0, stop))
        # Made where they are wanted: a copy to a GPU would wait for it.
        runs = [torch.arange(first, first + count, device=device) for first, count in part._runs]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Side:
    """Keys or values of one sequence.

    Attributes:
        buffered: tokens in the full-precision buffer, see `Sequence.buffer_index`.
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
    """Where the tokens of one sequence lie: [dropped pages | pages | residual window], sink tokens, and spans.

    Page j holds tokens 128 j to 128 j + 127 (`page_position`), whatever else is stored: it depends on no later token
    and on no other page. Sink tokens are kept in full precision in addition, and the first page's are not attended to.

    Never changed, only replaced: a layer that has not come to a forward pass yet keeps the state before it.

    Attributes:
        keys, values: pages and buffered tokens of each; their residual windows may differ.
        sink_tokens: first tokens, which stay at the beginning of both buffers.
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

    @property
    def stored(self) -> int:
        """Tokens stored, each once, however often its key and value are."""
        outside = self.page_position(0)
        return len(self) - max(0, outside - self.sink_tokens) + sum(span.tokens for span in self.spans)

    @property
    def seen(self) -> int:
        """Tokens that were ever stored, evicted and dropped ones included."""
        return len(self) + self.evicted + sum(span.tokens for span in self.spans)

    @property
    def residual(self) -> int:
        """Tokens attended to in full precision on both sides: sink tokens, and those after the last page of either."""
        return min(self.keys.buffered, self.values.buffered)

    def skip(self, side: Side) -> int:
        """How much further on than in `residual` tokens that are no sink tokens lie in a side's buffer."""
        return side.buffered - self.residual

    @property
    def residual_places(self) -> list[int]:
        """The last four columns of `GroupTables.described`."""
        return [self.sink_tokens, self.skip(self.keys), self.skip(self.values), self.residual]

    def page_position(self, page: int) -> int:
        """How many tokens came before page `page`, 0 being the first one that is not dropped."""
        return (self.dropped + page) * PAGE_SIZE

    def buffer_index(self, side: Side, page: int) -> int:
        """Index in a side's buffer of the first token of a page, or page to come, that is not among the side's own.

        The buffer holds sink tokens, then the tokens after the side's last page; before there was one, all tokens.
        """
        behind = self.sink_tokens if self.dropped + len(side.pages) else 0
        return behind + (page - len(side.pages)) * PAGE_SIZE

    def hidden(self, page: int) -> int:
        """Tokens at the beginning of a page that are sink tokens, kept elsewhere."""
        return self.sink_tokens if self.dropped + page == 0 else 0

    def before(self, position: int) -> int:
        """How many tokens have a position below `position`; kept ones all count."""
        return self.kept + self.positions.before(position)

    def position(self, index: int) -> int:
        """The position of token `index`; of a kept one the largest that it can be in any layer and head."""
        if index < self.kept:
            return self.kept_before - self.kept + index
        return self.positions.position(index - self.kept)

    @property
    def first(self) -> int:
        """The position of the first token that was ever stored; 0 before there is one."""
        if self.kept or self.evicted:
            return self.kept_before - self.kept - self.evicted
        stored = (self.positions, *(span.positions for span in self.spans))
        return min((tokens.position(0) for tokens in stored if len(tokens)), default=0)

    def shift(self, by: int) -> Sequence:
        """The same tokens at positions that are all `by` further."""
        spans = tuple(SpanTokens(span.tokens, span.positions.shift(by)) for span in self.spans)
        return replace(self, positions=self.positions.shift(by), spans=spans, kept_before=self.kept_before + by)

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
        count, positions = 0, self.positions
        for first, n in runs:
            count, positions = count + n, positions.append(first, n)
        keys, values = (Side(side.buffered + count, side.pages) for side in (self.keys, self.values))
        sink_tokens = min(sink_tokens, keys.buffered) if self.untouched else self.sink_tokens
        return replace(self, keys=keys, values=values, positions=positions, sink_tokens=sink_tokens)


@dataclass(frozen=True)
class SealSpan:
    """One row's open prompt becomes one span or several.

    Attributes:
        row: the row of the batch.
        parts: (start, stop) of its tokens in the buffers, ascending.
        used: tokens in the buffers before.
        lengths: tokens of each span, in order; together those of all parts.
    """

    row: int
    parts: tuple[tuple[int, int], ...]
    used: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class SealEviction:
    """One row's open prompt is reduced to sink tokens, heavy hitters and the newest tokens of each KV head.

    Attributes:
        row: the row of the batch.
        tokens: the number of tokens of the prompt, all in the buffers.
        sink_tokens, heavy_hitters, recent: how many are kept; nothing is evicted where their sum reaches `tokens`.
    """

    row: int
    tokens: int
    sink_tokens: int
    heavy_hitters: int
    recent: int

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is evicted."""
        return self.sink_tokens + self.heavy_hitters + self.recent >= self.tokens


class PromptPolicy:
    """Prompt tokens are like all others: complete pages are quantized, and nothing waits for a prompt's end.

    Attributes:
        flushes: whether complete pages are quantized as tokens arrive.
        selects: whether only some of a prompt's tokens are kept.
        sums_attention: whether the attention that they receive from the prompt decides which.
        is_plain: whether what is stored of a token depends on no token after its page.
    """

    flushes = True
    selects = False
    sums_attention = False
    is_plain = True

    def opens(self, sequence: Sequence, decoding: bool) -> bool:
        """Whether new tokens begin a prompt that will be compressed as a whole."""
        return False

    def seal(self, row: int, sequence: Sequence) -> tuple[Sequence, SealSpan | SealEviction | None]:
        """The sequence once its open prompt is complete, and what layers have to do."""
        return sequence, None


class OpenPolicy(PromptPolicy):
    """All tokens stay in full precision, until another cache takes them."""

    flushes = False
    is_plain = False


class SpanPolicy(PromptPolicy):
    """Every prompt becomes a span (CalibQuant); tokens of other modalities, and generated ones, are left alone.

    Args:
        spans: which tokens go to spans, and how many to one.
    """

    flushes = False
    is_plain = False

    def __init__(self, spans: methods.Spans):
        self.spans = spans

    def opens(self, sequence: Sequence, decoding: bool) -> bool:
        """The first prompt, even of one token, and every later one."""
        return not decoding or (sequence.untouched and not sequence.keys.buffered)

    def seal(self, row: int, sequence: Sequence) -> tuple[Sequence, SealSpan | None]:
        """Move the open prompt's tokens to spans."""
        sealed = replace(sequence, open_from=None, modality_runs=())
        parts = self._parts(sequence)
        if not parts:
            return sealed, None
        taken, rest = sequence.positions.take(parts)
        keys, values = (replace(s, buffered=s.buffered - len(taken)) for s in (sealed.keys, sealed.values))
        lengths = span_lengths(len(taken), self.spans.tokens)
        ends = [*accumulate(lengths)]
        spans = [SpanTokens(n, taken.part(end - n, end)) for n, end in zip(lengths, ends, strict=True)]
        work = SealSpan(row, tuple(parts), sequence.keys.buffered, lengths)
        sealed = replace(sealed, keys=keys, values=values, positions=rest, spans=(*sequence.spans, *spans))
        return sealed, work

    def _parts(self, sequence: Sequence) -> list[tuple[int, int]]:
        """The open prompt's tokens that go to its span, as (start, stop) in the buffers."""
        start, stop = max(sequence.open_from, sequence.sink_tokens), sequence.keys.buffered
        if self.spans.modality == "all":
            return [(start, stop)] if stop > start else []
        parts = []
        for position, count in sequence.modality_runs:
            first, end = max(start, sequence.before(position)), sequence.before(position + count)
            if end > first:
                parts.append((first, end))
        return parts


class EvictionPolicy(PromptPolicy):
    """Keeps a budget of the first prompt's tokens (MiniKV), and all later ones.

    Args:
        shares: the shares of the prompt's tokens that are kept as heavy hitters and as the newest ones.
    """

    selects = True
    sums_attention = True
    is_plain = False

    def __init__(self, shares: methods.Evict):
        self.shares = shares

    def opens(self, sequence: Sequence, decoding: bool) -> bool:
        """The first prompt alone."""
        return sequence.untouched and not sequence.keys.buffered

    def seal(self, row: int, sequence: Sequence) -> tuple[Sequence, SealEviction]:
        """Reduce the open prompt to its budget."""
        sealed, n = replace(sequence, open_from=None), sequence.keys.buffered
        work = self._work(row, n, sequence.sink_tokens)
        if work.keeps_all:
            return sealed, work
        kept = work.sink_tokens + work.heavy_hitters + work.recent
        keys, values = (replace(side, buffered=kept) for side in (sealed.keys, sealed.values))
        bound = sequence.positions.position(n - 1) + 1
        empty = TokenPositions()
        kept_tokens = {"kept": kept, "kept_before": bound, "evicted": n - kept, "positions": empty}
        return replace(sealed, keys=keys, values=values, **kept_tokens), work

    def _work(self, row: int, tokens: int, sink_tokens: int) -> SealEviction:
        return SealEviction(row, tokens, sink_tokens, *self.shares.budget(tokens))


class PredictionPolicy(EvictionPolicy):
    """Keeps what a repetition of the prompt would attend to most, by prediction; rows are KV heads.

    Attributes:
        budgets: the tokens that each KV head of each layer keeps of a prompt; layer: which of them is this one.
    """

    sums_attention = False

    def __init__(self, shares: methods.Evict):
        super().__init__(shares)
        self.budgets: Any = None
        self.layer = 0

    def _work(self, row: int, tokens: int, sink_tokens: int) -> SealEviction:
        kept, newest = self.budgets.of(tokens, self.layer)
        count = kept[row % len(kept)]
        if count == tokens:
            return SealEviction(row, tokens, 0, tokens, 0)
        return SealEviction(row, tokens, sink_tokens, count - sink_tokens - newest, newest)


class SharedBudgetPolicy(EvictionPolicy):
    """Keeps what a repetition of the prompt attends to most (KVzip); rows are KV heads, each with a budget of its own.

    Attributes:
        kept: by row, the number of tokens to keep of its open prompt, once these are scored.
    """

    sums_attention = False

    def __init__(self, shares: methods.Evict):
        super().__init__(shares)
        self.kept: dict[int, int] = {}

    def _work(self, row: int, tokens: int, sink_tokens: int) -> SealEviction:
        if row not in self.kept:
            raise CacheError(
                f'selection = "{self.shares.selection}" keeps what a second reading of the prompt attends to, and this '
                "prompt was read once: call kvconvert.runtime.seal_prompt(model, cache, input_ids) after it, or "
                "generate with a bundle's model."
            )
        # Sink tokens and the newest ones have the highest scores of all.
        return SealEviction(row, tokens, 0, self.kept.pop(row), 0)


def prompt_policy(scheme: methods.KVScheme) -> PromptPolicy:
    """How a scheme treats prompts."""
    prompt = scheme.prompt
    if isinstance(prompt, methods.Spans):
        return SpanPolicy(prompt)
    if isinstance(prompt, methods.Evict):
        kinds = {"predicted": PredictionPolicy, "reconstruction": SharedBudgetPolicy}
        return kinds.get(prompt.selection, EvictionPolicy)(prompt)
    return PromptPolicy()
