"""Loading a bundle: through the runtime and through plain transformers, and what a loaded model does by default."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from tiny.bundle import edit_json, reseal
from tiny.models import GREEDY, random_ids
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    AwqConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.distributed import DistributedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from kvconvert import KVCache, calibrate, export, load
from kvconvert.errors import BundleError, CheckpointError, NumericError, RecipeError, UsageError
from kvconvert.kernels.linear import DenseLinear, QuantizedLinear
from kvconvert.models.processors import load_tokenizer
from kvconvert.runtime.engine import Engine
from kvconvert.runtime.hf import load as runtime_load

REFERENCE = Path(__file__).resolve().parents[2] / "examples" / "reference-lm"


def convert(root: Path, name: str, source: Path, recipe: str) -> Path:
    (root / f"{name}.toml").write_text(recipe)
    work = root / f"{name}-work"
    calibrate(str(source), work, recipe=root / f"{name}.toml", samples=2, seq_len=64, progress=False)
    return export(work, root / name, progress=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A random Llama with biases in attention and the reference model's tokenizer."""
    directory = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=16,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(3) if parameter.dim() > 1 else parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REFERENCE / file, directory)
    return directory


@pytest.fixture(scope="module")
def bundle(source, tmp_path_factory):
    root = tmp_path_factory.mktemp("bundle")
    return convert(root, "bundle", source, '[weights]\nmethod = "awq"\ngroup_size = 32\n[kv]\npreset = "oscar"\n')


@pytest.fixture(scope="module")
def unquantized_weights(source, tmp_path_factory):
    return convert(
        tmp_path_factory.mktemp("none"), "bundle", source, '[weights]\nmethod = "none"\n[kv]\npreset = "oscar"\n'
    )


def test_load_gives_packed_weights_and_a_cache_after_the_plan(bundle):
    model, tokenizer = load(bundle)
    assert isinstance(model, LlamaForCausalLM)
    packed = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    assert len(packed) == 2 * 7
    assert model.dtype == torch.bfloat16
    ids = tokenizer("It was a dark night " * 40, return_tensors="pt")
    result = model.generate(**ids, max_new_tokens=4, return_dict_in_generate=True, **GREEDY)
    cache = result.past_key_values
    assert isinstance(cache, KVCache)
    assert cache.schemes == tuple(model.kv_schemes)
    assert cache.schemes[0].rotate_values == "folded"
    assert cache.stats().pages == 2 * (cache.get_seq_length() // 128) > 0


def test_a_batch_is_padded_on_the_left_and_continues_every_prompt(bundle):
    model, tokenizer = load(bundle)
    tokenizer.pad_token = tokenizer.eos_token
    texts = ["It was", "It was a dark night, and the old house"]
    together = model.generate(**tokenizer(texts, return_tensors="pt", padding=True), max_new_tokens=6, **GREEDY)
    alone = model.generate(**tokenizer(texts[:1], return_tensors="pt"), max_new_tokens=6, **GREEDY)
    assert together[0, -6:].tolist() == alone[0, -6:].tolist()


def test_what_is_no_number_is_no_token(bundle):
    model, tokenizer = load(bundle)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.finfo(model.dtype).max)
    ids = tokenizer(["It was"], return_tensors="pt")["input_ids"]
    with pytest.raises(NumericError, match="no token can be chosen"):
        model.generate(ids, max_new_tokens=3, **GREEDY)
    engine = Engine(model)
    for tokens in (1, 3):
        request = engine.add(ids, max_new_tokens=tokens)
        with pytest.raises(NumericError, match="no token can be chosen"):
            engine.run()
        assert (request.tokens, request.finish_reason) == ([], "error")


@pytest.fixture(scope="module")
def usual_cache(source, tmp_path_factory):
    root = tmp_path_factory.mktemp("usual")
    return convert(root, "bundle", source, '[weights]\nmethod = "rtn"\ngroup_size = 32\n[kv]\npreset = "none"\n')


