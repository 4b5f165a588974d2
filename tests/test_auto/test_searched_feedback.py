"""Candidates with narrow keys are measured as calibration will have them rounded: with error feedback."""

from dataclasses import replace

import pytest
import torch
from tiny.models import ARCHITECTURES, random_ids

from kvconvert.auto.clip_ratios import candidate_feedback
from kvconvert.auto.layers import SearchedLayer
from kvconvert.auto.model import SimulatedModel
from kvconvert.calibration.simulated_attention import SIMULATED_ATTENTION
from kvconvert.fidelity.scoring import Decoder, compare
from kvconvert.methods import PRESETS, KVCalibration
from kvconvert.methods.auto import KEY_CANDIDATES, VALUE_CANDIDATES
from kvconvert.runtime import KVCache


def test_simulated_feedback_is_that_of_the_cache():
    model, ids = ARCHITECTURES["llama"].build(), random_ids(2, 4 + 3 * 128 + 9, 3)
    scheme = replace(PRESETS["oscar-g128"], sink_tokens=4)
    layer = SearchedLayer(1, scheme, KVCalibration(), 2, 16, KEY_CANDIDATES, VALUE_CANDIDATES, {})
    narrow = next(candidate for candidate in KEY_CANDIDATES if candidate.name == "K2g128")
    wide = next(candidate for candidate in KEY_CANDIDATES if candidate.name == "K4g128")
    model.set_attn_implementation(SIMULATED_ATTENTION)
    simulated = SimulatedModel(model, model.model.layers)
    text = simulated.read(ids, 132)
    feedback = candidate_feedback(layer, simulated.attention_call(text, 1))
    assert layer.cache(wide, key_feedback=feedback).pages.key_feedback is None
    text = replace(text, positions=text.positions[:-1], log_probs=text.log_probs[:, :-1])
    found = simulated.divergence(text, {1: layer.cache(narrow, key_feedback=feedback)})
    nearest = simulated.divergence(text, {1: layer.cache(narrow)})
    assert feedback.dtype == torch.float16
    assert found != pytest.approx(nearest, rel=0.01)
    model.set_attn_implementation("kvconvert")
    stored = replace(layer.scheme_of(narrow), key_rounding="error_feedback").with_online_rotation()
    plan = {"layers.1.key_feedback": feedback}
    cache = Decoder(model, lambda: KVCache(model.config, [None, stored], plan=plan))
    through = compare(Decoder.plain(model), {"cache": cache}, ids, prefill=132, chunk=128)["cache"]
    assert found == pytest.approx(float(through.kl.mean()), rel=2e-3)
