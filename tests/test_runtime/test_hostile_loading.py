"""A config.json that contradicts a bundle, and what its attention cannot give, are refused before weights are used."""

import contextlib
import json
import math
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tiny.bundle import edit_json, reseal
from tiny.mixtures import MIXTURES
from transformers import AutoModelForCausalLM
from transformers.models.auto import tokenization_auto
from transformers.utils import import_utils

from kvconvert.bundle.reader import open_bundle
from kvconvert.convert.work_files import check_place
from kvconvert.errors import BundleError, CheckpointError, KvconvertError, MissingError, UsageError
from kvconvert.io.records import MAX_LAYERS
from kvconvert.methods import KVScheme
from kvconvert.models import configuration, processors
from kvconvert.models.configuration import make_config
from kvconvert.models.processors import load_processor, load_tokenizer
from kvconvert.runtime import KVCache, load
from kvconvert.runtime.hf.bundle_quantizer import check_fits

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1"


@pytest.fixture
def bundle(tmp_path):
    return Path(shutil.copytree(GOLDEN, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def model():
    return load(GOLDEN, dtype=torch.float32, verify="headers")[0]


CONTRADICTIONS = [
    {"head_dim": 8},
    {"vocab_size": 255},
    {"hidden_size": 64},
    {"intermediate_size": 96},
    {"num_key_value_heads": 2},
    {"model_type": "gpt2"},
    {"model_type": "no-such-model"},
    {"model_type": None},
    {"hidden_size": "thirty-two"},
    {"hidden_size": -32},
    {"hidden_act": "someone/activation"},
    {"rope_parameters": []},
    {"architectures": [7]},
    {"num_labels": 10**12},
    {"num_labels": 2**24},
    {"number_of_whatever": 2**25},
    {"nested": [{"number_of_whatever": 10**30}]},
    {"is_encoder_decoder": True},
    {"is_encoder_decoder": ["x"]},
    {"text_config": -1.5},
    {"text_config": "gelu"},
    {"dtype": "no-such-type"},
    {"vision_config": {"depth": 10**9}},
]


@pytest.mark.parametrize("change", CONTRADICTIONS, ids=str)
def test_a_config_that_does_not_fit_is_refused_before_weights_are_used(bundle, change, monkeypatch):
    monkeypatch.setattr(configuration, "_MOST_STEPS", 100_000)  # more take a second
    edit_json(bundle / "config.json", **change)
    reseal(bundle)
    opened = open_bundle(bundle, verify="headers")
    harmless = {"architectures", "dtype", "vision_config", "rope_parameters"} & change.keys()
    if harmless:  # only what the model does not read may say anything
        with contextlib.suppress(BundleError):
            check_fits(opened)
        return
    with pytest.raises(BundleError, match=r"^[^\n]*(config|kvconvert)\.json[^\n]*$"):
        check_fits(opened)
    with pytest.raises(BundleError):
        load(bundle, verify="headers")


NO_NUMBERS = [
    {"rms_norm_eps": -1.0},
    {"rms_norm_eps": math.nan},
    {"rms_norm_eps": 1e300},
    {"attention_dropout": math.nan},
    *({"rope_parameters": {"rope_type": "default", "rope_theta": base}} for base in (0, -5.0, math.inf)),
    *({"rope_parameters": {"rope_type": "linear", "factor": factor}} for factor in (0, -2.0)),
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e300}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 1e300, "mscale_all_dim": 1.0}},
    *({"rope_parameters": {"rope_type": kind, "factor": 1e-300}} for kind in ("yarn", "linear", "llama3")),
    {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 0.0], "long_factor": [1.0, 1.0]}},
    *(
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": factors}}
        for factors in ([1.0] * 7, [], ["1"] * 8, [None] * 8, [[1.0]] * 8, {"a": 1}, "x")
    ),
    *(
        {rope: {"rope_type": "yarn", "factor": 4.0, "attention_factor": factor}}
        for rope in ("rope_parameters", "rope_scaling")
        for factor in ("1.0", [], [1.0], {}, True)
    ),
    *({"attn_logit_softcapping": cap} for cap in (0.0, -5.0, 1e-40)),
    {"query_pre_attn_scalar": -4},
    *({heads: -4} for heads in ("n_head", "n_heads", "num_heads", "num_attention_heads", "num_key_value_heads")),
    {"is_causal": False},
    {"output_hidden_states": "a"},
    {"dtype": "int4"},
    {"dtype": "uint8"},
    {"output_attentions": [0]},
    {"return_dict": 1e-300},
]