@pytest.mark.parametrize("more", [{}, {"do_sample": True}, {"num_beams": 2}])
@pytest.mark.parametrize(("kind", "value"), [("bundle", torch.nan), ("bundle", torch.inf), ("usual_cache", torch.nan)])
def test_what_is_no_number_in_one_sequence_after_the_first_token_is_no_token(request, kind, value, more):
    model, tokenizer = load(request.getfixturevalue(kind))
    ids = tokenizer(["It was", "It was"], return_tensors="pt")["input_ids"]

    def spoil(module, args, output):
        if args[0].shape[1] == 1:
            output = output.clone()
            output[-1] = value
        return output

    model.get_input_embeddings().register_forward_hook(spoil)
    model.generate(ids, max_new_tokens=1, **GREEDY | more)
    with pytest.raises(NumericError, match="no token can be chosen"):
        model.generate(ids, max_new_tokens=3, **GREEDY | more)


@pytest.mark.parametrize("kind", ["bundle", "usual_cache"])
def test_the_class_of_a_bundle_s_model_loads_bundles_and_other_models(request, source, kind):
    path = request.getfixturevalue(kind)
    model, tokenizer = load(path)
    ids = tokenizer("It was", return_tensors="pt")["input_ids"]
    again = type(model).from_pretrained(path)
    assert torch.equal(again.generate(ids, max_new_tokens=3, **GREEDY), model.generate(ids, max_new_tokens=3, **GREEDY))
    assert type(type(model).from_pretrained(source)) is LlamaForCausalLM
    assert type(type(model)._from_config(model.config)) is LlamaForCausalLM


def test_a_bundle_without_tokenizer_is_one_sentence(bundle, tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, and no older file.*; fetch the model's tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    shutil.copy(bundle / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"can load \(\w+: .+\); fetch the model's tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "device_map", "expected"),
    [
        (torch.float16, None, torch.float32),
        (torch.float16, "cpu", torch.float32),
        (torch.float16, torch.device("cpu"), torch.float32),
        (torch.float16, "cuda", "auto"),
        (torch.float16, {"": 0}, "auto"),
        (torch.bfloat16, None, "auto"),
        (torch.float32, "cpu", "auto"),
    ],
)
def test_the_default_dtype_is_the_bundles_but_for_float16_on_a_cpu(dtype, device_map, expected):
    assert runtime_load._default_dtype(LlamaConfig(dtype=dtype), device_map) == expected


def test_unquantized_linears_know_what_the_processor_is_slow_at(bundle):
    model, _ = load(bundle, dtype=torch.bfloat16)
    kept = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert kept
    assert all(type(module) is DenseLinear for module in kept)


