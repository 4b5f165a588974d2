"""The attention and mask functions that transformers calls under the name "kvconvert"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from kvconvert.errors import CacheError, UnsupportedModelError
from kvconvert.kernels.attention import Choice, Scoring, choice_of
from kvconvert.kernels.decode import ResidualTokens, paged_attention
from kvconvert.kernels.pages import LayerFormat, PageFormat
from kvconvert.runtime.cache.attend import attend_latents, commit, store_and_attend
from kvconvert.runtime.cache.compress import end_forward
from kvconvert.runtime.cache.forward_pass import LayerTokens, PassTokens, layer_tokens
from kvconvert.runtime.cache.reconstruct import score_and_attend
from kvconvert.runtime.cache.store import LayerStore
from kvconvert.runtime.hf.handles import KeyHandle, MaskHandle
from kvconvert.runtime.hf.packed import PackedLayer, Segment

NAME = "kvconvert"


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> MaskHandle:
    """A `MaskHandle` [B, 1, T, 1] of query positions; the signature is that of transformers' mask interface."""
    # Static caches advance their offset tensor in place before the mask is evaluated.
    offset = int(q_offset)
    positions = (torch.arange(q_length, device=device) + offset).view(1, 1, -1, 1).expand(batch_size, 1, q_length, 1)
    arguments = kwargs | {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "device": device,
    }
    return MaskHandle.wrap(positions, arguments)


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention through the cache when `key` is a handle of one, else over `key` and `value` themselves.

    Args:
        module: the attention module, for its name and layer index.
        query: [B, Hq, T, D]; key, value: [B, H, n, D] and [B, H, n, E], new tokens only when `key` is a handle.
        attention_mask: a `MaskHandle`, or whatever the model prepared.
        scaling, softcap, s_aux: factor of the dot products, soft cap and sink logits of the model.
        indices, block_indices: what an indexer chose, see `choice_of`.

    Returns:
        [B, T, Hq, E] and no weights.

    Raises:
        CacheError: the model replaced the key or mask handle, uses dropout, or is not the one that the cache is for.
        UnsupportedModelError: the model adds a position bias.
    """
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} adds a position bias to its attention scores, which the kvconvert cache does "
            "not support."
        )
    choice = choice_of(indices, block_indices, getattr(module.config, "index_block_size", None))
    if not isinstance(key, KeyHandle):
        return _without_cache(module, query, key, value, attention_mask, scoring, choice, dropout, **kwargs), None
    store = getattr(key, "store", None)
    where = f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
    if not isinstance(store, (LayerStore, PackedLayer)):
        raise CacheError(
            f"The keys that reached {where} have lost their cache layer; the model changes them after the cache update."
        )
    if not isinstance(attention_mask, MaskHandle):
        raise CacheError(
            f"The attention mask that reached {where} is not kvconvert's: pass a 2-D attention_mask of ones and zeros "
            "(this cache does not support 4-D masks)."
        )
    if isinstance(store, LayerStore):
        store.group.made_for.check_reader(module.config)
    if dropout:
        raise CacheError(f"Attention dropout is on in {where}; call model.eval() before generating.")
    is_packed = isinstance(store, PackedLayer)
    is_latent = store.layers[0].store.is_latent if is_packed else store.is_latent
    if is_packed:

        def own(store: LayerStore, segment: Segment, chunk: PassTokens) -> torch.Tensor:
            parts = (segment.split(x.as_subclass(torch.Tensor)) for x in (query, key, value))
            return _over_latents(store, module, *parts, None, chunk, scoring)

        over_latents = own if is_latent else None
        options = {"value_dim": value.shape[-1], "over_latents": over_latents, "choice": choice}
        return store.attend(query, attention_mask, scoring, **options), None
    if store.scheme.heads_apart:
        output = _by_head(store, query, key, value, attention_mask, scoring)
        return output.transpose(1, 2).contiguous(), None
    chunk = layer_tokens(attention_mask.chunk(query.device, query.shape[2]), store, choice)
    if is_latent:
        return _over_latents(store, module, query, key, value, attention_mask, chunk, scoring), None
    output = store_and_attend(store, query, chunk, scoring)
    return output.transpose(1, 2).contiguous(), None


def _by_head(
    store: LayerStore,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: MaskHandle,
    scoring: Scoring,
) -> torch.Tensor:
    """Attention of [B, Hq, T, D] where every KV head is a row of the store: [B, Hq, T, E]."""
    if scoring.sink_logits is not None:
        raise UnsupportedModelError(
            f'This model\'s attention has sink logits, which selection = "{store.scheme.selection}" does not support; '
            'choose selection = "attention".'
        )
    batch, heads = key.shape[:2]
    grouped = query.unflatten(1, (heads, -1)).flatten(0, 1)
    if store.group.repetition is not None:
        keys, values = (part.as_subclass(torch.Tensor).flatten(0, 1).unsqueeze(1) for part in (key, value))
        output = score_and_attend(store, grouped, keys, values, scoring)
    else:
        chunk = mask.chunk(query.device, query.shape[2], heads)
        if not chunk.is_causal:
            raise CacheError(
                f'selection = "{store.scheme.selection}" needs causal attention, and this model masks otherwise; '
                'choose selection = "attention".'
            )
        output = store_and_attend(store, grouped, chunk, scoring)
    return output.unflatten(0, (batch, heads)).flatten(1, 2)


def _over_latents(
    store: LayerStore,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: MaskHandle | None,
    chunk: PassTokens,
    scoring: Scoring,
) -> torch.Tensor:
    """Latent attention [B, T, Hq, E]: of a prompt as the model computes it, later of stored latents.

    `mask` is None where nothing is padding.
    """
    commit(store, chunk)
    if store.up_projections is None:
        store.up_projections = _up_projections(module, store, query)
    if all(sequence.seen <= query.shape[2] for sequence in store.sequences):
        expanded = (states.as_subclass(torch.Tensor) for states in (key, value))
        choice = chunk.choice if isinstance(chunk, LayerTokens) else None
        output = _without_cache(module, query, *expanded, mask, scoring, choice)
    else:
        output = attend_latents(store, query, *store.up_projections, chunk, scoring)
        output = output.transpose(1, 2).contiguous()
    end_forward(store)
    return output


def _up_projections(
    module: torch.nn.Module, store: LayerStore, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """W_UK [Hq, D, R] and W_UV [Hq, E, R] of a module, whose Linear may be quantized, in the query's dtype.

    Caches of one model have them in the same place, of which recordings of its steps know.
    """
    rank, heads = store.format.keys.head_dim, query.shape[1]
    plain = query.shape[3] - store.format.values.head_dim
    every = module.kv_b_proj(torch.eye(rank, dtype=query.dtype, device=query.device)).T.unflatten(0, (heads, -1))
    parts, kept = every.tensor_split([plain], 1), store.group.registry.kept
    return tuple(kept((store.index, side, every.dtype, every.device), part) for side, part in enumerate(parts))


def _without_cache(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scoring: Scoring,
    choice: Choice | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> torch.Tensor:
    """Ordinary attention over the given keys: SDPA, or the streaming softmax for soft caps and sink logits."""
    plain, tokens = scoring.softcap is None and scoring.sink_logits is None, key.shape[2]
    if choice is not None and choice.is_all_of(tokens):
        choice = None
    if isinstance(attention_mask, MaskHandle):
        attention_mask = attention_mask.materialise(allow_causal_skip=plain)
    if choice is not None:
        attention_mask = choice.mask(attention_mask, query.shape[1], tokens)
    if plain:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scoring.scaling, **kwargs
        )[0]
    batch, _, length, dim = query.shape
    if attention_mask is None:
        attention_mask = torch.ones(length, key.shape[2], dtype=torch.bool, device=query.device).tril(
            key.shape[2] - length
        )[None, None]
    visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
    visible = visible.expand(batch, -1, length, key.shape[2])
    heads, e = key.shape[1], value.shape[-1]
    no_pages = LayerFormat(PageFormat.keys(heads, dim, 128, 16, 128), PageFormat.values(heads, e, 128, 16, e))
    tokens = ResidualTokens(torch.arange(batch, device=key.device), key, value, visible)
    output = paged_attention(query, [], [tokens], no_pages, scoring)
    return output.to(query.dtype).transpose(1, 2).contiguous()


def register() -> None:
    """Make `attn_implementation="kvconvert"` known to transformers."""
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)