@pytest.mark.parametrize("change", NO_NUMBERS, ids=str)
def test_values_of_a_config_that_make_no_numbers_are_refused(bundle, change):
    edit_json(bundle / "config.json", **change)
    reseal(bundle)
    with pytest.raises(BundleError, match=rf"config\.json does not fit the bundle: {next(iter(change))}.* should be"):
        load(bundle, verify="headers")


ROUTERS = [
    *(("mixtral", {"num_experts_per_tok": count}) for count in (-1, 5, 2**20)),
    ("ernie4_5_moe", {"moe_k": 5}),
    ("hunyuan_v1_moe", {"moe_topk": [2, 5]}),
    *(("deepseek_v3", {"n_group": groups}) for groups in (0, 3, 4)),
    *(("deepseek_v3", {"n_group": groups, "topk_group": 3}) for groups in (1, 2)),
]


@pytest.mark.parametrize(("kind", "change"), ROUTERS, ids=str)
def test_numbers_of_experts_that_no_router_can_choose_are_refused(kind, change, tmp_path):
    def made(**change):
        contents = {"model_type": kind, **MIXTURES[kind], **change}
        (tmp_path / "config.json").write_text(json.dumps(contents))
        return make_config(tmp_path, contents)

    chosen = {"num_experts_per_tok": 2} if kind == "deepseek_v3" else {}
    assert made(**chosen)
    with pytest.raises(BundleError, match=r"config\.json does not fit .* should be a number of"):
        made(**chosen, **change)


def test_layers_of_another_name_are_as_many_as_a_bundle_holds(tmp_path):
    def made(layers):
        contents = {"model_type": "gpt2", "n_layer": layers}
        (tmp_path / "config.json").write_text(json.dumps(contents))
        return make_config(tmp_path, contents)

    assert made(MAX_LAYERS).num_hidden_layers == MAX_LAYERS
    with pytest.raises(BundleError, match=f"the number of layers should be at most {MAX_LAYERS:,}, found"):
        made(MAX_LAYERS + 1)


def test_large_positions_and_bases_of_a_rope_are_none_of_these(bundle):
    edit_json(bundle / "config.json", max_position_embeddings=10_485_760, rope_theta=3_580_165_449)
    reseal(bundle)
    check_fits(open_bundle(bundle, verify="headers"))


BUILT = {
    "perceiver": {"model_type": "idefics2", "perceiver_config": {"resampler_depth": 10**6}},
    "audio": {"model_type": "phi4_multimodal", "audio_config": {"num_blocks": 10**9}},
    "stages": {"model_type": "florence2", "vision_config": {"depths": [10**9] * 4}},
    "types": {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 10**9]]},
}


@pytest.mark.parametrize("config", BUILT.values(), ids=BUILT)
def test_counts_of_any_name_are_refused_before_they_take_for_ever(bundle, config, monkeypatch):
    monkeypatch.setattr(configuration, "MOST_SPARE_MODULES", 2000)
    kept = json.loads((bundle / "config.json").read_text())["quantization_config"]
    (bundle / "config.json").write_text(json.dumps(config | {"quantization_config": kept}))
    reseal(bundle)
    with pytest.raises(
        BundleError, match=r"config\.json does not fit the bundle: (the model|audio_config|vision_config|attention)"
    ):
        load(bundle, verify="headers")


WINDOWS = [
    {"sliding_window": "x"},
    {"sliding_window": -1},
    {"sliding_window": 2**40},
    {"layer_types": ["sliding_attention"] * 2},
]


@pytest.mark.parametrize("change", WINDOWS, ids=str)
def test_windows_that_are_none_are_refused_when_a_cache_is_made(bundle, change):
    edit_json(bundle / "config.json", **change)
    reseal(bundle)
    with pytest.raises(BundleError, match=r"^[^\n]*config\.json[^\n]*$"):
        load(bundle, verify="headers")[0].new_kv_cache()


@pytest.mark.parametrize("change", [{"return_dict": False}, {"output_attentions": True}], ids=str)
def test_what_inspections_leave_in_a_config_does_not_end_generation(bundle, change, model):
    edit_json(bundle / "config.json", **change)
    reseal(bundle)
    ids = torch.tensor([[1, 2, 3]])
    found, expected = (
        loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
        for loaded in (load(bundle, dtype=torch.float32, verify="headers")[0], model)
    )
    assert torch.equal(found, expected)


TOKENIZERS = [
    {"tokenizer_class": "pipeline"},
    {"model_max_length": "x"},
    {"model_max_length": [1]},
]


