"""What calibration decides about the cache, end to end: every preset, decisions over all layers, kills, overrides."""

import json
from dataclasses import replace

import pytest
import torch
from calibrations import contents, killed_at_every_rename
from tiny.checkpoints import save_checkpoint
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from kvconvert import KVCache, calibrate, export, load
from kvconvert.bundle.describe import manifest_text
from kvconvert.bundle.reader import open_bundle
from kvconvert.calibration.calibquant import choose_taus
from kvconvert.calibration.minikv import calibrated_ratios
from kvconvert.convert import workdir
from kvconvert.errors import BundleError, RecipeError, UnsupportedModelError
from kvconvert.methods import PRESETS, SEARCHED_FIELDS, KVScheme, spread_ratios
from kvconvert.methods.keys import treatments
from kvconvert.models.configuration import model_cache
from kvconvert.recipes.recipe import KVCalibration, LayerOverride, Recipe, WeightsRecipe, preset_names

NO_WEIGHTS = WeightsRecipe(method="none")
LENGTH = 300  # two pages that some query reads


@pytest.fixture(scope="module")
def model(place):
    return save_checkpoint(place / "model", num_hidden_layers=3, max_position_embeddings=512)


def run(model, work, text, kv, **options):
    recipe = Recipe(weights=NO_WEIGHTS, kv=kv, **options)
    return calibrate(str(model), work, recipe=recipe, data=text, samples=1, seq_len=LENGTH, progress=False)


def schemes(work):
    return [work.layer_record(i).scheme() for i in range(work.state.num_layers)]


def plan(work, name):
    return [work.layer_plan(i)[f"layers.{i}.{name}"] for i in range(work.state.num_layers)]


def kv(name):
    return Recipe.load(name).kv


# The default, spans, and eviction; the others differ from one of these in numbers, or need no decision of their own.
FEW = ("default", "calibquant-1bit", "minikv-pyramid")


@pytest.mark.quick("minikv-pyramid")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FEW else pytest.mark.full)
        for name in preset_names()
        if kv(name) is not None and kv(name).modality == "all" and Recipe.load(name).auto is None
    ],
)
def test_every_preset_calibrates_exports_loads_and_generates(tmp_path, model, text, name):
    recipe = Recipe.load(name)
    if recipe.weights.method != "none":  # groups of 128 do not fit the tiny model; its search is another test's matter
        recipe = recipe.model_copy(update={"weights": WeightsRecipe(method="rtn", group_size=32)})
    few = replace(recipe.calibration, tau_grid=[0.0, 2.0])
    recipe = recipe.model_copy(update={"calibration": few})
    work = calibrate(str(model), tmp_path / "work", recipe=recipe, data=text, samples=2, seq_len=LENGTH, progress=False)
    open_fields = {*SEARCHED_FIELDS, "heavy_ratio", "allocation"}
    if recipe.calibration.chooses_treatment(recipe.kv):
        open_fields |= {field for treatment in treatments(recipe.kv, 16) for field in treatment.fields}
    for scheme in schemes(work):
        assert {f for f, v in scheme.to_dict().items() if v != getattr(recipe.kv, f)} <= open_fields
    bundle = export(tmp_path / "work", tmp_path / "bundle", progress=False)
    opened = open_bundle(bundle)
    assert opened.manifest.schemes() == schemes(work)
    loaded, _ = load(bundle)
    ids = torch.randint(1, 4096, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    out = loaded.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, KVCache)
    assert out.past_key_values.stats().bits_per_value < 32


@pytest.mark.parametrize("name", [n for n in preset_names() if kv(n) is not None and kv(n).modality != "all"])
def test_presets_of_a_modality_are_refused_before_any_work_by_a_model_that_lacks_it(tmp_path, model, text, name):
    with pytest.raises(UnsupportedModelError, match="no image or video token"):
        calibrate(str(model), tmp_path / "work", recipe=name, data=text, samples=2, seq_len=64, progress=False)
    assert not (tmp_path / "work").exists()


