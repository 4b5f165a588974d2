import errno
import json
import os
import resource
import shutil
import types

import pytest
import torch
from safetensors.torch import load_file
from tiny.llama import write_recipe, write_tiny_llama

from kvconvert.bundle import writer
from kvconvert.bundle.describe import manifest_text
from kvconvert.bundle.reader import open_bundle
from kvconvert.bundle.writer import replacing
from kvconvert.convert.export import COPIED_FILES, LICENSE_FILES, copy_files, export
from kvconvert.convert.pipeline import calibrate
from kvconvert.convert.work_files import read_sealed, sealed_json
from kvconvert.convert.workdir import WorkDir
from kvconvert.errors import CheckpointError, FidelityError, KvconvertError, UsageError
from kvconvert.recipes.recipe import Limits, Recipe, WeightsRecipe


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("source") / "tiny-llama")


@pytest.fixture(scope="module")
def work(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    recipe = Recipe.load(str(write_recipe(folder / "tiny.toml")))
    calibrate(str(source), folder / "work", recipe=recipe, samples=1, seq_len=16, progress=False)
    return folder / "work"


@pytest.fixture(scope="module")
def exported(work, tmp_path_factory):
    return export(work, tmp_path_factory.mktemp("exported") / "bundle", progress=False)


def snapshot(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def weights(bundle):
    tensors = {}
    for file in {*open_bundle(bundle).weight_files.values()}:
        tensors |= load_file(file)
    return tensors


def test_the_bundle_holds_what_calibration_made_and_the_rest_of_the_source(source, work, exported):
    store, original, found = WorkDir.open(work), load_file(source / "model.safetensors"), weights(exported)
    made = {name: tensor for layer in range(2) for name, tensor in store.layer_tensors(layer).items()}
    kept = {name: original[name] for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}
    assert found.keys() == made.keys() | kept.keys()
    for name, tensor in (made | kept).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_kv_only_leaves_every_weight_as_it_is_and_rotates_values_at_run_time(source, tmp_path):
    calibrate(str(source), tmp_path / "work", recipe="kv-only", samples=1, seq_len=16, progress=False)
    bundle = export(tmp_path / "work", tmp_path / "bundle", progress=False)
    original, found = load_file(source / "model.safetensors"), weights(bundle)
    assert found.keys() == original.keys()
    for name, tensor in original.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    manifest = open_bundle(bundle).manifest
    assert manifest.transforms == []
    assert {scheme.rotate_values for scheme in manifest.schemes()} == {"online"}


def test_equal_inputs_give_equal_bytes(work, exported, tmp_path):
    export(work, tmp_path / "bundle", progress=False)
    assert snapshot(tmp_path / "bundle") == snapshot(exported)


def test_shards_hold_the_same_tensors_and_none_is_larger_than_asked(work, exported, tmp_path):
    bundle = export(work, tmp_path / "bundle", progress=False, max_shard_bytes=300_000)
    files = open_bundle(bundle).manifest.files
    shards = [name for name in files if name.startswith("model-")]
    assert len(shards) > 1
    assert all(files[name].size < 300_000 + 20_000 for name in shards)  # tensors as asked, and a header
    expected, found = weights(exported), weights(bundle)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_manifest_covers_every_linear_and_counts_its_bits(exported):
    manifest = open_bundle(exported).manifest
    quantized = {module.name for module in manifest.modules if module.method == "rtn"}
    assert len(quantized) == 2 * 7
    assert {"lm_head", "model.embed_tokens", "model.norm"} <= {module.name for module in manifest.modules} - quantized
    # 4-bit codes, and per group of 16 a 4-bit zero and a 16-bit scale
    assert manifest.weights.quantized_bits_per_weight == pytest.approx(4 + 20 / 16)
    original = 2 * 4096 * 32 + 32 + 2 * (2 * 32 + 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48)
    assert manifest.weights.parameters == original
    assert manifest.transforms[-1] == "quantize_weights"
    assert manifest.conventions["rotation"]["matrix"] == {"16": "sylvester(16)"}


def test_the_manifest_says_what_each_layer_keeps_of_awq(source, tmp_path):
    recipe = Recipe(weights=WeightsRecipe(method="awq", group_size=16), kv=None)
    calibrate(str(source), tmp_path / "work", recipe=recipe, samples=2, seq_len=16, progress=False)
    manifest = open_bundle(export(tmp_path / "work", tmp_path / "bundle", progress=False)).manifest
    found = [layer.statistics["awq"] for layer in manifest.layers]
    for layer in found:
        errors = layer["layer_error"]
        assert errors.keys() == {"rounding", "clips", "scales and clips"}
        assert errors[layer["kept"]] == min(errors.values()) > 0
    kept = sum(layer["kept"] == "scales and clips" for layer in found)
    assert f"AWQ's scales kept in {kept} of 2 layers\n" in manifest_text(manifest)


def test_config_is_the_sources_own_plus_how_engines_read_the_weights(source, exported):
    config, own = (json.loads((path / "config.json").read_text()) for path in (exported, source))
    assert config.pop("quantization_config") == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 16,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
        "kvconvert": {"format_version": 1},
    }
    assert config == own


@pytest.mark.parametrize("name", ["LICENSE", "vocab.txt", "additional_chat_templates/x.jinja"])
def test_a_link_of_a_source_to_what_is_its_users_alone_is_not_copied(tmp_path, name):
    source, secret = tmp_path / "source", tmp_path / "id_rsa"
    secret.write_text("secret")
    (source / name).parent.mkdir(parents=True)
    (source / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match="is a link that leads out of the model's directory"):
        copy_files(source, tmp_path / "bundle", (*COPIED_FILES, *LICENSE_FILES))
    assert not (tmp_path / "bundle").exists()


def test_links_of_a_source_to_the_same_file_elsewhere_or_in_the_hubs_cache_are_copied(tmp_path):
    cached, source, other = tmp_path / "hub" / "snapshots" / "0", tmp_path / "source", tmp_path / "other"
    for folder in (cached, source, other, tmp_path / "hub" / "blobs"):
        folder.mkdir(parents=True)
    (tmp_path / "hub" / "blobs" / "1a2b").write_text("x")
    (cached / "merges.txt").symlink_to("../../blobs/1a2b")
    (other / "vocab.json").write_text("{}")
    (source / "vocab.json").symlink_to(other / "vocab.json")
    (source / "merges.txt").symlink_to(cached / "merges.txt")
    for directory, names in ((cached, {"merges.txt"}), (source, {"merges.txt", "vocab.json"})):
        assert copy_files(directory, tmp_path / "bundle" / directory.name, COPIED_FILES).keys() == names


def test_tokenizer_licence_and_templates_come_along_but_no_code(source, work, tmp_path):
    moved = tmp_path / "tiny-llama"
    shutil.copytree(source, moved)
    (moved / "LICENSE.txt").write_text("yours")
    (moved / "chat_template.jinja").write_text("x")
    (moved / "additional_chat_templates").mkdir()
    (moved / "additional_chat_templates" / "tool.jinja").write_text("y")
    (moved / "modeling_tiny.py").write_text("raise SystemExit")
    config = json.loads((moved / "config.json").read_text()) | {"auto_map": {"AutoModelForCausalLM": "modeling_tiny.M"}}
    (moved / "config.json").write_text(json.dumps(config))
    recipe = Recipe.load(str(write_recipe(tmp_path / "tiny.toml", method="none")))
    calibrate(str(moved), tmp_path / "work", recipe=recipe, samples=1, seq_len=16, progress=False)
    bundle = export(tmp_path / "work", tmp_path / "bundle", progress=False)
    manifest = open_bundle(bundle).manifest
    assert {"chat_template.jinja", "additional_chat_templates/tool.jinja", "tokenizer.json"} <= manifest.files.keys()
    assert manifest.informative == ["LICENSE.txt", "README.md"]
    assert not list(bundle.rglob("*.py"))
    config = json.loads((bundle / "config.json").read_text())
    assert "auto_map" not in config
    assert config["quantization_config"]["weights"] == "none"
    assert manifest.weights.bits is None


def test_the_card_links_a_hub_source_and_states_the_licence(exported):
    from kvconvert.bundle.card import model_card

    manifest = open_bundle(exported).manifest
    card = model_card(manifest, positions=512)
    assert card == (exported / "README.md").read_text()
    assert "base_model" not in card.split("---")[1]  # a local directory is nothing to link to
    hub = manifest.source.model_copy(update={"id": "org/model", "licence": "apache-2.0"})
    header = model_card(manifest.model_copy(update={"source": hub})).split("---")[1]
    assert 'base_model: "org/model"\nbase_model_relation: quantized\n' in header
    assert 'license: "apache-2.0"' in header
    assert "bits per value at 512 tokens" in card
    assert "bits per value at 4,096 tokens" in model_card(manifest)


def test_an_existing_bundle_is_replaced_only_with_force(work, exported, tmp_path):
    bundle = shutil.copytree(exported, tmp_path / "bundle")
    (bundle / "note.txt").write_text("old")
    with pytest.raises(UsageError, match="`force=True`"):
        export(work, bundle, progress=False)
    assert (bundle / "note.txt").exists()
    export(work, bundle, force=True, progress=False)
    assert snapshot(bundle) == snapshot(exported)
    assert os.listdir(tmp_path) == ["bundle"]


@pytest.mark.parametrize("force", [False, True])
def test_what_is_not_a_bundle_is_never_replaced(work, tmp_path, force):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("home", "file"):
        with pytest.raises(UsageError, match="not a bundle"):
            export(work, tmp_path / name, force=force, progress=False)
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_an_empty_directory_and_missing_parents_are_filled(work, exported, tmp_path):
    (tmp_path / "empty").mkdir()
    for output in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        export(work, output, progress=False)
        assert snapshot(output) == snapshot(exported)


def full_disk(monkeypatch):
    """No file may grow beyond 100 kB: the weights stop in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failing(name, error):
    def arrange(monkeypatch):
        def fail(*args, **kwargs):
            raise error

        monkeypatch.setattr(writer.os if hasattr(os, name) else writer, name, fail)
        return monkeypatch.undo

    return arrange


@pytest.mark.parametrize(
    ("arrange", "kind"),
    [
        (full_disk, KvconvertError),
        (failing("fsync", OSError(errno.ENOSPC, "No space left on device")), KvconvertError),
        (failing("_put_in_place", OSError(errno.EDQUOT, "Disk quota exceeded")), KvconvertError),
        (failing("write_tensors", KeyboardInterrupt()), KeyboardInterrupt),
    ],
    ids=["full disk", "full at sync", "quota at rename", "interrupted"],
)
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_in_the_middle_leaves_nothing_behind_and_the_old_bundle_whole(
    work, exported, tmp_path, monkeypatch, arrange, kind, existing
):
    output = tmp_path / "deep" / "bundle"
    if existing:
        shutil.copytree(exported, output)
    undo = arrange(monkeypatch)
    try:
        with pytest.raises(kind) as caught:
            export(work, output, force=True, progress=False)
    finally:
        undo()
    if kind is KvconvertError:
        assert caught.value.exit_code == 1
        assert "nothing was left behind" in str(caught.value)
    if existing:
        assert os.listdir(output.parent) == ["bundle"]
        assert snapshot(output) == snapshot(exported)
    else:
        assert os.listdir(tmp_path) == []


def test_an_old_bundle_comes_back_if_the_new_one_cannot_be_put_in_its_place(exported, tmp_path, monkeypatch):
    output = shutil.copytree(exported, tmp_path / "bundle")
    rename = os.rename

    def fail_for_the_new_one(old, new):
        if ".partial-" in str(old):
            raise OSError(errno.EIO, "Input/output error")
        rename(old, new)

    monkeypatch.setattr(writer.os, "rename", fail_for_the_new_one)
    with pytest.raises(KvconvertError, match="nothing was replaced"), replacing(output, force=True) as directory:
        (directory / "new").write_text("x")
    assert snapshot(output) == snapshot(exported)
    assert os.listdir(tmp_path) == ["bundle"]


def test_what_a_killed_export_left_is_removed_but_not_what_a_running_one_writes(tmp_path):
    (tmp_path / ".bundle.partial-dead").mkdir()
    with replacing(tmp_path / "bundle", force=False) as running:
        assert os.listdir(tmp_path) == [running.name]
        with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "bundle", force=False):
            raise KeyboardInterrupt
        assert os.listdir(tmp_path) == [running.name]


@pytest.mark.parametrize("kind", ["partial", "replaced"])
def test_what_others_put_beside_an_output_is_neither_followed_nor_waited_for(tmp_path, kind):
    home, shared = tmp_path / "home", tmp_path / "shared"
    home.mkdir()
    shared.mkdir()
    (home / "kvconvert.json").write_text("{}")
    before = snapshot(home)
    (shared / f".bundle.{kind}-link").symlink_to(home)
    os.mkfifo(shared / f".bundle.{kind}-pipe")
    with replacing(shared / "bundle", force=False) as directory:
        (directory / "new").write_text("x")
    assert snapshot(home) == before
    assert os.listdir(shared / "bundle") == ["new"]
    assert not (shared / "bundle").is_symlink()


def test_an_unfinished_calibration_is_not_exported(work, tmp_path):
    unfinished = shutil.copytree(work, tmp_path / "work")
    state = read_sealed(unfinished / "state.json") | {"complete": False}
    (unfinished / "state.json").write_text(sealed_json(state))
    with pytest.raises(UsageError, match="calibrate"):
        export(unfinished, tmp_path / "bundle", progress=False)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_source_that_changed_since_it_was_calibrated_is_refused(source, tmp_path, file):
    moved = shutil.copytree(source, tmp_path / "tiny-llama")
    recipe = Recipe.load(str(write_recipe(tmp_path / "tiny.toml")))
    calibrate(str(moved), tmp_path / "work", recipe=recipe, samples=1, seq_len=16, progress=False)
    if file == "config.json":
        (moved / file).write_text((moved / file).read_text() + " ")
    else:
        content = bytearray((moved / file).read_bytes())
        content[-1] ^= 1
        (moved / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{file} changed"):
        export(tmp_path / "work", tmp_path / "bundle", progress=False)


@pytest.fixture
def limited(source, work, tmp_path, monkeypatch):
    """Export with a limit on the KL divergence of 0.1, the measurement being replaced by a given figure."""
    limited = shutil.copytree(work, tmp_path / "limited")
    state = read_sealed(limited / "state.json")
    state["recipe"]["limits"]["max_kl"] = 0.1
    (limited / "state.json").write_text(sealed_json(state))

    def run(measured, force, lost=()):
        seen = {}

        def evaluate(bundle, against, device, progress):
            seen["opened"] = open_bundle(bundle).manifest.fidelity
            assert against == str(source)
            return types.SimpleNamespace(to_dict=lambda: {"kl": {"mean": measured}}, losses=lambda: list(lost))

        monkeypatch.setattr("kvconvert.fidelity.evaluate.evaluate", evaluate)
        export(limited, tmp_path / "bundle", force=force, progress=False)
        assert seen == {"opened": None}
        return open_bundle(tmp_path / "bundle").manifest.fidelity, (tmp_path / "bundle" / "README.md").read_text()

    return run


def test_a_bundle_within_its_limits_records_what_was_measured_on_it(limited):
    fidelity, card = limited(0.05, force=False)
    assert (fidelity.report, fidelity.limits, fidelity.missed) == ({"kl": {"mean": 0.05}}, {"max_kl": 0.1}, [])
    assert "met" in card


def test_a_probe_that_loses_more_than_a_tenth_is_warned_of(limited, caplog):
    limited(0.05, force=False)
    assert not caplog.records
    limited(0.05, force=True, lost=["following chains (10% right, the source 50%)"])
    assert "loses more than a tenth of what its source can do: following chains (10% right" in caplog.text


def test_a_bundle_that_misses_a_limit_is_refused(limited, tmp_path):
    with pytest.raises(FidelityError, match=r"KL divergence is 0\.2, max_kl is 0\.1") as caught:
        limited(0.2, force=False)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "bundle").exists()


def test_a_figure_that_is_not_a_number_misses_its_limit_and_is_recorded_as_null(limited):
    fidelity, _ = limited(float("nan"), force=True)
    assert fidelity.report == {"kl": {"mean": None}}
    assert len(fidelity.missed) == 1


def test_a_forced_bundle_says_which_limit_it_misses(limited):
    fidelity, card = limited(0.2, force=True)
    assert fidelity.missed == ["the mean KL divergence is 0.2, max_kl is 0.1"]
    assert "misses the fidelity limits of its own recipe" in card
    assert fidelity.missed[0] in card


@pytest.mark.parametrize(
    ("report", "missed"),
    [
        ({"perplexity": {"source": 10.0, "bundle": 10.5}, "retrieval": {"bundle": 0.9}, "kl": {"mean": 0.1}}, 0),
        ({"perplexity": {"source": 10.0, "bundle": 10.6}, "retrieval": {"bundle": 0.89}, "kl": {"mean": 0.11}}, 3),
        ({"perplexity": {"source": 10.0, "bundle": None}, "retrieval": {}, "kl": {"mean": float("nan")}}, 3),
        ({}, 3),
    ],
)
def test_limits_are_met_up_to_the_bound_and_a_figure_that_is_not_there_misses_them(report, missed):
    limits = Limits(max_kl=0.1, max_perplexity_increase=0.05 + 1e-9, min_retrieval=0.9)
    assert len(limits.missed(report)) == missed
