"""Every byte of a bundle is accounted for: files, manifest and safetensors headers, damaged or hostile ones refused."""

import hashlib
import json
import os
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file
from tiny.bundle import refusal, reseal, tiny_tensors, write_tiny_bundle

from kvconvert.bundle.files import INDEX_NAME
from kvconvert.bundle.locate import MANIFEST_NAME, PLAN_NAME
from kvconvert.bundle.reader import open_bundle
from kvconvert.errors import BundleError
from kvconvert.io.tensorheader import read_header

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
LOAD_CRITICAL = [
    MANIFEST_NAME,
    "config.json",
    PLAN_NAME,
    FIRST,
    SECOND,
    INDEX_NAME,
    "tokenizer.json",
    "generation_config.json",
    "chat_template.jinja",
]


@pytest.mark.parametrize("verify", ["full", "headers"])
def test_what_was_written_is_read_back(pristine, verify):
    bundle = open_bundle(pristine, verify=verify)
    expected = tiny_tensors()
    assert {path.name for path in bundle.weight_files.values()} == {FIRST, SECOND}
    assert bundle.weight_files.keys() == expected.keys()
    for file in (FIRST, SECOND):
        for name, tensor in load_file(pristine / file).items():
            assert torch.equal(tensor, expected[name])
    assert set(bundle.plan) == {"layers.0.key_mean_abs", "layers.1.key_mean_abs"}
    assert [scheme.key_bits for scheme in bundle.manifest.schemes()] == [2, 2]


def test_equal_inputs_give_equal_bytes(pristine, tmp_path):
    write_tiny_bundle(tmp_path / "again")
    for name in LOAD_CRITICAL:
        assert (tmp_path / "again" / name).read_bytes() == (pristine / name).read_bytes()


def test_a_small_model_is_one_file_without_an_index(tmp_path):
    write_tiny_bundle(tmp_path, max_shard_bytes=10**6)
    assert not (tmp_path / INDEX_NAME).exists()
    open_bundle(tmp_path)


@pytest.mark.each_value
@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("name", LOAD_CRITICAL)
def test_one_flipped_bit_in_any_load_critical_file_is_noticed(bundle, name, where):
    path = bundle / name
    content = bytearray(path.read_bytes())
    content[{"first": 0, "middle": len(content) // 2, "last": -1}[where]] ^= 1
    path.write_bytes(content)
    assert name in refusal(bundle, verify="full")


def test_the_list_of_load_critical_files_above_is_complete(pristine):
    assert set(LOAD_CRITICAL) == {MANIFEST_NAME, *open_bundle(pristine).manifest.files}


@pytest.mark.parametrize("mask", [0x01, 0x20])
def test_no_byte_of_the_manifest_can_change_unnoticed(bundle, mask):
    path = bundle / MANIFEST_NAME
    content = path.read_bytes()
    for position in range(0, len(content), 61):
        path.write_bytes(content[:position] + bytes([content[position] ^ mask]) + content[position + 1 :])
        refusal(bundle)


@pytest.mark.parametrize("name", LOAD_CRITICAL)
def test_a_missing_file_is_named(bundle, name):
    (bundle / name).unlink()
    assert name in refusal(bundle)


@pytest.mark.parametrize("name", LOAD_CRITICAL)
def test_a_truncated_file_is_noticed_without_hashing(bundle, name):
    os.truncate(bundle / name, (bundle / name).stat().st_size - 1)
    assert name in refusal(bundle)


@pytest.mark.parametrize("name", LOAD_CRITICAL)
def test_symbolic_links_are_refused(bundle, name):
    (bundle / name).rename(bundle.parent / "elsewhere")
    (bundle / name).symlink_to(bundle.parent / "elsewhere")
    message = refusal(bundle)
    assert name in message
    assert "symbolic link" in message


def test_the_links_of_the_hubs_own_cache_are_followed_but_only_to_its_blobs(pristine, tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(pristine, blobs)
    (blobs / PLAN_NAME).rename(blobs / "plan")
    (blobs / "kvconvert").rmdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (snapshot / "plan").unlink()
    (snapshot / "kvconvert").mkdir()
    (snapshot / PLAN_NAME).symlink_to("../../../blobs/plan")
    open_bundle(snapshot)
    fields = json.loads((blobs / MANIFEST_NAME).read_text())
    nested = "additional_chat_templates/extra.jinja"
    (blobs / "extra").write_bytes(b"x")
    (snapshot / nested).parent.mkdir()
    (snapshot / nested).symlink_to("../../../blobs/extra")
    digest = hashlib.sha256(b"x").hexdigest()
    reseal(blobs, files=fields["files"] | {nested: {"size": 1, "sha256": digest}})
    open_bundle(snapshot)
    (blobs / "config.json").rename(tmp_path / "elsewhere")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in refusal(snapshot)


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/passwd", "a/../../b", "a\\b", "C:\\x", "", ".", "a//b", "a\nb", "a\0b", MANIFEST_NAME]
)
@pytest.mark.parametrize("field", ["files", "informative"])
def test_names_that_lead_out_of_the_bundle_are_refused(bundle, name, field):
    fields = json.loads((bundle / MANIFEST_NAME).read_text())
    if field == "files":
        reseal(bundle, files=fields["files"] | {name: {"size": 0, "sha256": "0" * 64}})
    else:
        reseal(bundle, informative=[name])
    assert repr(name) in refusal(bundle)


def test_a_linked_folder_inside_the_bundle_is_refused(bundle):
    outside = bundle.parent / "outside"
    outside.mkdir()
    (outside / "extra.jinja").write_text("x")
    (bundle / "additional_chat_templates").symlink_to(outside)
    fields = json.loads((bundle / MANIFEST_NAME).read_text())
    name = "additional_chat_templates/extra.jinja"
    reseal(bundle, files=fields["files"] | {name: {"size": 1, "sha256": "0" * 64}})
    assert "symbolic link" in refusal(bundle)


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "adapter_config.json", "pytorch_model.bin", "modeling.py", "kvconvert/extra.safetensors"],
)
def test_an_unlisted_file_that_a_loader_would_read_is_refused(bundle, name):
    (bundle / name).write_bytes(b"")
    assert name in refusal(bundle)


