"""What `plan` says is what then happens."""

import gc
import json
import re
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tiny.checkpoints import save_checkpoint, save_text
from tiny.families import FAMILIES
from tiny.models import ARCHITECTURES, random_ids

from kvconvert.bundle.manifest import Manifest
from kvconvert.cache import LayerCache, ModelCache
from kvconvert.calibration.attention_sample import SAMPLE_SEQUENCES, AttentionSampler
from kvconvert.calibration.keys import KeyTreatmentPass
from kvconvert.calibration.scales import ClipRatioPass
from kvconvert.cli import cli
from kvconvert.convert.export import export
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.convert.pipeline import calibrate
from kvconvert.data.samples import MOST_SAMPLES, load_samples, text_shape
from kvconvert.errors import DataError, UsageError
from kvconvert.io import checksums
from kvconvert.io.process import anonymous_bytes
from kvconvert.kernels.linear.awq_format import quantize_weight
from kvconvert.methods import KVCalibration, KVScheme
from kvconvert.models.source import open_source
from kvconvert.planning.plan import fit, packed_bytes, plan, plan_text
from kvconvert.planning.probe import PartTime, measure, paced, sequences_probed
from kvconvert.recipes.recipe import Recipe, WeightsRecipe
from kvconvert.runtime.hf.generation import adopt

RTN = '[weights]\nmethod = "rtn"\nbits = {bits}\ngroup_size = 32\n[kv]\npreset = "{preset}"\n'


def recipe(tmp_path, bits=4, preset="kivi"):
    file = tmp_path / "recipe.toml"
    file.write_text(RTN.format(bits=bits, preset=preset))
    return str(file)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("outputs", "inputs", "group_size"), [(8, 32, 32), (40, 96, 32), (24, 128, 64)])
def test_packed_bytes_are_those_of_a_packed_weight(bits, outputs, inputs, group_size):
    packed = quantize_weight(torch.randn(outputs, inputs), bits, group_size)
    assert packed_bytes(outputs, inputs, bits, group_size) == sum(tensor.nbytes for tensor in packed)


@pytest.mark.quick("True")
@pytest.mark.parametrize("tied", [True, False])
def test_the_bundle_has_exactly_the_planned_bytes(tmp_path, tied):
    model = save_checkpoint(tmp_path / "model", "qwen2", torch.bfloat16, tie_word_embeddings=tied)
    planned = plan(model, recipe=recipe(tmp_path), probe=False, progress=False)
    options = {"data": save_text(tmp_path), "samples": 2, "seq_len": 32, "progress": False}
    calibrate(model, tmp_path / "work", recipe=recipe(tmp_path), **options)
    export(tmp_path / "work", tmp_path / "bundle", progress=False)
    manifest = Manifest.model_validate_json((tmp_path / "bundle" / "kvconvert.json").read_text())
    assert planned.disk.bundle == manifest.weights.bytes
    layers = sorted((tmp_path / "work" / "layers").glob("?????.safetensors"))
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in layers)
    assert planned.disk.work == sum(file.stat().st_size for file in layers) - headers


def test_longest_context_and_largest_batch_fit_and_one_more_does_not():
    cache = ModelCache((LayerCache(2, 16, 16), LayerCache(2, 16, 16, sliding_window=100)))
    memory, weights, context, batch = 2_000_000, 500_000, 300, 3

    def allowance(rows):
        return 10_000 + 100 * rows

    found = fit(memory, weights, cache, context, batch, None, allowance)
    longest, most = found.longest_context, found.largest_batch
    assert cache.bytes(300) == 2 * 64 * (300 + 100)
    assert weights + allowance(batch) + batch * cache.bytes(longest) <= memory
    assert weights + allowance(batch) + batch * cache.bytes(longest + 1) > memory
    assert weights + allowance(most) + most * cache.bytes(context) <= memory
    assert weights + allowance(most + 1) + (most + 1) * cache.bytes(context) > memory
    assert fit(memory, weights, cache, context, batch, 500, allowance).limited_by == "the model's positions"
    nothing = fit(weights, weights, cache, context, batch, 500, allowance)
    assert (nothing.longest_context, nothing.largest_batch) == (0, 0)
    with_states = fit(memory, weights, cache, context, batch, None, allowance, 70_000)
    moved = [fit(memory - n * 70_000, weights, cache, context, batch, None, allowance) for n in (batch, 1)]
    assert with_states.longest_context == moved[0].longest_context
    assert with_states.largest_batch < moved[1].largest_batch
    most = with_states.largest_batch
    assert weights + allowance(most) + most * (cache.bytes(context) + 70_000) <= memory
    assert weights + allowance(most + 1) + (most + 1) * (cache.bytes(context) + 70_000) > memory


