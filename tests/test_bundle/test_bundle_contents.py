"""Tensors, plan, index, config and coverage of a bundle agree with each other, or it is refused by name."""

import ast
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny.bundle import edit_json, refusal, replace_tensors, reseal

from kvconvert.bundle.files import INDEX_NAME
from kvconvert.bundle.locate import MANIFEST_NAME, PLAN_NAME
from kvconvert.bundle.reader import open_bundle
from kvconvert.io.tensorheader import read_header

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Q = "model.layers.0.q_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (f"{Q}.scales", None, "missing"),
        (f"{Q}.qzeros", None, "missing"),
        ("model.layers.0.norm.weight", None, "missing"),
        (f"{Q}.weight", torch.ones(32, 32), "extra"),
        (f"{Q}.qweight", torch.zeros(32, 8, dtype=torch.int32), "[32, 8]"),
        (f"{Q}.qweight", torch.zeros(32, 4, dtype=torch.int64), "I64"),
        (f"{Q}.scales", torch.ones(2, 32), "F32"),
    ],
)
def test_a_missing_extra_or_misshapen_tensor_is_named(bundle, name, tensor, words):
    file = open_bundle(bundle).weight_files[name if name != f"{Q}.weight" else f"{Q}.scales"]
    replace_tensors(file, **{name.replace(".", "__"): tensor})
    index = json.loads((bundle / INDEX_NAME).read_text())
    if tensor is None:
        del index["weight_map"][name]
    else:
        index["weight_map"][name] = file.name
    headers = [read_header(bundle / shard) for shard in (FIRST, SECOND)]
    index["metadata"]["total_size"] = sum(
        load_file(bundle / shard)[name].nbytes
        for shard, header in zip((FIRST, SECOND), headers, strict=True)
        for name in header
    )
    edit_json(bundle / INDEX_NAME, **index)
    reseal(bundle)
    message = refusal(bundle)
    assert name in message
    assert words in message


def spoil_scales(bundle, change):
    file = open_bundle(bundle).weight_files[f"{Q}.scales"]
    scales = load_file(file)[f"{Q}.scales"].clone()
    change(scales)
    replace_tensors(file, **{f"{Q}.scales".replace(".", "__"): scales})
    reseal(bundle)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("where", [(1, slice(None)), (0, 3), (slice(None), slice(None))])
def test_scales_that_are_zero_negative_or_not_finite_are_refused(bundle, value, where):
    spoil_scales(bundle, lambda scales: scales.__setitem__(where, value))
    message = refusal(bundle)
    assert f"{Q}.scales" in message


def test_a_plan_that_is_not_finite_is_refused(bundle):
    replace_tensors(bundle / PLAN_NAME, layers__1__key_mean_abs=torch.full((2, 16), float("nan")))
    reseal(bundle)
    assert "layers.1.key_mean_abs" in refusal(bundle)


@pytest.mark.parametrize("name", ["layers.2.key_mean_abs", "key_mean_abs"])
def test_a_plan_tensor_of_no_layer_is_refused(bundle, name):
    replace_tensors(bundle / PLAN_NAME, **{name.replace(".", "__"): torch.ones(1)})
    fields = json.loads((bundle / MANIFEST_NAME).read_text())
    reseal(bundle, plan=fields["plan"] | {name: {"dtype": "F32", "shape": [1]}})
    assert name in refusal(bundle)


def test_what_an_earlier_version_measured_for_allocations_by_variance_is_read(bundle):
    name = "layers.1.attention_variance"
    replace_tensors(bundle / PLAN_NAME, **{name.replace(".", "__"): torch.ones(1)})
    fields = json.loads((bundle / MANIFEST_NAME).read_text())
    recipe = {"kv": {"heavy_ratio": 0.2, "recent_ratio": 0.2, "allocation": "var_prop"}}
    reseal(bundle, plan=fields["plan"] | {name: {"dtype": "F32", "shape": [1]}}, recipe=fields["recipe"] | recipe)
    assert name in open_bundle(bundle).plan


