"""What a bundle from a stranger cannot do: lead out of its directory, pass by its hashes, or end a command otherwise
than in one sentence."""

import hashlib
import json
import os
import shutil

import pytest
import torch
from tiny.bundle import refusal, replace_tensors, reseal

from kvconvert.bundle import reader
from kvconvert.bundle.files import BundleFiles, is_for_people, may_be_loaded
from kvconvert.bundle.locate import MANIFEST_NAME, PLAN_NAME
from kvconvert.bundle.manifest import Manifest, ModuleCoverage, quantization_config, sealed
from kvconvert.bundle.reader import open_bundle
from kvconvert.errors import BundleError, MissingError
from kvconvert.fidelity import source_of
from kvconvert.io.tensorheader import read_header

LEVELS = ("full", "headers", "plan")
DATA = {"source": "books", "samples": 1, "length": 8, "seed": 0, "sha256": "3" * 64}
ALLOCATION = {
    "context": 4096,
    "budget_bytes_per_token": 1.0,
    "bytes_per_token": 1.0,
    "bits_per_value": 1.0,
    "candidates": {},
    "layers": [],
    "predicted_kl": 1.0,
    "measured_kl": 1.0,
    "plans": 1,
    "data": DATA,
    "dtype": "float32",
}
WIDTHS = {
    "budget_bits_per_weight": 3.0,
    "bits_per_weight": 3.0,
    "units": [{"layer": 0, "linears": ["a"], "bits": 4, "kl": {"4": 1.0}}],
    "predicted_kl": 1.0,
    "measured_kl": 1.0,
    "allocations": 1,
    "data": DATA,
    "dtype": "float32",
}


TARGETS = ("file", "directory", "nothing", "inside")


def put_link(bundle, name, target):
    places = {"file": bundle.parent / "secret", "directory": bundle.parent, "nothing": bundle.parent / "gone"}
    (bundle.parent / "secret").write_text("TOP SECRET")
    if target == "pipe":  # reading it would wait for ever
        os.mkfifo(places.setdefault("pipe", bundle.parent / "pipe"))
    (bundle / name).unlink(missing_ok=True)
    (bundle / name).parent.mkdir(exist_ok=True)
    if target == "hard link":
        return (bundle / name).hardlink_to(bundle.parent / "secret")
    (bundle / name).symlink_to(places.get(target, bundle / "tokenizer.json"))


@pytest.mark.each_value
@pytest.mark.parametrize("verify", LEVELS)
@pytest.mark.parametrize("name", [".hidden/x", "config.json", "chat_template.jinja", "vocab.txt", "x"])
@pytest.mark.parametrize("target", TARGETS)
def test_no_link_lies_in_place_of_what_loaders_read(bundle, name, verify, target):
    put_link(bundle, name, target)
    message = refusal(bundle, verify)
    assert f"{name} of the bundle" in message
    assert "symbolic link" in message


def test_names_of_tensors_are_no_escapes_of_a_terminal(bundle):
    replace_tensors(bundle / "model-00001-of-00002.safetensors", **{"a\x1b[31m": torch.zeros(0)})
    reseal(bundle)
    assert "the name of a tensor should be printable, found a\\x1b[31m;" in refusal(bundle)


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["README.md", "LICENSE", "notes.txt", "assets/plot.png"])
@pytest.mark.parametrize("target", [*TARGETS, "pipe", "hard link"])
def test_a_link_in_place_of_what_people_read_is_followed_by_nothing(bundle, name, target):
    put_link(bundle, name, target)
    for verify in LEVELS:
        files = open_bundle(bundle, verify=verify).files
        assert name not in files.names
        assert name in files.links
    if name == "README.md":
        fields = json.loads((bundle / MANIFEST_NAME).read_text())
        fields["informative"].remove(name)
        fields["files"][name] = {"size": 10, "sha256": hashlib.sha256(b"TOP SECRET").hexdigest()}
        (bundle / MANIFEST_NAME).write_bytes(sealed(fields))
        assert "found a link" in refusal(bundle, "headers")


