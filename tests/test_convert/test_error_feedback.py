"""Error feedback from calibration to generation."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert import KVCache, KVScheme, export, load
from kvconvert.calibration.attention_sample import RECORDING_ATTENTION, attention_observed
from kvconvert.calibration.keys import feedback_matrices
from kvconvert.convert import pipeline
from kvconvert.data.text import load_token_samples
from kvconvert.errors import BundleError, RecipeError
from kvconvert.kernels.pages import quantize_pages
from kvconvert.kernels.rotate import hadamard_matrix

SAMPLES, LENGTH = 2, 300
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def calibrated(model, directory, text, fields):
    """A working directory of a recipe with these lines in its [kv] table, weights left alone."""
    directory.mkdir(exist_ok=True)
    recipe = directory / "recipe.toml"
    recipe.write_text(f'[weights]\nmethod = "none"\n[kv]\n{fields}')
    settings = {"samples": SAMPLES, "seq_len": LENGTH, "progress": False}
    return pipeline.calibrate(str(model), directory / "work", recipe=recipe, data=text, **settings)


@pytest.fixture(scope="module")
def work(place, model, text):
    """A calibration that leaves the rounding open, with queries and keys rotated."""
    fields = 'preset = "oscar-g128"\ncalibrate_clip_ratios = false\nsink_tokens = 4\n'
    return calibrated(model, place / "fed", text, fields)


def test_the_plan_holds_the_matrices_of_the_rotated_queries(work, model, text):
    source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=RECORDING_ATTENTION)
    ids, found = load_token_samples(text, AutoTokenizer.from_pretrained(model), SAMPLES, LENGTH, 0).ids, []
    with torch.no_grad(), attention_observed(source.model.layers[1].self_attn, lambda q, k, v: found.append((q, k))):
        source.eval()(ids, use_cache=False)
    queries, keys = found[0]
    rotated = (queries @ hadamard_matrix(queries.shape[3]).float()).double().unflatten(1, (keys.shape[1], -1))
    moments = torch.einsum("bhgtd,bhgte->hde", rotated, rotated) / (SAMPLES * rotated.shape[2] * LENGTH)
    stored = work.layer_plan(1)["layers.1.key_feedback"]
    assert stored.dtype == torch.float16
    torch.testing.assert_close(stored.double(), feedback_matrices(moments)[0], rtol=2**-9, atol=1e-3)
    assert work.layer_record(1).kv["key_rounding"] == "error_feedback"


def test_a_bundle_loads_and_writes_its_pages_with_feedback(work, place, text, monkeypatch):
    export(work.path, place / "bundle", progress=False)
    built, tokenizer = load(place / "bundle", dtype=torch.float32)
    ids = load_token_samples(text, tokenizer, 1, LENGTH, 0).ids
    seen = []

    def noted(tokens, f, tensors, hidden):
        if f.is_key:
            seen.append(tensors.feedback)
        return quantize_pages(tokens, f, tensors, hidden)

    monkeypatch.setattr("kvconvert.kernels.pages.quantize_pages", noted)
    assert built.generate(ids[:, :270], max_new_tokens=3, **GREEDY).shape == (1, 273)
    plans = [work.layer_plan(index)[f"layers.{index}.key_feedback"] for index in range(len(seen))]
    assert len(seen) == built.config.num_hidden_layers
    assert all(torch.equal(*pair) for pair in zip(seen, plans, strict=True))


def test_a_bundle_whose_matrices_are_not_triangular_is_refused(work, place, model, text):
    tensors, record, before = work.layer_tensors(1), work.layer_record(1), work.layer_plan(1)
    plan = before | {"layers.1.key_feedback": before["layers.1.key_feedback"].transpose(1, 2).contiguous()}
    try:
        work.commit_layer(1, tensors, plan, record)
        with pytest.raises(BundleError, match=r"layers\.1\.key_feedback.*upper triangular"):
            export(work.path, place / "tampered", progress=False)
    finally:
        work.commit_layer(1, tensors, before, record)


@pytest.mark.parametrize(
    "fields", ["key_bits = 4\n", "calibrate_key_rounding = false\n", 'key_rounding = "nearest"\n'], ids=str.strip
)
def test_rounding_stays_as_it_is_where_nothing_is_to_be_chosen(place, model, text, fields):
    directory = place / fields.split()[0]
    work = calibrated(model, directory, text, f"{fields}calibrate_clip_ratios = false\n")
    assert work.layer_record(0).kv["key_rounding"] == "nearest"
    assert "layers.0.key_feedback" not in work.layer_plan(0)


def test_four_bits_are_rounded_with_feedback_where_a_recipe_says_so(place, model, text):
    fields = 'key_bits = 4\nkey_rounding = "error_feedback"\ncalibrate_clip_ratios = false\n'
    assert "layers.0.key_feedback" in calibrated(model, place / "four", text, fields).layer_plan(0)


def test_a_cache_without_a_plan_has_no_feedback_to_give(model):
    source = AutoModelForCausalLM.from_pretrained(model)
    cache = KVCache(source.config, KVScheme(key_rounding="error_feedback", rotate_values="none"))
    with pytest.raises(RecipeError, match="key_feedback of shape"):
        source(torch.arange(8)[None], past_key_values=cache)


def test_keys_that_are_not_rounded_take_no_feedback():
    with pytest.raises(RecipeError, match="16-bit keys are stored as they are"):
        KVScheme(key_bits=16, key_rounding="error_feedback")
