"""Calibrating a model end to end: what is stored, and what is refused."""

import copy
import subprocess
import sys

import pytest
import torch
from calibrations import AWQ, KV_ONLY, run
from safetensors.torch import load_file, save_file
from tiny.checkpoints import save_checkpoint
from tiny.models import ARCHITECTURES
from transformers import AutoConfig, AutoModelForCausalLM, Mamba2Config

from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.convert.passes import layer_jobs
from kvconvert.errors import (
    CheckpointError,
    DataError,
    KvconvertError,
    NumericError,
    RecipeError,
    UnsupportedModelError,
    UsageError,
)
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight, quantize_weight
from kvconvert.methods import KVScheme
from kvconvert.models.configuration import without_weights
from kvconvert.models.source import float_dtype, open_source
from kvconvert.recipes.recipe import Recipe, WeightsRecipe
from kvconvert.runtime import KVCache


def rebuilt(model, work):
    """The source model with a working directory's tensors in the place of its own, quantized ones read back."""
    built = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for index in range(work.state.num_layers):
        tensors = work.layer_tensors(index)
        for name in [name for name in tensors if name.endswith(".qweight")]:
            stem = name.removesuffix(".qweight")
            packed = AwqWeight(*(tensors.pop(f"{stem}.{field}") for field in AwqWeight._fields))
            tensors[f"{stem}.weight"] = dequantize_weight(packed)
        missing = set(built.load_state_dict(tensors, strict=False).unexpected_keys)
        assert not missing
    return built


def logits(model):
    ids = torch.randint(0, 4096, (2, 32), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model(ids).logits


def test_folded_weights_compute_the_same_function_from_the_stored_tensors(place, model, text):
    work = run(model, place / "folded", text, KV_ONLY)
    source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    converted = rebuilt(model, work)
    before, after = source.model.layers[0].self_attn, converted.model.layers[0].self_attn
    assert not torch.allclose(before.v_proj.weight, after.v_proj.weight)
    assert torch.equal(before.q_proj.weight, after.q_proj.weight)
    expected, found = logits(source), logits(converted)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert work.state.transforms == ["fold_value_rotation"]


def test_values_are_folded_under_sixteen_bit_keys_too(tmp_path, model, text):
    scheme = KVScheme(key_bits=16, rotate_keys="hadamard", rotate_values="folded")
    work = run(model, tmp_path / "work", text, KV_ONLY.model_copy(update={"kv": scheme}))
    name = "model.layers.0.self_attn.v_proj.weight"
    assert work.layer_record(0).kv["rotate_values"] == "folded"
    assert not torch.equal(work.layer_tensors(0)[name], open_source(str(model)).read([name])[name])


def test_awq_comes_closer_to_the_source_than_rounding(place, model, text, finished):
    rounded = run(model, place / "rtn", text, Recipe(weights=WeightsRecipe(method="rtn", group_size=32)))
    expected = logits(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
    error = {
        name: (logits(rebuilt(model, w)) - expected).square().mean()
        for name, w in (("awq", finished), ("rtn", rounded))
    }
    assert error["awq"] < error["rtn"]


def test_every_linear_is_covered_and_every_other_tensor_accounted_for(model, finished):
    source = AutoModelForCausalLM.from_pretrained(model)
    covered = {m.name: m for i in range(2) for m in finished.layer_record(i).modules}
    covered |= {m.name: m for m in finished.state.kept_modules}
    owners = {name.rpartition(".")[0] for name, _ in source.named_parameters()}
    assert owners <= covered.keys()
    for name, module in source.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            assert (covered[name].method, covered[name].bits, covered[name].group_size) == ("awq", 4, 32)
    assert finished.state.kept_tensors == ["model.embed_tokens.weight", "model.norm.weight"]


def test_rtn_without_a_cache_stores_plain_rounding_and_untouched_norms(place, model, text):
    recipe = Recipe(weights=WeightsRecipe(method="rtn", group_size=32), kv=None)
    tensors = run(model, place / "plain", text, recipe).layer_tensors(1)
    layer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).model.layers[1]
    packed = quantize_weight(layer.mlp.down_proj.weight, 4, 32)
    assert torch.equal(tensors["model.layers.1.mlp.down_proj.qweight"], packed.qweight)
    assert torch.equal(tensors["model.layers.1.input_layernorm.weight"], layer.input_layernorm.weight)


def test_layer_inputs_come_from_unquantized_layers_with_the_models_own_masks(place, text):
    """The statistics of the last layer's keys are those of the whole source model, sliding windows and all."""
    from transformers import AutoTokenizer

    from kvconvert.calibration.attention_sample import RECORDING_ATTENTION, attention_observed
    from kvconvert.calibration.oscar import KeyStatistics
    from kvconvert.data.text import load_token_samples

    path = save_checkpoint(
        place / "qwen2", "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1, num_hidden_layers=3
    )
    work = run(path, place / "qwen2-work", text)
    source = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=RECORDING_ATTENTION)
    ids = load_token_samples(text, AutoTokenizer.from_pretrained(path), 3, 24, 0).ids
    statistics = KeyStatistics(32)
    with torch.no_grad(), attention_observed(source.model.layers[2].self_attn, lambda q, k, v: statistics.update(k)):
        source.eval()(ids, use_cache=False)
    for name, expected in statistics.result().items():
        torch.testing.assert_close(work.layer_plan(2)[f"layers.2.{name}"], expected, rtol=1e-4, atol=1e-5)


