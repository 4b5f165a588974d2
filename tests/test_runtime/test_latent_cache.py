"""Caches of latent attention (MLA) in the models that have it, against transformers' own cache."""

import pytest
import torch
from tiny.models import ARCHITECTURES, random_ids
from transformers import AutoConfig, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from kvconvert import KVCache, KVScheme
from kvconvert.errors import CacheError, UnsupportedModelError
from kvconvert.kernels.quantizer import dequantize, quantize
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.models.configuration import model_cache

PAGE, SINKS, GROUP = 128, 4, 32
EXACT = KVScheme(key_bits=16, value_bits=16)
LATENT_MODELS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
SCHEME = KVScheme(
    key_bits=4, key_group_size=GROUP, rotate_keys="hadamard", value_bits=8, value_group_size=16, sink_tokens=SINKS
)


def model_of(name, attention="kvconvert"):
    return ARCHITECTURES[name].build(attention)


def read(model, ids, cache, first, step, mask=None):
    """Logits [B, T, V] of ids read through a cache: `first` tokens, then `step` at a time."""
    found = []
    with torch.no_grad():
        for part in ids.split([first, *[step] * ((ids.shape[1] - first) // step)], 1):
            end = cache.get_seq_length() + part.shape[1]
            seen = None if mask is None else mask[:, :end]
            found.append(model(part, attention_mask=seen, past_key_values=cache).logits)
    return torch.cat(found, 1)


class Simulated(DynamicLayer):
    """transformers' layer; of what is not padding, complete pages are quantized after they were attended to."""

    def __init__(self, padding):
        super().__init__()
        self.padding, self.done = padding, [0] * len(padding)

    def update(self, latent, rope, *args, **kwargs):
        if self.is_initialized:
            for row, before in enumerate(self.padding):
                complete = (self.keys.shape[2] - before) // PAGE * PAGE
                for start in range(self.done[row], complete, PAGE):
                    self._quantize(row, before + start, SINKS if start == 0 else 0)
                self.done[row] = complete
        return super().update(latent, rope, *args, **kwargs)

    def _quantize(self, row, start, exact):
        latents, rope = (side[row, 0, start : start + PAGE] for side in (self.keys, self.values))
        rotated = hadamard_transform(latents)
        # Tokens that are stored elsewhere widen no range.
        rotated[:exact] = rotated[exact]
        found = dequantize(*quantize(rotated, 4, GROUP, 0), GROUP, 0)
        latents[exact:] = hadamard_transform(found, inverse=True)[exact:]
        rope[exact:] = dequantize(*quantize(rope, 8, 16, 1), 16, 1)[exact:]


@pytest.mark.quick("deepseek_v2")
@pytest.mark.parametrize("name", LATENT_MODELS)
def test_unquantized_latents_give_what_transformers_gives(name):
    inputs = ARCHITECTURES[name].inputs(2, 240, padding=21)
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    model = model_of(name, "eager")
    expected = model.generate(**inputs, **options, output_logits=True)
    model.set_attn_implementation("kvconvert")
    cache = KVCache(model.config, EXACT)
    found = model.generate(**inputs, **options, output_logits=True, past_key_values=cache)
    assert cache.stats().pages == 6  # of both layers, two of one row and one of the other
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)


@pytest.mark.each_value
@pytest.mark.parametrize("name", LATENT_MODELS)
@pytest.mark.parametrize("step", [1, 15])
def test_quantized_latents_are_the_reference_quantizers(name, step):
    ids, padding = random_ids(2, 300), [0, 37]
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    expected, found = model_of(name, "eager"), model_of(name)
    layers = [Simulated(padding) for _ in range(found.config.num_hidden_layers)]
    reference = read(expected, ids, Cache(layers=layers), 285, step, mask)
    full = read(expected, ids, DynamicCache(config=expected.config), 285, step, mask)
    ours = read(found, ids, KVCache(found.config, SCHEME), 285, step, mask)
    effect = (reference - full)[:, 285:].abs().mean()
    # float32 sums in another order may round a code of a later page otherwise.
    assert (ours - reference)[:, 285:].abs().mean() < 0.02 * effect
    torch.testing.assert_close(ours[:, 37:285], full[:, 37:285], rtol=1e-3, atol=1e-3)


def test_a_prompt_in_parts_attends_to_the_latents_of_its_first_parts():
    model, ids = model_of("deepseek_v3"), random_ids(1, 200)
    expected = read(model, ids, KVCache(model.config, EXACT), 200, 1)
    found = read(model, ids, KVCache(model.config, EXACT), 70, 65)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_beams_are_those_of_exact_latents():
    inputs = ARCHITECTURES["deepseek_v3"].inputs(2, 140, padding=9)
    options = {"max_new_tokens": 20, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    model = model_of("deepseek_v3", "eager")
    expected = model.generate(**inputs, **options)
    model.set_attn_implementation("kvconvert")
    found = model.generate(**inputs, **options, past_key_values=KVCache(model.config, EXACT))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("tokens", [100, 300])
def test_sizes_are_those_of_the_tensors(tokens):
    model = model_of("deepseek_v3")
    cache = KVCache(model.config, SCHEME)
    read(model, random_ids(1, tokens), cache, tokens, 1)
    layers = model.config.num_hidden_layers
    size, stats = model_cache(model.config, [SCHEME] * layers, torch.float32), cache.stats()
    assert (size.exact_bytes(tokens), size.numbers(tokens)) == (stats.bytes_used, stats.values)
    # One latent and one RoPE part a token.
    assert stats.values == tokens * layers * (model.config.kv_lora_rank + model.config.qk_rope_head_dim)


def test_a_saved_session_goes_on_with_the_same_numbers(tmp_path):
    model, ids = model_of("glm4_moe_lite"), random_ids(1, 210)
    cache = KVCache(model.config, SCHEME)
    read(model, ids[:, :200], cache, 200, 1)
    cache.save(tmp_path / "session.safetensors")
    loaded = KVCache.load(tmp_path / "session.safetensors", KVCache(model.config, SCHEME))
    with torch.no_grad():
        found, expected = (model(ids[:, 200:], past_key_values=each).logits for each in (loaded, cache))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "fields",
    [{"value_bits": 4}, {"token_norm": "joint"}, {"key_center": "calibrated"}, {"static_scales": "calibrated"}],
    ids=str,
)
def test_schemes_of_keys_and_values_per_head_are_refused(fields):
    config = ARCHITECTURES["deepseek_v3"].config()
    with pytest.raises(UnsupportedModelError, match="latent-4bit"):
        KVCache(config, KVScheme(**SCHEME.to_dict() | fields))
    with pytest.raises(UnsupportedModelError, match="latent-4bit"):
        KVCache(config, [SCHEME, KVScheme.preset("kivi")])


@pytest.mark.parametrize("scheme", [SCHEME, KVScheme.preset("kivi")], ids=["of latents", "per head"])
def test_other_latent_attention_is_refused_by_name(scheme):
    config = AutoConfig.for_model("glm5_next_text", num_hidden_layers=1, layer_types=["indexed_attention"])
    with pytest.raises(UnsupportedModelError, match="indexer of glm5_next_text does not tell attention functions"):
        KVCache(config, scheme)


def test_another_attention_is_refused():
    model = model_of("deepseek_v3", "eager")
    with pytest.raises(CacheError, match="layer 0 in a kvconvert cache reached"):
        model(random_ids(1, 8), past_key_values=KVCache(model.config, SCHEME))
    model.set_attn_implementation("sdpa")
    with pytest.raises(CacheError, match="layer 0 in a kvconvert cache reached"):
        model(random_ids(1, 8), past_key_values=KVCache(model.config, SCHEME))
