"""Every architecture's weights: calibrated, exported, loaded, and compared at every stage."""

import json

import pytest
import torch
from facts import LIMITS, weight_facts
from kv_cells import generate
from record import RESULTS
from tiny.models import ARCHITECTURES, architectures
from tiny.structures import REFUSED_WEIGHTS
from weight_cells import CACHE_ONLY, RECIPE, convert, weight_cell

from kvconvert import KVCache, KVScheme, load
from kvconvert.errors import UnsupportedModelError

CONVERTED = [name for name in ARCHITECTURES if name not in REFUSED_WEIGHTS]
UNCACHED = ("bloom", "mpt", "falcon", "falcon_alibi")


@pytest.mark.quick("gemma4_text_same_kv", "gpt_oss")
@pytest.mark.parametrize("name", architectures(CONVERTED))
def test_a_converted_model_is_its_source_but_for_rounding_at_every_stage(name, tmp_path):
    cell = weight_cell(ARCHITECTURES[name], tmp_path)
    # Folding and scaling: what the project promises; float32 rounding gives 1e-6 to 1e-5.
    assert cell.preserved < LIMITS["preserved"]
    # Everything is listed once, with what was done to it, and nothing of the source is missing.
    assert cell.problems == []
    # The loaded bundle computes with the dequantized weights, which are not the source's.
    assert cell.changed > 0.05
    assert cell.loaded < LIMITS["loaded"]
    # Generation reads pages of those keys and values; a code at the edge between two may fall to either side.
    assert cell.generated is None or cell.generated < LIMITS["generated"]
    # What the page of models says of it; record it anew where this fails (record.py).
    recorded = json.loads(RESULTS.read_text(encoding="utf8"))["models"][name]["weights"]
    assert weight_facts(ARCHITECTURES[name], cell.manifest).items() <= recorded.items()
    pages = [layer.kv is not None for layer in cell.manifest.layers]
    assert all(kept or layer.reason for kept, layer in zip(pages, cell.manifest.layers, strict=True))
    assert any(pages) == ("mla" not in ARCHITECTURES[name].features and name not in UNCACHED)


@pytest.mark.parametrize("name", REFUSED_WEIGHTS)
def test_weights_that_cannot_be_converted_are_refused_by_name(name, tmp_path):
    with pytest.raises(UnsupportedModelError, match=REFUSED_WEIGHTS[name]):
        convert(ARCHITECTURES[name], tmp_path, RECIPE)
    assert not (tmp_path / "work").exists()


@pytest.mark.quick("gemma4_text_shared")
@pytest.mark.parametrize("name", [name for name in REFUSED_WEIGHTS if name not in UNCACHED])
def test_a_bundle_of_the_cache_alone_is_the_source_with_that_cache(name, tmp_path):
    entry = ARCHITECTURES[name]
    bundle = convert(entry, tmp_path, CACHE_ONLY)
    loaded, _ = load(bundle)
    source, inputs = entry.build("kvconvert"), entry.inputs(2, 136, padding=5)
    tokens = torch.ones(2, 8, dtype=torch.long)
    schemes = [scheme or KVScheme(key_bits=16, value_bits=16) for scheme in loaded.kv_schemes]
    assert any(scheme == KVScheme.preset("kivi") for scheme in schemes)
    expected = generate(source, inputs, KVCache(source.config, schemes), tokens)
    found = generate(loaded, inputs, None, tokens)
    # Weights at other addresses are summed in another order; a code at the edge may then fall to either side.
    assert (found - expected).abs().mean() < 1e-3 * expected.abs().mean()


@pytest.mark.parametrize("name", UNCACHED)
def test_where_neither_weights_nor_cache_can_be_converted_nothing_is_written(name, tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"nothing to convert.*computes attention by itself"):
        convert(ARCHITECTURES[name], tmp_path, CACHE_ONLY)
    assert not (tmp_path / "work").exists()
    assert not (tmp_path / "bundle").exists()
