"""What a bundle chooses of vLLM's settings, and each combination that is refused, in one sentence at the start."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from published.families import FAMILIES as PUBLISHED
from published.families import REFUSED
from published.models import published
from tiny.bundle import edit_json, reseal, write_tiny_bundle
from tiny.every_type import tiny_config
from tiny.families import FAMILIES
from tiny.hub import Repository, standing_in
from tiny.models import ARCHITECTURES, GREEDY, random_ids, randomise
from transformers import AutoConfig, PretrainedConfig

from kvconvert.errors import BundleError
from kvconvert.methods import KVScheme
from kvconvert.models.configuration import has_pages, layer_config, layer_types_of, model_class, stored_shape
from kvconvert.runtime import Engine
from kvconvert.runtime.hf.generation import adopt
from kvconvert.vllm.bundle import VERSIONS, ServedBundle, choose_settings, layer_index, refuse_config

ARGUMENTS = {
    "generation_config": "auto",
    "attention_backend": None,
    "block_size": None,
    "kv_cache_dtype": "auto",
    "enable_prefix_caching": None,
    "hf_token": None,
    "served_model_name": None,
    "speculative_config": None,
    "async_scheduling": None,
}
KNOWN = f"{VERSIONS[-1]}.0"
PARALLEL = {f"{name}_parallel_size": 1 for name in ("tensor", "pipeline", "decode_context", "prefill_context", "data")}


def arguments(model: Path | str, **given: Any) -> SimpleNamespace:
    return SimpleNamespace(model=str(model), revision=None, **ARGUMENTS | given)


def served(*schemes: KVScheme | None, **config: Any) -> ServedBundle:
    """A bundle as far as the plugin looks at it, of layers with two heads of 64 channels."""
    layers = [SimpleNamespace(num_key_value_heads=2, head_dim=64, value_head_dim=None) for _ in schemes]
    manifest = SimpleNamespace(schemes=lambda: list(schemes), layers=layers, modules=[], transforms=[])
    return ServedBundle(SimpleNamespace(manifest=manifest, config=config, plan={}))


def engine(**given: Any) -> SimpleNamespace:
    """vLLM's settings, which a bundle is refused with or not."""
    parallel = PARALLEL | {name: size for name, size in given.items() if name in PARALLEL}
    others = {"speculative_config": None, "kv_transfer_config": None, "lora_config": None}
    others["scheduler_config"] = SimpleNamespace(disable_hybrid_kv_cache_manager=False, async_scheduling=False)
    others["device_config"] = SimpleNamespace(device_type="cuda")
    scheduler = vars(others["scheduler_config"])
    scheduler |= {name: value for name, value in given.items() if name in scheduler}
    others |= {name: value for name, value in given.items() if name in others}
    model = SimpleNamespace(dtype=torch.bfloat16)
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel), model_config=model, **others)


KIVI = KVScheme.preset("kivi")


def refused(found: str | None, *words: str) -> None:
    assert found is not None
    assert found[-1] == "."
    assert not re.search(r"\. [A-Z]", found), "more than one sentence"
    for word in words:
        assert word in found


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "1.33.0", "0.3.2"])
def test_a_bundle_is_refused_in_every_version_but_those_that_were_tried(version, tmp_path):
    write_tiny_bundle(tmp_path)
    with pytest.raises(BundleError) as error:
        choose_settings(arguments(tmp_path), version)
    refused(str(error.value), version, *VERSIONS)
    for known in (f"{VERSIONS[0]}.0", f"{VERSIONS[1]}.1.post1+cpu"):
        assert choose_settings(arguments(tmp_path), known) is not None


def test_a_bundle_chooses_backend_page_size_and_cache(tmp_path):
    write_tiny_bundle(tmp_path)
    given = arguments(tmp_path)
    assert choose_settings(given, KNOWN) is not None
    assert (given.attention_backend, given.block_size) == ("CUSTOM", 128)
    assert (given.kv_cache_dtype, given.enable_prefix_caching) == ("auto", False)


