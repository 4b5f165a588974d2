"""A cache with static scales: what it costs, what it computes, and that it wants a plan."""

import pytest
import torch
from quantized_oracle import PAGE, sylvester
from tiny.models import GREEDY, random_ids, tiny_model
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvconvert import KVCache, KVScheme
from kvconvert.errors import RecipeError

STATIC = {"static_scales": "calibrated"}


def random_plan(layers: int, bits: tuple[int, int], heads: int = 2, dim: int = 16) -> dict[str, torch.Tensor]:
    """Scales that cover -2 to 2 more or less, so that some numbers are clamped."""
    generator = torch.Generator().manual_seed(3)
    plan = {}
    for index in range(layers):
        for side, width in zip(("key", "value"), bits, strict=True):
            low = -2 - torch.rand(heads, dim, generator=generator)
            extent = 4 + torch.rand(heads, dim, generator=generator)
            plan[f"layers.{index}.static_{side}_scale"] = (extent / (2**width - 1)).half()
            plan[f"layers.{index}.static_{side}_zero_point"] = low.half()
    return plan


def image(x: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, bits: int, rotation: torch.Tensor) -> torch.Tensor:
    """What a page [B, H, 128, D] looks like after storage."""
    scale, low = scale.float()[:, None], low.float()[:, None]
    codes = ((x @ rotation - low) / scale).round().clamp(0, 2**bits - 1)
    return (codes * scale + low) @ rotation.T


class StaticLayer(DynamicLayer):
    """Keys and values in full precision; complete pages become their image when the next tokens arrive."""

    def __init__(self, plan, index, bits, rotation):
        super().__init__()
        self.done = 0
        self.settings = [
            [plan[f"layers.{index}.static_{side}_{part}"] for part in ("scale", "zero_point")] + [width, rotation]
            for side, width in zip(("key", "value"), bits, strict=True)
        ]

    def update(self, key_states, value_states, *args, **kwargs):
        while self.is_initialized and self.done + PAGE <= self.keys.shape[2]:
            page = (slice(None), slice(None), slice(self.done, self.done + PAGE))
            self.keys[page] = image(self.keys[page], *self.settings[0])
            self.values[page] = image(self.values[page], *self.settings[1])
            self.done += PAGE
        return super().update(key_states, value_states, *args, **kwargs)


@pytest.mark.parametrize(("bits", "rotate"), [((8, 8), False), ((4, 4), True), ((4, 8), False)])
def test_generation_matches_an_independent_model_of_it(bits, rotate):
    model = tiny_model("llama", "eager", num_hidden_layers=2, gain=3.0)
    plan, ids = random_plan(2, bits), random_ids(2, 250)
    oracle = DynamicCache()
    oracle.layer_class_to_replicate = None
    rotation = sylvester(16).float() if rotate else torch.eye(16)
    oracle.layers = [StaticLayer(plan, index, bits, rotation) for index in range(2)]
    expected = model.generate(ids, max_new_tokens=12, past_key_values=oracle, **GREEDY)
    rotations = {"rotate_keys": "hadamard", "rotate_values": "online"} if rotate else {}
    scheme = KVScheme(key_bits=bits[0], value_bits=bits[1], **rotations, **STATIC)
    model.set_attn_implementation("kvconvert")
    cache = KVCache(model.config, scheme, plan=plan)
    assert model.generate(ids, max_new_tokens=12, past_key_values=cache, **GREEDY).tolist() == expected.tolist()
    assert cache.stats().pages == 2 * 2 * 2


@pytest.mark.parametrize("bits", [4, 8])
def test_pages_cost_their_codes_and_nothing_else(bits):
    model = tiny_model("llama", "kvconvert", num_hidden_layers=2)
    cache = KVCache(model.config, KVScheme(key_bits=bits, value_bits=bits, **STATIC), plan=random_plan(2, (bits, bits)))
    model(random_ids(1, 256), past_key_values=cache)
    assert cache.stats().residual_tokens == 0
    assert cache.stats().bits_per_value == bits


def test_one_side_may_be_in_full_precision():
    model = tiny_model("llama", "kvconvert", num_hidden_layers=1)
    plan = {name: tensor for name, tensor in random_plan(1, (8, 8)).items() if "value" in name}
    cache = KVCache(model.config, KVScheme(key_bits=16, value_bits=8, **STATIC), plan=plan)
    model(random_ids(1, 128), past_key_values=cache)
    model(random_ids(1, 1), past_key_values=cache)
    store = cache.layers[0].store
    assert (store.key_pages.page_bytes, store.value_pages.page_bytes) == (128 * 2 * 16 * 4, 128 * 2 * 16)


def test_static_scales_without_a_plan_are_refused_by_name():
    model = tiny_model("llama", "kvconvert", num_hidden_layers=1)
    scheme = KVScheme(key_bits=8, value_bits=8, **STATIC)
    with pytest.raises(RecipeError, match=r"static_scales = 'calibrated' needs static_key_scale.*found none"):
        model(random_ids(1, 4), past_key_values=KVCache(model.config, scheme))
    wide = random_plan(1, (8, 8), dim=32)
    with pytest.raises(RecipeError, match=r"2 heads of 16 channels from a KV plan, and found \(2, 32\)"):
        model(random_ids(1, 4), past_key_values=KVCache(model.config, scheme, plan=wide))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"key_bits": 2, "value_bits": 8}, r"key_bits = 2 .* too coarse"),
        ({"key_bits": 8, "value_bits": 1}, r"value_bits = 1 .* too coarse"),
        ({"key_bits": 16, "value_bits": 16}, "no scales at all"),
        ({"key_bits": 8, "value_bits": 8, "token_norm": "joint"}, "a norm is stored with each token"),
        ({"key_bits": 4, "value_bits": 4, "boost_fraction": 0.25}, "one width"),
        (
            {"key_bits": 8, "value_bits": 8, "key_granularity": "span", "value_granularity": "span"},
            "a span takes its scales from its own tokens",
        ),
    ],
)
def test_meaningless_combinations_are_refused_with_the_reason(fields, said):
    with pytest.raises(RecipeError, match=said):
        KVScheme(**fields, **STATIC)