def test_ranges_are_chosen_layer_by_layer_and_a_given_one_stays(tmp_path, model, text):
    searched = run(model, tmp_path / "both", text, PRESETS["oscar-g128"])
    assert len({(s.key_clip_ratio, s.value_clip_ratio) for s in schemes(searched)}) > 1
    for i, scheme in enumerate(schemes(searched)):
        grid = searched.layer_plan(i)[f"layers.{i}.clip_ratio_grid"]
        errors = searched.layer_plan(i)[f"layers.{i}.key_clip_ratio_error"]
        assert scheme.key_clip_ratio == pytest.approx(float(grid[errors.argmin()]))
        assert (
            searched.layer_record(i).statistics["clip_ratios"]["key_output_error"]["chosen"] <= float(errors[0]) + 1e-6
        )
    fixed = replace(PRESETS["oscar-g128"], key_clip_ratio=0.5)
    given = run(model, tmp_path / "one", text, fixed, calibration=KVCalibration(given=["key_clip_ratio"]))
    assert {s.key_clip_ratio for s in schemes(given)} == {0.5}
    assert [s.value_clip_ratio for s in schemes(given)] == [s.value_clip_ratio for s in schemes(searched)]
    neither = KVCalibration(calibrate_clip_ratios=False, calibrate_key_rounding=False)
    off = run(model, tmp_path / "off", text, fixed, calibration=neither)
    assert schemes(off) == [fixed] * 3
    assert "clip_ratios" not in off.layer_record(0).statistics


def test_one_pair_of_taus_for_all_layers_or_one_for_each(tmp_path, model, text):
    settings = {"calibrate_clip_ratios": False, "tau_grid": [0.0, 2.0]}
    span = replace(PRESETS["calibquant-1bit"], tau2=0.0)
    shared = run(model, tmp_path / "shared", text, span, calibration=KVCalibration(**settings))
    errors, outputs = plan(shared, "tau_error"), plan(shared, "tau_output_error")
    row, column = choose_taus(errors, outputs)
    grid = settings["tau_grid"]
    assert {(s.tau1, s.tau2) for s in schemes(shared)} == {(grid[row], grid[column])}
    apart = run(model, tmp_path / "apart", text, span, calibration=KVCalibration(tau_per_layer=True, **settings))
    assert [e.tolist() for e in plan(apart, "tau_error")] == [e.tolist() for e in errors]
    for scheme, error, output in zip(schemes(apart), errors, outputs, strict=True):
        row, column = choose_taus([error], [output])
        assert (scheme.tau1, scheme.tau2) == (grid[row], grid[column])
    given = run(model, tmp_path / "given", text, replace(span, tau2=1.5), calibration=KVCalibration(given=["tau2"]))
    assert {(s.tau1, s.tau2) for s in schemes(given)} == {(0.0, 1.5)}
    assert all("tau_grid" not in name for name in given.layer_plan(0))


@pytest.mark.quick("calibrated")
@pytest.mark.parametrize("allocation", ["pyramid", "calibrated"])
def test_budgets_are_spread_by_what_was_measured_and_arrive_resolved(tmp_path, model, text, allocation):
    kv = replace(PRESETS["minikv"], heavy_ratio=0.3, recent_ratio=0.2, allocation=allocation)
    work = run(model, tmp_path / "work", text, kv, calibration=KVCalibration(calibrate_clip_ratios=False))
    if allocation == "pyramid":
        expected = [scheme.heavy_ratio for scheme in spread_ratios([kv] * 3)]
    else:
        expected = calibrated_ratios(0.3, 0.2, plan(work, "lost_output"))
    assert [s.heavy_ratio for s in schemes(work)] == pytest.approx(expected)
    assert sum(expected) == pytest.approx(0.9)
    assert {s.allocation for s in schemes(work)} == {"uniform"}
    bundle = export(tmp_path / "work", tmp_path / "bundle", progress=False)
    assert list(load(bundle)[0].new_kv_cache().schemes) == schemes(work)


@pytest.mark.quick("minikv-pyramid")
@pytest.mark.parametrize("preset", ["calibquant-2bit", "minikv-pyramid"])
def test_a_kill_among_the_last_decisions_costs_nothing(tmp_path, model, text, monkeypatch, preset):
    def go(work):
        return run(model, work, text, PRESETS[preset], calibration=KVCalibration(tau_grid=[0.0, 2.0]))

    work = tmp_path / "work"
    killed = killed_at_every_rename(monkeypatch, work, tmp_path, lambda: go(work))
    expected = contents(work)
    for left in killed[-4::3]:  # of the records of three layers the first, and the state that says complete
        assert not json.loads((left / "state.json").read_text())["complete"]
        assert all((left / "layers" / f"0000{layer}.json").exists() for layer in range(3))
        go(left)
        assert contents(left) == expected, f"killed before rename {left.name}"


