"""Settings that make a loader run code, fetch something or read other files are refused, and never exported."""

import json
import os
import re

import jinja2
import pytest
import torch
from safetensors.torch import load_file
from tiny.bundle import edit_json, refusal, replace_tensors, reseal
from transformers.utils.chat_template_utils import render_jinja_template

from kvconvert.bundle.files import is_settings, safe_settings, unsafe_settings
from kvconvert.bundle.locate import MANIFEST_NAME
from kvconvert.bundle.manifest import ModuleCoverage
from kvconvert.bundle.reader import open_bundle
from kvconvert.bundle.statements import weights_info
from kvconvert.io.records import TensorInfo

HOSTILE = [
    {"attn_implementation": "someone/kernel"},
    {"_attn_implementation": "paged|someone/kernel@main:function"},
    {"attn_implementation": "flash_attention_2"},
    {"attn_implementation": {"": "sdpa", "text_config": "someone/kernel"}},
    {"attn_implementation": ["someone/kernel"]},
    {"_attn_implementation_internal": "someone/kernel"},
    {"experts_implementation": "sonicmoe"},
    {"_experts_implementation": {"text_config": "deepgemm"}},
    {"auto_map": {"AutoModel": "evil.Model"}},
    {"custom_generate": "someone/generate"},
    {"trust_remote_code": True},
    {"use_kernels": True},
    {"transformers_weights": "other/model.safetensors"},
    {"configuration_files": ["config.4.0.0.json"]},
    {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]},
    {"init_inputs": ["/etc/passwd"]},
    {"vocab_file": "/etc/passwd"},
    {"tokenizer_file": "..\\x"},
    {"vocab": "words"},
    {"merges": "/etc/passwd"},
    {"audio_tokenizer": {"audio_tokenizer_name_or_path": "someone/model"}},
    {"backbone": "hf-hub:someone/model"},
    {"architecture": " local-dir:/tmp/x"},
    {"gguf_file": "model.gguf"},
    {"class_info_file": "classes.json"},
    {"checkpoint_path": "/etc/passwd"},
    {"tesseract_config": "-c debug_file=/home/someone/.profile"},
    {"ocr_lang": "../../etc/eng"},
    {"font": "/etc/passwd"},
    {"mecab_option": "-d /tmp/dictionary"},
    {"sudachi_config_path": "/tmp/sudachi.json"},
    {"sudachi_resource_dir": "/tmp"},
    {"compression_config": {"format": "dense"}},
]
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json")


@pytest.mark.parametrize("settings", HOSTILE, ids=lambda settings: next(iter(settings)))
def test_hostile_settings_are_found_at_any_depth_and_left_out_by_the_exporter(settings):
    for value in (settings, {"vision_config": {"x": [settings]}}, [settings]):
        assert [*unsafe_settings(value)]
        assert not [*unsafe_settings(safe_settings(value))]
    assert safe_settings({"keep": 1, "sub": settings | {"too": 2}}) == {"keep": 1, "sub": {"too": 2}}


def test_settings_that_ask_for_nothing_stay():
    harmless = {"attn_implementation": None, "use_kernels": False, "tokenizer_file": None, "vocab_file": "vocab.json"}
    harmless |= {"_attn_implementation": "sdpa", "experts_implementation": "eager", "time_step_limit": [0.0, 1.0]}
    harmless |= {"vocab": {"a": 0}, "merges": [["a", "b"], "b c"], "font": "Roboto-Regular.ttf", "ocr_lang": "eng"}
    harmless |= {"tesseract_config": "", "mecab_kwargs": {"mecab_dic": "unidic_lite"}}
    assert not [*unsafe_settings(harmless)]
    assert safe_settings(harmless) == harmless


@pytest.mark.parametrize("file", FILES)
def test_a_resealed_bundle_with_hostile_settings_is_refused(bundle, file):
    for settings in ({"attn_implementation": "someone/kernel"}, {"text": {"auto_map": {"AutoModel": "evil.Model"}}}):
        before = json.loads((bundle / file).read_text()) if (bundle / file).exists() else {}
        (bundle / file).write_text(json.dumps(before | settings))
        fields = json.loads((bundle / MANIFEST_NAME).read_text())
        fields["files"][file] = {"size": 0, "sha256": ""}
        (bundle / MANIFEST_NAME).write_text(json.dumps(fields))
        reseal(bundle)
        message = refusal(bundle)
        assert file in message
        assert next(iter(settings)) in message
        (bundle / file).write_text(json.dumps(before))


def test_the_quantization_of_a_part_is_refused_beside_that_of_the_model(bundle):
    edit_json(bundle / "config.json", text_config={"quantization_config": {"quant_method": "other"}})
    reseal(bundle)
    assert "text_config.quantization_config" in refusal(bundle)


