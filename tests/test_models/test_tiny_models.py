"""The tiny models are what their entries say, and what tests of caches and weights need."""

import pytest
import torch
from tiny.models import ARCHITECTURES, FEATURES, architectures
from tiny.texts import VOCABULARY
from transformers import AutoTokenizer

# The architectures that DESIGN.md names, by transformers' model types.
NAMED = {
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gemma3n_text"),
    *("gemma4_text", "phi", "phi3", "olmo2", "olmo3", "granite", "cohere", "cohere2", "glm", "glm4", "smollm3"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "llama4_text", "deepseek_v2", "deepseek_v3", "starcoder2"),
    *("stablelm", "gpt_neox", "opt", "exaone4", "hunyuan_v1_dense", "ernie4_5", "nemotron", "seed_oss"),
    *("qwen3_next", "lfm2", "llava", "llava_next", "llava_onevision", "internvl", "qwen2_vl", "qwen2_5_vl"),
    *("qwen3_vl", "gemma3", "gemma4", "smolvlm", "paligemma", "mistral3", "qwen2_audio"),
}


def test_every_architecture_that_is_spoken_of_has_a_tiny_model():
    assert {entry.model_type for entry in ARCHITECTURES.values()} >= NAMED


def test_features_are_words_of_the_list():
    assert {feature for entry in ARCHITECTURES.values() for feature in entry.features} == set(FEATURES)


@pytest.mark.parametrize("name", architectures())
def test_what_comes_first_in_a_prompt_matters_for_what_comes_next(name):
    entry = ARCHITECTURES[name]
    model, inputs = entry.build(), entry.inputs(batch=1)
    logits = model(**inputs).logits[:, -1]
    inputs["input_ids"][:, 0] = VOCABULARY - 1
    changed = model(**inputs).logits[:, -1]
    assert logits.isfinite().all()
    # Comparisons of caches allow 1e-3 at most.
    assert (changed - logits).abs().max() > 0.05
    if entry.multimodal:
        features = next(k for k in ("pixel_values", "input_features") if k in inputs)
        inputs[features] = 1 - inputs[features]
        assert (model(**inputs).logits[:, -1] - changed).abs().max() > 0.01


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_vl"])
def test_a_checkpoint_loads_as_it_was_built(name, tmp_path):
    entry = ARCHITECTURES[name]
    model, inputs = entry.build(), entry.inputs()
    loaded = type(model).from_pretrained(entry.write(tmp_path), attn_implementation="eager")
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("a <image> of a cat" if entry.multimodal else "a cat").input_ids
    assert max(ids) < model.config.get_text_config().vocab_size
    assert not entry.multimodal or entry.media.token in ids