def test_plain_from_pretrained_is_the_same_model(bundle):
    model, _ = load(bundle, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(bundle, dtype=torch.float32)
    ids = random_ids(1, 150)
    expected = model.generate(ids, max_new_tokens=5, **GREEDY)
    result = plain.generate(ids, max_new_tokens=5, return_dict_in_generate=True, **GREEDY)
    assert result.sequences.tolist() == expected.tolist()
    assert isinstance(result.past_key_values, KVCache)


def test_the_config_is_written_back_as_it_was_read(bundle):
    model, _ = load(bundle, verify="headers")
    said = json.loads((bundle / "config.json").read_text())["quantization_config"]
    assert model.config.to_dict()["quantization_config"] == said
    assert json.loads(model.config.to_json_string(use_diff=False))["quantization_config"] == said


def test_a_forward_pass_without_a_cache_argument_builds_the_bundles(bundle):
    model, _ = load(bundle)
    ids = random_ids(1, 130)
    with torch.no_grad():
        assert isinstance(model(ids).past_key_values, KVCache)
        assert model(ids, use_cache=False).past_key_values is None
        assert isinstance(model(ids, None, None, DynamicCache(config=model.config)).past_key_values, DynamicCache)


def test_a_full_precision_cache_is_used_when_asked_for(bundle):
    model, _ = load(bundle, dtype=torch.float32)
    ids = random_ids(2, 20)
    dynamic = model.generate(
        ids, max_new_tokens=5, cache_implementation="dynamic", return_dict_in_generate=True, **GREEDY
    )
    assert type(dynamic.past_key_values) is DynamicCache
    static = StaticCache(config=model.config, max_cache_len=32)
    assert (
        model.generate(ids, max_new_tokens=5, past_key_values=static, **GREEDY).tolist() == dynamic.sequences.tolist()
    )
    assert model.generate(ids, max_new_tokens=5, use_cache=False, **GREEDY).tolist() == dynamic.sequences.tolist()


@pytest.mark.parametrize("implementation", ["static", "offloaded", "quantized"])
def test_other_caches_of_transformers_are_refused_by_name(bundle, implementation):
    model, _ = load(bundle, verify="headers")
    with pytest.raises(UsageError, match=f"cache_implementation='{implementation}'"):
        model.generate(random_ids(1, 4), max_new_tokens=2, cache_implementation=implementation, **GREEDY)


def test_continuous_batching_is_refused_by_name(bundle):
    model, _ = load(bundle, verify="headers")
    with pytest.raises(UsageError, match="Continuous batching"):
        model.generate_batch([[1, 2, 3]])


def test_contrastive_search_is_not_served_by_this_version_of_transformers(bundle):
    model, _ = load(bundle, verify="headers")
    with pytest.raises(UsageError, match="Contrastive Search requires"):
        model.generate(random_ids(1, 4), max_new_tokens=2, penalty_alpha=0.5, top_k=4, pad_token_id=0)


@pytest.fixture(scope="module")
def loaded(bundle):
    """Only to be asked for what it refuses."""
    return load(bundle, verify="headers")[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": "hot"},
        {"temperature": 0.0},
        {"top_k": -3},
        {"min_p": 7.0},
        {"typical_p": "x"},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": []},
        {"no_repeat_ngram_size": "two"},
        {"suppress_tokens": [[1]]},
        {"bad_words_ids": 3},
        {"sequence_bias": {"a": 1}},
        {"sequence_bias": [[[10**7], 1.0]]},
        {"forced_eos_token_id": 10**8},
        *({"exponential_decay_length_penalty": value} for value in (3, {"0": 1}, {}, "ab", [1, "x"], [[1], 2.0], [1])),
        {"watermarking_config": {"greenlist_ratio": 9}},
        {"watermarking_config": 1},
        {"stop_strings": ["x"]},
        {"eos_token_id": "end"},
        {"max_new_tokens": 0},
        {"max_new_tokens": "ten"},
        {"max_length": -1, "max_new_tokens": None},
        {"max_new_tokens": float("nan")},
        *({"prefill_chunk_size": value} for value in (0, -1, 1.5, "8", [1])),
        {"num_beams": 2, "num_return_sequences": 3},
        {"no_such_setting": 1},
        {"logits_processor": 3},
        {"temperature": 1e-320},
        {"repetition_penalty": 1e-300},
        {"num_beams": 0},
        {"max_time": "soon"},
        {"prompt_lookup_num_tokens": -1},
        {"prefix_allowed_tokens_fn": 7},
        {"token_healing": True},
        {"generation_config": {"top_k": 1}},
    ],
    ids=str,
)
def test_settings_that_generate_cannot_use_are_one_sentence(loaded, settings):
    arguments = {"max_new_tokens": 2, "pad_token_id": 0, "do_sample": True} | settings
    with pytest.raises(UsageError, match=r"cannot (be applied|use its input or settings) \(.*\); correct") as caught:
        loaded.generate(random_ids(1, 4), **arguments)
    assert "\n" not in str(caught.value)


def test_a_compiled_model_computes_what_the_model_computes(loaded):
    ids, compiled = random_ids(1, 4), torch.compile(loaded)
    torch.testing.assert_close(compiled(ids).logits, loaded(ids).logits)
    assert torch.equal(
        compiled.generate(ids, max_new_tokens=2, **GREEDY), loaded.generate(ids, max_new_tokens=2, **GREEDY)
    )