def test_layers_of_unknown_structure_convert_their_cache_only_and_the_record_says_why(tmp_path, text):
    model = ARCHITECTURES["gpt2"].write(tmp_path / "gpt2")
    work = run(model, tmp_path / "work", text, KV_ONLY)
    record = work.layer_record(1)
    assert work.state.adapter is None
    assert record.kv["rotate_values"] == "online"
    assert "the structure of this model's layers is unknown" in record.reason
    assert work.layer_tensors(1) == {}
    assert set(work.state.kept_tensors) == set(load_file(model / "model.safetensors"))
    kept = {m.name: m.reason for m in work.state.kept_modules}
    assert kept["transformer.h.0.attn.c_attn"] == "the recipe keeps weights"
    with pytest.raises(KvconvertError, match=r"transformer\.h\.0\.attn has no Linear.*method = \"none\""):
        run(model, tmp_path / "other", text, AWQ)


def test_a_cache_that_the_model_would_never_fill_is_not_promised(tmp_path, text):
    model = ARCHITECTURES["bloom"].write(tmp_path / "bloom")
    with pytest.raises(UnsupportedModelError, match=r"nothing to convert.*bloom computes attention by itself"):
        run(model, tmp_path / "work", text, KV_ONLY)


def test_a_model_without_attention_is_told_that_it_has_no_keys_and_values():
    told = without_weights(Mamba2Config(num_hidden_layers=1))
    assert told == "nor can its cache be converted, for a linear_attention layer has no keys and values"


def test_layers_without_a_cache_of_their_own_have_no_scheme_and_the_record_says_why(tmp_path, text):
    model = ARCHITECTURES["gemma4_text_shared"].write(tmp_path / "model")
    work = run(model, tmp_path / "work", text, KV_ONLY)
    records = [work.layer_record(index) for index in range(4)]
    assert [record.kv is None for record in records] == [False, False, True, True]
    assert "reads an earlier layer's" in records[3].reason
    assert (records[0].head_dim, records[1].head_dim) == (16, 32)