def test_nothing_but_weights_lies_as_safetensors_beside_config_json(pristine):
    assert {path.name for path in pristine.glob("*.safetensors")} == {FIRST, SECOND}


def test_a_bundle_with_its_plan_in_the_former_place_has_to_be_exported_again(bundle):
    former = "kv_plan.safetensors"
    (bundle / PLAN_NAME).rename(bundle / former)
    files = json.loads((bundle / MANIFEST_NAME).read_text())["files"]
    files[former] = files.pop(PLAN_NAME)
    reseal(bundle, files=files)
    message = refusal(bundle)
    assert former in message
    assert "export the bundle again" in message


def test_weights_in_a_folder_are_refused(bundle):
    (bundle / FIRST).rename(bundle / "kvconvert" / FIRST)
    files = json.loads((bundle / MANIFEST_NAME).read_text())["files"]
    files[f"kvconvert/{FIRST}"] = files.pop(FIRST)
    reseal(bundle, files=files)
    assert f"kvconvert/{FIRST}" in refusal(bundle)


def test_a_listed_file_that_loading_could_execute_is_refused(bundle):
    fields = json.loads((bundle / MANIFEST_NAME).read_text())
    (bundle / "modeling.py").write_bytes(b"x")
    reseal(bundle, files=fields["files"] | {"modeling.py": {"size": 1, "sha256": "0" * 64}})
    assert "could execute" in refusal(bundle)


def test_a_manifest_without_seal_is_refused(bundle):
    text = (bundle / MANIFEST_NAME).read_text()
    seal = json.loads(text)["manifest_sha256"]
    (bundle / MANIFEST_NAME).write_text(text.replace(seal, ""))
    assert "manifest_sha256" in refusal(bundle)


def test_files_for_people_may_be_added_or_removed(bundle):
    (bundle / "README.md").unlink()
    (bundle / "LICENSE").write_text("x")
    (bundle / ".gitattributes").write_text("x")
    open_bundle(bundle)


def test_a_newer_format_version_is_refused_and_says_what_to_do(bundle):
    reseal(bundle, format_version=2)
    message = refusal(bundle)
    assert "format_version 2" in message
    assert "newer kvconvert" in message


@pytest.mark.parametrize("version", [-1, "0", None, 0.5, True])
def test_a_meaningless_format_version_is_refused(bundle, version):
    reseal(bundle, format_version=version)
    assert "format_version" in refusal(bundle)


@pytest.mark.parametrize(("field", "value"), [("layers", 3), ("surprise", 1), ("transforms", ["a", 1])])
def test_a_manifest_that_breaks_its_schema_is_refused_by_field(bundle, field, value):
    fields = json.loads((bundle / MANIFEST_NAME).read_text()) | {field: value}
    (bundle / MANIFEST_NAME).write_text(json.dumps(fields))
    message = refusal(bundle)
    assert MANIFEST_NAME in message
    assert field in message


def test_a_directory_without_manifest_is_no_bundle(tmp_path):
    assert "kvconvert convert" in refusal(tmp_path)
    assert "not a directory" in refusal(tmp_path / "gone")
    (tmp_path / "model.gguf").touch()
    assert "`kvconvert convert` makes one of a model" in refusal(tmp_path / "model.gguf")


def header_of(path):
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_with_header(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def overlap(header):
    header[list(header)[-1]]["data_offsets"] = [value - 2 for value in header[list(header)[-1]]["data_offsets"]]


def gap(header):
    header[list(header)[-1]]["data_offsets"] = [value + 2 for value in header[list(header)[-1]]["data_offsets"]]


def set_entry(**changes):
    return lambda header: header[list(header)[-1]].update(changes)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (overlap, "offset"),
        (gap, "offset"),
        (set_entry(dtype="F17"), "dtype"),
        (set_entry(dtype=["F16"]), "dtype"),
        (set_entry(shape=[-1]), "shape"),
        (set_entry(shape=[2**62, 2**62]), "shape"),
        (set_entry(shape=[True]), "shape"),
        (set_entry(data_offsets=[0]), "data_offsets"),
        (set_entry(extra=1), "entry"),
        (lambda header: header.update(__metadata__={"a": 1}), "__metadata__"),
        (lambda header: header.update(x=3), "entry"),
    ],
)
def test_a_hostile_safetensors_header_is_refused(bundle, spoil, words):
    header, data = header_of(bundle / SECOND)
    spoil(header)
    write_with_header(bundle / SECOND, header, data)
    reseal(bundle)
    message = refusal(bundle)
    assert SECOND in message
    assert words in message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x00",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 99) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{]",
        struct.pack("<Q", 2) + b"{}trailing",
        struct.pack("<Q", 2) + b"\xff\xfe",
        struct.pack("<Q", 200_000) + b'{"a":' * 40_000,
        struct.pack("<Q", 13) + b'{"a":1,"a":2}',
        struct.pack("<Q", 54) + b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[-0,0]}}',  # to safetensors a float
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"x\.safetensors"):
        read_header(path)