@pytest.mark.parametrize(
    ("stated", "read", "named"),
    [
        ({}, {"eos_token_id": 7}, None),
        ({"eos_token_id": [3, -1]}, {"eos_token_id": [3, 7]}, None),
        ({"do_sample": True, "temperature": 0, "top_k": -1}, {"temperature": 0.0, "do_sample": False}, None),
        ({"temperature": 0.6, "top_p": 0.5}, {}, None),
        (
            {"do_sample": True, "temperature": 2, "min_p": 0.1, "repetition_penalty": 2, "no_repeat_ngram_size": 3},
            {"do_sample": True, "temperature": 2.0, "min_p": 0.1, "repetition_penalty": 2.0},
            "no_repeat_ngram_size = 3",
        ),
        ({"num_beams": 3, "stop_strings": "x"}, {}, "num_beams = 3"),
    ],
    ids=str,
)
def test_generation_settings_are_those_of_generate(stated, read, named, tmp_path, caplog):
    write_tiny_bundle(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 7}]}))
    edit_json(tmp_path / "config.json", eos_token_id=2, text_config={"eos_token_id": 7})
    reseal(tmp_path)
    given = arguments(tmp_path)
    choose_settings(given, KNOWN)
    written = json.loads((Path(given.generation_config) / "generation_config.json").read_text())
    assert written == {"eos_token_id": 7} | read
    assert (named or "") in caplog.text
    assert bool(caplog.text) == (named is not None)
    given = arguments(tmp_path, generation_config="vllm")
    choose_settings(given, KNOWN)
    assert given.generation_config == "vllm"


def test_settings_of_an_older_model_are_those_of_its_config(tmp_path):
    write_tiny_bundle(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    edit_json(tmp_path / "config.json", repetition_penalty=2, eos_token_id=7)
    reseal(tmp_path)
    given = arguments(tmp_path)
    choose_settings(given, KNOWN)
    written = json.loads((Path(given.generation_config) / "generation_config.json").read_text())
    assert (written["repetition_penalty"], written["eos_token_id"]) == (2.0, 7)


def test_another_model_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    with standing_in(monkeypatch, tmp_path) as hub:
        hub.repositories["owner/name"] = Repository()
        hub.repositories["owner/name"].commit("main", {"config.json": b"{}", "model.safetensors": b"weights"})
        for model in (tmp_path, "owner/name", "owner/missing", "gpt2"):
            given = arguments(model, block_size=16)
            assert choose_settings(given, KNOWN) is choose_settings(given, "0.3.2") is None
            assert vars(given) == vars(arguments(model, block_size=16))
        # No more than vLLM fetches anyway.
        assert set(hub.fetched()) == {"config.json"}


def test_a_bundle_on_the_hub_is_fetched_and_verified(tmp_path, monkeypatch):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    write_tiny_bundle(bundle)
    files = {path.relative_to(bundle).as_posix(): path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    with standing_in(monkeypatch, tmp_path) as hub:
        hub.repositories["owner/name"] = Repository()
        commit = hub.repositories["owner/name"].commit("main", files)
        given = arguments("owner/name")
        assert choose_settings(given, KNOWN) is not None
        assert (given.served_model_name, Path(given.model).name) == ("owner/name", commit)
        assert (Path(given.model) / "kvconvert.json").exists()
        altered = next(name for name in files if name.endswith(".safetensors"))
        hub.repositories["owner/name"].commit("main", files | {altered: files[altered][:-1] + b"x"})
        with pytest.raises(BundleError, match="sha256"):
            choose_settings(arguments("owner/name"), KNOWN)


def test_a_directory_of_that_name_is_not_asked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    write_tiny_bundle(tmp_path / "owner" / "name")
    with standing_in(monkeypatch, tmp_path) as hub:
        assert choose_settings(arguments("owner/name"), KNOWN) is not None
        assert not hub.requests


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("attention_backend", "FLASH_ATTN", "--attention-backend FLASH_ATTN"),
        ("block_size", 16, "--block-size 16"),
        ("kv_cache_dtype", "fp8", "--kv-cache-dtype fp8"),
    ],
)
def test_an_argument_that_says_otherwise_is_refused(name, value, said, tmp_path):
    write_tiny_bundle(tmp_path)
    with pytest.raises(BundleError) as error:
        choose_settings(arguments(tmp_path, **{name: value}), KNOWN)
    refused(str(error.value), said)


