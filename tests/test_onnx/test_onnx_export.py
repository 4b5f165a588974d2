"""What an ONNX export writes, and what it refuses."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_generate
import onnxruntime
import pytest
import torch
from click.testing import CliRunner
from conversions import converted_tiny
from tiny.bundle import change_after_verification, edit_json, reseal
from tiny.models import ARCHITECTURES, random_ids, write_tokenizer
from transformers import AutoTokenizer

from kvconvert import KVScheme, Recipe
from kvconvert.bundle.manifest import LayerPlan
from kvconvert.cli import cli
from kvconvert.errors import BundleError, KvconvertError, UnsupportedModelError, UsageError
from kvconvert.kernels.linear.awq_format import dequantize_weight, quantize_weight
from kvconvert.onnx import export as exporting
from kvconvert.onnx.architecture import DecoderShape, served_bits
from kvconvert.onnx.decoder import repack
from kvconvert.onnx.export import export_onnx

EXAMPLES = Path(onnx_generate.__file__).parent


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    directory = tmp_path_factory.mktemp("onnx") / "bundle"
    converted_tiny("llama", directory, bits=4)
    return directory


def unpacked(pairs, count):
    """Codes [rows, count] of bytes that hold two, the first in the lower half."""
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)[:, :count].float()


@pytest.mark.parametrize(("outputs", "inputs", "group"), [(8, 16, 16), (24, 96, 32), (16, 640, 128)])
def test_repacked_weights_are_the_same_numbers(outputs, inputs, group):
    packed = quantize_weight(torch.randn(outputs, inputs), 4, group)
    b, scales, zeros = repack(packed, "here")
    blocks = inputs // group
    assert b.shape == (outputs, blocks, group // 2)
    assert zeros.shape == (outputs, (blocks + 1) // 2)
    codes = unpacked(b.flatten(1), inputs).unflatten(1, (blocks, group))
    weight = (codes - unpacked(zeros, blocks)[..., None]) * scales[..., None]
    assert torch.equal(weight.flatten(1), dequantize_weight(packed))


def test_groups_that_onnx_runtime_lacks_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"down_proj has groups of 48 inputs"):
        repack(quantize_weight(torch.randn(8, 96), 4, 48), "down_proj")


def test_weights_lie_in_one_file_of_external_data_and_equal_exports_are_equal(bundle, tmp_path):
    contents = []
    for name in ("first", "second"):
        export_onnx(bundle, tmp_path / name)
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]
    assert set(contents[0]) == {"model.onnx", "model.onnx.data", "genai_config.json", "config.json"}
    model = onnx.load(tmp_path / "first" / "model.onnx", load_external_data=False)
    inline = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    assert inline < 20_000 < len(contents[0]["model.onnx.data"])
    properties = {entry.key: entry.value for entry in model.metadata_props}
    assert (
        properties["bundle_manifest_sha256"] == json.loads((bundle / "kvconvert.json").read_text())["manifest_sha256"]
    )
    assert "quantization_config" not in json.loads(contents[0]["config.json"])


@pytest.fixture
def spoken(bundle, tmp_path):
    """A copy of the bundle with a tokenizer, and a function that writes its generation_config.json."""
    directory = tmp_path / "bundle"
    shutil.copytree(bundle, directory)
    write_tokenizer(directory)

    def state(**settings):
        (directory / "generation_config.json").write_text(json.dumps(settings))
        fields = json.loads((directory / "kvconvert.json").read_text())
        for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            fields["files"][name] = {"size": 0, "sha256": "0" * 64}
        (directory / "kvconvert.json").write_text(json.dumps(fields))
        reseal(directory)
        return directory

    return state


def test_settings_of_generation_are_those_of_load(spoken, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    directory = spoken(eos_token_id=[5, 6], temperature=0, do_sample=True, top_k=-1, bad_words_ids=[[7]], min_length=3)
    found = json.loads((export_onnx(directory, tmp_path / "onnx") / "genai_config.json").read_text())
    end = AutoTokenizer.from_pretrained(directory).eos_token_id
    assert found["model"]["eos_token_id"] == [5, 6, end]
    assert found["model"]["pad_token_id"] == 5
    length = found["model"]["context_length"]
    expected = {
        "max_length": length,
        "past_present_share_buffer": True,
        "do_sample": False,
        "top_k": 0,
        "min_length": 3,
    }
    assert found["search"] == expected
    assert "onnxruntime-genai does not apply bad_words_ids = [[7]] of generation_config.json" in caplog.text


@pytest.mark.parametrize("settings", [{"temperature": "hot"}, {"eos_token_id": "</s>"}, {"num_beams": 0}])
def test_settings_that_nothing_can_apply_are_refused(spoken, tmp_path, settings):
    with pytest.raises(BundleError, match=f"generation_config.json says {next(iter(settings))} = "):
        export_onnx(spoken(**settings), tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "generation_config.json", "tokenizer.json"])
def test_a_file_that_changes_between_verification_and_export_is_noticed(spoken, tmp_path, monkeypatch, name):
    directory = spoken()
    change_after_verification(monkeypatch, exporting, directory / name)
    with pytest.raises(BundleError, match="changed after it was verified"):
        export_onnx(directory, tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


# What transformers refuses in words of its own, what would take gigabytes, and what other tensors belong to.
CONFIGS = [
    *({"use_cache": 1}, {"attention_bias": "x"}, {"hidden_act": ["silu"]}, {"model_type": 7}, {"auto_map": None}),
    *({"rope_parameters": 7}, {"rms_norm_eps": "x"}, {"vocab_size": None}, {"eos_token_id": 1.5}, {"id2label": 5}),
    *({"head_dim": 8}, {"hidden_size": 96}, {"num_key_value_heads": 0}, {"num_attention_heads": 3}),
    *({"intermediate_size": 8}, {"max_position_embeddings": 2**23}, {"hidden_act": "none"}, {"vocab_size": 7}),
    *({"max_position_embeddings": -1}, {"max_position_embeddings": 0}, {"is_causal": False}, {"mlp_bias": True}),
]


@pytest.mark.parametrize("settings", CONFIGS, ids=str)
def test_a_sealed_configuration_that_makes_no_model_of_these_tensors_is_one_sentence(bundle, tmp_path, settings):
    directory = shutil.copytree(bundle, tmp_path / "bundle")
    edit_json(directory / "config.json", **settings)
    reseal(directory)
    with pytest.raises(KvconvertError) as caught:
        export_onnx(directory, tmp_path / "onnx")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "onnx").exists()


@pytest.mark.parametrize(
    ("name", "settings", "missing"),
    [
        ("llama", {"attention_bias": True}, r"model.layers.0.self_attn.k_proj.bias and 7 more tensors"),
        ("gemma2", {"tie_word_embeddings": False}, "lm_head.weight"),
    ],
)
def test_a_configuration_that_asks_for_tensors_that_the_bundle_lacks_is_refused(tmp_path, name, settings, missing):
    converted_tiny(name, tmp_path / "bundle")
    edit_json(tmp_path / "bundle" / "config.json", **settings)
    reseal(tmp_path / "bundle")
    with pytest.raises(BundleError, match=f"lacks {missing}, which the model needs"):
        export_onnx(tmp_path / "bundle", tmp_path / "onnx", kv_cache="float")


def test_what_a_rope_says_of_one_type_of_layers_means_nothing_where_all_have_one(bundle, tmp_path):
    directory = shutil.copytree(bundle, tmp_path / "bundle")
    rope = json.loads((directory / "config.json").read_text())["rope_parameters"]
    edit_json(directory / "config.json", rope_parameters=rope | {"full_attention": {"rope_type": "default"}})
    reseal(directory)
    for source, output in ((bundle, "a"), (directory, "b")):
        export_onnx(source, tmp_path / output)
    assert (tmp_path / "a" / "model.onnx.data").read_bytes() == (tmp_path / "b" / "model.onnx.data").read_bytes()


def test_a_batch_of_padded_prompts_gives_each_sequence_its_own_tokens(bundle, tmp_path):
    """Prompts padded at their end, then one token each, in a buffer that past and present share."""
    directory = export_onnx(bundle, tmp_path / "onnx")
    prompts = [random_ids(1, length, seed=length)[0].tolist() for length in (9, 5)]
    alone = [[logits for _, logits in onnx_generate.generate(directory, ids, 3, threads=1)] for ids in prompts]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(directory / "model.onnx", options, providers=["CPUExecutionProvider"])
    past = {p.name: np.zeros((2, p.shape[1], 16, p.shape[3]), np.uint8) for p in session.get_inputs()[2:]}
    lengths = np.array([9, 5])
    new = np.zeros((2, 9), np.int64)
    for row, ids in enumerate(prompts):
        new[row, : len(ids)] = ids
    last = lengths - 1
    for step in range(3):
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        logits, *present = session.run(None, {"input_ids": new, "attention_mask": mask} | past)
        past = dict(zip(past, present, strict=True))
        for row in range(2):
            np.testing.assert_allclose(logits[row, last[row]], alone[row][step], atol=1e-3)
        new = logits[np.arange(2), last].argmax(-1)[:, None]
        lengths, last = lengths + 1, np.array([0, 0])


def test_int8_activations_are_what_the_products_are_asked_for(bundle, tmp_path):
    for wanted in (False, True):
        export_onnx(bundle, tmp_path / str(wanted), int8_activations=wanted)
        nodes = onnx.load(tmp_path / str(wanted) / "model.onnx", load_external_data=False).graph.node
        levels = [a.i for n in nodes if n.op_type == "MatMulNBits" for a in n.attribute if a.name == "accuracy_level"]
        assert levels == [4 if wanted else 0] * 14


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ({"value_bits": 4}, "keys of 8 and values of 4 bits"),
        ({"rotate_keys": "hadamard"}, "rotated at run time"),
        ({"sink_tokens": 4}, "4 sink tokens"),
        ({"key_recent_tokens": 128}, "windows in full precision"),
        ({"heavy_ratio": 0.5, "recent_ratio": 0.1}, "a prompt budget"),
        ({"static_scales": "none"}, "layer 0 has no static scales"),
    ],
)
def test_plans_that_the_operator_cannot_follow_are_refused(scheme, reason):
    fields = {"key_bits": 8, "value_bits": 8, "static_scales": "calibrated"} | scheme
    plan = LayerPlan(index=0, kv=KVScheme(**fields).to_dict(), head_dim=16, num_key_value_heads=2, value_group_size=16)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        served_bits(plan)
    assert 'static_scales = "calibrated"' in str(caught.value)


def test_a_soft_cap_between_zero_points_and_softmax_is_refused(tmp_path):
    converted_tiny("gemma2", tmp_path / "bundle")
    with pytest.raises(UnsupportedModelError, match=r"soft cap.*`kv_cache` to \"float\""):
        export_onnx(tmp_path / "bundle", tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("qwen3_moe", {}, "models of type qwen3_moe"),
        ("phi", {}, "models of type phi"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "RoPE is of type dynamic",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "only a part of each head",
        ),
        ("llama", {"hidden_act": "relu"}, "activation is relu"),
        ("llama", {"head_dim": 24}, "heads have 24 channels, no multiple of 16"),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            "RoPE is of type None",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_models_that_the_graph_cannot_express_are_refused(name, settings, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        DecoderShape.of(ARCHITECTURES[name].config(**settings))


@pytest.mark.parametrize("bits", [8, 4])
def test_the_recipes_of_the_examples_are_served(bits):
    recipe = Recipe.load(str(EXAMPLES / "recipes" / f"onnx-int{bits}.toml"))
    plan = LayerPlan(index=0, kv=recipe.kv.to_dict(), head_dim=64, num_key_value_heads=2, value_group_size=32)
    assert served_bits(plan) == bits


def test_the_command_line_writes_replaces_and_refuses(bundle, tmp_path):
    def run(*options):
        return CliRunner().invoke(cli, ["export", str(bundle), "-o", str(tmp_path / "onnx"), *options])

    assert run("--kv-cache", "float").exit_code == 2
    done = run("--format", "onnx")
    assert done.exit_code == 0, done.output
    assert "onnxruntime-genai" in done.output
    assert run("--format", "onnx").exit_code == 2
    done = run("--format", "onnx", "--kv-cache", "float", "--force")
    assert done.exit_code == 0, done.output
    (tmp_path / "onnx" / "genai_config.json").unlink()
    refused = run("--format", "onnx", "--force")
    assert refused.exit_code == 2
    assert "is a model, not an export for ONNX Runtime" in refused.output
    with pytest.raises(UsageError, match="give 'plan' or 'float'"):
        export_onnx(bundle, tmp_path / "other", kv_cache="int8")


def test_the_example_prints_a_continuation(bundle, tmp_path, capsys, monkeypatch):
    directory = export_onnx(bundle, tmp_path / "onnx")
    write_tokenizer(directory)
    for tokens in ([], ["--tokens", "4"]):
        monkeypatch.setattr("sys.argv", ["onnx_generate.py", str(directory), "Once upon a time", *tokens])
        onnx_generate.main()
        assert capsys.readouterr().out.startswith("Once upon a time")


@pytest.mark.parametrize("kv_cache", ["float", "plan"])
def test_onnxruntime_genai_gives_the_same_tokens(bundle, tmp_path, kv_cache):
    genai = pytest.importorskip("onnxruntime_genai", reason="there is no onnxruntime-genai for this platform")
    directory = export_onnx(bundle, tmp_path / "onnx", kv_cache=kv_cache)
    write_tokenizer(directory)
    ids = AutoTokenizer.from_pretrained(directory)("Once upon a time").input_ids
    expected = [token for token, _ in onnx_generate.generate(directory, ids, 8, stop=[0], threads=1)]
    model = genai.Model(str(directory))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(ids) + 8, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(ids)
    while not generator.is_done():
        generator.generate_next_token()
    assert generator.get_sequence(0)[len(ids) :].tolist() == expected