def test_vocabularies_are_no_settings():
    assert [
        name for name in ("tokenizer.json", "vocab.json", "model.safetensors.index.json") if is_settings(name)
    ] == []
    assert all(map(is_settings, FILES))


def list_file(bundle, name, content=b"{}"):
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).write_bytes(content)
    fields = json.loads((bundle / MANIFEST_NAME).read_text())
    fields["files"][name] = {"size": 0, "sha256": ""}
    (bundle / MANIFEST_NAME).write_text(json.dumps(fields))
    reseal(bundle)


@pytest.mark.parametrize("name", ["adapter_config.json", "audio_tokenizer_config.json"])
def test_a_listed_file_that_names_another_model_is_refused(bundle, name):
    list_file(bundle, name)
    assert name in refusal(bundle)


def test_weights_under_a_name_that_loaders_take_for_something_else_are_refused(bundle):
    list_file(bundle, "shard-00001-model-00001-of-00001.safetensors", b"\x02\0\0\0\0\0\0\0{}")
    assert "shard-00001" in refusal(bundle)


@pytest.mark.parametrize("name", ["custom_generate/generate.py", "deep/er/model.bin", "tokenizer.tiktoken"])
def test_unlisted_code_and_vocabularies_are_refused_in_folders_too(bundle, name):
    (bundle / name).parent.mkdir(parents=True, exist_ok=True)
    (bundle / name).write_bytes(b"")
    assert name in refusal(bundle)


def test_names_that_occur_twice_in_manifest_or_config_are_refused(bundle):
    config = bundle / "config.json"
    config.write_text(config.read_text().replace("{", '{"vocab_size": 1, "vocab_size": 2,', 1))
    reseal(bundle)
    assert "vocab_size" in refusal(bundle)
    manifest = bundle / MANIFEST_NAME
    manifest.write_text(manifest.read_text().replace("{", '{"format_version": 9,', 1))
    assert "format_version" in refusal(bundle)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_the_manifest_holds_finite_numbers_only(bundle, number):
    path = bundle / MANIFEST_NAME
    path.write_text(re.sub(r'("bits_per_weight": )[0-9.]+', rf"\g<1>{number}", path.read_text()))
    assert "finite" in refusal(bundle)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_kept_tensors_that_are_not_finite_are_refused_when_all_is_read(bundle, value):
    name = "model.embed_tokens.weight"
    file = open_bundle(bundle).weight_files[name]
    tensor = load_file(file)[name].clone()
    tensor[-1, -1] = value
    replace_tensors(file, **{name.replace(".", "__"): tensor})
    reseal(bundle)
    assert name in refusal(bundle, verify="full")
    open_bundle(bundle, verify="headers")


def test_float8_tensors_are_read_too(bundle):
    name = "model.norm.weight"
    file = open_bundle(bundle).weight_files[name]
    fields = json.loads((bundle / MANIFEST_NAME).read_text())
    tensor = torch.ones(32).to(torch.float8_e5m2)
    replace_tensors(file, **{name.replace(".", "__"): tensor})
    index = json.loads((bundle / "model.safetensors.index.json").read_text())
    edit_json(
        bundle / "model.safetensors.index.json",
        metadata={"total_size": index["metadata"]["total_size"] - 32},
    )
    fields["tensors"][name]["dtype"] = "F8_E5M2"
    modules = [ModuleCoverage(**module) for module in fields["modules"]]
    infos = {name: TensorInfo(**info) for name, info in fields["tensors"].items()}
    reseal(bundle, tensors=fields["tensors"], weights=weights_info(modules, infos).model_dump())
    open_bundle(bundle)


def test_links_in_a_circle_are_one_sentence(bundle):
    (bundle / "config.json").unlink()
    (bundle / "config.json").symlink_to("config.json")
    assert "symbolic link" in refusal(bundle)
    snapshots = bundle.parent / "snapshots"
    snapshots.mkdir()
    bundle.rename(snapshots / "x")
    assert "symbolic link" in refusal(snapshots / "x")
    (snapshots / "x" / "additional_chat_templates").symlink_to("additional_chat_templates")
    os.unlink(snapshots / "x" / "config.json")
    refusal(snapshots / "x")
    (bundle.parent / "loop").symlink_to("loop")
    refusal(bundle.parent / "loop")


@pytest.mark.parametrize("template", ["{{ ''.__class__.__mro__ }}", "{{ messages.__init__.__globals__ }}"])
def test_chat_templates_run_in_a_sandbox(template):
    with pytest.raises(jinja2.exceptions.SecurityError):
        render_jinja_template([[{"role": "user", "content": "x"}]], chat_template=template)