@pytest.mark.parametrize("change", TOKENIZERS, ids=str)
def test_what_is_no_tokenizer_or_writes_no_token_is_refused(bundle, change):
    edit_json(bundle / "tokenizer_config.json", **change)
    reseal(bundle)
    with pytest.raises(KvconvertError, match=r"has no tokenizer that transformers can load \([^\n]*$"):
        load(bundle, verify="headers")


SPECIAL = [
    ("tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", "extra_ids": 10**9}),
    ("tokenizer_config.json", {"tokenizer_class": "PegasusTokenizer", "offset": 10**9}),
    ("tokenizer_config.json", {"additional_special_tokens": ["<x>"] * 40_000}),
    ("special_tokens_map.json", {"additional_special_tokens": ["<x>"] * 40_000}),
    ("tokenizer_config.json", {"model_specific_special_tokens": {f"a{i}": "<x>" for i in range(40_000)}}),
    ("tokenizer_config.json", {f"a{i}_token": "<x>" for i in range(40_000)}),
]


@pytest.mark.parametrize(("name", "change"), SPECIAL, ids=lambda value: str(value)[:40])
def test_more_special_tokens_than_any_model_has_are_refused_before_they_are_made(tmp_path, name, change):
    (tmp_path / "tokenizer_config.json").write_bytes((GOLDEN / "tokenizer_config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_bytes((GOLDEN / "tokenizer.json").read_bytes())
    (tmp_path / name).write_text(json.dumps(json.loads((GOLDEN / "tokenizer_config.json").read_text()) | change))
    with pytest.raises(CheckpointError, match=rf"{name} states [\d,]+ special tokens in [\w ]+, more than 32,768"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_whose_packages_are_missing_is_one_sentence(bundle, monkeypatch):
    class SiglipTokenizer(metaclass=import_utils.DummyObject):
        _backends = ("sentencepiece",)

    missing = import_utils.BACKENDS_MAPPING["sentencepiece"][1]
    monkeypatch.setitem(import_utils.BACKENDS_MAPPING, "sentencepiece", (lambda: False, missing))
    for module in (tokenization_auto, processors):
        monkeypatch.setattr(module, "tokenizer_class_from_name", lambda name: SiglipTokenizer)
    edit_json(bundle / "tokenizer_config.json", tokenizer_class="SiglipTokenizer")
    reseal(bundle)
    with pytest.raises(
        MissingError, match=r"^The tokenizer of \S+ needs more packages: .*SentencePiece library[^\n]*$"
    ):
        load(bundle, verify="headers")


def test_a_file_of_the_tokenizer_that_may_not_be_read_is_named(bundle, monkeypatch):
    def refuse(file, *args, opened=Path.open, **kwargs):
        if file.name == "tokenizer_config.json":
            raise PermissionError(13, "Permission denied")
        return opened(file, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json cannot be read \(Permission denied\); check the"):
        load_tokenizer(bundle)


def test_plain_from_pretrained_verifies_before_it_builds_the_model(bundle, monkeypatch):
    edit_json(bundle / "config.json", attn_implementation="someone/kernel")
    reseal(bundle)
    for read in (load, AutoModelForCausalLM.from_pretrained):
        monkeypatch.setattr(
            "transformers.integrations.hub_kernels.load_and_register_attn_kernel",
            lambda *_, **__: pytest.fail("asked for a kernel"),
        )
        with pytest.raises(BundleError, match="attn_implementation"):
            read(bundle)


def test_another_attention_is_refused_at_load_and_afterwards(model):
    with pytest.raises(UsageError, match="attn_implementation='eager'"):
        AutoModelForCausalLM.from_pretrained(GOLDEN, attn_implementation="eager")
    with pytest.raises(UsageError, match="set_attn_implementation"):
        model.set_attn_implementation("sdpa")
    model.set_attn_implementation("kvconvert")


def test_attention_weights_are_refused(model):
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(UsageError, match="output_attentions"):
        model(ids, output_attentions=True)
    with pytest.raises(UsageError, match="output_attentions"):
        model.generate(ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True, pad_token_id=0)
    assert model(ids, output_attentions=False).logits.shape == (1, 3, 256)


@pytest.mark.parametrize("scheme", [None, 2, {"key_bits": 2}, b"oscar", [2] * 4])
def test_a_cache_of_no_scheme_is_refused(model, scheme):
    with pytest.raises(UsageError, match=r"`scheme` is .*; give a KVScheme, a preset's name, or a list with one of"):
        KVCache(model.config, scheme)


def test_a_cache_takes_schemes_and_names_of_presets_alike_for_each_layer(model):
    count = model.config.num_hidden_layers
    named, kivi = KVCache(model.config, "oscar").schemes, KVScheme.preset("kivi")
    assert KVCache(model.config, ["oscar"] * count).schemes == named
    assert KVCache(model.config, ["oscar", None, kivi] + [None] * (count - 3)).schemes[:3] == (named[0], None, kivi)


@pytest.mark.parametrize("config", ["model", None, {"num_hidden_layers": 2}])
def test_a_cache_of_no_configuration_is_refused(config):
    with pytest.raises(UsageError, match=r"`config` is .*; give `model.config`, or"):
        KVCache(config, "oscar")


def test_a_working_directory_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="no directory"):
        check_place(tmp_path / "file" / "work")


@pytest.mark.full
def test_three_hundred_mutated_configs_are_loaded_or_refused(bundle):
    sys.path.insert(0, str(Path(__file__).parents[1] / "test_bundle"))
    from fuzzing import mutated, time_limit

    config = json.loads((bundle / "config.json").read_text())
    for number in range(300):
        (bundle / "config.json").write_text(json.dumps(mutated(config, random.Random(number))))
        reseal(bundle)
        with time_limit(20), contextlib.suppress(BundleError):
            load(bundle, verify="headers")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer_config.json", lambda path: path.write_bytes(path.read_bytes())),
        ("added_tokens.json", lambda path: path.write_bytes(b"{}")),
        ("model.safetensors", lambda path: path.write_bytes(path.read_bytes())),
        ("model.safetensors", lambda path: path.write_bytes(b"")),
        ("model.safetensors", lambda path: path.unlink()),
    ],
)
def test_a_file_that_changes_between_verification_and_loading_is_noticed(bundle, monkeypatch, name, change):
    from kvconvert.runtime.hf import load as loading

    def verified_then_changed(*arguments, **options):
        opened = open_bundle(*arguments, **options)
        change(bundle / name)
        return opened

    monkeypatch.setattr(loading, "open_bundle", verified_then_changed)
    with pytest.raises(BundleError, match="changed after it was verified"):
        load(bundle)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", {"version": "1.0", "model": 3}),
        ("tokenizer_config.json", {"eos_token": 3}),
        ("special_tokens_map.json", []),
        ("added_tokens.json", 3),
    ],
)
def test_tokenizer_files_of_other_types_are_one_sentence(bundle, name, content):
    (bundle / name).write_text(json.dumps(content))
    fields = json.loads((bundle / "kvconvert.json").read_text())
    fields["files"][name] = {"size": 0, "sha256": ""}
    (bundle / "kvconvert.json").write_text(json.dumps(fields))
    reseal(bundle)
    said = "holds no JSON object" if content == [] else "has no tokenizer that transformers can load"
    with pytest.raises(KvconvertError, match=rf"^[^\n]*{said}[^\n]*$"):
        load(bundle, verify="headers")


