"""Scoring held-out text through a cache, under the conditions of decoding.

The first page of a segment is prefilled, with the newest tokens that stay in full precision besides; the rest follows
in chunks of one page. After each chunk the cache quantizes the page that became complete, so a token of the next chunk
attends to quantized pages and, in full precision, to its own page up to itself: exactly what it attends to when tokens
are decoded one by one, at a hundredth of the time.
Caches that compress whole prompts are given a longer prompt, which is sealed before scoring begins.

Confidence intervals come from resampling segments: tokens of one segment are not independent, segments nearly are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvconvert.errors import NumericError, UsageError
from kvconvert.io.progress import progress_bar
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.kernels.quantizer import all_finite
from kvconvert.methods import KVScheme
from kvconvert.models import CACHE
from kvconvert.runtime import KVCache, seal_prompt

RESAMPLES = 10_000  # times that the segments are drawn with replacement
CONFIDENCE = 0.95
_RESAMPLES_AT_ONCE = 1_000  # bounds the table of drawn indices


@dataclass(frozen=True)
class Interval:
    """A mean over segments with its percentile-bootstrap confidence interval.

    Attributes:
        mean: the mean of the segments' values.
        low, high: bounds of the interval; both None with a single segment, which says nothing of the spread.
    """

    mean: float
    low: float | None
    high: float | None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """`low` and `high`; None with a single segment."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def above_zero(self) -> bool:
        """Whether the whole interval lies above 0."""
        return self.low is not None and self.low > 0

    @property
    def below_zero(self) -> bool:
        """Whether the whole interval lies below 0."""
        return self.high is not None and self.high < 0


def bootstrap_mean(values: torch.Tensor, seed: int, confidence: float = CONFIDENCE) -> Interval:
    """The mean of one value per segment and its interval.

    For a paired comparison of two methods on the same segments, pass the difference of their values.

    Args:
        values: [segments], any real dtype.
        seed: the seed of the resampling.
        confidence: share of the resampled means inside the interval.

    Raises:
        UsageError: no segment, or a value that is not finite.
    """
    values = values.double()
    count = values.numel()
    if count == 0 or not values.isfinite().all():
        raise UsageError(
            f"A confidence interval needs finite values of one segment or more, not {values.tolist()[:8]}."
        )
    if count == 1:
        return Interval(float(values[0]), None, None)
    generator = torch.Generator().manual_seed(seed)
    means = torch.cat(
        [
            values[torch.randint(count, (min(_RESAMPLES_AT_ONCE, RESAMPLES - done), count), generator=generator)].mean(
                1
            )
            for done in range(0, RESAMPLES, _RESAMPLES_AT_ONCE)
        ]
    )
    tail = (1 - confidence) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(float(values.mean()), low, high)


UNCOMPRESSED_CHUNK = 2048  # tokens per pass of a prompt that is compressed as a whole
_NOTHING: Mapping[str, torch.Tensor] = {}


@dataclass(frozen=True)
class Decoder:
    """A model together with the cache it decodes with.

    Attributes:
        model: in evaluation mode.
        new_cache: makes an empty cache for one batch.
    """

    model: PreTrainedModel
    new_cache: Callable[[], Cache]

    @classmethod
    def plain(cls, model: PreTrainedModel) -> Decoder:
        """The model with transformers' own full-precision cache."""
        return cls(model, lambda: DynamicCache(config=model.config))


@dataclass(frozen=True)
class Comparison:
    """Every scored token of every segment, source against another decoder.

    Attributes:
        source_nll, other_nll: negative log-likelihood of the next token, float64 [segments, scored].
        kl: Kullback-Leibler divergence source || other of the next-token distributions, float64 [segments, scored].
        agrees: whether both rank the same token first, bool [segments, scored].
        residual_share: share of the attended tokens, over all scored queries, that `other` held in full precision.
        clamped_rows: queries, per layer and head, for which CalibQuant's shift made different scores equal.
        attended: attended tokens that `other` held in full precision, and all of them, summed over scored queries.
    """

    source_nll: torch.Tensor
    other_nll: torch.Tensor
    kl: torch.Tensor
    agrees: torch.Tensor
    residual_share: float
    clamped_rows: int = 0
    attended: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, parts: Sequence[Scores], reader: Reader) -> Comparison:
        """Compare one batch, the chunks that `reader` scored, in their order."""
        scores = Scores.join(parts, 1)
        clamped = reader.cache.stats().clamped_rows if isinstance(reader.cache, KVCache) else 0
        return cls(*vars(scores).values(), _share(reader.attended), clamped, reader.attended)

    @classmethod
    def join(cls, batches: Sequence[Comparison]) -> Comparison:
        """Several batches as one."""
        scores = Scores.join([Scores(b.source_nll, b.other_nll, b.kl, b.agrees) for b in batches], 0)
        attended = tuple(map(sum, zip(*(b.attended for b in batches), strict=True)))
        return cls(*vars(scores).values(), _share(attended), sum(b.clamped_rows for b in batches), attended)


