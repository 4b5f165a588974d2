"""benchmarks/real_model.py: its case files are recipes of this version, and `auto` is compared at equal bytes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import real_model_docs as docs
import torch
from real_model_bench import over_a_page
from real_model_cases import Case
from real_model_lookup import ObjectBook
from real_model_measure import cache_size, launches_of
from tiny.checkpoints import REFERENCE, tiny_model
from transformers import AutoTokenizer, Gemma3TextConfig

from kvconvert.cache.size import LayerCache, ModelCache
from kvconvert.fidelity.scoring import Decoder, feed
from kvconvert.kernels.device import GPU, imagined
from kvconvert.kernels.launches import noted
from kvconvert.methods import PRESETS
from kvconvert.models.configuration import head_dim, key_value_heads
from kvconvert.runtime import KVCache

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
FILES = ("ablations.txt", "baselines.txt")
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
CASES = [case for file in FILES for case in docs.cases_of(BENCHMARKS / file)]


@pytest.mark.parametrize("case", CASES)
def test_a_line_of_a_case_file_is_a_recipe_of_a_cache(case, tmp_path):
    recipe = Case.parse(case).recipe(True, tmp_path)
    assert recipe.kv is not None
    assert recipe.weights.method == "none"


def test_the_mean_over_a_page_of_lengths_is_the_stated_one_wherever_the_text_ends():
    tiny = tiny_model("llama", 0).config
    schemes = [PRESETS["oscar-g128"]] * tiny.num_hidden_layers
    layer = LayerCache(key_value_heads(tiny), head_dim(tiny), head_dim(tiny), schemes[0])
    for length in (512, 516, 600):
        size = cache_size(tiny, schemes, {}, length, "cpu")
        assert size["mean_bits_per_value"] == pytest.approx(ModelCache((layer,)).bits_per_value(length), rel=0.01)


def test_bits_over_a_page_are_those_that_are_stated_and_follow_from_those_at_its_end():
    tiny = tiny_model("llama", 0).config
    schemes = [PRESETS["oscar-g128"]] * tiny.num_hidden_layers
    length = 4 * 128
    size = cache_size(tiny, schemes, {}, length, "cpu")
    layer = LayerCache(key_value_heads(tiny), head_dim(tiny), head_dim(tiny), schemes[0])
    assert size["mean_bits_per_value"] == pytest.approx(ModelCache((layer,)).bits_per_value(length), rel=0.01)
    longer = cache_size(tiny, schemes, {}, length + 128, "cpu")["bits_per_value"]
    assert over_a_page(longer, length, length + 128) == pytest.approx(size["mean_bits_per_value"], rel=0.01)


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
        with noted() as launched:
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


def row(mean, kl, protocol="pages", last=None):
    size = {"mean_bits_per_value": mean, "bits_per_value": mean if last is None else last}
    return {"protocol": protocol, "size": size, "texts": {"novels": {"kl_by_segment": kl}}}


REPORT = {
    "settings": {"texts": ["novels"]},
    "baseline": "kivi",
    "caches": {
        "kivi": row(3.0, [0.2, 0.3]),
        "oscar": row(2.5, [0.1, 0.1]),
        "auto:kv_bits=2.9": row(2.9, [0.1, 0.2]),
        "auto:kv_bits=2.5": row(2.5, [0.2, 0.3]),
        "kivi, sealed prompt": row(3.0, [0.3, 0.3], "sealed prompt"),
        # Its own mean is over lengths, of which after a sealed prompt none counts.
        "auto:kv_bits=2, sealed prompt": row(2.4, [0.1, 0.3], "sealed prompt", last=2.0),
        "minikv": row(2.0, [0.1, 0.2], "sealed prompt"),
        "broken": {"failure": "no calibration"},
    },
}


def test_auto_is_paired_with_every_cache_of_its_protocol_that_takes_its_bytes():
    assert docs._same_size(docs._measured(REPORT)) == [
        ("auto:kv_bits=2.5", "oscar"),
        ("auto:kv_bits=2.9", "kivi"),
        ("auto:kv_bits=2, sealed prompt", "minikv"),
    ]


def test_the_verdict_counts_significant_differences():
    text = docs._auto(REPORT)
    assert "Of 3 differences 1 are significantly better and 1 significantly worse" in text
    assert "| kivi | 3.000 | 2.900 | -0.1000 (-0.1000 to -0.1000) |" in text
    assert "| minikv | 2.000 | 2.000 | +0.0500 (+0.0000 to +0.1000) |" in text


def test_options_that_every_search_has_are_said_once():
    caches = {"auto:kv_bits=2,context=64": {}, "auto:kv_bits=3,context=64, sealed prompt": {}, "kivi": {}}
    labels = [docs._label(name, {"caches": caches}) for name in caches]
    assert labels == ["auto:kv_bits=2", "auto:kv_bits=3, sealed prompt", "kivi"]
    assert "for all: context=64." in docs._options({"caches": caches})
    caches["auto:kv_bits=2"] = {}
    assert [docs._label(name, {"caches": caches}) for name in caches] == [*caches]
    assert docs._options({"caches": caches}) == ""


MEASURED = {
    "settings": {"model": "tiny", "texts": ["wikitext2-test", "python", "books-val"], "recall": [16], "json": [40]},
    "source": {"found": {"16": [True, True], "32": [False, False]}, "json": {"40": [True, False]}},
    "baseline": "kivi",
    "bundles": {},
}


def figures(bits, kl, hits):
    texts = {
        name: {"kl": kl, "perplexity": 21.0, "source_perplexity": 20.0, "kl_by_segment": [kl, kl]}
        for name in MEASURED["settings"]["texts"]
    }
    size = {"bits_per_value": bits, "mean_bits_per_value": bits}
    recall = {"found": {"16": hits, "32": hits}, "json": {"40": hits}}
    return {"protocol": "pages", "texts": texts, "size": size, **recall}


def test_the_source_comes_first_and_numbers_are_those_it_finds():
    report = MEASURED | {"caches": {"kivi": figures(3.0, 0.25, [True, False]), "small": figures(1.5, 0.5, [False] * 2)}}
    assert docs._table(report, "caches", "pages").splitlines() == [
        "| scheme | bits | KL WikiText-2 | KL code | perplexity WikiText-2 | JSON, 40 pairs | numbers at 16 |",
        "|---|---|---|---|---|---|---|",
        "| source | 16 | 0 | 0 | 20.00 | 50% | 100% |",
        "| small | 1.50 | 0.500 | 0.500 | 21.00 | 0% | 0% |",
        "| kivi | 3.00 | 0.250 | 0.250 | 21.00 | 50% | 50% |",
    ]


def test_models_are_compared_by_scheme_wherever_it_was_measured():
    auto = "auto:kv_bits=2,context=64"
    first = MEASURED | {"caches": {"kivi": figures(3.0, 0.25, [True, True]), auto: figures(2.0, 0.125, [True, True])}}
    second = MEASURED | {"caches": {"kivi": figures(3.1, 0.0625, [True, False]), "failed": {"failure": "no"}}}
    second["settings"] = MEASURED["settings"] | {"model": "other"}
    divergences, found = (part.splitlines() for part in docs.comparison([first, second]).split("\n\n")[1::2])
    assert divergences == [
        "| scheme | bits | tiny | other |",
        "|---|---|---|---|",
        "| source | 16 | 0 | 0 |",
        "| `auto --kv-bits 2.00` | 2.00 | 0.125 / 0.125 |  |",
        "| kivi | 3.00 to 3.10 | 0.250 / 0.250 | 0.0625 / 0.0625 |",
    ]
    assert found[-1] == "| kivi | 3.00 to 3.10 | 100% / 100% | 50% / 50% |"
