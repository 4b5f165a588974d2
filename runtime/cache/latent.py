"""Latent attention (MLA) over a layer that stores latents as its keys, and RoPE parts as its values, of one head."""

from __future__ import annotations

import torch

from kvconvert.errors import CacheError
from kvconvert.kernels.device import runs_triton
from kvconvert.kernels.latent import latent_attention, latent_decode
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.runtime.cache.attend import StoredRows
from kvconvert.runtime.cache.chunked_prefill import AttentionCall, ChunkedPrefill
from kvconvert.runtime.cache.forward_pass import PassTokens
from kvconvert.runtime.cache.store import LayerStore


def attend_latents(
    store: LayerStore,
    queries: torch.Tensor,
    up_keys: torch.Tensor,
    up_values: torch.Tensor,
    chunk: PassTokens,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over everything that a layer of latents stores, the queries' own tokens included.

    Args:
        store: whose newest T positions are the queries'.
        queries: [B, Hq, T, D + r], the channels without RoPE first.
        up_keys: W_UK [Hq, D, R]; up_values: W_UV [Hq, E, R].
        chunk: of the forward pass.
        scaling, softcap, sink_logits: see `AttentionCall`.

    Returns:
        [B, Hq, T, E]; zeros at padding.

    Raises:
        CacheError: attention is not causal.
    """
    if chunk.mask_function is not None:
        raise CacheError(
            f"Layer {store.index} stores latents, whose attention is causal, and the model's mask is not; use the "
            "model without a KV scheme."
        )
    plain, rope = queries.split([up_keys.shape[1], queries.shape[-1] - up_keys.shape[1]], -1)
    latent = plain @ up_keys
    if store.format.rotations.keys:
        latent = hadamard_transform(latent)
    if store.format.rotations.values:
        rope = hadamard_transform(rope)
    reason = store.latents_unsupported
    if reason is None and queries.dtype != store.dtype:
        reason = f"queries are {queries.dtype} and stored tokens {store.dtype}"
    if reason is None and queries.shape[2] > 1:
        reason = "the kernel of their pages takes one query of each sequence"
    if reason is None and not chunk.is_causal:
        reason = "an indexer chose the tokens"
    if reason is None and (softcap is not None or sink_logits is not None):
        reason = "there are soft caps or sink logits"
    if reason is None:
        rows = StoredRows(store, list(range(len(queries))), chunk, 1, store.group.registry.step_tables(store))
        attended = latent_decode(latent[:, :, 0], rope[:, :, 0], rows, store.format, scaling).unsqueeze(2)
    else:
        if runs_triton(store.device):
            store.fall_back("attention over latents", reason)
        attended = _over_dequantized(AttentionCall(store, chunk, scaling, softcap, sink_logits), latent, rope)
    if store.format.rotations.keys:
        attended = hadamard_transform(attended, inverse=True)
    return attended.to(queries.dtype) @ up_values.mT


def _over_dequantized(call: AttentionCall, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Sums of latents, float32 [B, Hq, T, R], for queries of latents of that shape and of RoPE parts [B, Hq, T, r]."""
    store, chunk, length = call.store, call.chunk, latent.shape[2]
    attended = torch.zeros(latent.shape, dtype=torch.float32, device=latent.device)
    first = store.logical - length
    for row, sequence in enumerate(store.sequences):
        positions = sequence.positions
        own = len(positions) - positions.before(first)
        if not own:
            continue
        at = slice(None)
        if own < length:
            at = positions.slice(len(positions) - own, len(positions), latent.device) - first
        parts, visible = ChunkedPrefill(call, row).parts(0, addressed=False), None
        if not chunk.is_causal:
            every = positions.slice(0, len(positions), latent.device)
            visible = chunk.visible(row, chunk.query_positions[at].to(latent.device), every)[0]
        attended[row, :, at] = latent_attention(
            latent[row][:, at],
            rope[row][:, at],
            parts,
            call.scaling,
            softcap=call.softcap,
            sink_logits=call.sink_logits,
            visible=visible,
        )
    return attended