def test_a_plan_tensor_of_another_shape_is_refused(bundle):
    replace_tensors(bundle / PLAN_NAME, layers__1__key_mean_abs=torch.ones(2, 15))
    reseal(bundle)
    assert "[2, 15]" in refusal(bundle)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda index: index["weight_map"].popitem(), "weight_map"),
        (lambda index: index["weight_map"].update(ghost=FIRST), "ghost"),
        (lambda index: index["weight_map"].update({f"{Q}.scales": "../x"}), f"{Q}.scales"),
        (lambda index: index.update(weight_map=[]), "weight_map"),
        (lambda index: index["metadata"].update(total_size=1), "total_size"),
    ],
)
def test_an_index_that_disagrees_with_the_shards_is_refused(bundle, spoil, words):
    index = json.loads((bundle / INDEX_NAME).read_text())
    spoil(index)
    edit_json(bundle / INDEX_NAME, **index)
    reseal(bundle)
    message = refusal(bundle)
    assert INDEX_NAME in message
    assert words in message


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda config: config.pop("quantization_config"), "quantization_config"),
        (lambda config: config["quantization_config"].update(group_size=128), "group_size"),
        (lambda config: config["quantization_config"].update(bits=3), "bits"),
        (lambda config: config["quantization_config"].pop("kvconvert"), "kvconvert"),
        (lambda config: config["quantization_config"].update(surprise=1), "surprise"),
        (lambda config: config["quantization_config"].update(modules_to_not_convert=[]), "modules_to_not_convert"),
        (lambda config: config.update(num_hidden_layers=3), "num_hidden_layers"),
        (lambda config: config.update(auto_map={"AutoModel": "evil.Model"}), "auto_map"),
    ],
)
def test_a_config_that_disagrees_with_the_manifest_is_refused(bundle, spoil, words):
    config = json.loads((bundle / "config.json").read_text())
    spoil(config)
    (bundle / "config.json").write_text(json.dumps(config))
    reseal(bundle)
    assert words in refusal(bundle)


def change_module(bundle, number, **changes):
    modules = json.loads((bundle / MANIFEST_NAME).read_text())["modules"]
    modules[number] |= changes
    reseal(bundle, modules=modules)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 8}, "model.layers.0.q_proj"),
        ({"bits": 3}, "model.layers.0.q_proj"),
        ({"in_features": 64}, "qweight"),
        ({"method": "rtn"}, "model.layers.0.q_proj"),
        ({"method": "kept"}, "model.layers.0.q_proj"),
        ({"name": "model.layers.1.q_proj"}, "model.layers.1.q_proj"),
        ({"name": "ghost"}, "ghost"),
    ],
)
def test_coverage_that_disagrees_with_the_tensors_is_refused(bundle, changes, words):
    change_module(bundle, 0, **changes)
    assert words in refusal(bundle)


def test_a_matrix_that_the_coverage_does_not_mention_is_refused(bundle):
    modules = json.loads((bundle / MANIFEST_NAME).read_text())["modules"]
    reseal(bundle, modules=[module for module in modules if module["name"] != "model.embed_tokens"])
    assert "model.embed_tokens" in refusal(bundle)


@pytest.mark.parametrize(
    "changes",
    [{"kv": {"key_bits": 5}}, {"kv": {"surprise": 1}}, {"index": 7}, {"head_dim": None}, {"value_group_size": 32}],
)
def test_a_kv_plan_that_means_nothing_is_refused(bundle, changes):
    layers = json.loads((bundle / MANIFEST_NAME).read_text())["layers"]
    layers[1] |= changes
    reseal(bundle, layers=layers)
    assert "layers" in refusal(bundle)


def test_fidelity_measured_on_another_bundle_is_refused(bundle):
    reseal(bundle, fidelity={"measured_on": "3" * 64, "report": {}, "limits": {}, "missed": []})
    assert "fidelity.measured_on" in refusal(bundle)


def test_the_bundle_package_imports_nothing_that_production_does_without():
    allowed = {"numpy", "torch", "safetensors", "pydantic", "huggingface_hub", "kvconvert"}
    import sys

    import kvconvert.bundle

    for path in Path(kvconvert.bundle.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] in allowed | sys.stdlib_module_names, (path.name, name)
                rooms = ("arguments", "bundle", "cache", "io", "errors", "methods", "tables")
                assert not name.startswith("kvconvert.") or name.split(".")[1] in rooms, (path.name, name)
