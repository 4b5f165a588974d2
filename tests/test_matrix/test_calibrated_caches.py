"""What calibration chooses for a cache (ranges, taus) reaches the loaded bundle, on every architecture with a cache."""

import pytest
from kv_cells import NAME, RECIPES, REFUSED, generate, needs_own_attention, with_attention
from kv_reference import reference_cache
from tiny.models import ARCHITECTURES
from tiny.structures import REFUSED_WEIGHTS
from transformers.cache_utils import DynamicCache
from weight_cells import convert

from kvconvert import KVScheme, load
from kvconvert.bundle.reader import open_bundle

# Preset of the recipe, further settings, and the prompt on which it compresses.
PRESETS = {
    "kivi": ("kivi", "", RECIPES["kivi"]),
    "kitty": ("kitty", "", RECIPES["kitty"]),
    "minikv": ("minikv", "", RECIPES["minikv"]),
    "calibquant": ("calibquant-1bit", "tau_grid = [0, 2]", RECIPES["calibquant"]),
}
KEPT = [name for name in ARCHITECTURES if name not in REFUSED]
IN_EVERY_RUN = ("gemma2", "qwen3_next", "gemma4_text")


@pytest.mark.quick("gemma4_text-minikv")
@pytest.mark.parametrize(
    ("name", "preset"),
    [
        pytest.param(name, preset, marks=() if name in IN_EVERY_RUN else pytest.mark.full, id=f"{name}-{preset}")
        for name, preset in zip(KEPT, list(PRESETS) * len(KEPT), strict=False)
    ],
)
def test_a_bundle_generates_as_the_reference_does_with_what_was_calibrated(name, preset, tmp_path):
    entry, (scheme_name, settings, recipe) = ARCHITECTURES[name], PRESETS[preset]
    text = f'[weights]\nmethod = "none"\n\n[kv]\npreset = "{scheme_name}"\n{settings}\n'
    bundle = convert(entry, tmp_path, text, recipe.length)
    layers = open_bundle(bundle).manifest.layers
    schemes = [None if layer.kv is None else KVScheme.from_dict(layer.kv) for layer in layers]
    stated = KVScheme.preset(scheme_name)
    chosen = [scheme for scheme in schemes if scheme is not None]
    assert chosen
    if name not in REFUSED_WEIGHTS:
        assert any(
            (s.key_clip_ratio, s.value_clip_ratio) != (stated.key_clip_ratio, stated.value_clip_ratio) for s in chosen
        )
    model, inputs = entry.build(), entry.inputs(2, recipe.length, padding=recipe.padding)
    full = generate(model, inputs, DynamicCache(config=model.config), None)
    tokens = full.argmax(-1)
    with_attention(model, entry, NAME if any(map(needs_own_attention, chosen)) else "eager")
    loaded = load(bundle)[0]
    cache = reference_cache(model, schemes, [recipe.padding, 0], loaded.kv_plan)
    expected = generate(model, inputs, cache, tokens)
    found = generate(loaded, inputs, None, tokens)
    # As for caches without calibration (test_kv.py).
    assert (found - expected).abs().mean() < 0.02 * (expected - full).abs().mean()