@dataclass(frozen=True)
class Scores:
    """Scores of one chunk of logits beside a reference's; all [B, n], on the host.

    Attributes:
        source_nll, other_nll: negative log-likelihood of the next token, float64.
        kl: Kullback-Leibler divergence reference || other of the next-token distributions, float64.
        agrees: whether both rank the same token first, bool.
    """

    source_nll: torch.Tensor
    other_nll: torch.Tensor
    kl: torch.Tensor
    agrees: torch.Tensor

    @classmethod
    def of(cls, reference: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> Scores:
        """Compare log-probabilities [B, n, vocabulary] in float32; `targets` [B, n] are the tokens that came."""
        targets = targets.to(reference.device).unsqueeze(-1)
        source_nll, other_nll = (-scores.gather(-1, targets).squeeze(-1).double() for scores in (reference, other))
        kl = (reference.exp() * (reference - other)).sum(-1, dtype=torch.float64)
        agrees = reference.argmax(-1) == other.argmax(-1)
        return cls(*(part.cpu() for part in (source_nll, other_nll, kl, agrees)))

    @classmethod
    def join(cls, parts: Sequence[Scores], axis: int) -> Scores:
        """Several of them, one after another along tokens (axis 1) or segments (axis 0)."""
        columns = zip(*((p.source_nll, p.other_nll, p.kl, p.agrees) for p in parts), strict=True)
        return cls(*(torch.cat(column, axis) for column in columns))


@torch.no_grad()
def compare(
    source: Decoder,
    others: Mapping[str, Decoder],
    ids: torch.Tensor,
    prefill: int = PAGE_SIZE,
    chunk: int = PAGE_SIZE,
    batch: int = 4,
    progress: bool = False,
    extras: Sequence[dict[str, torch.Tensor]] = (),
) -> dict[str, Comparison]:
    """Score the same text with a source and other decoders side by side.

    All decoders stay in memory together, and one chunk of log-probabilities of each at a time.

    Args:
        source: the reference.
        others: by name.
        ids: int64 [segments, length]; tokens prefill + 1 ... length - 1 of each segment are scored.
        prefill: tokens read before scoring begins.
        chunk: tokens per forward pass after that.
        batch: segments at a time.
        progress: a bar on stderr.
        extras: other model inputs for each segment's first `prefill` tokens (pixel values, token types), when
            `batch` is 1.

    Raises:
        NumericError: a decoder computes NaN or infinity.
    """
    found: dict[str, list[Comparison]] = {name: [] for name in others}
    starts = range(prefill, ids.shape[1] - 1, chunk)
    count = -(-ids.shape[0] // batch)
    with progress_bar(total=count * len(starts), desc="scoring", unit="chunk", shown=progress) as bar:
        for number, segments in enumerate(ids.split(batch)):
            readers = {name: Reader(decoder, name) for name, decoder in (("source", source), *others.items())}
            for reader in readers.values():
                reader.read(segments[:, :prefill], extras[number] if extras else {})
                seal(reader.decoder, reader.cache, segments[:, :prefill])
            parts: dict[str, list[Scores]] = {name: [] for name in others}
            for start in starts:
                stop = min(start + chunk, ids.shape[1] - 1)
                reference = readers["source"].score(segments[:, start:stop])
                for name in others:
                    scored = readers[name].score(segments[:, start:stop])
                    parts[name].append(Scores.of(reference, scored, segments[:, start + 1 : stop + 1]))
                bar.update()
            for name in others:
                found[name].append(Comparison.of(parts[name], readers[name]))
    return {name: Comparison.join(batches) for name, batches in found.items()}


class Reader:
    """One decoder reading one batch of segments chunk by chunk.

    Args:
        decoder: which.
        name: the name of the decoder, for messages.

    Attributes:
        cache: what it has read; length: how many tokens of each segment.
        attended: tokens in full precision, and all tokens, that the scored queries attended to.
    """

    def __init__(self, decoder: Decoder, name: str):
        self.decoder, self.name, self.cache = decoder, name, decoder.new_cache()
        self.attended = (0, 0)
        self.length = 0

    def read(self, ids: torch.Tensor, extra: Mapping[str, torch.Tensor] = _NOTHING) -> None:
        """Feed ids [B, n] with their images, scoring nothing."""
        self._logits(ids, logits_to_keep=1, **extra)

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed ids [B, n] and count what they attend to; log-probabilities of what follows each: float32 [B, n, V]."""
        full = self.length
        if isinstance(self.cache, KVCache) and any(map(_quantizes, self.cache.schemes)):
            full = self.cache.stats().residual_tokens // ids.shape[0]
        own = ids.shape[1] * (ids.shape[1] + 1) // 2
        exact, every = (ids.shape[1] * tokens + own for tokens in (full, self.length))
        self.attended = (self.attended[0] + exact, self.attended[1] + every)
        return self._logits(ids).float().log_softmax(-1)

    def _logits(self, ids: torch.Tensor, **kwargs) -> torch.Tensor:
        logits = feed(self.decoder, self.cache, ids, **kwargs).logits
        self.length += ids.shape[1]
        if not all_finite(logits):
            raise NumericError(
                f"The {self.name} answers with NaN or infinity before token {self.length} of the evaluation text; its "
                "fidelity cannot be measured."
            )
        return logits


def feed(decoder: Decoder, cache: Cache, ids: torch.Tensor, **kwargs):
    """One forward pass over ids [B, n] that extends `cache`."""
    with cache.receiving("The model") if isinstance(cache, KVCache) else nullcontext():
        return decoder.model(
            input_ids=ids.to(decoder.model.device), use_cache=True, return_dict=True, **{CACHE: cache}, **kwargs
        )


def seal(decoder: Decoder, cache: Cache, ids: torch.Tensor) -> None:
    """Say that what was read, ids [B, n], is the whole prompt, for caches that compress whole prompts."""
    if isinstance(cache, KVCache):
        seal_prompt(decoder.model, cache, ids)


def treats_whole_prompts(cache: Cache) -> bool:
    """Whether the cache compresses a prompt as a whole instead of page by page."""
    return compress_prompts(schemes_of(cache))


def schemes_of(cache: Cache) -> Sequence[KVScheme | None]:
    """Of the layers; none of a cache of transformers' own."""
    return cache.schemes if isinstance(cache, KVCache) else ()


def compress_prompts(schemes: Sequence[KVScheme | None]) -> bool:
    """The same of layers' schemes."""
    return any(scheme is not None and scheme.compresses_prompts() for scheme in schemes)


def first_page(schemes: Sequence[KVScheme | None]) -> int:
    """Tokens to read before chunks of a page, so that a chunk begins where decoding would quantize a page.

    A page and the newest tokens that stay in full precision besides; where sides or layers keep different numbers of
    them, the most, modulo the page size.
    """
    sides = [side for scheme in schemes if scheme is not None for side in scheme.sides if side.quantized]
    return PAGE_SIZE + max((side.recent_tokens % PAGE_SIZE for side in sides), default=0)


@torch.no_grad()
def read_prompt(decoder: Decoder, cache: Cache, ids: torch.Tensor, chunk: int = PAGE_SIZE) -> None:
    """Read a prompt [B, n] chunk by chunk into `cache` and seal it.

    Every chunk attends to what the cache made of those before it, as in a conversation that grew turn by turn. A
    cache that compresses whole prompts leaves them alone until they are sealed and is given larger chunks.
    """
    step = max(chunk, UNCOMPRESSED_CHUNK) if treats_whole_prompts(cache) else chunk
    for start in range(0, ids.shape[1], step):
        feed(decoder, cache, ids[:, start : start + step], logits_to_keep=1)
    seal(decoder, cache, ids)


@torch.no_grad()
def generate_greedily(
    decoder: Decoder, context: torch.Tensor, cue: torch.Tensor, new_tokens: int, chunk: int | None = None
) -> torch.Tensor:
    """Continue greedily, past any end-of-sequence token, reading the cue through what the cache made of the context.

    A single pass over the whole prompt would answer from full precision: the cache only quantizes what it has read.

    Args:
        decoder: model and cache.
        context: int64 [B, n].
        cue: int64 [B, m], read in one pass of its own.
        new_tokens: how many.
        chunk: tokens in which the context is read; None reads it in one pass.

    Returns:
        int64 [B, new_tokens].
    """
    cache = decoder.new_cache()
    read_prompt(decoder, cache, context, chunk or context.shape[1])
    generated: list[torch.Tensor] = []
    step = cue
    for _ in range(new_tokens):
        step = feed(decoder, cache, step, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        generated.append(step)
    return torch.cat(generated, 1).cpu()


def batches(prompts: list[tuple[list[int], list[int]]], size: int) -> Iterator[list[int]]:
    """Indices of (context, cue) prompts grouped so that contexts and cues within a batch are equally long."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, (context, cue) in enumerate(prompts):
        groups.setdefault((len(context), len(cue)), []).append(index)
    for group in groups.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _quantizes(scheme: KVScheme | None) -> bool:
    return scheme is not None and scheme.quantizes


def _share(attended: tuple[int, int]) -> float:
    return attended[0] / attended[1]


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
    read_prompt(decoder, cache, page)
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