def test_a_generation_config_of_other_types_is_one_sentence(bundle):
    edit_json(bundle / "generation_config.json", max_new_tokens="many")
    fields = json.loads((bundle / "kvconvert.json").read_text())
    fields["files"]["generation_config.json"] = {"size": 0, "sha256": ""}
    (bundle / "kvconvert.json").write_text(json.dumps(fields))
    reseal(bundle)
    with pytest.raises(BundleError, match=r"^[^\n]*generation_config\.json[^\n]*$"):
        load(bundle, verify="headers")


@pytest.mark.parametrize(
    ("file", "key", "name"),
    [
        ("tokenizer_config.json", "tokenizer_class", "RagRetriever"),
        ("tokenizer_config.json", "tokenizer_class", "RagTokenizer"),
        ("tokenizer_config.json", "tokenizer_class", "AutoModelForCausalLM"),
        ("processor_config.json", "processor_class", "RagRetriever"),
        ("preprocessor_config.json", "processor_class", "LlamaForCausalLM"),
    ],
)
def test_no_settings_make_something_else_of_a_tokenizer_or_a_processor(bundle, monkeypatch, file, key, name):
    called = []
    loaded = getattr(transformers, name)
    monkeypatch.setattr(loaded, "from_pretrained", classmethod(lambda cls, *_, **__: called.append(cls)))
    path = bundle / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | {key: name}))
    with pytest.raises(CheckpointError, match=f"{file} says that {key} is {name}, which is none"):
        (load_processor if "processor" in file else load_tokenizer)(bundle)
    assert not called


def test_a_class_that_transformers_passes_over_is_passed_over_here(bundle):
    edit_json(bundle / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    edit_json(bundle / "config.json", tokenizer_class="AutoTokenizer")
    load_tokenizer(bundle)
