"""The committed bundle of each format version keeps loading and computes what it did; other programs can read it."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import make_golden
import numpy as np
import pytest
import torch

from kvconvert.bundle.manifest import FORMAT_VERSION, Fidelity, schema_text
from kvconvert.bundle.reader import open_bundle
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight
from kvconvert.kernels.pages import PageFormat, SideTensors
from kvconvert.kernels.pages.reference import dequantize_pages, quantize_pages
from kvconvert.kernels.rotate.matrices import hadamard_matrix
from kvconvert.recipes.recipe import Limits
from kvconvert.runtime.hf.bundle_quantizer import check_fits

HERE = Path(__file__).parent
BUNDLES = sorted(path for path in HERE.glob("format-*") if path.is_dir())
EXAMPLE = HERE.parents[1] / "examples" / "read_bundle.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("read_bundle", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=BUNDLES, ids=lambda path: path.name)
def golden(request):
    return request.param


def test_there_is_a_golden_bundle_of_the_present_version():
    assert HERE / f"format-{FORMAT_VERSION}" in BUNDLES
    assert all(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) < 300_000 for path in BUNDLES)


def test_it_is_intact_and_has_every_kind_of_plan(golden):
    bundle = open_bundle(golden)
    assert check_fits(bundle) > 4 * 7
    assert {name.split(".")[2] for name in bundle.plan} >= {"boosted_channels", "key_feedback", "tau_error"}
    schemes = bundle.manifest.schemes()
    assert schemes[0].rotate_values == "folded"
    assert schemes[1].boost_select == "calibrated"
    assert schemes[2].is_span
    assert schemes[3].key_rounding == "error_feedback"


def test_the_schema_in_docs_is_the_code_s(golden):
    text = (HERE.parents[1] / "docs" / "manifest.schema.json").read_text()
    assert text == schema_text(), "write it anew with `make docs`"
    schema, fields = json.loads(text), json.loads((golden / "kvconvert.json").read_text())
    assert fields.keys() == schema["properties"].keys()
    for name in schema["required"]:
        assert name in fields
    module = schema["$defs"]["ModuleCoverage"]
    assert module["additionalProperties"] is False
    assert all(entry.keys() <= module["properties"].keys() for entry in fields["modules"])


def test_figures_that_a_bundle_recorded_before_1_0_have_the_names_of_today():
    stored = {"measured_on": "0" * 64, "limits": {"min_passkey": 0.5, "max_kl": 0.1}}
    stored["report"] = {"passkey": {"source": 1.0, "bundle": 0.9}, "recall_form": "plain text", "kl": {"mean": 0.1}}
    found = Fidelity.model_validate(stored)
    assert found.limits == {"min_retrieval": 0.5, "max_kl": 0.1}
    assert found.report["retrieval"] == {"source": 1.0, "bundle": 0.9}
    assert found.report.keys() == {"retrieval", "retrieval_form", "kl"}
    assert Limits(min_passkey=0.5) == Limits(min_retrieval=0.5)


def test_it_computes_what_it_did(golden):
    expected, found = json.loads((HERE / f"{golden.name}.json").read_text()), make_golden.compute(golden)
    # Other processors add in another order; a token differs only where two logits are that close.
    torch.testing.assert_close(torch.tensor(found["logits"]), torch.tensor(expected["logits"]), rtol=1e-3, atol=1e-3)
    assert found["tokens"] == expected["tokens"]


def test_the_example_uses_nothing_but_numpy_and_python(golden, monkeypatch, capsys):
    imported = {
        line.split()[1].split(".")[0] for line in EXAMPLE.read_text().splitlines() if line.startswith("import ")
    }
    imported |= {line.split()[1] for line in EXAMPLE.read_text().splitlines() if line.startswith("from ")}
    assert imported - sys.stdlib_module_names == {"numpy"}
    monkeypatch.setattr(sys, "argv", ["read_bundle.py", str(golden)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "model.layers.0.self_attn.q_proj [[" in capsys.readouterr().out


def test_the_example_reads_the_weights_of_a_layer(golden, example):
    bundle = open_bundle(golden)
    stored = example.read_tensors(golden / "model.safetensors")
    for module in bundle.manifest.modules:
        if module.method == "kept" or ".layers.0." not in module.name:
            continue
        parts = (torch.tensor(stored[f"{module.prefix}.{part}"]) for part in ("qweight", "qzeros", "scales"))
        expected = dequantize_weight(AwqWeight(*parts)).numpy()
        np.testing.assert_array_equal(example.weight(stored, module.prefix, module.group_size), expected)


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_the_example_makes_the_pages_of_the_reference(golden, example, layer):
    bundle = open_bundle(golden)
    plan, scheme = bundle.manifest.layers[layer], bundle.manifest.schemes()[layer]
    heads, channels = plan.num_key_value_heads, plan.head_dim
    keys = torch.randn(heads, 128, channels, generator=torch.Generator().manual_seed(layer))
    turned = keys @ hadamard_matrix(channels).float() if scheme.rotate_keys == "hadamard" else keys
    assert plan.rotation in (None, f"sylvester({channels})")
    boosted = bundle.plan.get(f"layers.{layer}.boosted_channels")
    form = PageFormat.keys(
        heads,
        channels,
        128,
        scheme.key_bits,
        scheme.key_group_size,
        scheme.token_norm,
        scheme.token_norm_measure,
        scheme.key_clip_ratio,
        0 if boosted is None else boosted.shape[1],
        boosted is not None,
    )
    fixed = None if boosted is None else boosted.long()
    tensors = SideTensors(fixed)
    expected = dequantize_pages(quantize_pages(turned[None], form, tensors), tensors)[0]
    fields = json.loads((golden / "kvconvert.json").read_text())["layers"][layer]
    none = torch.empty(heads, 0, dtype=torch.int64)
    found = example.page_of_keys(keys.numpy(), fields, (none if fixed is None else fixed).numpy())
    # A quotient on the border of two codes may be rounded either way.
    assert np.isclose(found, expected.numpy(), atol=1e-5).mean() > 0.999
    values = PageFormat.values(
        heads, channels, 128, scheme.value_bits, plan.value_group_size, clip_ratio=scheme.value_clip_ratio
    )
    expected = dequantize_pages(quantize_pages(keys[None], values))[0]
    assert np.isclose(example.page_of_values(keys.numpy(), fields), expected.numpy(), atol=1e-5).mean() > 0.999