def test_prefixes_are_shared_if_asked_for(tmp_path):
    write_tiny_bundle(tmp_path)
    for asked in (None, False, True):
        for drafts in (None, {"method": "eagle"}):
            given = arguments(tmp_path, enable_prefix_caching=asked, speculative_config=drafts)
            choose_settings(given, KNOWN)
            assert given.enable_prefix_caching is bool(asked)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pipeline_parallel_size": 2, "speculative_config": SimpleNamespace(method="ngram")}, "pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, "drafts by eagle3"),
        ({"speculative_config": SimpleNamespace(method="draft_model")}, "drafts by a model of their own"),
        ({"speculative_config": SimpleNamespace(method="ngram"), "async_scheduling": True}, "--async-scheduling"),
        ({"kv_transfer_config": object()}, "a KV connector"),
    ],
)
def test_settings_that_are_not_served_are_refused(given, said):
    refuse_config(served(KIVI, KIVI), engine())
    with pytest.raises(BundleError) as error:
        refuse_config(served(KIVI, KIVI), engine(**given))
    refused(str(error.value), said)


@pytest.mark.parametrize("scheme", [KIVI, None])
def test_adapters_are_refused_where_weights_were_changed(scheme):
    found, adapters = served(scheme), engine(lora_config=object())
    refuse_config(found, adapters)
    found.bundle.manifest.transforms.append("fold_value_rotation")
    refuse_config(found, engine())
    with pytest.raises(BundleError) as error:
        refuse_config(found, adapters)
    refused(str(error.value), "LoRA adapters", "weights")


def test_layers_that_draft_have_small_blocks(tmp_path):
    write_tiny_bundle(tmp_path)
    for method, size in (("ngram", 128), ("eagle", 32), ("mtp", 32), (None, 32)):
        found = arguments(tmp_path, speculative_config={"method": method} if method else {"model": "eagle"})
        choose_settings(found, KNOWN)
        assert (found.attention_backend, found.block_size) == ("CUSTOM", size)
    eagle = engine(speculative_config=SimpleNamespace(method="eagle"))
    refuse_config(served(KIVI, KIVI, layer_types=["sliding_attention", "full_attention"]), eagle)
    with pytest.raises(BundleError) as error:
        refuse_config(served(KIVI, KIVI, layer_types=["linear_attention", "full_attention"]), eagle)
    refused(str(error.value), "drafts by eagle", "beside layers with a state")


def test_drafts_of_n_grams_are_served_one_pass_after_another(tmp_path):
    refuse_config(served(KIVI), engine(speculative_config=SimpleNamespace(method="ngram")))
    write_tiny_bundle(tmp_path)
    for given, expected in (({}, None), ({"speculative_config": {}}, False), ({"async_scheduling": True}, True)):
        found = arguments(tmp_path, **given)
        choose_settings(found, KNOWN)
        assert found.async_scheduling is expected


