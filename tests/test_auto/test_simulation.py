"""One forward pass with simulated caches gives what reading page by page through the cache gives."""

from dataclasses import replace

import pytest
import torch
from tiny.models import ARCHITECTURES, random_ids

from kvconvert.auto.model import SimulatedModel
from kvconvert.cache import LayerCache, layer_format
from kvconvert.calibration.simulated_attention import SIMULATED_ATTENTION
from kvconvert.fidelity.scoring import Decoder, compare, first_page
from kvconvert.methods import PRESETS
from kvconvert.models.configuration import layer_types_of
from kvconvert.runtime import KVCache

SINKS, PAGE = 4, 128
OSCAR = replace(PRESETS["oscar-g128"], sink_tokens=SINKS, rotate_values="online", key_clip_ratio=0.8)
SCHEMES = {
    "two layers": [OSCAR, replace(OSCAR, value_bits=4, value_group_size=32, boost_fraction=0.25)],
    "windows": [
        replace(OSCAR, key_recent_tokens=PAGE),
        replace(OSCAR, key_bits=1, value_recent_tokens=PAGE, value_clip_ratio=0.7),
    ],
    "short windows": [replace(OSCAR, key_recent_tokens=16, value_recent_tokens=16, value_bits=bits) for bits in (1, 2)],
    "scales of 8 bits": [
        replace(OSCAR, key_bits=1, key_clip_ratio=0.5, key_scale_bits=8, value_scale_bits=8),
        replace(OSCAR, value_bits=1, key_scale_bits=8, value_scale_bits=8, boost_fraction=0.25),
    ],
    "second layer": [None, replace(OSCAR, key_bits=16, token_norm="none", rotate_keys="none", value_bits=1)],
}


def cache_of(scheme):
    return layer_format(scheme, heads=2, key_dim=16)


def both(name, schemes, length=3 * PAGE + 37):
    """Divergence through the cache, simulated, and simulated from the first layer on."""
    model, ids = ARCHITECTURES[name].build(), random_ids(2, length, 3)
    model.set_attn_implementation("kvconvert")
    decoder = Decoder(model, lambda: KVCache(model.config, schemes))
    # Chunks end where pages are quantized, so that no token reads a page later than it would when decoding.
    first = first_page(decoder.new_cache().schemes)
    through = compare(Decoder.plain(model), {"cache": decoder}, ids, prefill=first, chunk=PAGE)["cache"]
    model.set_attn_implementation(SIMULATED_ATTENTION)
    simulated = SimulatedModel(model, model.model.layers)
    text = simulated.read(ids, first)
    assert simulated.starts_late
    text = replace(text, positions=text.positions[:-1], log_probs=text.log_probs[:, :-1])  # as `compare` scores
    caches = {i: cache_of(scheme) for i, scheme in enumerate(schemes) if scheme is not None}
    assert simulated.divergence(text, {}) == 0
    return float(through.kl.mean()), simulated.divergence(text, caches), simulated._divergence(text, caches, 0)


@pytest.mark.quick("llama-windows", "gemma2")
@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("llama", "two layers"),
        ("llama", "windows"),
        ("llama", "short windows"),
        ("llama", "second layer"),
        ("llama", "scales of 8 bits"),
        ("gemma2", "two layers"),  # soft caps and a sliding window
        pytest.param("gpt_oss", "windows", marks=pytest.mark.full),  # sink logits
        pytest.param("mistral", "two layers", marks=pytest.mark.full),
        pytest.param("qwen3", "windows", marks=pytest.mark.full),
    ],
)
def test_simulated_divergence_is_that_through_the_cache(name, which):
    through, simulated, whole = both(name, SCHEMES[which])
    assert through > 1e-4
    assert simulated == pytest.approx(through, rel=2e-3)
    assert simulated == pytest.approx(whole, rel=1e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("length", [3, 100, 132, 700])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_sizes_are_those_of_the_cache(name, length):
    model = ARCHITECTURES[name].build("kvconvert").to(torch.bfloat16)
    windows = [arguments.get("sliding_window") for arguments in layer_types_of(model.config)[1]]
    for schemes in (
        SCHEMES["two layers"],
        SCHEMES["scales of 8 bits"],
        SCHEMES["windows"],
        [SCHEMES["second layer"][1]] * 2,
    ):
        cache = KVCache(model.config, schemes)
        ids = random_ids(1, length, 3)
        for chunk in ids.split(300, 1):
            model(input_ids=chunk, past_key_values=cache)
        pairs = zip(schemes, windows, strict=True)
        stated = sum(LayerCache(2, 16, 16, scheme, window).exact_bytes(length) for scheme, window in pairs)
        assert cache.stats().bytes_used == stated