def test_errors_of_what_the_caller_gives_generate_stay_what_they_are(bundle):
    model, _ = load(bundle, verify="headers")

    class Stops(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise ValueError("enough")

    with pytest.raises(ValueError, match=r"^enough$"):
        model.generate(random_ids(1, 4), max_new_tokens=2, stopping_criteria=StoppingCriteriaList([Stops()]), **GREEDY)
    model.lm_head.forward = None
    with pytest.raises(TypeError):
        model.generate(random_ids(1, 4), max_new_tokens=2, **GREEDY)


def test_streamers_receive_the_text(bundle):
    model, tokenizer = load(bundle, verify="headers")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    ids = random_ids(1, 6)
    tokens = model.generate(ids, max_new_tokens=8, streamer=streamer, **GREEDY)
    assert "".join(streamer) == tokenizer.decode(tokens[0, 6:])


def test_beams_samples_lookup_and_assistants_run_with_the_bundles_cache(bundle):
    model, _ = load(bundle, dtype=torch.float32, verify="headers")
    ids = random_ids(1, 30).repeat(1, 5)
    greedy = model.generate(ids, max_new_tokens=6, **GREEDY)
    assert model.generate(ids, max_new_tokens=6, prompt_lookup_num_tokens=3, **GREEDY).tolist() == greedy.tolist()
    assert model.generate(ids, max_new_tokens=6, assistant_model=model, **GREEDY).tolist() == greedy.tolist()
    beams = model.generate(ids, max_new_tokens=6, num_beams=3, num_return_sequences=2, **GREEDY)
    assert beams.shape == (2, 156)
    sampled = model.generate(
        ids, max_new_tokens=6, do_sample=True, num_return_sequences=3, eos_token_id=None, pad_token_id=0
    )
    assert sampled.shape == (3, 156)


def test_weights_may_stay_unquantized_under_a_kv_plan(unquantized_weights, source):
    model, _ = load(unquantized_weights, dtype=torch.float32)
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = random_ids(1, 100)
    with torch.no_grad():
        got, expected = model(ids, use_cache=False).logits, original(ids, use_cache=False).logits
    # the fold is stored in bfloat16, whose rounding is 2^-9 per weight
    assert (got - expected).abs().max() < 0.03 * expected.abs().max()


def test_transformers_alone_refuses_unquantized_weights_under_a_kv_plan(unquantized_weights, monkeypatch):
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "awq", AwqConfig)  # as before `import kvconvert.runtime`
    with pytest.raises(ValueError, match=r"import kvconvert\.runtime"):
        AutoModelForCausalLM.from_pretrained(unquantized_weights)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("device_map", ["cuda", "cuda:1", {"": 0}])
def test_a_device_map_with_a_gpu_that_is_not_there_is_one_sentence(bundle, device_map):
    with pytest.raises(UsageError, match=r"torch finds no GPU for the device .*; `device_map` has to be cpu"):
        load(bundle, device_map=device_map, verify="headers")


@pytest.mark.parametrize(
    ("device_map", "said"),
    [
        ("abacus", "There is no device abacus; `device_map` may be cpu or cuda"),
        ("meta", "`device_map` is meta; it may be cpu or cuda"),
        ({"": "auto"}, "There is no device auto; `device_map` may be cpu or cuda"),
        ({"": "disk"}, "There is no device disk; `device_map` may be cpu or cuda"),
        ([], r"`device_map` is \[\]; give a device, 'auto', or a dict from modules to devices"),
        ({"model.layrs.0": "cpu"}, r"`device_map` names 'model\.layrs\.0', .*; did you mean model\.layers\.0\?"),
        ({"model": "cpu"}, r"`device_map` gives lm_head\.\w+ no device; name a module that it is in"),
        ({}, r"`device_map` gives .* no device"),
    ],
)
def test_a_device_map_that_does_not_fit_is_one_sentence(bundle, device_map, said):
    with pytest.raises(UsageError, match=said):
        load(bundle, device_map=device_map, verify="headers")


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}])
def test_device_maps(bundle, device_map):
    model, _ = load(bundle, device_map=device_map, verify="headers")
    assert model.generate(random_ids(1, 6), max_new_tokens=3, **GREEDY).shape == (1, 9)


def test_tensor_parallelism_is_refused_with_what_serves_it(bundle):
    with pytest.raises(UsageError, match="with the vLLM plugin"):
        load(bundle, tp_plan="auto")
    # What transformers makes of its own `tp_plan`, under torchrun.
    config = AutoConfig.from_pretrained(bundle)
    config.distributed_config = DistributedConfig(tp_plan="auto")
    with pytest.raises(UsageError, match="with the vLLM plugin"):
        AutoModelForCausalLM.from_pretrained(bundle, config=config)


def test_layers_offloaded_to_disk_generate_the_same(unquantized_weights, tmp_path):
    model, _ = load(unquantized_weights, verify="headers")
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    offloaded = AutoModelForCausalLM.from_pretrained(
        unquantized_weights, device_map=device_map, offload_folder=tmp_path
    )
    ids = random_ids(1, 140)
    assert (
        offloaded.generate(ids, max_new_tokens=4, **GREEDY).tolist()
        == model.generate(ids, max_new_tokens=4, **GREEDY).tolist()
    )


