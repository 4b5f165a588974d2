"""Candidates are measured as calibration will have their keys stored: treated, and rounded with error feedback."""

from dataclasses import replace

import pytest
import torch
from tiny.models import ARCHITECTURES, random_ids

from kvconvert.auto.layers import SearchedLayer, candidate_treatments, measured_layer
from kvconvert.auto.model import SimulatedModel
from kvconvert.calibration.simulated_attention import SIMULATED_ATTENTION
from kvconvert.fidelity.scoring import Decoder, compare
from kvconvert.methods import PRESETS, KVCalibration, preset_calibration
from kvconvert.methods.auto import KEY_CANDIDATES, VALUE_CANDIDATES
from kvconvert.runtime import KVCache


def simulated_layer(scheme, search):
    """A tiny model with simulated attention, text, one of its layers, and what its candidates are fitted with."""
    model, ids = ARCHITECTURES["llama"].build(), random_ids(2, 3 * 128 + 9, 3)
    layer = SearchedLayer(1, scheme, search, 2, 16, 16, KEY_CANDIDATES, VALUE_CANDIDATES, {}, 400)
    model.set_attn_implementation(SIMULATED_ATTENTION)
    simulated = SimulatedModel(model, model.model.layers)
    text = simulated.read(ids, 128)
    weight = model.model.layers[1].self_attn.o_proj.weight
    fitted = measured_layer(layer, simulated.attention_call(text, 1), weight, text.embeddings[1], None)
    return model, ids, simulated, text, layer, fitted


def test_simulated_feedback_is_that_of_the_cache():
    scheme = replace(PRESETS["oscar-g128"], sink_tokens=4)
    model, ids, simulated, text, layer, fitted = simulated_layer(scheme, KVCalibration())
    narrow = next(candidate for candidate in KEY_CANDIDATES if candidate.name == "K2g128s8")
    wide = next(candidate for candidate in KEY_CANDIDATES if candidate.name == "K4g128")
    assert layer.cache(wide, measured=fitted).key_tensors.feedback is None
    text = replace(text, positions=text.positions[:-1], log_probs=text.log_probs[:, :-1])
    cache = layer.cache(narrow, measured=fitted)
    found, nearest = (simulated.divergence(text, {1: c}) for c in (cache, layer.cache(narrow)))
    assert cache.key_tensors.feedback.dtype == torch.float16
    assert found != pytest.approx(nearest, rel=0.01)
    stored = replace(layer.scheme_of(narrow), key_rounding="error_feedback").with_online_rotation()
    plan = {"layers.1.key_feedback": cache.key_tensors.feedback}
    assert found == pytest.approx(divergence_of_cache(model, ids, stored, plan), rel=2e-3)


def divergence_of_cache(model, ids, scheme, plan):
    """KL with layer 1 in such a cache, read as decoding reads it."""
    model.set_attn_implementation("kvconvert")
    cache = Decoder(model, lambda: KVCache(model.config, [None, scheme], plan=plan))
    through = compare(Decoder.plain(model), {"cache": cache}, ids, prefill=128, chunk=128)["cache"]
    return float(through.kl.mean())


def test_simulated_centers_are_those_of_the_cache():
    scheme = replace(PRESETS["default"], sink_tokens=4)
    model, ids, simulated, text, layer, fitted = simulated_layer(scheme, preset_calibration("default"))
    chosen = candidate_treatments(layer, fitted)
    assert chosen.keys() == {candidate.name for candidate in layer.keys if not candidate.exact}
    assert all(fields["rotate_keys"] == "none" for name, fields in chosen.items() if "+" in name)
    fields = {"rotate_keys": "hadamard", "token_norm": "none", "key_center": "calibrated"}
    layer = layer.treated({"K2g128s8": fields})
    narrow = next(candidate for candidate in layer.keys if candidate.name == "K2g128s8")
    text = replace(text, positions=text.positions[:-1], log_probs=text.log_probs[:, :-1])
    found = simulated.divergence(text, {1: layer.cache(narrow, measured=fitted)})
    stored = replace(layer.scheme_of(narrow), key_rounding="error_feedback").with_online_rotation()
    plan = {f"layers.1.{name}": tensor for name, tensor in fitted.constant.plan().items()}
    plan["layers.1.key_feedback"] = layer.cache(narrow, measured=fitted).key_tensors.feedback
    assert found == pytest.approx(divergence_of_cache(model, ids, stored, plan), rel=5e-3)
