"""A cache whose pages hold keys without their constant part gives attention over pages that have it."""

from dataclasses import replace

import pytest
import torch
from tiny.key_centers import center_plan, constant_part
from tiny.models import ARCHITECTURES, GREEDY, random_ids, tiny_model
from tiny.prompt_chunks import CONFIG, PADDING, WINDOW, error, outputs, window
from transformers import DynamicCache

from kvconvert.kernels.attention import Scoring, attention_reference
from kvconvert.kernels.pages import dequantize_pages, page_centers, quantize_pages
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.methods import KVScheme
from kvconvert.runtime import Engine, KVCache
from kvconvert.runtime.cache.attend import attend, commit
from kvconvert.runtime.cache.compress import end_forward
from kvconvert.runtime.cache.forward_pass import PassTokens
from kvconvert.runtime.hf.generation import adopt

CPU = torch.device("cpu")
# A prompt, a chunk over it that is dequantized, a few tokens, single ones, and another chunk.
LENGTHS = (400, 60, 3, 1, 1, 200, 1)
CENTERED = KVScheme(key_center="calibrated")
SCHEMES = {
    "rotated": replace(CENTERED, rotate_keys="hadamard", sink_tokens=4),
    "norms": replace(CENTERED, rotate_keys="hadamard", token_norm="joint", key_group_size=128),
    "boosted, keys stay longer": replace(CENTERED, boost_fraction=0.25, key_recent_tokens=200, sink_tokens=3),
    "values stay longer": replace(CENTERED, key_bits=3, value_recent_tokens=200),
    "1 bit": replace(CENTERED, key_bits=1, key_group_size=128, value_bits=4, sink_tokens=1),
}
PLAN = center_plan(1, 2, 32)


def layer_of(scheme: KVScheme, sliding_window: int | None = None):
    layer = KVCache(CONFIG, scheme, plan=PLAN).layers[0]
    layer.store.group.sliding_window = sliding_window
    return layer


def by_hand(layer, lengths, sliding_window=None, softcap=None, rows=3) -> list[torch.Tensor]:
    """`outputs` of float32 tokens, row by row, from keys and values that are put back together page by page."""
    scheme, f = layer.store.scheme, layer.store.format
    generator, found = torch.Generator().manual_seed(0), []
    stored = [[torch.zeros(heads, 0, 32) for heads in (2, 2)] for _ in range(rows)]
    done = [[0, 0] for _ in range(rows)]
    start = 0
    for length in lengths:
        new = [torch.randn(rows, heads, length, 32, generator=generator) for heads in (2, 2, 4)]
        outputs = []
        for row in range(rows):
            real = PADDING[row, start : start + length]
            for side in range(2):
                stored[row][side] = torch.cat([stored[row][side], new[side][row][:, real]], 1)
            keys, values = stored[row]
            total, own = keys.shape[1], int(real.sum())
            position, query = torch.arange(total), torch.arange(total - own, total).unsqueeze(1)
            visible = position <= query
            if sliding_window is not None:
                # The mask counts columns, padding included.
                columns = PADDING[row, : start + length].nonzero().flatten()
                visible &= columns > columns[total - own :].unsqueeze(1) - sliding_window
            attended = attention_reference(new[2][row][:, real], keys, values, visible, 0.2, softcap).output
            outputs.append(attended.transpose(0, 1))
            for side, recent in enumerate((scheme.key_recent_tokens, scheme.value_recent_tokens)):
                while done[row][side] + 128 + recent <= total:
                    first = done[row][side]
                    hidden = 0 if first else scheme.sink_tokens
                    page = stored[row][side][None, :, first : first + 128]
                    if side:
                        image = dequantize_pages(quantize_pages(page, f.values, hidden=hidden))
                    else:
                        center = page_centers(torch.tensor([first]), 128, layer.store.format.key_tensors.center)
                        rotated = layer.store.format.rotations.keys
                        page = hadamard_transform(page) if rotated else page
                        pages = quantize_pages(page - center, f.keys, hidden=hidden)
                        image = dequantize_pages(pages) + center
                        image = hadamard_transform(image, inverse=True) if rotated else image
                    stored[row][side] = stored[row][side].clone()
                    stored[row][side][:, first + hidden : first + 128] = image[0, :, hidden:]
                    done[row][side] += 128
        found.append(torch.cat(outputs))
        start += length
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_padded_rows_attend_as_each_would_alone_to_whole_keys(name):
    layer = layer_of(SCHEMES[name])
    got = outputs(layer, LENGTHS, CPU, torch.float32)
    for one, other in zip(got, by_hand(layer, LENGTHS), strict=True):
        # A number halfway between two codes may be rounded the other way.
        assert error(one, other) < 2e-3


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_positions_count_pages_that_a_sliding_window_dropped(softcap):
    layer = layer_of(SCHEMES["rotated"], WINDOW)
    got = outputs(layer, LENGTHS, CPU, torch.float32, window, softcap=softcap)
    assert layer.store.sequences[0].dropped
    for one, other in zip(got, by_hand(layer, LENGTHS, WINDOW, softcap), strict=True):
        assert error(one, other) < 2e-3