def test_what_is_no_bundle_is_said_to_be_none(tmp_path, source):
    with pytest.raises(BundleError, match=r"is not a kvconvert bundle: it has no kvconvert\.json"):
        load(source)
    with pytest.raises(BundleError, match="is not a kvconvert bundle"):
        load(tmp_path / "missing")
    (tmp_path / "genai_config.json").write_text("{}")
    with pytest.raises(BundleError, match="it is an export for ONNX Runtime, which other programs run"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["missing", "./missing/bundle", "../bundle", "/missing", "work/bundle/", "a/b/c"])
def test_what_is_neither_a_directory_nor_a_repository_never_reaches_the_hub(name, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # no name is one of a folder here
    for function in ("snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(huggingface_hub, function, lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(BundleError, match=f"^{re.escape(name)} is not a kvconvert bundle: there is no such directory"):
        load(name)
    with pytest.raises(BundleError, match="there is no such directory"):
        load(Path("owner/name"))


def test_a_repository_on_the_hub_is_fetched_with_the_arguments_given(bundle, monkeypatch):
    calls = []

    def download(name, **arguments):
        calls.append((name, arguments))
        return str(bundle)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model, _ = load("owner/name", verify="headers", revision="v1", token="secret", local_files_only=True)
    assert isinstance(model, LlamaForCausalLM)
    arguments = {"revision": "v1", "token": "secret", "local_files_only": True}
    manifest = {"allow_patterns": ["kvconvert.json"]}
    # The manifest's commit, in whose snapshot it lies, and nothing hidden.
    others = {"revision": bundle.name, "ignore_patterns": [".*", "*/.*"]}
    assert calls == [("owner/name", arguments | manifest), ("owner/name", arguments | others)]


def test_a_repository_that_cannot_be_fetched_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BundleError, match="owner/name is not, or not completely, in the Hub's cache"):
        load("owner/name", local_files_only=True)


def damaged(bundle: Path, directory: Path) -> Path:
    """A copy with one bit of its weights flipped."""
    copy = shutil.copytree(bundle, directory)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    return copy


def test_verify_holds_for_one_call_and_stays_out_of_the_config(bundle, tmp_path):
    copy = damaged(bundle, tmp_path / "copy")
    model, _ = load(copy, verify="headers")
    assert "verify" not in model.config.to_dict()["quantization_config"]
    with pytest.raises(BundleError, match=r"model\.safetensors"):
        load(copy)


def test_a_bundle_cannot_weaken_its_own_verification(bundle, tmp_path):
    copy = damaged(bundle, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["verify"] = "headers"
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(BundleError):
        AutoModelForCausalLM.from_pretrained(copy)


@pytest.mark.parametrize("loads", [load, AutoModelForCausalLM.from_pretrained])
def test_a_model_that_lacks_tensors_is_refused(unquantized_weights, tmp_path, loads):
    copy = shutil.copytree(unquantized_weights, tmp_path / "bundle")
    edit_json(copy / "config.json", mlp_bias=True)
    reseal(copy)
    with pytest.raises(BundleError, match=r"lacks model\.layers\.0\.mlp\.down_proj\.bias and 5 more"):
        loads(copy)


@pytest.mark.parametrize("asked", [AutoModel, AutoModelForSequenceClassification])
def test_a_class_that_the_bundle_is_not_of_says_which_one_to_ask_for(bundle, asked):
    with pytest.raises(BundleError, match=r"load it as the class that config\.json names"):
        asked.from_pretrained(bundle)


def test_from_pretrained_verifies_too(bundle, tmp_path):
    with pytest.raises(BundleError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(damaged(bundle, tmp_path / "copy"))


def test_other_awq_checkpoints_still_reach_transformers_own_quantizer(bundle, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]["kvconvert"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ImportError, match="gptqmodel"):
        AutoModelForCausalLM.from_pretrained(copy)


def test_a_cache_for_a_bundle_knows_that_its_weights_are_folded(bundle):
    model, tokenizer = load(bundle, verify="headers")
    assert KVCache(model.config, "oscar").schemes[0].rotate_values == "folded"
    assert KVCache(model.config, "kivi").schemes[0].rotate_values == "none"
    assert AutoTokenizer.from_pretrained(bundle).vocab_size == tokenizer.vocab_size
    with pytest.raises(RecipeError, match="was given a list of 1 KV scheme; give one without a list"):
        KVCache(model.config, [None])