def test_buffers_that_old_checkpoints_store_are_passed_over(tmp_path, text):
    model = ARCHITECTURES["gpt_neox"].write(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    for index in range(2):
        tensors[f"gpt_neox.layers.{index}.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
        tensors[f"gpt_neox.layers.{index}.attention.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    work = run(model, tmp_path / "work", text, AWQ)
    assert "gpt_neox.layers.0.attention.query_key_value.qweight" in work.layer_tensors(0)
    assert not any(name.endswith(("attention.bias", "inv_freq")) for name in work.layer_tensors(0))


def test_a_hybrid_layers_parts_are_quantized_or_kept_with_the_reason(tmp_path, text):
    model = ARCHITECTURES["qwen3_5_text"].write(tmp_path / "model")
    work = run(model, tmp_path / "work", text, AWQ)
    linear, attention = (work.layer_record(index) for index in range(2))
    assert linear.kv is None
    assert attention.kv["rotate_values"] == "online"
    assert "a gate weighs each channel" in attention.reason
    covered = {module.name.removeprefix("model.layers.0."): module for module in linear.modules}
    assert covered["linear_attn.in_proj_qkv"].method == covered["linear_attn.out_proj"].method == "awq"
    assert (covered["linear_attn.in_proj_a"].method, covered["linear_attn.conv1d"].method) == ("kept", "kept")
    assert "forgets" in covered["linear_attn.in_proj_a"].reason
    assert "skipped: a norm over each head" in covered["linear_attn.out_proj"].reason


@pytest.mark.quick("qwen3_5_text")
@pytest.mark.parametrize("name", ["qwen3_5_text", "deepseek_v3"])
def test_a_mixers_output_is_corrected_after_what_reads_its_input(name, tmp_path, text):
    source = ARCHITECTURES[name].write(tmp_path / "model")
    layer = LayerRunner(open_source(str(source)), torch.device("cpu")).structure(0)
    inner = [linear for linear in layer.linears if linear.startswith(f"{layer.attention}.")]
    assert inner[-1] == layer.output
    assert len(inner) > 2
    work = run(source, tmp_path / "work", text, Recipe.load("default", {"weights.kept_share": 0}))
    modules = {module.name: module for module in work.layer_record(0).modules}
    assert modules[f"model.layers.0.{layer.output}"].method != "kept"


def test_scalings_that_no_norm_allows_are_listed_and_a_layers_own_parameters_kept(tmp_path, text):
    work = run(ARCHITECTURES["olmo2"].write(tmp_path / "olmo2"), tmp_path / "olmo2-work", text, AWQ)
    covered = {module.name: module for module in work.layer_record(0).modules}
    assert "no norm precedes" in covered["model.layers.0.self_attn.q_proj"].reason
    assert covered["model.layers.0.mlp.down_proj"].reason == ""
    work = run(ARCHITECTURES["gemma4_text"].write(tmp_path / "gemma4"), tmp_path / "gemma4-work", text, AWQ)
    assert "model.layers.0.layer_scalar" in work.layer_tensors(0)
    assert all(".." not in name for name in work.layer_tensors(0))


def test_groups_of_weights_fit_the_model_unless_a_recipe_says_how_large_they_are(tmp_path, model, text, caplog):
    caplog.set_level("INFO", "kvconvert")
    work = run(model, tmp_path / "work", text, Recipe(weights=WeightsRecipe(method="rtn"), kv=None))
    assert "groups of 32, as auto chooses for a hidden size of 64 where they divide the inputs of every" in caplog.text
    assert work.state.recipe["weights"]["group_size"] == 32
    sizes = {module.group_size for module in work.layer_record(0).modules if module.method == "rtn"}
    assert sizes == {32}
    # The same run again finds itself complete: what it began from is the recipe with the size.
    run(model, tmp_path / "work", text, Recipe(weights=WeightsRecipe(method="rtn"), kv=None))


def test_a_model_with_attention_code_of_its_own_is_refused(tmp_path, text):
    model = ARCHITECTURES["falcon"].write(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="falcon computes attention by itself"):
        run(model, tmp_path / "work", text, KV_ONLY)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"recipe": Recipe(weights=WeightsRecipe(group_size=128))},
            RecipeError,
            r"128 does not divide the 64 inputs of model\.layers\.0.*group_size = 64",
        ),
        ({"seq_len": 4000}, UsageError, "more than the 512 positions"),
        ({"samples": 0}, UsageError, "at least 1"),
        ({"device": "toaster"}, UsageError, "There is no device"),
        ({"samples": 4000}, DataError, "tokens"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(tmp_path, model, text, options, error, said):
    with pytest.raises(error, match=said):
        run(model, tmp_path / "work", text, **options)
    assert not (tmp_path / "work").exists()


def test_nan_in_a_weight_is_named_with_its_tensor(tmp_path, text):
    model = save_checkpoint(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][2, 3] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(NumericError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight"):
        run(model, tmp_path / "work", text)


def test_nan_outside_the_layers_is_found_before_the_first_layer(tmp_path, text):
    model = save_checkpoint(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][2] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(NumericError, match=r"model\.norm\.weight"):
        run(model, tmp_path / "work", text)


def test_an_overflowing_activation_is_named_with_its_module(tmp_path, text):
    model = save_checkpoint(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.1.mlp.{name}.weight"] = tensors[f"model.layers.1.mlp.{name}.weight"] * 1e25
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(NumericError, match=r"model\.layers\.1\.mlp\.\w+ computes NaN or infinity"):
        run(model, tmp_path / "work", text, KV_ONLY)


@pytest.mark.parametrize("damage", ["missing", "extra", "shape"])
def test_a_layer_that_does_not_fit_its_configuration_is_refused(tmp_path, text, damage):
    model = save_checkpoint(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if damage == "missing":
        tensors.pop(name)
    elif damage == "extra":
        tensors["model.layers.1.mlp.up_proj.bias"] = torch.zeros(128)
    else:
        tensors[name] = tensors[name][:64].clone()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj"):
        run(model, tmp_path / "work", text)


def test_where_the_fold_is_not_legal_values_rotate_on_line_and_weights_stay(tmp_path, text):
    model = ARCHITECTURES["qwen3_5_text"].write(tmp_path / "model")
    work = run(model, tmp_path / "work", text, KV_ONLY)
    record = work.layer_record(1)
    assert record.kv["rotate_values"] == "online"
    assert "a gate weighs each channel of the values before the output projection" in record.reason
    assert work.state.transforms == []
    source = load_file(model / "model.safetensors")
    assert all(torch.equal(tensor, source[name]) for name, tensor in work.layer_tensors(1).items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_no_pass_changes_keeps_the_sources_bytes_and_dtype(tmp_path, text, dtype):
    model = save_checkpoint(tmp_path / "model", "qwen3", dtype=dtype)
    assert float_dtype(open_source(str(model))) == dtype
    kept = load_file(model / "model.safetensors")
    tensors = run(model, tmp_path / "work", text, KV_ONLY).layer_tensors(1)
    changed = {name for name in tensors if not torch.equal(tensors[name], kept[name])}
    assert changed == {f"model.layers.1.self_attn.{name}.weight" for name in ("v_proj", "o_proj")}
    assert all(tensor.dtype == dtype for tensor in tensors.values())


def test_head_sizes_that_the_value_group_does_not_divide_are_resolved(tmp_path, text):
    model = save_checkpoint(tmp_path / "model", head_dim=48)
    record = run(model, tmp_path / "work", text, recipe=Recipe.load("oscar")).layer_record(0)
    assert record.scheme().rotate_values == "folded"
    assert (record.head_dim, record.num_key_value_heads, record.value_group_size) == (48, 2, 24)
    assert record.rotation == "paley(12) x sylvester(4)"


MEMORY = """
import resource, sys
import torch
torch.set_num_threads(1)
from kvconvert.convert.pipeline import calibrate
from kvconvert.recipes.recipe import Recipe, WeightsRecipe
def peak(model, work):
    recipe = Recipe(weights=WeightsRecipe(method="awq", group_size=128))
    calibrate(model, work, recipe=recipe, data=sys.argv[1], samples=2, seq_len=16, progress=False)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
few = peak(sys.argv[2], sys.argv[3])
print(few, peak(sys.argv[4], sys.argv[5]))
"""


@pytest.mark.full
def test_peak_memory_does_not_grow_with_the_number_of_layers(tmp_path, text):
    """A layer here is 1.6 million weights, 6.3 MB in float32: keeping the six added ones would show as 38 MB."""
    shape = {"hidden_size": 384, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 4}
    arguments = [text]
    for layers in (3, 9):
        model = save_checkpoint(tmp_path / f"{layers}", dtype=torch.bfloat16, num_hidden_layers=layers, **shape)
        arguments += [str(model), str(tmp_path / f"work{layers}")]
    done = subprocess.run([sys.executable, "-c", MEMORY, *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    few, many = (int(value) / 1024 for value in done.stdout.split())
    assert many - few < 12, f"peak {few:.0f} MB with 3 layers, {many:.0f} MB with 9"


def test_short_windows_beside_full_attention_have_four_bits_by_default(tmp_path):
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=512,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )

    def widths(changes=None, **values):
        own = copy.deepcopy(config)
        for name, value in values.items():
            setattr(own, name, value)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(own)
        model = model.to_empty(device="cpu")
        model.init_weights()
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder)
        recipe = Recipe.load("default", changes or {})
        runner = LayerRunner(open_source(str(folder)), torch.device("cpu"))
        return [(job.scheme.key_bits, job.scheme.value_bits) for job in layer_jobs(runner, recipe)]

    assert widths() == [(4, 4), (4, 4), (3, 2)]
    assert [(own.key_bits, own.value_bits) for own in KVCache(config, "default").schemes] == widths()
    assert widths({"kv.value_bits": 1}) == [(3, 1)] * 3
    assert widths({"kv.key_bits": 8, "kv.window_bits": 2}) == [(8, 2)] * 3
    assert widths({"kv.window_bits": 0}) == widths(sliding_window=2048) == [(3, 2)] * 3
    assert widths(layer_types=["sliding_attention"] * 3) == [(3, 2)] * 3
