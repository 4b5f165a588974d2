"""A cache served by the kernels gives what the reference path gives."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from kvconvert import KVCache, KVScheme
from kvconvert.kernels import decode
from kvconvert.kernels import device as dispatch
from kvconvert.kernels.attention import Scoring
from kvconvert.runtime.cache.attend import attend, commit
from kvconvert.runtime.cache.compress import end_forward
from kvconvert.runtime.cache.forward_pass import ModalityMask, PassTokens

CONFIG = LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
CONFIG.image_token_id = 1
SCHEMES = {
    "norms and sink tokens": KVScheme(
        rotate_keys="hadamard", rotate_values="online", token_norm="joint", sink_tokens=3
    ),
    "keys stay longer": KVScheme(key_recent_tokens=200, sink_tokens=5, value_bits=4, value_group_size=16),
    "values stay longer": KVScheme(value_recent_tokens=200, boost_fraction=0.25, key_group_size=128),
    "1 bit": KVScheme(key_bits=1, value_bits=1, key_group_size=128, token_norm="per_head"),
    "16 and 8 bits": KVScheme(key_bits=16, value_bits=8, key_recent_tokens=20, value_recent_tokens=20),
    "scales of 8 bits": KVScheme(key_bits=3, value_bits=1, key_scale_bits=8, value_scale_bits=8, sink_tokens=3),
    "visual spans with tau": replace(KVScheme.preset("calibquant-2bit-visual"), sink_tokens=2, tau2=0.5),
    "spans with tau": replace(KVScheme.preset("calibquant-1bit"), sink_tokens=2, tau2=0.5, span_tokens=128),
    "eviction": replace(KVScheme.preset("minikv"), key_group_size=32),
}
PADDING = torch.ones(2, 600, dtype=torch.bool)
PADDING[1, :150] = False


def window(batch, head, query, key):
    return (key <= query) & (key > query - 170)


# A prompt, a single token, a few behind a sliding window; and a few at once, over which the mask is causal.
LONG = ((330, None), (1, None), (3, None), (2, window))
# The shortest prompt of which every kind of token is stored.
CASES = [pytest.param("norms and sink tokens", ((290, None), *LONG[1::2]), id="norms and sink tokens")]
CASES += [pytest.param(name, LONG, id=f"{name}, longer", marks=pytest.mark.full) for name in SCHEMES]


@pytest.mark.parametrize(("name", "steps"), CASES)
def test_attention_over_the_cache_is_the_reference_paths(device, monkeypatch, name, steps):
    generator = torch.Generator().manual_seed(0)
    layer = KVCache(CONFIG, SCHEMES[name]).layers[0]

    def step(layer, tokens, keys, values, queries, mask_function):
        start = layer.store.logical
        if layer.store.scheme.modality != "all":  # what is visual has gaps, and differs in the rows
            layer.store.group.modality_mask = ModalityMask(torch.arange(2 * tokens).view(2, tokens) % 9 > 4)
        layer.update(keys, values)
        columns = torch.arange(start, start + tokens, device=keys.device)
        chunk = PassTokens(columns, PADDING[:, : start + tokens].to(keys.device), mask_function)
        commit(layer.store, chunk)
        output = attend(layer.store, queries, chunk, Scoring(0.2))
        end_forward(layer.store)
        return output[:, :, PADDING[1, start : start + tokens]]

    for tokens, mask_function in steps:
        new = [torch.randn(2, heads, tokens, 32, generator=generator).to(device) for heads in (2, 2, 4)]
        reference = copy.deepcopy(layer)
        with dispatch.interpreted(False), monkeypatch.context() as patch:
            patch.setattr(decode, "unsupported", lambda *given: "the reference is wanted")
            expected = step(reference, tokens, *new, mask_function)
        if tokens > 3:
            # What the kernels make of a prompt is tested elsewhere.
            layer = reference
            continue
        got = step(layer, tokens, *new, mask_function)
        error = float((got - expected).double().norm() / expected.double().norm())
        # products of fp16 halves with float32 sums
        assert error < 2e-3, (tokens, mask_function)
        assert layer.store.fallbacks == 0
        if "tau" in name:
            assert layer.store.group.registry.clamped_rows(layer.store) == reference.store.group.registry.clamped_rows(
                reference.store
            )
