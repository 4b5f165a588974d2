"""From a budget to a bundle: what is measured, chosen, kept, resumed and refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from tiny.checkpoints import save_checkpoint, save_text
from tiny.every_type import tiny_config
from tiny.models import ARCHITECTURES, write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from kvconvert import KVCache, Recipe, calibrate, export, load
from kvconvert.auto import read_allocation, search
from kvconvert.auto.model import SimulatedModel
from kvconvert.bundle.describe import manifest_text
from kvconvert.bundle.reader import open_bundle
from kvconvert.cli import cli
from kvconvert.convert import pipeline
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.convert.passes import layer_jobs
from kvconvert.convert.workdir import WorkDir
from kvconvert.errors import RecipeError, UnsupportedModelError, UsageError
from kvconvert.methods.auto import AutoSearch
from kvconvert.methods.awq import WeightsRecipe
from kvconvert.models.configuration import model_cache
from kvconvert.models.source import open_source

CONTEXT = 400
BITS = 10.0  # in the mean over the 128 lengths up to 400, a fifth of all tokens is exact
RECIPE = Recipe.load("auto").model_copy(
    update={"weights": WeightsRecipe(method="none"), "auto": AutoSearch(context=CONTEXT, tokens=CONTEXT, repairs=2)}
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("auto")


@pytest.fixture(scope="module")
def model(place):
    return str(save_checkpoint(place / "model", max_position_embeddings=512))


@pytest.fixture(scope="module")
def text(place):
    return save_text(place)


def run(model, work, text, **options):
    settings = {"recipe": RECIPE, "samples": 2, "seq_len": 140, "progress": False, "kv_bits": BITS} | options
    return calibrate(model, work, data=text, **settings)


def contents(work):
    return {str(f.relative_to(work)): f.read_bytes() for f in sorted(work.rglob("*")) if f.is_file()}


@pytest.fixture(scope="module")
def finished(place, model, text):
    return run(model, place / "work", text)


def test_the_bundle_takes_what_was_allowed_and_says_what_was_measured(place, finished):
    bundle = export(finished.path, place / "bundle", progress=False)
    manifest = open_bundle(bundle, verify="full").manifest
    found = manifest.allocation
    assert found.bits_per_value <= BITS < found.bits_per_value + 2
    assert (found.context, found.data.samples, found.data.length) == (CONTEXT, 1, CONTEXT)
    for own, scheme in zip(found.layers, manifest.schemes(), strict=True):
        stated = found.candidates[own.keys] | found.candidates[own.values] | own.treatments.get(own.keys, {})
        assert {field: getattr(scheme, field) for field in stated} == stated
        assert scheme.sink_tokens == 4
        assert own.kl["K16"] == own.kl["V16"] == 0 < own.kl["K4g128"] < own.kl["K1g128s8"]
    parts = sum(own.kl[own.keys] + own.kl[own.values] for own in found.layers)
    assert found.predicted_kl == pytest.approx(parts, rel=1e-4)
    assert found.measured_kl == pytest.approx(parts, rel=1)
    loaded, _ = load(bundle, dtype=torch.bfloat16)
    ids = torch.randint(1, 4096, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    out = loaded.generate(ids, max_new_tokens=1, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, KVCache)
    size = model_cache(loaded.config, manifest.schemes())
    assert size.bits_per_value(CONTEXT) == pytest.approx(found.bits_per_value)
    assert size.exact_bytes(CONTEXT) == out.past_key_values.stats().bytes_used
    shown = manifest_text(manifest)
    assert f"{found.bits_per_value:.3f} bits per value at {CONTEXT} tokens" in shown
    row = next(line.split() for line in shown.splitlines() if line.startswith("1  ") and "*" in line)
    header = next(line.split() for line in shown.splitlines() if line.startswith("layer  K1g128s8"))
    starred = [name for name, cell in zip(header, row, strict=True) if cell.endswith("*")]
    assert starred == [found.layers[1].keys, found.layers[1].values]


@pytest.mark.full
def test_an_interrupted_search_goes_on_and_measures_nothing_twice(tmp_path, model, text, finished, monkeypatch):
    work, commit = tmp_path / "work", WorkDir.commit_measurement
    measured = []
    divergence = SimulatedModel.divergence

    def count(self, text, caches):
        measured.append(tuple(caches))
        return divergence(self, text, caches)

    def killed(self, name, values):
        if name == "layer-00001":
            raise KeyboardInterrupt
        commit(self, name, values)

    monkeypatch.setattr(SimulatedModel, "divergence", count)
    with monkeypatch.context() as patch:
        patch.setattr(WorkDir, "commit_measurement", killed)
        with pytest.raises(KeyboardInterrupt):
            run(model, work, text)
    first, candidates = len(measured), len(finished_layer(finished)["kl"])
    assert measured[2:].count((0,)) == candidates - 2  # two runs are timed; 16 bits need none
    run(model, work, text)
    assert measured[first + 2 :].count((0,)) == 0
    assert contents(work) == contents(finished.path)
    before = len(measured)
    run(model, work, text)
    assert len(measured) == before


def test_another_budget_takes_the_measurements_of_single_layers(tmp_path, model, text, finished, monkeypatch):
    measured, divergence = [], SimulatedModel.divergence

    def count(self, text, caches):
        measured.append(tuple(caches))
        return divergence(self, text, caches)

    monkeypatch.setattr(SimulatedModel, "divergence", count)
    cheap = run(model, tmp_path / "cheap", text, kv_bits=BITS - 2, auto_from=finished.path)
    assert cheap.measurement("layer-00001") == finished.measurement("layer-00001")
    assert all(len(layers) == 2 for layers in measured[2:])  # whole plans alone
    assert read_allocation(cheap).bits_per_value <= BITS - 2
    with pytest.raises(UsageError, match=r"cannot be used: the recipe's auto.context differs"):
        run(model, tmp_path / "other", text, context=500, auto_from=finished.path)
    assert not (tmp_path / "other").exists()
    with pytest.raises(UsageError, match="`auto_from` means nothing for the recipe kivi"):
        run(model, tmp_path / "other", text, recipe="kivi", kv_bits=None, auto_from=finished.path)


def finished_layer(work):
    return work.measurement("layer-00000")


def test_candidates_are_measured_on_text_that_calibration_does_not_use(finished, model, text, monkeypatch):
    read = []

    def stop(self, ids, first):
        read.append(ids)
        if len(read) == 2:
            raise KeyboardInterrupt
        return None

    monkeypatch.setattr(SimulatedModel, "read", stop)
    with pytest.raises(KeyboardInterrupt):
        run(model, finished.path.parent / "other", text)
    samples, held_out = (ids.tolist() for ids in read)
    assert len(held_out[0]) == CONTEXT
    starts = [held_out[0][i : i + 140] for i in range(CONTEXT - 139)]
    assert not any(sample in starts for sample in samples)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe", "gpt_oss", "olmo2", "cohere", "llava", "gpt2"])
def test_other_architectures_are_searched_too(tmp_path, text, name):
    model = ARCHITECTURES[name].write(tmp_path / "model")
    work = run(str(model), tmp_path / "work", text)
    found = read_allocation(work)
    assert found.bits_per_value <= BITS
    assert all(layer.kl[layer.keys] + layer.kl[layer.values] >= 0 for layer in found.layers)
    assert max(layer.kl["K1g128s8"] for layer in found.layers) > 0
    bundle = export(work.path, tmp_path / "bundle", progress=False)
    assert open_bundle(bundle).manifest.allocation == found


def test_a_budget_may_be_given_in_bytes(model):
    """2 layers of 2 heads of 16 channels: 128 numbers."""
    runner = LayerRunner(open_source(model), torch.device("cpu"), discovers=False)
    tasks = [
        search.search_task(runner.config, layer_jobs(runner, RECIPE), RECIPE.with_budget(**budget), runner.device)
        for budget in ({"kv_bits": BITS}, {"kv_bytes_per_token": BITS * 128 / 8})
    ]
    assert tasks[0].budget == tasks[1].budget == BITS * 128 / 8 * sum(range(273, 401))


def test_the_layer_that_is_timed_is_fitted_once_and_progress_counts_layers(model, monkeypatch, capfd):
    runner = LayerRunner(open_source(model), torch.device("cpu"), discovers=False)
    recipe = RECIPE.with_budget(kv_bits=BITS)
    task = search.search_task(runner.config, layer_jobs(runner, recipe), recipe, runner.device)
    fitted, known = [], {"layer-00001": {"index": 1, "keys": "", "values": "", "kl": {}, "clip_ratios": {}}}
    store = SimpleNamespace(measurement=known.get, commit_measurement=known.__setitem__)
    simulated = SimpleNamespace(model=SimpleNamespace(config=runner.config), starts_late=False)
    run = SimpleNamespace(store=store, model=simulated, progress=True, say=lambda said: None)
    measuring = search._Measuring(task, recipe, run, text=SimpleNamespace(ids=torch.zeros(1, 8)))
    monkeypatch.setattr(search._Measuring, "read", lambda self, samples: None)
    monkeypatch.setattr(search._Measuring, "_divergence", lambda self, plan, ratios: 0.5)
    monkeypatch.setattr(search._Measuring, "_fitted", lambda self, layer: fitted.append(layer.index) or ({}, layer, {}))
    found = measuring.table(torch.zeros(1, 8))
    count = len(task.layers)
    assert [layer.index for layer in found] == [*range(count)]
    # The layer that is timed first is timed twice where that is quick.
    assert sorted(fitted) == sorted([0, 0, *(index for index in range(count) if index not in (0, 1))])
    assert f"layers: {count} layers" in capfd.readouterr().err


def test_a_budget_that_treatments_of_keys_exceed_is_refused(model):
    runner = LayerRunner(open_source(model), torch.device("cpu"), discovers=False)
    recipe = RECIPE.with_budget(kv_bits=BITS)
    task = search.search_task(runner.config, layer_jobs(runner, recipe), recipe, runner.device)
    task = replace(task, budget=task.extremes()[0])
    task.check_budget(recipe.auto)
    for number, layer in enumerate(task.layers):
        task.layers[number] = layer.treated({c.name: {"token_norm": "per_head"} for c in layer.keys[:-1]})
    with pytest.raises(UsageError, match="can be allocated from"):
        search._Measuring(task, recipe, None).plan([])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_bits": 1.0}, r"`kv_bits` is 1, and at 400 tokens this model's cache can be allocated from \d"),
        ({"kv_bits": 17.0}, "to below 16.19 bits per value"),
        ({"kv_bits": None, "kv_bytes_per_token": 3.0}, "`kv_bytes_per_token` is 3, .* to below 259 bytes per token"),
        ({"kv_bits": None}, "give `kv_bits`"),
        ({"kv_bits": 9.0, "kv_bytes_per_token": 3.0}, "two ways to say one budget"),
        ({"kv_bits": -1.0}, "`kv_bits` is not possible"),
        ({"context": 513}, "`context` is 513, more than the 512 positions"),
        ({"context": 200}, "`context` leaves sequences of 200 tokens .* 256 are needed"),
        ({"auto_tokens": 10}, "`auto_tokens` is not possible"),
        ({"recipe": "kv-only"}, "`kv_bits` belongs to recipes that search"),
        ({"recipe": "kivi", "kv_bits": None, "context": 400}, "`context` belongs to recipes that search"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_any_work(tmp_path, model, text, options, message):
    with pytest.raises(UsageError, match=message):
        run(model, tmp_path / "work", text, **options)
    assert not (tmp_path / "work").exists()


def test_layers_that_read_earlier_layers_keys_are_refused(tmp_path, text):
    model = ARCHITECTURES["gemma3n_text"].write(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="layers read earlier layers' keys and values; choose a preset"):
        run(str(model), tmp_path / "work", text)


@pytest.mark.full
def test_an_architecture_without_calibration_is_measured_as_it_will_round(tmp_path, text, monkeypatch):
    feedbacks, divergence = [], SimulatedModel.divergence

    def seen(self, text, caches):
        feedbacks.extend(cache.key_tensors.feedback for cache in caches.values())
        return divergence(self, text, caches)

    monkeypatch.setattr(SimulatedModel, "divergence", seen)
    monkeypatch.setattr(pipeline, "make_runner", lambda source, _, device: LayerRunner(source, device, discovers=False))
    model = ARCHITECTURES["falcon_h1"].write(tmp_path / "model")
    auto = AutoSearch(context=264, tokens=264, repairs=0)
    work = run(str(model), tmp_path / "work", text, recipe=RECIPE.model_copy(update={"auto": auto}), kv_bits=12.0)
    assert feedbacks
    assert all(feedback is None for feedback in feedbacks)
    assert work.layer_record(0).kv["key_rounding"] == "nearest"


def test_a_model_without_a_layer_to_search_is_refused(tmp_path, text, monkeypatch):
    monkeypatch.setattr(search, "searched_layers", lambda *_: [])
    model = ARCHITECTURES["llama"].write(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=r"nothing to search for.* choose the recipe weights-only"):
        run(str(model), tmp_path / "work", text)


def test_a_model_that_keeps_its_own_cache_is_sent_to_its_weights_and_these_are_converted(tmp_path, text):
    source, config = tmp_path / "model", tiny_config("xglm")
    AutoModelForCausalLM.from_config(config).save_pretrained(source)
    write_tokenizer(source)
    with pytest.raises(UnsupportedModelError, match="choose the recipe weights-only"):
        run(str(source), tmp_path / "searched", text, recipe=Recipe.load("auto"))
    recipe = Recipe.load("weights-only", {"weights.group_size": 16})
    work = calibrate(str(source), tmp_path / "work", recipe=recipe, data=text, samples=2, seq_len=140)
    bundle = export(work.path, tmp_path / "bundle", progress=False)
    assert any(module.method != "kept" for module in open_bundle(bundle).manifest.modules)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ('[kv]\npreset = "calibquant-1bit"\n[auto]\n', "chooses among page schemes"),
        ('[kv]\npreset = "minikv"\n[auto]\n', "chooses among page schemes"),
        ('[kv]\npreset = "none"\n[auto]\n', "chooses among page schemes"),
        ('[kv]\npreset = "oscar"\n[[kv.layers]]\nindex = [0]\nkey_bits = 4\n[auto]\n', "beside .auto."),
        ('[kv]\npreset = "oscar"\nkey_bits = 4\n[auto]\n', ".kv. key_bits beside .auto."),
        ('[kv]\npreset = "oscar"\n[auto]\nkv_bit = 3\n', "unknown key kv_bit"),
        ('[kv]\npreset = "oscar"\n[auto]\nkv_bits = 3\nkv_bytes_per_token = 3\n', "two ways"),
    ],
)
def test_recipes_that_mean_nothing_are_refused(tmp_path, tables, message):
    file = tmp_path / "mine.toml"
    file.write_text(tables)
    with pytest.raises(RecipeError, match=message):
        Recipe.load(str(file))


def test_the_recipe_file_states_a_budget_and_the_option_replaces_it(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[kv]\npreset = "oscar"\n[auto]\nkv_bits = 3\ncontext = 2048\n')
    recipe = Recipe.load(str(file))
    assert (recipe.auto.kv_bits, recipe.auto.context) == (3, 2048)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    changed = recipe.with_budget(kv_bytes_per_token=900, auto_tokens=512).auto
    assert (changed.kv_bits, changed.kv_bytes_per_token, changed.context, changed.tokens) == (None, 900, 2048, 512)


def test_the_command_names_its_options(tmp_path, model):
    result = CliRunner().invoke(cli, ["calibrate", model, "-o", str(tmp_path / "w"), "--kv-bits", "3"])
    assert result.exit_code == 2
    assert "--kv-bits belongs to recipes that search" in result.output
    result = CliRunner().invoke(cli, ["calibrate", model, "-o", str(tmp_path / "w"), "--recipe", "auto"])
    assert result.exit_code == 2
    assert "give --kv-bits" in result.output


def test_the_chosen_layers_become_the_recipe(model, text, finished):
    """What is exported has the clip ratios that calibration found for the finished weights, on its own grid."""
    schemes = [finished.layer_record(i).scheme() for i in range(2)]
    found = read_allocation(finished)
    for own, scheme in zip(found.layers, schemes, strict=True):
        fields = found.candidates[own.keys] | found.candidates[own.values] | own.treatments.get(own.keys, {})
        clip = {"key_clip_ratio": scheme.key_clip_ratio, "value_clip_ratio": scheme.value_clip_ratio}
        rounding = "error_feedback" if scheme.key_bits < 4 else "nearest"
        assert scheme == replace(RECIPE.kv, **fields | {"key_rounding": rounding}, **clip)


@pytest.mark.parametrize("length", [256, 400, 1024])
def test_the_end_of_the_searched_text_repeats_passages_from_all_over_what_was_before(length):
    ids = torch.arange(2 * length).view(2, length)
    found = search.with_repeats(ids)
    repeated = length // 256 * 64
    before, end = found.split([length - repeated, repeated], dim=1)
    assert torch.equal(before, ids[:, : length - repeated])
    passages = end.unflatten(1, (-1, 64))
    assert (passages.diff(dim=2) == 1).all()  # passages of the text, whole
    starts = passages[0, :, 0]
    assert starts[0] == 0
    assert torch.equal(starts, starts.unique())
    assert all(start + 64 <= length - repeated for start in starts)
    if len(starts) > 1:
        assert starts[-1] + 2 * 64 > length - repeated
    assert torch.equal(passages[1], passages[0] + length)


def test_divergences_are_measured_on_text_with_repeats(model, text, finished, monkeypatch):
    read, divergence = [], SimulatedModel.divergence

    def seen(self, text, caches):
        read.append(text.ids)
        return divergence(self, text, caches)

    monkeypatch.setattr(SimulatedModel, "divergence", seen)
    run(model, finished.path.parent / "repeated", text, kv_bits=BITS - 1, auto_from=finished.path)
    assert read
    assert all(torch.equal(ids[:, -64:], ids[:, :64]) for ids in read)


@pytest.mark.quick("16")
@pytest.mark.parametrize("better", [0, 16])
def test_all_layers_get_the_window_whose_plan_loses_less_and_it_counts_as_bytes(
    tmp_path, model, text, finished, monkeypatch, better
):
    measured = []

    def divergence(self, text, caches):
        windows = {n for cache in caches.values() for n in (cache.key_window, cache.value_window)}
        measured.append(windows)
        return 0.1 if windows == {better} else 0.2

    monkeypatch.setattr(SimulatedModel, "divergence", divergence)
    work = run(model, tmp_path / "work", text, kv_bits=BITS - 1, auto_from=finished.path)
    found = read_allocation(work)
    assert {0} in measured
    assert {16} in measured
    assert (found.measured_kl, found.plans) == (0.1, RECIPE.auto.repairs + 1)
    schemes = [work.layer_record(i).scheme() for i in range(2)]
    assert {side.recent_tokens for scheme in schemes for side in scheme.sides} == {better}
    size = model_cache(AutoConfig.from_pretrained(model), schemes).bits_per_value(CONTEXT)
    assert size == pytest.approx(found.bits_per_value)
    assert size <= BITS - 1
