"""How schemes treat whole prompts: as pages, as spans, or by eviction. Decided on the host, for a group of layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from kvconvert import methods
from kvconvert.errors import CacheError
from kvconvert.kernels.spans import span_lengths
from kvconvert.runtime.cache.sequence import Sequence, SpanTokens, TokenPositions


@dataclass(frozen=True)
class SealSpan:
    """One row's open prompt becomes one span or several.

    Attributes:
        row: of the batch.
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
        row: of the batch.
        tokens: of the prompt, all in the buffers.
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
        shares: of the prompt's tokens that are kept as heavy hitters and as the newest ones.
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


class SharedBudgetPolicy(EvictionPolicy):
    """Keeps what a repetition of the prompt attends to most (KVzip), or would by prediction; rows are KV heads, each
    with a budget of its own.

    Attributes:
        kept: of each row, the tokens of its open prompt that are to be kept, once that is scored.
    """

    sums_attention = False

    def __init__(self, shares: methods.Evict):
        super().__init__(shares)
        self.kept: dict[int, int] = {}

    def _work(self, row: int, tokens: int, sink_tokens: int) -> SealEviction:
        if row not in self.kept:
            why = (
                "keeps what a second reading of the prompt attends to, and this prompt was read once: call "
                "kvconvert.runtime.seal_prompt(model, cache, input_ids) after it"
                if self.shares.selection == "reconstruction"
                else "shares a budget among all layers, and this prompt is not sealed: call cache.begin_prompt() "
                "before it and cache.seal() after it"
            )
            raise CacheError(f'selection = "{self.shares.selection}" {why}, or generate with a bundle\'s model.')
        # Sink tokens and the newest ones have the highest scores of all.
        return SealEviction(row, tokens, 0, self.kept.pop(row), 0)


def prompt_policy(scheme: methods.KVScheme) -> PromptPolicy:
    """How a scheme treats prompts."""
    prompt = scheme.prompt
    if isinstance(prompt, methods.Spans):
        return SpanPolicy(prompt)
    if isinstance(prompt, methods.Evict):
        return SharedBudgetPolicy(prompt) if prompt.heads_apart else EvictionPolicy(prompt)
    return PromptPolicy()
