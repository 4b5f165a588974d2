"""benchmarks/real_model.py: its cases are recipes of this version, and it measures what it says."""

import json
from dataclasses import replace

import pytest
import real_model
import torch
from real_model_cases import Case
from real_model_measure import ObjectBook, cache_size, launches_of
from tiny.checkpoints import REFERENCE, tiny_model
from transformers import AutoTokenizer, Gemma3TextConfig

from kvconvert.cache import LayerCache, ModelCache
from kvconvert.fidelity.scoring import Decoder, feed
from kvconvert.kernels.device import GPU, imagined
from kvconvert.kernels.launches import record_specializations
from kvconvert.methods import PRESETS
from kvconvert.models.configuration import head_dim, key_value_heads
from kvconvert.runtime import KVCache

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"


@pytest.mark.parametrize("name", real_model.PRESETS)
def test_a_case_is_the_recipe_of_a_cache(name, tmp_path):
    recipe = Case.parse(name).recipe(tmp_path)
    assert recipe.kv is not None
    assert recipe.weights.method == "none"


def test_the_mean_over_a_page_of_lengths_is_the_stated_one_wherever_the_text_ends():
    tiny = tiny_model("llama", 0).config
    schemes = [PRESETS["oscar-g128"]] * tiny.num_hidden_layers
    layer = LayerCache(key_value_heads(tiny), head_dim(tiny), head_dim(tiny), schemes[0])
    for length in (512, 516, 600):
        size = cache_size(tiny, schemes, {}, length, "cpu")
        assert size["mean_bits_per_value"] == pytest.approx(ModelCache((layer,)).bits_per_value(length), rel=0.01)


def test_tokens_beyond_a_sliding_window_are_neither_stored_nor_divided_by():
    config = Gemma3TextConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=256,
    )
    size = cache_size(config, [PRESETS["kivi"]] * 2, {}, 1024, "cpu")
    # A page may stand in the window with its end alone.
    assert 256 + 1024 <= 2 * size["kept_tokens"] <= 256 + 128 + 1024
    numbers = (256 + 1024) * 2 * 32
    assert size["bits_per_value"] == pytest.approx(8 * size["bytes_per_token"] * 1024 / numbers)


@pytest.mark.parametrize("changes", [{}, {"key_recent_tokens": 16, "value_recent_tokens": 16}], ids=["pages", "window"])
@torch.no_grad()
def test_kernels_of_a_text_and_of_a_question_are_compiled_beforehand(changes):
    model = tiny_model("llama", 0, head_dim=64).to(torch.bfloat16)
    model.set_attn_implementation("kvconvert")
    schemes = [replace(PRESETS[name], rotate_values="none", **changes) for name in ("oscar-g128", "kivi")]
    schemes *= model.config.num_hidden_layers // 2
    decoder = Decoder(model, lambda: KVCache(model.config, schemes))
    with imagined(GPU((9, 0), 132)):
        listed = launches_of(decoder, (2, 4))
        with record_specializations() as launched:
            for rows, passes in ((2, (144, *[128] * 4, 3)), (4, (*[128] * 5, 31, 1, 1, 1)), (4, (128, 77, 31, 1, 1))):
                cache = decoder.new_cache()
                for tokens in passes:
                    feed(decoder, cache, torch.zeros(rows, tokens, dtype=torch.int64))
    assert len(listed) > 10
    assert launched.keys() <= set(listed)


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["text", "chat"])
def test_objects_are_equally_long_and_hold_the_value_asked_for(template):
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    tokenizer.chat_template = template
    drills = ObjectBook(tokenizer, 0).drills(20, 8, 2048)
    assert len({(len(drill.context), len(drill.cue)) for drill in drills}) == 1
    for drill in drills:
        shown, asked = tokenizer.decode(drill.context), tokenizer.decode(drill.cue)
        key = asked.rpartition('of "')[2].partition('"')[0]
        found = json.loads(shown[shown.index("{") : shown.index("}") + 1])
        assert len(found) == 20
        assert found[key] == drill.expected
        assert asked.endswith(f'The value of "{key}" is "')
        assert ("<|assistant|>" in asked) == (template is not None)
    assert ObjectBook(tokenizer, 0).drills(20, 8, len(drills[0].context)) == []