@pytest.mark.parametrize(
    ("scheme", "ranks", "said"),
    [
        (KVScheme.preset("oscar-g128"), 2, 'token_norm = "per_head"'),
        (KIVI, 3, "2 KV heads, which tensor parallelism cannot divide among 3"),
        (KIVI, 4, "2 KV heads"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused(scheme, ranks, said):
    refuse_config(served(KIVI, KIVI), engine(tensor_parallel_size=2))
    with pytest.raises(BundleError) as error:
        refuse_config(served(KIVI, scheme), engine(tensor_parallel_size=ranks))
    refused(str(error.value), said)


@pytest.mark.parametrize("scheme", [KIVI, None])
def test_weights_that_are_not_divided_are_refused(scheme):
    found = served(scheme, quantization_config={"kvconvert": {}})
    refuse_config(found, engine(tensor_parallel_size=2))
    found.bundle.manifest.modules.append(SimpleNamespace(method="rtn"))
    refuse_config(found, engine())
    with pytest.raises(BundleError) as error:
        refuse_config(found, engine(tensor_parallel_size=2))
    refused(str(error.value), "tensor parallelism", "4 bits")
    found.bundle.config["quantization_config"]["version"] = "gemm"
    refuse_config(found, engine(tensor_parallel_size=2))


def test_a_rank_has_its_heads_of_the_plan():
    scheme = replace(KIVI, key_rounding="error_feedback", boost_fraction=0.125, boost_select="calibrated")
    scheme = replace(scheme, key_center="calibrated")
    found = served(scheme)
    plan = {
        "key_feedback": torch.eye(64) * torch.tensor([1.0, 2.0])[:, None, None],
        "boosted_channels": torch.arange(16, dtype=torch.int32).view(2, 8),
        "key_mean": torch.arange(128.0).view(2, 64),
        "rope_frequencies": torch.ones(32),
        "rope_pairs": torch.arange(64).view(2, 32).T.contiguous(),
    }
    found.bundle.plan.update({f"layers.0.{name}": tensor for name, tensor in plan.items()})
    whole, whole_layout = found.layer(0, torch.device("cpu"), torch.bfloat16)
    for rank in range(2):
        part, layout = found.layer(0, torch.device("cpu"), torch.bfloat16, rank, 2)
        own = slice(rank, rank + 1)
        assert part.keys.heads == part.values.heads == 1
        assert torch.equal(part.key_tensors.feedback, whole.key_tensors.feedback[own])
        assert torch.equal(part.key_tensors.boosted, whole.key_tensors.boosted[own])
        assert torch.equal(part.key_tensors.center.matrix, whole.key_tensors.center.matrix[own])
        assert layout == found.layouts(torch.bfloat16, 2)[0]
        assert 2 * layout.token_bytes == whole_layout.token_bytes


SPANS = KVScheme.preset("calibquant-1bit")


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        (KVScheme.preset("minikv"), "keeps a part of each prompt"),
        (SPANS, "quantizes prompts as a whole"),
        (replace(SPANS, modality="visual"), "compresses visual tokens alone"),
    ],
)
def test_schemes_that_blocks_cannot_hold_are_refused(scheme, said):
    refused(served(KIVI, scheme).refusal(torch.bfloat16), "Layer 1", said)


def test_values_may_have_other_sizes_than_keys():
    found = served(KIVI, None, v_head_dim=32, num_key_value_heads=2, head_dim=64)
    found.bundle.manifest.layers[0].value_head_dim = 32
    found.bundle.manifest.layers[1] = SimpleNamespace(num_key_value_heads=None, head_dim=None, value_head_dim=None)
    assert found.refusal(torch.bfloat16) is None
    for index, layout in found.layouts(torch.bfloat16).items():
        format, _ = found.layer(index, torch.device("cpu"), torch.bfloat16)
        assert (format.keys.head_dim, format.values.head_dim) == (64, 32)
        assert layout.token_bytes == 2 * (64 + 32) * 2


def test_layers_of_any_widths_windows_and_sink_tokens_are_served():
    wide, windowed = KVScheme(key_bits=8, value_bits=8, sink_tokens=4), replace(KIVI, sink_tokens=8)
    found = served(None, KIVI, wide, replace(windowed, value_recent_tokens=128))
    assert found.refusal(torch.bfloat16) is None
    layouts = list(found.layouts(torch.bfloat16).values())
    assert found.layer(2, torch.device("cpu"), torch.bfloat16)[1] == layouts[2]
    assert len({layout.block_bytes for layout in layouts}) == 3
    assert len({layout.first_page for layout in layouts}) == 1
    # A layer without a scheme finds its tokens as that after it does.
    assert layouts[0].sink_tokens == KIVI.sink_tokens


def test_layers_of_other_types_are_refused():
    types = {"layer_types": ["chunked_attention", "full_attention"]}
    refused(served(KIVI, KIVI, text_config=types).refusal(torch.bfloat16), "chunked_attention")


EIGHT = KVScheme(key_bits=8, value_bits=8, sink_tokens=4)
SENT_ON = {
    "eviction": ("llama", ["minikv"]),
    "spans": ("llama", ["calibquant-1bit"]),
    "images alone": ("qwen2_5_vl", [replace(SPANS, modality="visual").with_online_rotation()]),
    "sparse attention": ("minimax_m3_vl_text", ["kivi"]),
    "chunks": ("llama4_text", ["kivi"]),
    "several widths beside states": ("falcon_h1", ["kivi", EIGHT]),
}


def planned(text: PretrainedConfig, schemes: list[KVScheme | None], config: dict[str, Any]) -> ServedBundle:
    """A bundle of a language model, with a scheme for each layer, as far as the plugin looks at it."""
    layers = []
    for index, scheme in enumerate(schemes):
        heads, keys, values = (None,) * 3 if scheme is None else stored_shape(layer_config(text, index))
        found = {"num_key_value_heads": heads, "head_dim": keys, "value_head_dim": None if values == keys else values}
        layers.append(SimpleNamespace(**found))
    manifest = SimpleNamespace(schemes=lambda: schemes, layers=layers, modules=[])
    return ServedBundle(SimpleNamespace(manifest=manifest, config=config, plan={}))


# Families whose cache vLLM keeps; those that are not converted aside.
LATENTS = ("Kimi K2", "GLM-4.7-Flash", "Mistral Small 4, Large 3", "DeepSeek V3.2", "GLM-5", "Kimi Linear")


@pytest.mark.parametrize("family", [family for family in PUBLISHED if family not in REFUSED])
def test_families_as_they_are_published(family, tmp_path):
    for number, name in enumerate(PUBLISHED[family]):
        model = published(name)
        model.write_configuration(tmp_path / str(number))
        text = AutoConfig.from_pretrained(tmp_path / str(number)).get_text_config(decoder=True)
        scheme = KVScheme.preset("latent-4bit" if family in LATENTS else "kivi")
        schemes = [scheme if has_pages(kind) else None for kind in layer_types_of(text)[0]]
        found = planned(text, schemes, model.config)
        if family in LATENTS:
            assert found.unused_schemes
            assert not found.has_cache
        elif family == "MiniMax M3":
            refused(found.refusal(torch.bfloat16), "minimax_m3_sparse")
        else:
            assert found.has_cache
            assert found.refusal(torch.bfloat16) is None


@pytest.mark.quick("eviction", "sparse", "widths")
@pytest.mark.parametrize("case", SENT_ON)
def test_whoever_is_sent_to_kvconvert_serve_is_served(case):
    name, stated = SENT_ON[case]
    entry = (ARCHITECTURES | FAMILIES).get(name)
    if entry is None:
        config = tiny_config(name)
        torch.manual_seed(0)
        model = model_class(config).from_config(config).eval().requires_grad_(False)
        randomise(model)
    else:
        model = entry.build()
    config = model.config.get_text_config(decoder=True)
    presets = [KVScheme.preset(each).with_online_rotation() if isinstance(each, str) else each for each in stated]
    schemes = (presets * config.num_hidden_layers)[: config.num_hidden_layers]
    adopt(model, schemes, {})
    plugin = planned(config, schemes, model.config.to_dict())
    refused(plugin.refusal(torch.bfloat16), "use `kvconvert serve`")
    ids = [random_ids(1, length, seed=length) for length in (140, 5, 140)]
    server = Engine(model, max_batch=2, prompt_chunk=4096)
    requests = [server.add(each, max_new_tokens=4, stop_token_ids=[]) for each in ids]
    server.run()
    for each, request in zip(ids, requests, strict=True):
        expected = model.generate(each, max_new_tokens=4, **GREEDY)
        assert request.tokens == expected[0, each.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("config", "windows", "states", "attending"),
    [
        ({}, False, False, [0, 1]),
        ({"sliding_window": 512}, True, False, []),
        ({"sliding_window": 512, "use_sliding_window": False}, False, False, [0, 1]),
        ({"text_config": {"layer_types": ["sliding_attention", "full_attention"]}}, True, False, [1]),
        ({"layer_types": ["linear_attention", "full_attention"]}, False, True, [1]),
        ({"layers_block_type": ["mamba", "attention"]}, False, True, [1]),
        ({"layer_types": ["hybrid", "hybrid_sliding"]}, True, True, [0]),
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, True, False, [1]),
    ],
    ids=str,
)
def test_layers_that_attend_to_all_tokens_are_ours(config, windows, states, attending):
    found = served(EIGHT, EIGHT, **config)
    assert (found.has_windows, found.has_states, found.attending) == (windows, states, attending)
    assert list(found.layouts(torch.bfloat16)) == list(found.schemes) == attending
    assert found.has_cache == bool(attending)
    assert found.unused_schemes == [index for index in (0, 1) if index not in attending]
    assert found.refusal(torch.bfloat16) is None