def test_layers_may_have_schemes_of_their_own(tmp_path, model, text):
    file = tmp_path / "mixed.toml"
    file.write_text(
        '[weights]\nmethod = "none"\n[kv]\npreset = "kitty"\nboost_select = "calibrated"\n'
        "[[kv.layers]]\nindex = [0]\nkey_bits = 4\nvalue_bits = 3\nkey_clip_ratio = 0.9\n"
        '[[kv.layers]]\nindex = [2]\npreset = "calibquant-2bit"\n'
    )
    recipe = Recipe.load(str(file))
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    work = calibrate(str(model), tmp_path / "work", recipe=recipe, data=text, samples=2, seq_len=LENGTH, progress=False)
    first, second, third = schemes(work)
    assert (first.key_bits, first.value_bits, first.key_clip_ratio, first.boost_fraction) == (4, 3, 0.9, 0.125)
    assert (second.key_bits, second.is_span, third.is_span) == (2, False, True)
    bundle = export(tmp_path / "work", tmp_path / "bundle", progress=False)
    loaded, _ = load(bundle)
    ids = torch.randint(1, 4096, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    assert loaded.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (2, LENGTH + 3)
    channels = open_bundle(bundle).plan["layers.1.boosted_channels"]
    assert (channels.dtype, channels.shape) == (torch.int32, (2, 2))


@pytest.mark.full
def test_three_bits_calibrate_export_verify_and_generate(tmp_path, model, text):
    scheme = KVScheme(**KVScheme.preset("oscar").to_dict() | {"key_bits": 3, "value_bits": 3})
    run(model, tmp_path / "work", text, scheme)
    opened = open_bundle(export(tmp_path / "work", tmp_path / "bundle", progress=False), verify="full")
    assert "codes of 3 bits" in opened.manifest.conventions["kv"]["fields"]
    assert "3-bit keys in groups of 32 tokens" in manifest_text(opened.manifest)
    loaded, _ = load(tmp_path / "bundle", dtype=torch.float32)
    ids = torch.randint(1, 4096, (1, 260), generator=torch.Generator().manual_seed(0))
    coarser = [replace(planned, key_bits=2, value_bits=2) for planned in opened.manifest.schemes()]
    caches = loaded.new_kv_cache(), KVCache(loaded.config, coarser, plan=loaded.kv_plan)
    errors = []
    with torch.no_grad():
        exact = loaded(ids, use_cache=False).logits[:, 256:]
        for cache in caches:
            loaded(ids[:, :256], past_key_values=cache)
            errors.append(float((loaded(ids[:, 256:], past_key_values=cache).logits - exact).norm()))
    # A random model exaggerates small differences, so that errors do not shrink as steps do.
    assert errors[0] < errors[1]
    cache = loaded.new_kv_cache()
    loaded(ids[:, :256], past_key_values=cache)
    assert cache.stats().bits_per_value == pytest.approx(
        8 * model_cache(loaded.config, opened.manifest.schemes(), torch.float32).exact_bytes(256) / cache.stats().values
    )
    assert loaded.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (1, 263)


@pytest.mark.quick("missing", "bounds")
@pytest.mark.parametrize("damage", ["missing", "shape", "order", "bounds"])
def test_damaged_boosted_channels_are_refused(tmp_path, model, text, damage, monkeypatch):
    kv = replace(PRESETS["kitty"], boost_select="calibrated")
    work = run(model, tmp_path / "work", text, kv, calibration=KVCalibration(calibrate_clip_ratios=False))
    original = workdir.WorkDir.layer_plan

    def damaged(self, index):
        tensors = original(self, index)
        name = f"layers.{index}.boosted_channels"
        channels = tensors[name]
        if damage == "missing":
            del tensors[name]
        else:
            changed = {"shape": channels[:, :1], "order": channels.flip(1), "bounds": channels + 16}[damage]
            tensors[name] = changed.contiguous()
        return tensors

    monkeypatch.setattr(workdir.WorkDir, "layer_plan", damaged)
    with pytest.raises(BundleError, match=r"layers\.0\.boosted_channels"):
        export(work.path, tmp_path / "bundle", progress=False)


def test_short_sequences_leave_ranges_and_the_record_says_why(tmp_path, model, text):
    recipe = Recipe(weights=NO_WEIGHTS, kv=PRESETS["oscar"])
    work = calibrate(str(model), tmp_path / "work", recipe=recipe, data=text, samples=2, seq_len=64, progress=False)
    assert "sequences of 64 tokens are too short to calibrate key_clip_ratio" in work.layer_record(0).reason
    assert schemes(work)[0].key_clip_ratio == 1.0


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (
            Recipe(weights=NO_WEIGHTS, layers=[LayerOverride(index=[1, 3], kv=None, calibration=KVCalibration())]),
            r"lists layer 3, but this model has layers 0 to 2",
        ),
        (Recipe(weights=NO_WEIGHTS, kv=replace(PRESETS["kivi"], key_bits=1, value_bits=1)), None),
    ],
)
def test_recipes_that_do_not_fit_the_model_are_refused_before_any_work(tmp_path, model, text, recipe, said):
    if said is None:
        narrow = save_checkpoint(tmp_path / "narrow", head_dim=8)
        model, said = narrow, "multiple of 16; this model has 8"
    with pytest.raises(RecipeError, match=said):
        calibrate(str(model), tmp_path / "work", recipe=recipe, data=text, samples=2, seq_len=64, progress=False)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"boost_fraction": 0.25, "boost_select": "calibrated"},
            "boost_select = 'calibrated' follows from calibration",
        ),
        ({"heavy_ratio": 0.2, "recent_ratio": 0.2, "allocation": "calibrated"}, "allocation = 'calibrated' follows"),
        ({"heavy_ratio": 0.2, "recent_ratio": 0.2, "selection": "predicted"}, "selection = 'predicted' follows"),
    ],
)
def test_what_only_calibration_can_say_is_refused_where_layers_are_unknown(tmp_path, text, change, said):
    GPT2LMHeadModel(GPT2Config(vocab_size=4096, n_embd=64, n_layer=1, n_head=4)).save_pretrained(tmp_path / "gpt2")
    recipe = Recipe(weights=NO_WEIGHTS, kv=KVScheme(**change))
    with pytest.raises(RecipeError, match=said):
        calibrate(
            str(tmp_path / "gpt2"), tmp_path / "work", recipe=recipe, data=text, samples=2, seq_len=64, progress=False
        )


