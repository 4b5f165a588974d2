"""Bytes of a layer's cache: pinned by hand, and as tensors have them."""

import pytest
import torch
from tiny.mixtures import tiny_mixture
from tiny.models import random_ids, tiny_model
from transformers import DynamicCache

from kvconvert import KVCache
from kvconvert.cache import LayerCache, ModelCache
from kvconvert.methods import PRESETS, KVScheme
from kvconvert.models.configuration import model_cache

HEADS, CHANNELS = 3, 64
CONTEXTS = (64, 1024, 4096, 4100)
# Of one layer by preset and sliding window, after prompts of CONTEXTS tokens.
PINNED = {
    ("default", None): (49_152, 144_384, 568_320, 571_392),
    ("default", 512): (49_152, 73_728, 73_728, 76_800),
    ("oscar", None): (49_152, 152_576, 601_088, 604_160),
    ("oscar", 512): (49_152, 77_824, 77_824, 80_896),
    ("oscar-g128", None): (49_152, 121_856, 478_208, 481_280),
    ("oscar-g128", 512): (49_152, 62_464, 62_464, 65_536),
    ("kivi", None): (49_152, 150_528, 592_896, 595_968),
    ("kivi", 512): (49_152, 76_800, 76_800, 79_872),
    ("kivi-paper", None): (49_152, 187_392, 629_760, 632_832),
    ("kivi-paper", 512): (49_152, 113_664, 113_664, 116_736),
    ("kitty", None): (49_152, 189_312, 559_104, 562_176),
    ("kitty", 512): (49_152, 127_680, 127_680, 130_752),
    ("kitty-pro", None): (49_152, 195_456, 583_680, 586_752),
    ("kitty-pro", 512): (49_152, 130_752, 130_752, 133_824),
    ("calibquant-1bit", None): (10_752, 58_368, 224_256, 224_256),
    ("calibquant-2bit-visual", None): (16_896, 102_912, 397_824, 397_824),
    ("calibquant-2bit-paper", None): (13_824, 99_840, 394_752, 407_040),
    ("minikv", None): (28_080, 110_640, 423_984, 425_544),
    ("minikv-plain", None): (24_960, 104_448, 417_792, 419_352),
}


@pytest.mark.parametrize(("preset", "window"), PINNED, ids=lambda part: str(part))
def test_sizes_are_what_they_were(preset, window):
    cache = LayerCache(HEADS, CHANNELS, CHANNELS, PRESETS[preset], window)
    found = tuple(cache.exact_bytes(context) for context in CONTEXTS)
    assert found == PINNED[preset, window]


@pytest.mark.parametrize(
    ("fields", "bits"),
    [
        ({"key_bits": 16, "value_bits": 16}, 2 * 64 * 32),
        ({}, 2 * 64 * (2 + 2) + 2 * 64 * 2),  # 32 bits of scale and zero point for every 32 numbers, both sides
        ({"key_group_size": 128}, 2 * 64 * (2 + 2) + 2 * 64 * (32 / 128 + 1)),
        ({"key_bits": 3}, 2 * 64 * (3 + 2) + 2 * 64 * 2),
        ({"token_norm": "joint"}, 2 * 64 * (2 + 2) + 2 * 64 * 2 + 16),
        ({"token_norm": "per_head"}, 2 * 64 * (2 + 2) + 2 * 64 * 2 + 2 * 16),
        # eight channels of each head with twice the bits, and 16 bytes in each page for their numbers
        ({"boost_fraction": 0.125}, 2 * 64 * (2 + 2) + 2 * 64 * 2 + 2 * (8 * 2 + 16 * 8 / 128)),
        ({"boost_fraction": 0.125, "boost_select": "calibrated"}, 2 * 64 * (2 + 2) + 2 * 64 * 2 + 2 * 8 * 2),
        ({"static_scales": "calibrated", "key_bits": 4, "value_bits": 8}, 2 * 64 * 12),
    ],
    ids=str,
)
def test_pages_hold_codes_and_everything_stored_beside_them(fields, bits):
    """Bits per token of two heads of 64 channels."""
    assert LayerCache(2, 64, 64, KVScheme(**fields)).one_page_bytes * 8 / 128 == pytest.approx(bits)


def read(model, schemes, tokens):
    """A cache after a prompt."""
    cache = KVCache(model.config, schemes)
    with torch.no_grad():
        model(random_ids(1, tokens), past_key_values=cache, logits_to_keep=1)
    cache.seal()
    return cache


@pytest.mark.each_value
@pytest.mark.parametrize("tokens", [3, 400])
@pytest.mark.parametrize("preset", ["kitty", "minikv", "calibquant-1bit"])
@pytest.mark.parametrize("unquantized", [0, 1])
def test_bytes_are_those_of_a_cache_after_a_prompt(preset, tokens, unquantized):
    model = tiny_model("gemma2", attention="kvconvert", num_hidden_layers=4).to(torch.bfloat16)
    schemes = [KVScheme.preset(preset).with_online_rotation()] * 4
    schemes[unquantized] = None  # it has pages of the model's own dtype, with a sliding window or without
    found = read(model, schemes, tokens).stats()
    assert model_cache(model.config, schemes).exact_bytes(tokens) == found.bytes_used


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_plain_bytes_are_those_of_transformers_cache(architecture):
    model = tiny_mixture(architecture) if architecture == "deepseek_v3" else tiny_model(architecture)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model.to(torch.bfloat16)(random_ids(1, 50), past_key_values=cache)
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    sizes = model_cache(model.config, [None] * model.config.num_hidden_layers)
    assert sizes.bytes(50) == sizes.plain_bytes(50) == stored


def test_a_stated_size_is_the_mean_over_how_full_the_last_page_is():
    """By hand: keys of 2 bits in groups of 32 tokens have 3 a number, values alike; four sink tokens of 16 besides."""
    cache = ModelCache((LayerCache(2, 64, 64, KVScheme(sink_tokens=4)),))
    for context, full in ((100, 0), (132, 1), (4096, 1)):
        lengths = range(max(1, context - 127), context + 1)
        stored = [16 * (n % 128 + 4 * (n >= 128)) + 3 * (n - n % 128) for n in lengths]
        bits = sum(stored) / sum(lengths)
        assert cache.bits_per_value(context) == pytest.approx(bits)
        assert cache.bytes(context) == pytest.approx(bits / 8 * context * 2 * 2 * 64)
        assert (bits < 16) == bool(full)


def test_a_budget_stands_for_the_layers_that_it_pays_for():
    kept, searched = LayerCache(2, 64, 64), LayerCache(2, 64, 64, KVScheme(), sliding_window=512)
    cache = ModelCache((kept, searched), budget_bits=3.0)
    numbers = kept.numbers(4096), searched.numbers(4096)
    assert numbers == (4096 * 256, 512 * 256)
    assert cache.exact_bytes(4096) == (16 * numbers[0] + 3 * numbers[1]) / 8


@pytest.mark.parametrize("preset", ["kitty", "minikv", "calibquant-1bit"])
def test_statistics_count_the_same_numbers(preset):
    model = tiny_model("gemma2", attention="kvconvert", num_hidden_layers=2).to(torch.bfloat16)
    schemes = [KVScheme.preset(preset).with_online_rotation()] * 2
    found, expected = read(model, schemes, 400).stats(), model_cache(model.config, schemes)
    assert found.values == expected.numbers(400)
    assert found.bits_per_value == 8 * expected.exact_bytes(400) / expected.numbers(400)
