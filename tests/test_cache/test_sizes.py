"""Bytes of a layer's cache: pinned by hand, and as tensors have them."""

import pytest
import torch
from tiny.mixtures import tiny_mixture
from tiny.models import random_ids, tiny_model
from transformers import DynamicCache

from kvconvert import KVCache
from kvconvert.cache.size import LayerCache
from kvconvert.methods import PRESETS, KVScheme
from kvconvert.models.cache_shapes import model_cache

HEADS, CHANNELS = 3, 64
CONTEXTS = (64, 1024, 4096, 4100)
# Of one layer by preset and sliding window, after prompts of CONTEXTS tokens.
PINNED = {
    ("default", None): (49_152, 221_952, 645_888, 568_320),
    ("default", 512): (49_152, 168_960, 168_960, 73_728),
    ("oscar", None): (49_152, 229_120, 677_632, 601_088),
    ("oscar", 512): (49_152, 173_056, 173_056, 77_824),
    ("oscar-g128", None): (49_152, 202_240, 558_592, 478_208),
    ("oscar-g128", 512): (49_152, 157_696, 157_696, 62_464),
    ("kivi", None): (49_152, 227_328, 669_696, 592_896),
    ("kivi", 512): (49_152, 172_032, 172_032, 76_800),
    ("kivi-paper", None): (49_152, 187_392, 629_760, 632_832),
    ("kivi-paper", 512): (49_152, 113_664, 113_664, 116_736),
    ("kitty", None): (49_152, 247_632, 617_424, 620_496),
    ("kitty", 512): (49_152, 201_408, 201_408, 204_480),
    ("kitty-pro", None): (49_152, 253_008, 641_232, 644_304),
    ("kitty-pro", 512): (49_152, 204_480, 204_480, 207_552),
    ("calibquant-1bit", None): (10_752, 58_368, 224_256, 224_256),
    ("calibquant-2bit-visual", None): (16_896, 102_912, 397_824, 397_824),
    ("calibquant-2bit-paper", None): (13_824, 99_840, 394_752, 407_040),
    ("minikv", None): (28_080, 107_568, 420_912, 422_472),
    ("minikv-plain", None): (24_960, 104_448, 417_792, 419_352),
}


@pytest.mark.parametrize(("preset", "window"), PINNED, ids=lambda part: str(part))
def test_sizes_are_what_they_were(preset, window):
    cache = LayerCache(HEADS, CHANNELS, CHANNELS, PRESETS[preset], window)
    found = tuple(cache.bytes(context) for context in CONTEXTS)
    assert found == PINNED[preset, window]


def read(model, schemes, tokens):
    """A cache after a prompt."""
    cache = KVCache(model.config, schemes)
    with torch.no_grad():
        model(random_ids(1, tokens), past_key_values=cache, logits_to_keep=1)
    cache.seal()
    return cache


@pytest.mark.parametrize("tokens", [3, 400])
@pytest.mark.parametrize("preset", ["kitty", "minikv", "calibquant-1bit"])
@pytest.mark.parametrize("unquantized", [0, 1])
def test_bytes_are_those_of_a_cache_after_a_prompt(preset, tokens, unquantized):
    model = tiny_model("gemma2", attention="kvconvert", num_hidden_layers=4).to(torch.bfloat16)
    schemes = [KVScheme.preset(preset).with_online_rotation()] * 4
    schemes[unquantized] = None  # it has pages of the model's own dtype, with a sliding window or without
    found = read(model, schemes, tokens).stats()
    assert model_cache(model.config, schemes).bytes(tokens) == found.bytes_used


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_plain_bytes_are_those_of_transformers_cache(architecture):
    model = tiny_mixture(architecture) if architecture == "deepseek_v3" else tiny_model(architecture)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model.to(torch.bfloat16)(random_ids(1, 50), past_key_values=cache)
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    sizes = model_cache(model.config, [None] * model.config.num_hidden_layers)
    assert sizes.bytes(50) == sizes.plain_bytes(50) == stored