def test_sink_tokens_and_windows_count_in_short_contexts(tmp_path):
    model = save_checkpoint(tmp_path / "model", max_position_embeddings=100_000)
    bits = [
        plan(model, recipe=recipe(tmp_path), context=n, probe=False).cache.bits_per_value for n in (64, 1024, 100_000)
    ]
    assert bits[0] == 16, "nothing is in a page yet"
    assert bits[0] > bits[1] > bits[2] > 2


def test_layers_that_keep_the_models_own_cache_are_counted_with_the_reason(tmp_path):
    model = ARCHITECTURES["qwen3_5_text"].write(tmp_path / "model")
    planned = plan(model, recipe=recipe(tmp_path), probe=False, progress=False)
    reason = "a linear_attention layer has no keys and values; its state is stored in 12 bits"
    assert planned.cache.left == {reason: 1}
    assert re.search(rf"\n1 layer +no low-bit keys and values +{reason}", plan_text(planned))


WITH_STATES = ["qwen3_5_text", "kimi_linear", "falcon_h1", "lfm2"]  # delta rule, KDA, Mamba 2, short convolutions
MORE = ["bamba", "jamba", "granitemoehybrid", "qwen3_next"]


@pytest.mark.quick("falcon_h1")
@pytest.mark.parametrize("name", [*WITH_STATES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_planned_states_are_those_that_a_sequence_has(name, tmp_path):
    entry = (ARCHITECTURES | FAMILIES)[name]
    preset = KVScheme.preset("latent-4bit" if name == "kimi_linear" else "kivi")
    entry.write(tmp_path / "model", vocab_size=4096)  # those of the tokenizer
    for state_bits in (12, 16):
        scheme = replace(preset, state_bits=state_bits)
        method = Recipe(weights=WeightsRecipe(method="none"), kv=scheme)
        planned = plan(tmp_path / "model", recipe=method, probe=False, progress=False)
        model = entry.build().to(torch.bfloat16)
        adopt(model, [scheme] * model.config.num_hidden_layers, {})
        cache = model.new_kv_cache()
        for length in (5, 130):
            model(random_ids(1, length), past_key_values=cache)
            held = [tensor for layer in cache.state_layers().values() for tensor in layer.tensors().values()]
            assert planned.cache.states == sum(tensor.nbytes for tensor in held) > 0
        assert "measured on one token" in plan_text(planned)


def test_what_does_not_depend_on_tokens_is_not_extrapolated():
    assert PartTime("gptq", (1, 2, 16), (5.0, 7.0)).whole() == pytest.approx(3 + 2 * 16)
    assert PartTime("gptq", (1, 2, 16), (7.0, 6.0)).whole() == pytest.approx(6)
    assert PartTime("gptq", (4, 8), (6.0,)).whole() == pytest.approx(12)
    assert sequences_probed(64, 512) == (4, 8)
    assert sequences_probed(6, 512) == (6,)
    assert sequences_probed(64, 8192) == (1, 2)


def test_a_probe_calibrates_one_layer_on_some_sequences(tmp_path):
    model = save_checkpoint(tmp_path / "model")
    found = measure(
        {
            "model": str(model),
            "recipe": Recipe.load(recipe(tmp_path, preset="oscar")).to_dict(),
            "data": save_text(tmp_path),
            "samples": 4,
            "length": 32,
            "seed": 0,
            "device": "cpu",
            "layer": 1,
            "folder": str(tmp_path),
        }
    )
    assert {part.name for part in found.parts} == {"", "oscar", "attention_sample", "error_feedback", "clip_ratios"}
    assert found.layer_seconds() > 0
    assert len(list((tmp_path / "work-4" / "layers").glob("00001.*"))) == 3


def test_searches_are_not_extrapolated_beyond_the_sample_that_they_read(tmp_path, monkeypatch, capfd):
    model = save_checkpoint(tmp_path / "model", max_position_embeddings=2048)
    found = []

    def solve(self, work):
        found.append(len(self.sampler.sample.queries))

    monkeypatch.setattr(ClipRatioPass, "solve", solve)
    request = {
        "model": str(model),
        "recipe": Recipe.load(recipe(tmp_path, preset="oscar")).to_dict(),
        "data": None,
        "samples": 16,
        "length": 2048,
        "seed": 0,
        "device": "cpu",
        "layer": 0,
        "folder": str(tmp_path),
    }
    parts = {part.name: part for part in measure(request).parts}
    assert found == [1, 2]
    assert parts["clip_ratios"].read == parts["attention_sample"].read == (1, 2, SAMPLE_SEQUENCES)
    assert parts["oscar"].read == parts[""].read == (1, 2, 16)
    assert "about" in capfd.readouterr().out, "a probe says how long it still takes"


def test_the_samples_of_a_probe_are_those_that_passes_take():
    sampler = AttentionSampler()
    assert [sampler.sequences_read(16, length) for length in (512, 2048, 4096, 32768)] == [8, 8, 4, 1]
    assert sampler.sequences_read(3, 512) == 3
    search = KeyTreatmentPass(sampler, KVScheme(), KVCalibration())
    assert [search.sequences_read(16, length) for length in (2048, 8192)] == [4, 2]


def test_other_programs_do_not_move_the_proportion_of_times():
    alone, busy = paced((1.0, 2.0), (1.0, 2.0)), paced((1.0, 2.0), (5.0, 1.0))
    assert alone == pytest.approx((1, 2))
    assert busy == pytest.approx((2, 4)), "as long as the wall's, and to each other as the processor's"


def test_layers_are_freed_without_waiting_for_the_garbage_collector(tmp_path, monkeypatch):
    layers = []
    read = LayerRunner.layer

    def watched(self, index, mapped=None):
        assert not any(layer() is not None for layer in layers), "an earlier layer is still in memory"
        layer, dtypes = read(self, index, mapped)
        layers.append(weakref.ref(layer))
        return layer, dtypes

    monkeypatch.setattr(LayerRunner, "layer", watched)
    model = save_checkpoint(tmp_path / "model", num_hidden_layers=3)
    gc.collect()
    gc.disable()
    try:
        options = {"data": save_text(tmp_path), "samples": 2, "seq_len": 32, "progress": False}
        calibrate(model, tmp_path / "work", recipe=recipe(tmp_path, preset="oscar"), **options)
    finally:
        gc.enable()
    assert len(layers) == 3


def test_a_cache_whose_keys_are_to_be_treated_is_planned_with_the_largest_treatment(tmp_path):
    model = save_checkpoint(tmp_path / "model", max_position_embeddings=1024)

    def planned(stated: str = ""):
        return plan(model, recipe=recipe(tmp_path, preset=f'default"{stated}\n#'), probe=False).cache

    found, largest, plain = planned(), planned('\ntoken_norm = "joint"'), planned("\ncalibrate_keys = false")
    assert plain.bytes_per_token < found.bytes_per_token == largest.bytes_per_token
    assert found.basis.startswith("at most")
    assert not largest.basis.startswith("at most")


def test_the_command_shows_a_table_or_json(tmp_path):
    model = str(save_checkpoint(tmp_path / "model"))
    arguments = ["plan", model, "--no-probe", "--gpu-memory", "24GB", "--context", "128", "--batch", "2"]
    found = json.loads(CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert found["gpu_memory"] == 24 * 10**9
    assert found["seconds"] is None
    assert found["fit"]["limited_by"] == "the model's positions"
    shown = CliRunner().invoke(cli, arguments, catch_exceptions=False).stdout
    for word in ("host memory, calibrate", "disk, bundle", "longest context", "largest batch"):
        assert word in shown
    assert "time" not in shown


def test_a_recipe_is_changed_for_a_plan_as_for_a_calibration(tmp_path):
    model = str(save_checkpoint(tmp_path / "model"))

    def planned(*arguments):
        told = CliRunner().invoke(cli, ["plan", model, "--no-probe", "--json", *arguments], catch_exceptions=False)
        return json.loads(told.stdout)

    plain, wide = planned(), planned("--weights", "none", "--key-bits", "8", "--set", "kv.value_bits=8")
    assert plain["disk"]["bundle"] < wide["disk"]["bundle"]
    assert plain["cache"]["bytes_per_token"] < wide["cache"]["bytes_per_token"]
    narrow, wide = planned("--weight-bits", "3.5"), planned("--weight-bits", "8")
    assert narrow["disk"]["bundle"] < plain["disk"]["bundle"]
    assert narrow["disk"]["bundle"] < wide["disk"]["bundle"]
    # Models as small as this one keep Linears for a tenth more bytes by default.
    without = planned("--set", "weights.kept_share=0")
    assert without["disk"]["bundle"] * 1.1 == pytest.approx(plain["disk"]["bundle"], 1e-4)
    refused = CliRunner().invoke(cli, ["plan", model, "--no-probe", "--weight-bits", "1"])
    assert "--weight-bits is 1, and with scales" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu-memory", "much"], "is not a size"),
        (["--gpu-memory", "0GB"], "is not a size"),
        (["--gpu-memory", f"{'9' * 400}GB"], "is not a size"),
        (["--gpu-memory", "24"], "is not a size"),
        (["--seq-len", "4096"], "--seq-len is 4,096, more than the 128 positions"),
        (["--context", "4096"], "--context is 4,096, more than the 128 positions"),
        (["--recipe", "nothing"], "There is no recipe preset 'nothing'"),
        (["--device", "abacus"], "There is no device abacus"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, arguments, sentence):
    model = str(save_checkpoint(tmp_path / "model"))
    found = CliRunner().invoke(cli, ["plan", model, "--no-probe", *arguments])
    assert found.exit_code == 2
    assert sentence in found.stderr


def test_a_recipe_that_searches_needs_its_budget(tmp_path):
    model = save_checkpoint(tmp_path / "model")
    with pytest.raises(UsageError, match="how large the cache may be"):
        plan(model, recipe="auto", probe=False)


def peak_of(*command: str) -> int:
    """Largest RssAnon of a kvconvert command."""
    process = subprocess.Popen([sys.executable, "-m", "kvconvert", *command])
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous_bytes(process.pid) or 0)
        time.sleep(0.005)
    assert process.returncode == 0
    return peak


@pytest.mark.full
@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
@pytest.mark.skipif(anonymous_bytes() is None, reason="only Linux tells anonymous memory")
def test_memory_is_as_planned(tmp_path, method):
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
    sizes = large | {"head_dim": 64, "num_hidden_layers": 3}
    model = str(save_checkpoint(tmp_path / "model", dtype=torch.bfloat16, **sizes))
    file = tmp_path / "recipe.toml"
    file.write_text(RTN.format(bits=4, preset="kivi").replace("rtn", method))
    options = ["--recipe", str(file), "--samples", "16", "--seq-len", "128"]
    planned, least = (
        json.loads(
            subprocess.run(
                [sys.executable, "-m", "kvconvert", "plan", model, "--json", *options, *more],
                check=True,
                stdout=subprocess.PIPE,
            ).stdout
        )["memory"]
        for more in ([], ["--no-probe"])
    )
    calibrated = peak_of("calibrate", model, "-o", str(tmp_path / "work"), *options)
    exported = peak_of("export", str(tmp_path / "work"), "-o", str(tmp_path / "bundle"))
    assert (planned["source"], least["source"]) == ("probe", "headers")
    assert planned["calibrate"] == pytest.approx(calibrated, rel=0.1)
    assert exported < least["calibrate"] <= calibrated
    # Whether a second thread hashes files before the first has finished is chance; each holds two blocks.
    beside = 2 * checksums._BLOCK
    for memory in (planned, least):  # `plan` has imported what only calibrating needs, too
        assert exported - beside <= memory["export"] <= 1.2 * exported


def test_every_figure_says_what_it_rests_on(tmp_path):
    model = save_checkpoint(tmp_path / "model")
    shown = plan_text(plan(model, recipe=recipe(tmp_path), probe=False, gpu_memory=10**6))
    assert "at least" in shown
    assert "not measured" in shown
    assert "leave no room" in shown


def test_text_that_calibrate_would_refuse_is_refused(tmp_path):
    model, wanted = save_checkpoint(tmp_path / "model"), {"samples": 10**6, "seq_len": 32}
    for given in ({}, {"data": save_text(tmp_path)}):
        said = [pytest.raises(DataError, match="give more text, or a smaller `samples` or `seq_len`") for _ in range(2)]
        with said[0] as planned:
            plan(model, recipe="kv-only", probe=False, **given, **wanted)
        with said[1] as calibrated:
            calibrate(model, tmp_path / "work", recipe="kv-only", progress=False, **given, **wanted)
        assert str(planned.value) == str(calibrated.value)


def test_tokens_that_calibrate_would_refuse_are_refused(tmp_path):
    model, said = save_checkpoint(tmp_path / "model", vocab_size=64), []
    for run in (partial(plan, model), partial(calibrate, model, tmp_path / "work", progress=False)):
        with pytest.raises(DataError, match=r"gives the token \d+, and the model's ids are 0 to 63; fetch") as refused:
            run(recipe="kv-only", data=save_text(tmp_path), samples=2, seq_len=32)
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_a_model_that_reads_images_is_planned_with_the_samples_that_calibrate_takes():
    model = Path(__file__).parents[2] / "examples" / "reference-vlm"
    planned = plan(model, recipe="kv-only", probe=False)
    taken = load_samples(open_source(str(model)), None, 2, None, 0).info
    assert (planned.samples, planned.length) == (MOST_SAMPLES, taken.length)
    assert plan(model, recipe="kv-only", probe=False, samples=3, seq_len=300).samples == 3
    text = plan(model, recipe="kv-only", probe=False, data="kvconvert:books-calib.txt")
    assert (text.samples, text.length) == text_shape(None, None, 10**6)
