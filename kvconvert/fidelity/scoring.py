"""Scoring held-out text through a cache, under the conditions of decoding.

The first page of a segment is prefilled; the continuation follows in chunks of one page. After each chunk the cache
quantizes the page that became complete, so a token of the next chunk attends to quantized pages and, in full precision,
to its own page up to itself: exactly what it attends to when tokens are decoded one by one, at a hundredth of the time.
Caches that compress whole prompts are given a longer prompt, which is sealed before scoring begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from kvconvert.errors import NumericError
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import KVScheme
from kvconvert.runtime import KVCache

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
    """

    source_nll: torch.Tensor
    other_nll: torch.Tensor
    kl: torch.Tensor
    agrees: torch.Tensor
    residual_share: float
    clamped_rows: int = 0


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
    rows: dict[str, list[tuple[torch.Tensor, ...]]] = {name: [] for name in others}
    shares = dict.fromkeys(others, (0, 0))
    clamped_rows = dict.fromkeys(others, 0)
    count = -(-ids.shape[0] // batch)
    bar = tqdm(ids.split(batch), total=count, desc="scoring", unit="batch", disable=not progress)
    for number, segments in enumerate(bar):
        streams = {name: _Stream(decoder, name) for name, decoder in (("source", source), *others.items())}
        for stream in streams.values():
            stream.read(segments[:, :prefill], extras[number] if extras else {})
            seal(stream.cache)
        parts: dict[str, list[tuple[torch.Tensor, ...]]] = {name: [] for name in others}
        for start in range(prefill, ids.shape[1] - 1, chunk):
            stop = min(start + chunk, ids.shape[1] - 1)
            targets = segments[:, start + 1 : stop + 1]
            reference = streams["source"].score(segments[:, start:stop])
            reference_nll = _nll(reference, targets)
            for name in others:
                scored = streams[name].score(segments[:, start:stop])
                divergence = (reference.exp() * (reference - scored)).sum(-1, dtype=torch.float64)
                agrees = reference.argmax(-1) == scored.argmax(-1)
                parts[name].append((reference_nll, _nll(scored, targets), divergence.cpu(), agrees.cpu()))
        for name, stream in streams.items():
            if name in others:
                rows[name].append(tuple(torch.cat(column, 1) for column in zip(*parts[name], strict=True)))
                shares[name] = tuple(a + b for a, b in zip(shares[name], stream.attended, strict=True))
                if isinstance(stream.cache, KVCache):
                    clamped_rows[name] += stream.cache.stats().clamped_rows
    return {
        name: Comparison(
            *(torch.cat(column) for column in zip(*rows[name], strict=True)),
            residual_share=shares[name][0] / shares[name][1],
            clamped_rows=clamped_rows[name],
        )
        for name in others
    }


class _Stream:
    """One decoder reading one batch of segments chunk by chunk."""

    def __init__(self, decoder: Decoder, name: str):
        self.decoder, self.name, self.cache = decoder, name, decoder.new_cache()
        self.attended = (0, 0)  # tokens in full precision, and all tokens, summed over the scored queries
        self.length = 0

    def read(self, ids: torch.Tensor, extra: Mapping[str, torch.Tensor] = _NOTHING) -> torch.Tensor:
        """Feed ids [B, n] with their images; log-probabilities of the next tokens, float32 [B, n, vocabulary]."""
        logits = feed(self.decoder, self.cache, ids, **extra).logits
        self.length += ids.shape[1]
        scores = logits.float().log_softmax(-1)
        if not scores.isfinite().all():
            raise NumericError(
                f"The {self.name} answers with NaN or infinity before token {self.length} of the evaluation text; its "
                "fidelity cannot be measured."
            )
        return scores

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        """`read`, counting what its queries attend to."""
        full = self.length
        if isinstance(self.cache, KVCache) and any(map(_quantizes, self.cache.schemes)):
            full = self.cache.stats().residual_tokens // ids.shape[0]
        own = ids.shape[1] * (ids.shape[1] + 1) // 2
        exact, every = (ids.shape[1] * tokens + own for tokens in (full, self.length))
        self.attended = (self.attended[0] + exact, self.attended[1] + every)
        return self.read(ids)


def feed(decoder: Decoder, cache: Cache, ids: torch.Tensor, **kwargs):
    """One forward pass over ids [B, n] that extends `cache`."""
    return decoder.model(
        input_ids=ids.to(decoder.model.device), past_key_values=cache, use_cache=True, return_dict=True, **kwargs
    )


def seal(cache: Cache) -> None:
    """Say that what was read is the whole prompt, for caches that compress whole prompts."""
    if isinstance(cache, KVCache):
        cache.seal()


def treats_whole_prompts(cache: Cache) -> bool:
    """Whether the cache compresses a prompt as a whole instead of page by page."""
    return isinstance(cache, KVCache) and any(s is not None and (s.is_span or s.evicts) for s in cache.schemes)


@torch.no_grad()
def generate_greedily(decoder: Decoder, context: torch.Tensor, cue: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Continue greedily, past any end-of-sequence token, reading the cue through what the cache made of the context.

    A single pass over the whole prompt would answer from full precision: the cache only quantizes what it has read.

    Args:
        decoder: model and cache.
        context: int64 [B, n], read in one pass.
        cue: int64 [B, m], read in a second one.
        new_tokens: how many.

    Returns:
        int64 [B, new_tokens].
    """
    cache = decoder.new_cache()
    feed(decoder, cache, context, logits_to_keep=1)
    seal(cache)
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
    return scheme is not None and min(scheme.key_bits, scheme.value_bits) < 16


def _nll(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    picked = log_probs.gather(-1, targets.to(log_probs.device).unsqueeze(-1)).squeeze(-1)
    return -picked.double().cpu()