@pytest.mark.parametrize(
    ("model_type", "config", "types"),
    [
        ("falcon_h1", {}, ["hybrid"] * 4),
        ("bamba", {"attn_layer_indices": [1, 3]}, ["linear_attention", "full_attention"] * 2),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, ["linear_attention", "full_attention"] * 2),
        (
            "minimax_m3_vl_text",
            {"sparse_attention_config": {"sparse_attention_freq": [0, 1, 1, 1]}},
            ["full_attention"] + ["minimax_m3_sparse"] * 3,
        ),
        (
            "mimo_v2_flash",
            {"hybrid_layer_pattern": [0, 1, 1, 1], "attention_chunk_size": 128},
            ["full_attention"] + ["sliding_attention"] * 3,
        ),
        ("qwen3_next", {}, ["linear_attention"] * 3 + ["full_attention"]),
        ("qwen3_next", {"full_attention_interval": 2}, ["linear_attention", "full_attention"] * 2),
        ("gemma2", {"sliding_window": 512}, ["sliding_attention", "full_attention"] * 2),
        (
            "gemma3_text",
            {"sliding_window": 512, "sliding_window_pattern": 3},
            ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
        ),
        ("mistral", {"sliding_window": 512}, ["sliding_attention"] * 4),
        ("qwen2", {"sliding_window": 512, "use_sliding_window": False}, ["full_attention"] * 4),
        ("llama", {}, ["full_attention"] * 4),
    ],
)
def test_layers_whose_types_a_model_says_in_words_of_its_own_are_known(model_type, config, types):
    assert served(*[EIGHT] * 4, model_type=model_type, **config).layer_types == types
    known = AutoConfig.for_model(model_type, num_hidden_layers=4, **config)
    assert layer_types_of(known)[0] == types