@pytest.mark.parametrize("verify", ["full", "headers"])
def test_no_listed_file_lies_behind_a_link_to_a_folder(bundle, verify):
    outside = bundle.parent / "outside"
    outside.mkdir()
    (outside / "words.json").write_text("{}")
    fields = json.loads((bundle / MANIFEST_NAME).read_text())
    fields["files"]["notes.md/words.json"] = {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    (bundle / MANIFEST_NAME).write_bytes(sealed(fields))
    (bundle / "notes.md").symlink_to(outside)
    assert "notes.md/words.json" in refusal(bundle, verify)


def test_what_loaders_read_as_a_whole_is_no_larger_than_they_can_hold(bundle):
    size = 256_000_001
    with (bundle / "chat_template.jinja").open("wb") as file:
        file.truncate(size)
    fields = json.loads((bundle / MANIFEST_NAME).read_text())
    fields["files"]["chat_template.jinja"]["size"] = size
    (bundle / MANIFEST_NAME).write_bytes(sealed(fields))
    assert "at most 256,000,000 bytes" in refusal(bundle)


def test_what_is_neither_file_nor_directory_is_refused_unread(bundle):
    (bundle / "README.md").unlink()
    os.mkfifo(bundle / "README.md")  # reading it would wait for ever
    assert "regular file" in refusal(bundle)


@pytest.mark.parametrize("name", ["kvconvert.json", "config.json", "model-00001-of-00002.safetensors"])
@pytest.mark.parametrize("into", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_becomes_a_pipe_or_a_device_after_it_was_looked_at_is_refused_unread(bundle, monkeypatch, name, into):
    looked_at = BundleFiles.__init__

    def look(files, directory):
        looked_at(files, directory)
        (bundle / name).unlink()
        into(bundle / name)  # reading it would wait for ever, or never end

    monkeypatch.setattr(BundleFiles, "__init__", look)
    assert name in refusal(bundle, "full")


def test_weights_that_become_a_pipe_after_their_header_was_read_are_refused_unread(bundle, monkeypatch):
    def check(manifest):
        for path in bundle.glob("*.safetensors"):
            path.unlink()
            os.mkfifo(path)

    monkeypatch.setattr(reader, "check_modules", check)
    assert "it is no regular file" in refusal(bundle)


def test_a_hub_snapshot_whose_blobs_are_elsewhere_is_refused(pristine, tmp_path):
    snapshot, outside = tmp_path / "snapshots" / "abc", tmp_path / "outside"
    snapshot.parent.mkdir()
    shutil.copytree(pristine, snapshot)
    outside.mkdir()
    (snapshot / "tokenizer.json").rename(outside / "words")
    (tmp_path / "blobs").symlink_to(outside)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/words")
    assert "symbolic link" in refusal(snapshot)


@pytest.mark.parametrize("verify", LEVELS)
@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_no_manifest_can_call_what_loaders_read_informative(bundle, name, verify):
    fields = json.loads((bundle / MANIFEST_NAME).read_text())
    fields["files"].pop(name)
    fields["informative"].append(name)
    (bundle / MANIFEST_NAME).write_bytes(sealed(fields))
    assert f"{name} as informative" in refusal(bundle, verify)


@pytest.mark.parametrize("verify", LEVELS)
@pytest.mark.parametrize(
    "name",
    ["source.spm", "bpe.codes", "vocab.txt", "dict.txt", "Tokenizer_Config.JSON", "decoder_tokenizer/tokenizer.json"],
)
def test_nothing_that_loaders_read_lies_unlisted_beside_the_rest(bundle, name, verify):
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).write_text("{}")
    assert name in refusal(bundle, verify)


def test_only_a_few_kinds_of_files_are_for_people():
    for name in ("README.md", "report.html", "LICENSE", "LICENSE-2.0.txt", "NOTICE", "assets/plot.png", "notes.txt"):
        assert is_for_people(name)
        assert not may_be_loaded(name)
    for name in ("LICENSE.json", "license.bin", "tokenizer.model", "x", "merges.txt", "vocab_x.TXT", "README.md/x"):
        assert may_be_loaded(name), name
    assert not may_be_loaded(".git/config")


def test_settings_are_recognized_whatever_the_case_of_their_name(bundle):
    (bundle / "Config_2.JSON").write_text('{"auto_map": {"AutoModel": "evil.Model"}}')
    fields = json.loads((bundle / MANIFEST_NAME).read_text())
    fields["files"]["Config_2.JSON"] = {"size": 0, "sha256": "0" * 64}
    (bundle / MANIFEST_NAME).write_text(json.dumps(fields))
    reseal(bundle)
    assert "auto_map" in refusal(bundle)


@pytest.mark.parametrize("how", ["written", "replaced", "added", "put back", "folder exchanged", "removed"])
def test_what_changes_after_verification_is_noticed(bundle, how):
    opened = open_bundle(bundle)
    opened.files.check_unchanged()
    path = bundle / "tokenizer.json"
    before, content = path.stat(), path.read_bytes()
    if how == "written":
        path.write_bytes(content.replace(b"1", b"2"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif how == "replaced":
        (bundle / "new").write_bytes(content)
        os.utime(bundle / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
        (bundle / "new").rename(path)
    elif how == "added":
        (bundle / "added_tokens.json").write_text("{}")
    elif how == "put back":
        path.rename(bundle.parent / "aside")
        path.write_text("{}")
        (bundle.parent / "aside").rename(path)
    elif how == "folder exchanged":
        bundle.rename(bundle.parent / "aside")
        shutil.copytree(bundle.parent / "aside", bundle)
    else:
        path.unlink()
    with pytest.raises(BundleError, match="changed after it was verified"):
        opened.files.check_unchanged()


def fields_with(bundle, **changes):
    fields = json.loads((bundle / MANIFEST_NAME).read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        entry = fields
        for part in parents:
            entry = entry[int(part) if part.isdecimal() else part]
        entry[last] = value
    (bundle / MANIFEST_NAME).write_bytes(sealed(fields))


def kl(value):
    return {"measured_on": "0" * 64, "report": {"kl": {"mean": value}}, "limits": {}, "missed": []}


FILE = {"size": 1, "sha256": "0" * 64}
FACTS = ("recipe", "conventions", "layers__0__kv", "layers__0__statistics")


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fidelity": kl(10**400)}, "beyond 64 bits"),
        ({"allocation": ALLOCATION | {"context": 0}}, "allocation.context"),
        ({"allocation": ALLOCATION | {"context": 2**40}}, "allocation.context"),
        ({"allocation": ALLOCATION | {"candidates": {str(i): {} for i in range(300)}}}, "allocation.candidates"),
        ({"weight_allocation": WIDTHS | {"units": [WIDTHS["units"][0] | {"kl": {"x": 1.0}}]}}, "kl"),
        ({"weights__bytes": -1}, "weights.bytes"),
        ({"weights__bits_per_weight": 1e300}, "weights.bits_per_weight"),
        ({"layers__0__head_dim": 2**40}, "layers.0.head_dim"),
        ({"layers__0__num_key_value_heads": 0}, "num_key_value_heads"),
        ({"modules__0__name": "a." * 200}, "modules.0.name"),
        ({"data__seed": 2**70}, "beyond 64 bits"),
        ({"recipe": {"a": json.loads("[" * 150 + "]" * 150)}}, "more than 100 lists"),
        ({"source__id": "x" * 2000}, "source.id"),
        ({"informative": ["x" * 300 + ".md"]}, "informative"),
        ({"tensors": {str(i): {} for i in range(5000)}}, "tensors"),
        ({"transforms": ["x"] * 2000}, "transforms"),
        ({"files": {f"f{i}.json": FILE for i in range(10_001)}}, "at most 10000 items"),
        *(({field: {"a": [[1] * 300] * 400}}, f"{field.replace('__', '.')} should be") for field in FACTS),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
@pytest.mark.parametrize("verify", LEVELS)
def test_every_field_of_the_manifest_has_a_range(bundle, changes, words, verify):
    fields_with(bundle, **changes)
    assert words in refusal(bundle, verify)


def test_an_informative_name_that_the_file_system_cannot_hold_is_just_absent(bundle):
    fields_with(bundle, informative=["\u00e9" * 200 + ".md"])
    opened = open_bundle(bundle)
    assert not {*opened.manifest.informative} & {*opened.files.names}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_settings_nested_by_the_hundred_are_refused(bundle, name):
    nested = {"a": json.loads("[" * 200 + "]" * 200)}
    (bundle / name).write_text(json.dumps(json.loads((bundle / name).read_text()) | nested))
    reseal(bundle)
    assert "more than 100 lists" in refusal(bundle)


@pytest.mark.parametrize("name", [MANIFEST_NAME, "config.json", "generation_config.json"])
def test_no_file_is_parsed_into_many_times_its_size(bundle, monkeypatch, name):
    monkeypatch.setattr("kvconvert.io.json_text.MAX_VALUES", 10_000)
    fields = json.loads((bundle / name).read_text()) | {"empty": [[]] * 10_000}
    (bundle / name).write_text(json.dumps(fields))
    if name != MANIFEST_NAME:
        reseal(bundle)
    assert "more than 10,000 commas, lists and objects" in refusal(bundle)


def test_a_manifest_lists_no_more_tensors_than_models_have(bundle, monkeypatch):
    monkeypatch.setattr("kvconvert.io.records.MAX_ENTRIES", 100)
    fields_with(bundle, tensors={f"t{i}": {"dtype": "F16", "shape": [1]} for i in range(101)})
    assert "tensors should be a dictionary that should have at most 100 items" in refusal(bundle)


@pytest.mark.parametrize("revision", [None, "main"])
@pytest.mark.parametrize("recorded", ["/", "..", "../model", "./model", "model/../model"])
def test_a_recorded_source_is_no_path(pristine, tmp_path, monkeypatch, recorded, revision):
    (tmp_path / "model").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "model").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    manifest = open_bundle(pristine).manifest

    def source(name):
        stated = manifest.source.model_copy(update={"id": name, "revision": revision})
        return source_of(manifest.model_copy(update={"source": stated}), None)

    assert source("model") == "model"
    assert source("somebody/model") == "somebody/model"
    with pytest.raises(MissingError, match="give its path as `against`"):
        source(recorded)


def test_work_on_names_grows_with_their_length_and_no_faster(pristine):
    manifest = open_bundle(pristine).manifest
    quantized = [module for module in manifest.modules if module.method != "kept"]

    def unconverted(names):
        kept = [ModuleCoverage.model_construct(name=n, stored_name="", kind="linear", method="kept") for n in names]
        config = quantization_config(manifest.weights, [*quantized, *kept])
        return config["modules_to_not_convert"]

    assert unconverted(["model.layers.0.extra", "model.vision.deep.x", "model.vision.y", "lm_head", "model"]) == [
        "model.layers.0.extra",
        "model.vision",
        "lm_head",
        "model",
    ]
    assert unconverted(["model.layers.0.q_proj.inner.x"]) == ["model.layers.0.q_proj"]
    assert len(unconverted(["a." * 200_000])) == 1  # all modules around it would have 40 GB of names


def test_the_manifest_that_is_shown_may_be_longer_than_one_that_is_read(pristine):
    from kvconvert.bundle.describe import printable_manifest

    manifest = open_bundle(pristine).manifest
    source = manifest.source.model_copy(update={"id": "\n" * 900})
    shown = printable_manifest(manifest.model_copy(update={"source": source}))
    assert isinstance(shown, Manifest)
    assert shown.source.id == "\\n" * 900


@pytest.mark.parametrize("name", ["decoder_tokenizer/tokenizer.json", "kvconvert/x.json", "images/x.png"])
def test_a_folder_of_another_kind_is_refused_though_its_files_are_listed(bundle, name):
    path = bundle / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"{}")
    fields = json.loads((bundle / MANIFEST_NAME).read_text())
    if is_for_people(name):
        fields["informative"] = sorted([*fields["informative"], name])
    else:
        fields["files"][name] = {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    (bundle / MANIFEST_NAME).write_text(json.dumps(fields))
    reseal(bundle)
    assert name in refusal(bundle, "full")


def test_a_directory_that_cannot_be_read_is_told_as_such(bundle, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read all
    assert f"The directory {bundle} cannot be read" in refusal(bundle)


def test_layers_that_share_a_budget_have_one(bundle):
    fields = json.loads((bundle / MANIFEST_NAME).read_text())
    evicting = {"heavy_ratio": 0.3, "recent_ratio": 0.1, "token_norm": "none"}
    for place, layer in enumerate(fields["layers"]):
        layer["kv"] |= evicting | {"selection": "attention" if place else "reconstruction"}
    reseal(bundle, layers=fields["layers"])
    assert "among all layers" in refusal(bundle)


def test_a_plan_of_a_type_that_numpy_lacks_is_refused(bundle):
    replace_tensors(bundle / PLAN_NAME, layers__0__scorer_bias=torch.zeros(2, dtype=torch.bfloat16))
    reseal(bundle, plan={name: info.model_dump() for name, info in read_header(bundle / PLAN_NAME).items()})
    assert "found BF16 [2]" in refusal(bundle)
