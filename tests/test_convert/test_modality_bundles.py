"""A bundle whose spans hold one modality: its model knows which tokens these are, and its record what was searched."""

from dataclasses import replace

import pytest
import torch
from tiny.checkpoints import save_text
from tiny.models import ARCHITECTURES, GREEDY
from tiny.processors import write_vision_model

from kvconvert import KVScheme, calibrate, export
from kvconvert.bundle.describe import manifest_text
from kvconvert.bundle.reader import open_bundle
from kvconvert.errors import CacheError
from kvconvert.recipes.recipe import Recipe, WeightsRecipe
from kvconvert.runtime import KVCache, load, watch_inputs

VISUAL = KVScheme.preset("calibquant-2bit-visual-paper")


@pytest.mark.quick("llava")
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen2_audio"])
def test_a_loaded_bundle_compresses_its_modality_by_itself(tmp_path, name):
    tiny = ARCHITECTURES[name]
    scheme = replace(VISUAL, modality="audio") if "audio" in tiny.features else VISUAL
    source = tiny.write(tmp_path / "source")
    recipe = Recipe(weights=WeightsRecipe(method="none"), kv=scheme)
    text = save_text(tmp_path)
    calibrate(str(source), tmp_path / "work", recipe=recipe, data=text, samples=2, seq_len=32, progress=False)
    bundle = export(tmp_path / "work", tmp_path / "bundle", progress=False)
    told = manifest_text(open_bundle(bundle).manifest)
    assert f"{scheme.modality} tokens of prompts as spans" in told
    assert f"holds for {scheme.modality} tokens, others stay in full precision" in told
    loaded, _ = load(bundle)
    inputs = tiny.inputs(batch=2, length=40)
    out = loaded.generate(**inputs, max_new_tokens=6, return_dict_in_generate=True, **GREEDY)
    cache = out.past_key_values
    assert isinstance(cache, KVCache)
    assert [sum(span.tokens for span in s.spans) for s in cache.layers[0].store.sequences] == [tiny.media.count] * 2
    source_model = tiny.build("kvconvert")
    watch_inputs(source_model)
    own = KVCache(source_model.config, loaded.kv_schemes, plan=loaded.kv_plan)
    expected = source_model.generate(**inputs, past_key_values=own, max_new_tokens=6, **GREEDY)
    assert torch.equal(out.sequences, expected)
    # A forward pass without a cache gets one, and its modality mask as well.
    made = loaded(**inputs).past_key_values
    made.seal()
    assert made.layers[0].store.sequences[1].spans
    with pytest.raises(CacheError, match="inputs_embeds alone"):
        loaded(inputs_embeds=loaded.get_input_embeddings()(inputs["input_ids"]))


@pytest.mark.parametrize("images", [True, False])
def test_tau_and_ranges_are_searched_where_the_data_has_images_and_the_record_says_if_not(tmp_path, images):
    source = write_vision_model(tmp_path, "llava")
    recipe = Recipe(weights=WeightsRecipe(method="rtn", group_size=32), kv=VISUAL)
    data = None if images else save_text(tmp_path)
    work = calibrate(str(source), tmp_path / "work", recipe=recipe, data=data, samples=2, seq_len=96, progress=False)
    for record in (work.layer_record(0), work.layer_record(1)):
        scheme = record.scheme()
        assert scheme.modality == "visual"
        assert ("calibquant" in record.statistics) == images
        if not images:
            assert replace(scheme, key_rounding="nearest") == VISUAL
            assert "no visual tokens" in record.reason