def test_the_constant_part_is_what_rope_makes_of_the_mean():
    for name in ("rotated", "1 bit"):
        layer = layer_of(SCHEMES[name])
        layer.store.allocate(torch.zeros(1, 2, 1, 32), torch.zeros(1, 2, 1, 32))
        found = page_centers(torch.tensor([4, 100_004]), 128, layer.store.format.key_tensors.center)
        if layer.store.format.rotations.keys:
            found = hadamard_transform(found, inverse=True)
        for page, first in zip(found, (4, 100_004), strict=True):
            expected = constant_part(PLAN["layers.0.key_mean"], torch.arange(first, first + 128))
            # Numbers of about 3 in float16; float32 angles of up to 1e5 radians.
            assert error(page, expected) < (1e-3 if first == 4 else 3e-3)


def test_keys_that_are_nearly_constant_before_rope_keep_their_differences():
    generator, errors = torch.Generator().manual_seed(0), {}
    tokens = constant_part(20 * PLAN["layers.0.key_mean"], torch.arange(300))[None].float()
    tokens = tokens + 0.5 * torch.randn(tokens.shape, generator=generator)
    queries, values = (torch.randn(1, heads, 300, 32, generator=generator) for heads in (4, 2))
    expected = attention_reference(queries[0, :, -1:], tokens[0], values[0], None, 0.02).output
    plan = PLAN | {"layers.0.key_mean": 20 * PLAN["layers.0.key_mean"]}
    for scheme in (SCHEMES["rotated"], replace(SCHEMES["rotated"], key_center="none")):
        store = KVCache(CONFIG, replace(scheme, value_bits=16), plan=plan).layers[0].store
        store.allocate(tokens, values)
        for part in (slice(0, 299), slice(299, 300)):
            store.park(tokens[:, :, part], values[:, :, part])
            chunk = PassTokens(torch.arange(300)[part])
            commit(store, chunk)
            found = attend(store, queries[:, :, part], chunk, Scoring(0.02))
            end_forward(store)
        errors[scheme.key_center] = error(found[0], expected)
    assert errors["calibrated"] < 0.05 < 10 * errors["calibrated"] < errors["none"]


# Numbers of 8 bits are near enough for the same tokens; without their constant part keys would be far off.
EIGHT = KVScheme(
    key_bits=8, value_bits=8, sink_tokens=4, rotate_keys="hadamard", rotate_values="online", key_center="calibrated"
)
WAYS = {
    "left padding": {"max_new_tokens": 8},
    "beams": {"max_new_tokens": 6, "num_beams": 3, "num_return_sequences": 2},
    "prompt lookup": {"max_new_tokens": 12, "prompt_lookup_num_tokens": 3},
    "chunks": {"max_new_tokens": 6, "prefill_chunk_size": 50},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_generating(way):
    model, options = tiny_model("llama"), WAYS[way]
    ids = random_ids(2, 150)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    if way == "prompt lookup":
        ids, mask = ids[:1, :75].repeat(1, 2), None
    expected = model.generate(ids, attention_mask=mask, past_key_values=DynamicCache(), **options, **GREEDY)
    model.set_attn_implementation("kvconvert")
    cache = KVCache(model.config, EIGHT, plan=center_plan(4, 2, 16))
    got = model.generate(ids, attention_mask=mask, past_key_values=cache, **options, **GREEDY)
    assert got.tolist() == expected.tolist()
    assert cache.stats().pages


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3n_text"])
def test_softcaps_sliding_layers_and_layers_that_share_keys(architecture):
    model, ids = ARCHITECTURES[architecture].build(), random_ids(1, 300)
    config = model.config
    count, heads = config.num_hidden_layers, config.num_key_value_heads
    plan, caches = center_plan(count, heads, config.head_dim), []
    expected = [model(ids, use_cache=False).logits[:, at] for at in (-2, -1)]
    model.set_attn_implementation("kvconvert")
    for scheme in (EIGHT, replace(EIGHT, key_center="none")):
        cache = KVCache(config, scheme, plan=plan)
        model(ids[:, :-2], past_key_values=cache)
        got = [model(ids[:, at : at + 1], past_key_values=cache).logits[:, -1] for at in (298, 299)]
        caches.append(max(error(*pair) for pair in zip(got, expected, strict=True)))
    # A larger range, and no more.
    assert caches[0] < 4 * caches[1] < 0.2


def test_an_engine_gives_what_generate_gives():
    model = ARCHITECTURES["llama"].build()
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    adopt(model, [replace(EIGHT, key_bits=2)] * layers, center_plan(layers, heads, model.config.head_dim, 0.5))
    prompts = [random_ids(1, length, seed=length) for length in (5, 126, 131)]
    engine = Engine(model, max_batch=2, prompt_chunk=4096)
    requests = [engine.add(ids, max_new_tokens=9, stop_token_ids=[]) for ids in prompts]
    engine.run()
    for ids, request in zip(prompts, requests, strict=True):
        assert request.tokens == model.generate(ids, max_new_tokens=9, **GREEDY)[0, ids.shape[1] :].tolist()