@pytest.mark.quick("predicted")
@pytest.mark.parametrize("selection", ["reconstruction", "predicted"])
def test_a_budget_that_layers_cannot_share_is_refused_before_anything_is_written(tmp_path, selection):
    heads = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, **heads}
    MistralForCausalLM(MistralConfig(**sizes, sliding_window=64)).save_pretrained(tmp_path / "windows")
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 32}
    config = GptOssConfig(**sizes | experts, layer_types=["full_attention"], rope_parameters={"rope_type": "default"})
    GptOssForCausalLM(config).save_pretrained(tmp_path / "sinks")
    scheme = KVScheme(heavy_ratio=0.2, recent_ratio=0.2, selection=selection)
    for model, said in (("windows", "layers with sliding_attention"), ("sinks", "has sink logits")):
        with pytest.raises(UnsupportedModelError, match=f'{said}.*choose selection = "attention"'):
            run(tmp_path / model, tmp_path / "work", None, scheme)
        assert not (tmp_path / "work").exists()


def test_networks_that_predict_scores_are_fitted_and_served(tmp_path, model, text, monkeypatch):
    monkeypatch.setattr("kvconvert.calibration.kvzip.STEPS", 20)
    monkeypatch.setattr("kvconvert.convert.scores.TOKENS", 4 * LENGTH)
    scheme = replace(
        PRESETS["default"], heavy_ratio=0.3, recent_ratio=0.02, selection="predicted", rotate_values="folded"
    )
    work = run(model, tmp_path / "work", text, scheme)
    assert all(work.layer_record(i).statistics["kvzip"]["explained"] <= 1 for i in range(3))
    bundle = export(tmp_path / "work", tmp_path / "bundle", progress=False)
    loaded, _ = load(bundle, verify="full")
    ids = torch.randint(1, 4096, (1, 450), generator=torch.Generator().manual_seed(0))
    out = loaded.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    assert out.sequences.shape == (1, 453)
    assert len({tokens for store in out.past_key_values.stores() for tokens in map(len, store.rows[0].kept)}) == 1
