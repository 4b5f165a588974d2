"""A prompt is read again, so that caches with `selection = "reconstruction"` know what to keep of it (KVzip)."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvconvert.arguments import checked
from kvconvert.errors import UsageError, counted
from kvconvert.models import CACHE
from kvconvert.models.configuration import context_length
from kvconvert.runtime.cache.reconstruct import PART, share_budget
from kvconvert.runtime.hf.cache import KVCache

MOST_TOKENS = 16 * PART  # of a forward pass


@checked
@torch.no_grad()
def seal_prompt(model: torch.nn.Module, cache: KVCache, input_ids: torch.Tensor) -> None:
    """State that a prompt is complete, as `KVCache.seal()`; it is read again first where the cache's scheme selects by
    reconstruction.

    `generate` of a bundle's model does this by itself.

    Args:
        model: that has read the prompt.
        cache: that it was read into.
        input_ids: int64 [B, n], all tokens read so far, padding included.

    Raises:
        UsageError: the cache holds another number of tokens, or another batch.
    """
    if cache.reconstructs and any(sequence.open_from is not None for sequence in cache.groups[0].sequences):
        score_prompt(model, cache, input_ids)
    cache.seal()


@torch.no_grad()
def score_prompt(model: PreTrainedModel, cache: KVCache, input_ids: torch.Tensor) -> None:
    """Read a prompt again, so that the scores of its tokens are known; arguments and errors as of `seal_prompt`."""
    (batch, length), first = input_ids.shape, cache.groups[0]
    heads = first.stores[0].heads_apart
    if (batch * heads, length) != (first.rows, cache.get_seq_length()):
        raise UsageError(
            f"`input_ids` are {counted(batch, 'row')} of {length} tokens, and the cache holds {first.rows // heads} of "
            f"{cache.get_seq_length()}; pass all tokens that were read into it."
        )
    real = torch.ones(batch, length, dtype=torch.int64) if first.real is None else first.real[::heads].long().cpu()
    before = real.cumsum(1) - 1  # index of a token among its sequence's own
    positions = context_length(model.config) or int(before.max()) + 1 + PART
    try:
        for start in range(0, length, MOST_TOKENS):
            stop = min(start + MOST_TOKENS, length)
            for group in cache.groups:
                group.repetition = (start, stop)
            own = before[:, start:stop].clamp(min=0)
            # The repetition of a part begins where the part ends, or earlier where positions end.
            begin = own[:, :1].clamp(min=first.scheme.sink_tokens)
            index = (own - begin).clamp(min=0)
            size = (own[:, -1:] + 1 - begin - index // PART * PART).clamp(0, PART)
            room = (positions - (own - index % PART + size)).clamp(min=0)
            model(
                input_ids=input_ids[:, start:stop].to(model.device),
                position_ids=(own + size.minimum(room)).to(model.device),
                use_cache=True,
                logits_to_keep=1,
                **{CACHE: cache},
            )
    finally:
        for group in cache.groups:
            group.repetition = None
    share_budget(cache.groups, heads)
