"""Prompt chunks over stored tokens of every kind, attended to by a cache layer without a model around it."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from transformers import LlamaConfig

from kvconvert.kernels.attention import Scoring
from kvconvert.methods import KVScheme
from kvconvert.runtime import KVCache
from kvconvert.runtime.cache import attend as attending
from kvconvert.runtime.cache.attend import commit
from kvconvert.runtime.cache.chunked_prefill import ChunkedPrefill
from kvconvert.runtime.cache.compress import end_forward, seal
from kvconvert.runtime.cache.forward_pass import PassTokens

CONFIG = LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
SCHEMES = {
    "norms and sink tokens": KVScheme(
        rotate_keys="hadamard", rotate_values="online", token_norm="joint", sink_tokens=3
    ),
    "keys stay longer": KVScheme(key_recent_tokens=200, sink_tokens=5, value_bits=4, value_group_size=16),
    "values stay longer": KVScheme(value_recent_tokens=200, boost_fraction=0.25, key_group_size=128),
    "16 and 8 bits": KVScheme(key_bits=16, value_bits=8, key_recent_tokens=10, value_recent_tokens=10),
    "scales of 8 bits": KVScheme(key_bits=3, value_bits=1, key_scale_bits=8, value_scale_bits=8, sink_tokens=3),
    "eviction": replace(KVScheme.preset("minikv"), key_group_size=32),
    "spans": replace(KVScheme.preset("calibquant-2bit"), tau1=0.0, tau2=0.0, sink_tokens=2),
    "spans with tau": replace(KVScheme.preset("calibquant-1bit"), tau2=0.5, sink_tokens=2, span_tokens=128),
}
WINDOW = 170
# The second row is padded at its beginning, the third in the middle of its second chunk as well.
PADDING = torch.ones(3, 1000, dtype=torch.bool)
PADDING[1, :150] = PADDING[2, :20] = PADDING[2, 410:425] = False


def window(batch, head, query, key):
    """Causal attention within `WINDOW` tokens."""
    return (key <= query) & (key > query - WINDOW)


def layer_of(scheme: KVScheme, sliding_window: int | None = None):
    """A cache layer that is still empty."""
    layer = KVCache(CONFIG, scheme).layers[0]
    layer.store.group.sliding_window = sliding_window
    return layer


def outputs(
    layer,
    lengths: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    mask_function=None,
    rows: int = 3,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Attention of each chunk's real tokens, one after another; each of them is a prompt that is sealed."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in lengths:
        start = layer.store.logical
        new = [torch.randn(rows, heads, length, 32, generator=generator).to(device, dtype) for heads in (2, 2, 4)]
        seal(layer.store.group)
        layer.update(*new[:2])
        padding = PADDING[:rows, : start + length].to(device)
        chunk = PassTokens(torch.arange(start, start + length, device=device), padding, mask_function)
        commit(layer.store, chunk)
        output = attending.attend(layer.store, new[2], chunk, Scoring(0.2, softcap, sink_logits))
        end_forward(layer.store)
        found.append(output.transpose(1, 2)[padding[:, start:]])
    return found


def counted(monkeypatch) -> list[int]:
    """The rows whose chunks will be attended to over a dequantized history, as they come."""
    rows: list[int] = []
    attend = ChunkedPrefill.attend

    def counting(history, *arguments):
        rows.append(history.row)
        attend(history, *arguments)

    monkeypatch.setattr(ChunkedPrefill, "attend", counting)
    return rows


def both_paths(monkeypatch, layer, *arguments, **options) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs as they are, and with pages as they are stored."""
    other = copy.deepcopy(layer)
    got = outputs(layer, *arguments, **options)
    with monkeypatch.context() as patch:
        patch.setattr(ChunkedPrefill, "is_served", lambda *given: False)
        expected = outputs(other, *arguments, **options)
    return got, expected


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to all of what is expected."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())