def test_beside_states_all_blocks_have_one_size_of_whole_bytes_for_each_token():
    states = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
    found = served(None, KIVI, replace(KIVI, token_norm="per_head"), **states)
    sizes = {layout.block_bytes for layout in found.layouts(torch.bfloat16).values()}
    assert len(sizes) == 1
    assert sizes.pop() % 128 == 0
    assert found.refusal(torch.bfloat16) is None
    refused(served(None, KIVI, EIGHT, **states).refusal(torch.bfloat16), "with a state", "one width")


def test_settings_beside_windows_and_states(tmp_path, monkeypatch, caplog):
    write_tiny_bundle(tmp_path)

    def chosen(types: list[str], **given: Any) -> SimpleNamespace:
        found = arguments(tmp_path, **given)
        monkeypatch.setattr(
            "kvconvert.vllm.bundle.served_bundle", lambda directory: served(KIVI, KIVI, layer_types=types)
        )
        choose_settings(found, KNOWN)
        return found

    windows, states = ["sliding_attention", "full_attention"], ["linear_attention", "full_attention"]
    given = chosen(windows, attention_backend="FLASH_ATTN")
    assert (given.attention_backend, given.block_size) == ("FLASH_ATTN", 32)
    assert "1 layers of type sliding_attention" in caplog.text
    assert chosen(windows, block_size=64).block_size == 64
    assert chosen(states).block_size is None
    with pytest.raises(BundleError) as error:
        chosen(states, block_size=64)
    refused(str(error.value), "--block-size 64")
    assert chosen(windows, enable_prefix_caching=True).enable_prefix_caching
    with pytest.raises(BundleError) as error:
        chosen(states, enable_prefix_caching=True)
    refused(str(error.value), "--enable-prefix-caching", "beside layers with a state")
    on_cpu = engine(device_config=SimpleNamespace(device_type="cpu"))
    refuse_config(served(KIVI, KIVI, layer_types=windows), on_cpu)
    refuse_config(served(KIVI, KIVI, layer_types=states), engine())
    with pytest.raises(BundleError) as error:
        refuse_config(served(KIVI, KIVI, layer_types=states), on_cpu)
    refused(str(error.value), "on a CPU", "several pages")
    # Of windows alone nothing is ours.
    assert chosen(["sliding_attention"] * 2, enable_prefix_caching=True, block_size=16).block_size == 16
    alike = engine(disable_hybrid_kv_cache_manager=True)
    refuse_config(served(KIVI, KIVI), alike)
    with pytest.raises(BundleError) as error:
        refuse_config(served(KIVI, KIVI, layer_types=windows), alike)
    refused(str(error.value), "--disable-hybrid-kv-cache-manager")


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_latents_are_left_to_vllm_which_is_said(dtype, tmp_path, monkeypatch, caplog):
    write_tiny_bundle(tmp_path)
    scheme = KVScheme.preset("latent-4bit")
    found = served(None, scheme, kv_lora_rank=512, layer_types=["linear_attention", "full_attention"])
    assert (found.attending, found.unused_schemes, found.has_cache) == ([], [1], False)
    monkeypatch.setattr("kvconvert.vllm.bundle.served_bundle", lambda directory: found)
    given = arguments(tmp_path, kv_cache_dtype=dtype)
    assert choose_settings(given, KNOWN) is found
    assert (given.attention_backend, given.block_size, given.kv_cache_dtype) == (None, None, dtype)
    refuse_config(found, engine(device_config=SimpleNamespace(device_type="cpu")))
    assert "1 layers of type latent_attention itself" in caplog.text
    assert f"in {'the model' if dtype == 'auto' else dtype}" in caplog.text
    assert "more memory" in caplog.text


def test_a_module_tells_its_layer_or_is_refused():
    assert layer_index("model.layers.13.self_attn.attn") == 13
    for name in ("model.attn", "a.1.b.2.attn"):
        with pytest.raises(BundleError) as error:
            layer_index(name)
        refused(str(error.value), name)


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": 5},
        {"layer_types": [["full_attention"]]},
        {"layer_types": ["full attention"]},
        {"layers_block_type": {"mamba": 1}, "layer_types": 7},
        {"attn_layer_indices": 1},
        {"sparse_attention_config": {"sparse_attention_freq": {"x": 1}}},
        {"attn_layer_period": 0},
        {"sparse_attention_config": 1},
    ],
    ids=str,
)
def test_a_config_that_tells_no_layers_is_refused(config):
    with pytest.raises(BundleError, match=r"^config\.json .*bundle again\.$"):
        served(KIVI, **config).layer_types  # noqa: B018


def test_a_config_that_tells_no_heads_is_refused():
    found = served(KIVI, layer_types=["full_attention"], num_attention_heads="4", hidden_size=256)
    found.bundle.manifest.layers[0].head_dim = None
    with pytest.raises(BundleError, match="numbers of heads and channels"):
        found.layouts(torch.bfloat16)
