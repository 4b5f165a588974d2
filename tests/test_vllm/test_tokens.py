"""vLLM with the plugin gives the tokens of our own runtime; `KVCONVERT_VLLM_PYTHON` names a Python that has vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_vllm.generate import MARKER
from tiny.llama import RECIPE, save_llama
from tiny.models import ARCHITECTURES, write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from kvconvert import calibrate, export, load
from kvconvert.vllm.bundle import served_bundle

PYTHON = os.environ.get("KVCONVERT_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="KVCONVERT_VLLM_PYTHON names no Python with vLLM and kvconvert")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
NEW = 200


def bundle_of(folder: Path, settings: str, bits: int | None = None, group: int = 16, **sizes: int) -> Path:
    """A random Llama of two layers, or three for layers that differ, as a bundle; `settings` are lines of the recipe's
    [kv], `bits` and `group` those of weights, `sizes` of its config.
    """
    sizes |= SIZES | {"max_position_embeddings": 2048, "num_hidden_layers": 3 if "kv.layers" in settings else 2}
    save_llama(folder / "model", tie_word_embeddings=False, **sizes)
    recipe = RECIPE.format(method="rtn" if bits else "none", kv="kivi") + settings
    return converted(
        folder, recipe.replace("group_size = 16", f"bits = {bits}\ngroup_size = {group}", 1) if bits else recipe
    )


def converted(folder: Path, recipe: str) -> Path:
    """The bundle of the model in `folder`."""
    (folder / "recipe.toml").write_text(recipe)
    options = {"recipe": str(folder / "recipe.toml"), "samples": 2, "seq_len": 160, "progress": False}
    calibrate(folder / "model", folder / "work", **options)
    return export(folder / "work", folder / "bundle", progress=False)


def in_vllm(
    bundle: Path, batches: list[list[list[int]]], new_tokens: int = NEW, *, kernels: bool = False,
    forgets: bool = False, adapter: Path | None = None, records: Path | None = None, **arguments: Any,
) -> Any:  # fmt: skip
    """Tokens of all prompts, batch after batch, and what `generate` counts; or what vLLM says when it fails.

    With `kernels` Triton's interpreter stands in for a GPU; with `forgets` no batch finds prefixes of those before;
    `adapter` is one of LoRA's; `records` is a file for what layers are given and give.
    """
    arguments = {"enforce_eager": True, "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4} | arguments
    request = {"model": str(bundle), "batches": batches, "new_tokens": new_tokens, "arguments": arguments}
    request |= {"kernels": kernels, "forgets": forgets, "adapter": adapter and str(adapter)}
    request["records"] = records and str(records)
    script = Path(__file__).with_name("generate.py")
    ended = subprocess.run(
        [PYTHON, str(script)], input=json.dumps(request), capture_output=True, text=True, timeout=600
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith(MARKER)]
    return json.loads(lines[0].removeprefix(MARKER)) if lines else ended.stderr


def in_runtime(bundle: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    model, _ = load(bundle, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        answer = model.generate(ids, max_new_tokens=NEW, do_sample=False, **options)
        found.append(answer[0, len(prompt) :].tolist())
    return found


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 4000, (n,), generator=generator).tolist() for n in lengths]


SCHEMES = {
    "kivi": "",
    "windows": "value_recent_tokens = 128\nkey_recent_tokens = 20\n",
    "rotated": 'rotate_keys = "hadamard"\nrotate_values = "online"\ntoken_norm = "joint"\nkey_group_size = 128\n',
    "boosted": "boost_fraction = 0.25\nkey_bits = 2\n",
    "calibrated": (
        'key_center = "calibrated"\nkey_rounding = "error_feedback"\n'
        'boost_fraction = 0.125\nboost_select = "calibrated"\n'
    ),
    "static": 'key_bits = 8\nvalue_bits = 8\nstatic_scales = "calibrated"\n',
    # Blocks of three sizes: a layer of 2 bits, one of 8 and 1, and one that is kept, which the others' windows fit.
    "mixed": (
        "value_recent_tokens = 128\n"
        "[[kv.layers]]\nindex = [1]\nkey_bits = 8\nvalue_bits = 1\nboost_fraction = 0.0\n"
        "[[kv.layers]]\nindex = [2]\nkey_bits = 16\nvalue_bits = 16\n"
    ),
    "wide": "key_bits = 8\nvalue_bits = 4\nsink_tokens = 0\n",
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_are_those_of_the_runtime(scheme, tmp_path):
    bundle = bundle_of(tmp_path, SCHEMES[scheme])
    asked = prompts(3, 130, 300)
    # One by one, then side by side: what a request gets does not depend on the others.
    found, _ = in_vllm(bundle, [[prompt] for prompt in asked] + [asked])
    expected = in_runtime(bundle, asked)
    assert found[:3] == expected
    assert found[3:] == expected


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["kivi", "rotated"])
def test_kernels_give_the_same_tokens(scheme, tmp_path):
    """Chunks of prompts beside requests that decode, and the second time prefixes from the cache."""
    bundle, asked, new = bundle_of(tmp_path, SCHEMES[scheme]), prompts(120, 300), 12
    chunks = {"max_num_batched_tokens": 128, "enable_chunked_prefill": True, "enable_prefix_caching": True}
    found, counted = in_vllm(bundle, [asked, asked], new, kernels=True, **chunks)
    assert counted["hits"]
    assert found == in_vllm(bundle, [asked, asked], new, **chunks)[0]


@pytest.mark.full
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_our_kernels_for_few_rows_give_the_tokens_of_vllms_kernels(eager, tmp_path):
    bundle, asked = bundle_of(tmp_path, SCHEMES["kivi"], 4, group=32), prompts(3, 40)
    settings = {"dtype": "bfloat16", "enforce_eager": eager}
    found, ours = in_vllm(bundle, [asked], 6, kernels=True, quantization="kvconvert_awq", **settings)
    # Two layers of qkv, output, gate and up, down.
    assert ours["packed"] == 8
    expected, theirs = in_vllm(bundle, [asked], 6, **settings)
    assert found == expected
    assert not theirs["packed"]


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_weights_of_other_widths_are_read_by_our_kernels(bits, tmp_path):
    bundle, asked = bundle_of(tmp_path, SCHEMES["kivi"], bits), prompts(130)
    # Compiled, as vLLM does unless it is told otherwise.
    found, _ = in_vllm(bundle, [asked], enforce_eager=False)
    assert found == in_runtime(bundle, asked)


def test_prompts_in_chunks_are_those_of_the_runtime(tmp_path):
    bundle, asked = bundle_of(tmp_path, SCHEMES["windows"]), prompts(150, 400)
    chunks = {"max_num_batched_tokens": 100, "max_num_seqs": 1, "enable_chunked_prefill": True}
    found, _ = in_vllm(bundle, [[prompt] for prompt in asked], **chunks)
    assert found == in_runtime(bundle, asked, prefill_chunk_size=100)


def test_requests_go_on_after_an_interruption(tmp_path):
    """Memory for two of three prompts and one more page: a recomputed request reads as a prompt, over tokens in full
    precision, what it had answered, so that it may go on otherwise; the first is never interrupted.
    """
    bundle, asked = bundle_of(tmp_path, SCHEMES["kivi"]), prompts(140, 150, 160)
    blocks = 2 * served_bundle(str(bundle)).layouts(torch.float32)[0].blocks_for(256) + 1
    found, counted = in_vllm(bundle, [asked], num_gpu_blocks_override=1 + blocks, max_model_len=512)
    expected = in_runtime(bundle, asked)
    assert counted["interrupted"]
    assert found[0] == expected[0]
    for tokens, own in zip(found, expected, strict=True):
        assert len(tokens) == NEW
        assert tokens[:64] == own[:64]


# Tokens of prefixes that are found: up to the prompt's recent tokens, and of answers none where these are recent; where
# layers have a cache of vLLM's own, as far as these have it, too, and one block less beside layers that draft.
PREFIXES = {
    "calibrated": [256, 128, 384, 512],
    "wide": [256, 128, 384, 512],
    "windows": [256, 0, 256, 384],
    "beside windows": [128, 0, 256, 256],
    "EAGLE": [128, 128, 256, 384],
}


@pytest.mark.parametrize("case", PREFIXES)
def test_a_prefix_that_is_found_gives_what_reading_it_gives(case, tmp_path):
    """Prompts read in chunks of a page, so that they end where the pages of a prefix do."""
    settings = {"max_num_batched_tokens": 128, "max_num_seqs": 1, "enable_chunked_prefill": True}
    settings |= {"enable_prefix_caching": True}
    if case == "beside windows":
        bundle = gemma2_bundle(tmp_path, SCHEMES["windows"])
    else:
        bundle = bundle_of(tmp_path, SCHEMES["wide" if case == "EAGLE" else case], head_dim=32)
    if case == "EAGLE":
        drafts = eagle(tmp_path / "eagle", tmp_path / "model", torch.eye(64, 128))
        settings["speculative_config"] = {"method": "eagle", "model": str(drafts), "num_speculative_tokens": 2}
    (first, other), new = prompts(400, 150), 160
    # A prompt of the same beginning, one of whole pages, the same again, and one that goes on with the answer.
    (answer,), _ = in_vllm(bundle, [[first]], new, forgets=True, **settings)
    asked = [[first], [first[:300] + other], [first[:256]], [first], [first + answer[:150] + other]]
    read, none = in_vllm(bundle, asked, new, forgets=True, **settings)
    found, counted = in_vllm(bundle, asked, new, **settings)
    assert found == read
    # On GPUs vLLM 0.33 finds the block beside layers that draft, too.
    most = PREFIXES["wide" if case == "EAGLE" else case]
    assert not none["hits"]
    assert sum(PREFIXES[case]) <= counted["hits"] <= sum(most)


def test_two_ranks_give_the_tokens_of_one(tmp_path):
    bundle, asked = bundle_of(tmp_path, SCHEMES["calibrated"] + 'token_norm = "per_head"\n'), prompts(130, 300)
    found, _ = in_vllm(bundle, [asked], tensor_parallel_size=2, distributed_executor_backend="mp")
    assert found == in_runtime(bundle, asked)


@pytest.mark.parametrize("scheme", ["kivi", "mixed"])
def test_two_ranks_with_different_layers_give_the_tokens_of_one(scheme, tmp_path):
    """Layers of several sizes of blocks, and prefixes that are found in both ranks' caches."""
    bundle, asked = bundle_of(tmp_path, SCHEMES[scheme]), prompts(130, 300)
    # vLLM 0.32 makes what its second rank on a CPU receives only where it warms the model up.
    settings = {"enable_prefix_caching": True, "enforce_eager": False}
    ranks = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    found, counted = in_vllm(bundle, [asked, asked[1:]], **settings | ranks)
    assert found[:2] == in_runtime(bundle, asked)
    assert counted["hits"]
    assert found == in_vllm(bundle, [asked, asked[1:]], **settings)[0]


@pytest.mark.parametrize("scheme", ["windows", "kivi"])
def test_drafts_change_no_token(scheme, tmp_path):
    bundle, asked = bundle_of(tmp_path, SCHEMES[scheme]), prompts(100, 300)
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    found, counted = in_vllm(bundle, [asked], speculative_config=drafts)
    assert counted["accepted"]
    assert found == in_runtime(bundle, asked)


def eagle(folder: Path, source: Path, weight: torch.Tensor) -> Path:
    """A draft model (EAGLE) of the source's embedding and first layer; `weight` [C, 2 C] joins the embedding of a token
    with the hidden state before it.
    """
    folder.mkdir()
    found = load_file(source / "model.safetensors")
    own = {name.removeprefix("model."): t for name, t in found.items() if name.startswith("model.layers.0.")}
    del own["layers.0.input_layernorm.weight"]
    own |= {"fc.weight": weight, "embed_tokens.weight": found["model.embed_tokens.weight"]}
    save_file({name: t.contiguous() for name, t in own.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def goes_on_by_its_newest_token(
    source: Path, damped: tuple[str, ...] = ("o_proj.weight", "down_proj.weight"), factor: float = 0.3
) -> dict[str, torch.Tensor]:
    """Make a source go on mostly by its newest token, which a draft model may look at; returns its tensors."""
    found = load_file(file := source / "model.safetensors")
    for name, tensor in found.items():
        tensor.mul_(factor if name.endswith(damped) else 1.0)
    save_file(found, file, {"format": "pt"})
    return found


# What joins the embedding of a token with the hidden state before it: the one alone, and both at random. Beside each
# the minimum and maximum number of drafts accepted in 200 tokens.
DRAFT_SIZE = 128
JOINED = {
    "the newest token": (torch.eye(DRAFT_SIZE, 2 * DRAFT_SIZE), 50, 150),
    "random": (torch.randn(DRAFT_SIZE, 2 * DRAFT_SIZE, generator=torch.Generator().manual_seed(3)), 0, 5),
}


def test_drafts_of_a_model_change_no_token_however_many_are_accepted(tmp_path):
    sizes = {"hidden_size": DRAFT_SIZE, "head_dim": 32, "max_position_embeddings": 2048, "num_hidden_layers": 2}
    save_llama(tmp_path / "model", tie_word_embeddings=False, **SIZES | sizes)
    goes_on_by_its_newest_token(tmp_path / "model")
    bundle, asked = converted(tmp_path, RECIPE.format(method="none", kv="kivi")), prompts(100, 300)
    expected = [tokens[:100] for tokens in in_runtime(bundle, asked)]
    for number, (weight, least, most) in enumerate(JOINED.values()):
        drafts = {"method": "eagle", "num_speculative_tokens": 3}
        drafts["model"] = str(eagle(tmp_path / f"eagle{number}", tmp_path / "model", weight))
        tokens, counted = in_vllm(bundle, [asked], 100, speculative_config=drafts)
        assert tokens == expected
        assert least <= counted["accepted"] <= most


def test_drafts_beside_windows_change_no_token(tmp_path):
    """OLMo 3 with a layer of each type, and drafts of a Llama's layer."""
    sizes = SIZES | {"hidden_size": DRAFT_SIZE, "max_position_embeddings": 2048, "num_hidden_layers": 2}
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40, "vocab_size": 4096}
    types |= {"pad_token_id": None, "eos_token_id": 0, "tie_word_embeddings": False}
    torch.manual_seed(0)
    config = AutoConfig.for_model("olmo3", **sizes, **types)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    found = goes_on_by_its_newest_token(tmp_path / "model", ("layernorm.weight",), 0.005)
    exact = "value_recent_tokens = 128\n[[kv.layers]]\nindex = [0]\nkey_bits = 16\nvalue_bits = 16\n"
    bundle, asked = converted(tmp_path, RECIPE.format(method="none", kv="kivi") + exact), prompts(100, 300)
    save_llama(tmp_path / "draft", tie_word_embeddings=False, head_dim=32, **sizes)
    own = goes_on_by_its_newest_token(tmp_path / "draft") | {
        "model.embed_tokens.weight": found["model.embed_tokens.weight"]
    }
    save_file(own, tmp_path / "draft" / "model.safetensors", {"format": "pt"})
    drafts = {"method": "eagle", "num_speculative_tokens": 3}
    drafts["model"] = str(eagle(tmp_path / "eagle", tmp_path / "draft", JOINED["the newest token"][0]))
    tokens, counted = in_vllm(bundle, [asked], 100, speculative_config=drafts)
    assert tokens == [tokens[:100] for tokens in in_runtime(bundle, asked)]
    assert counted["accepted"] > 50


@pytest.mark.parametrize("joined", JOINED)
def test_drafts_of_a_layer_of_the_checkpoint_change_no_token_however_many_are_accepted(joined, tmp_path):
    """A layer behind the model's own (MTP), as GLM-4.5 has it, and bundles keep it: here a copy of the last."""
    weight, least, most = JOINED[joined]
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    sizes = SIZES | {"hidden_size": DRAFT_SIZE, "head_dim": 32, "vocab_size": 4096, "moe_intermediate_size": 32}
    config = AutoConfig.for_model("glm4_moe", num_hidden_layers=2, num_nextn_predict_layers=1, **sizes, **experts)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    found = goes_on_by_its_newest_token(tmp_path / "model")
    layer = {name.replace(".1.", ".2.", 1): t for name, t in found.items() if name.startswith("model.layers.1.")}
    embeddings, head = found["model.embed_tokens.weight"], found["lm_head.weight"]
    own = {"eh_proj": weight, "enorm": embeddings.std().expand(DRAFT_SIZE), "hnorm": torch.ones(DRAFT_SIZE)}
    own |= {"shared_head.norm": torch.ones(DRAFT_SIZE), "shared_head.head": head, "embed_tokens": embeddings}
    layer |= {f"model.layers.2.{name}.weight": tensor for name, tensor in own.items()}
    every = {name: tensor.clone() for name, tensor in (found | layer).items()}
    save_file(every, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    bundle, asked = converted(tmp_path, RECIPE.format(method="none", kv="kivi")), prompts(100, 300)
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    tokens, counted = in_vllm(bundle, [asked], 100, speculative_config=drafts)
    assert tokens == [tokens[:100] for tokens in in_runtime(bundle, asked)]
    assert least <= counted["accepted"] <= most


def lora(folder: Path, source: Path) -> Path:
    """A random adapter of the Linears that make queries and values, which is also added to the source's weights."""
    folder.mkdir()
    generator, found, own = torch.Generator().manual_seed(4), load_file(file := source / "model.safetensors"), {}
    for name in [name for name in found if name.endswith(("q_proj.weight", "v_proj.weight"))]:
        outputs, inputs = found[name].shape
        a, b = (torch.randn(*shape, generator=generator) for shape in ((4, inputs), (outputs, 4)))
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        own |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b * 0.02}
        found[name] = found[name] + b @ a * 0.02
    save_file(own, folder / "adapter_model.safetensors")
    save_file(found, file, {"format": "pt"})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none", "task_type": "CAUSAL_LM"}))
    return folder


def test_adapters_of_unchanged_weights_are_served_as_if_they_were_added(tmp_path):
    folders = [tmp_path / name for name in ("source", "added")]
    for folder in folders:
        model = save_llama(folder / "model", tie_word_embeddings=False, max_position_embeddings=2048, **SIZES)
        model.float().save_pretrained(folder / "model")
    adapter = lora(tmp_path / "adapter", folders[1] / "model")
    # Where products differ in their last bits, so do few codes of 8 bits.
    recipe = RECIPE.format(method="none", kv="kivi") + "key_bits = 8\nvalue_bits = 8\n"
    bundle, added = (converted(folder, recipe) for folder in folders)
    asked = prompts(130, 300)
    found, _ = in_vllm(bundle, [asked], adapter=adapter, enable_lora=True, max_lora_rank=8)
    expected = in_runtime(added, asked)
    assert found == expected
    assert in_runtime(bundle, asked) != expected


def gemma2_bundle(folder: Path, settings: str) -> Path:
    """A random Gemma 2 with a layer of each type, also with soft caps, as a bundle; `settings` as for `bundle_of`."""
    tiny = ARCHITECTURES["gemma2"]
    sizes = {"head_dim": 32, "query_pre_attn_scalar": 32}
    replace(tiny, settings=tiny.settings | sizes).write(folder / "model")
    return converted(folder, RECIPE.format(method="none", kv="kivi") + settings)


def test_layers_with_windows_are_left_to_vllm(tmp_path):
    """In full precision where a bundle's scheme would not be used."""
    exact = "[[kv.layers]]\nindex = [0]\nkey_bits = 16\nvalue_bits = 16\n"
    bundle, asked = gemma2_bundle(tmp_path, exact), prompts(3, 130, 300)
    found, _ = in_vllm(bundle, [asked], 160)
    assert found == [tokens[:160] for tokens in in_runtime(bundle, asked)]


# Parameters ask which of several processes they are of.
ONE_RANK = """
from vllm.model_executor import parameter
parameter.get_tensor_model_parallel_rank, parameter.get_tensor_model_parallel_world_size = lambda: 0, lambda: 1
"""


def test_our_kernels_join_those_of_awq_on_gpus_alone_and_only_unasked():
    script = (
        ONE_RANK
        + """
import torch
from kvconvert.vllm import weights
known = {"quant_method": "awq", "version": "gemm", "kvconvert": {}}
asked = (known, None), (known, "awq"), (known | {"version": "kvconvert"}, None), ({"version": "gemm"}, None)
methods = weights.BundleWeights, weights.BundleAwqWeights
for is_gpu in (False, True):
    weights.current_platform.is_cuda = lambda: is_gpu
    for config, user in asked:
        print("SAID", [method.override_quantization_method(config, user) for method in methods])
weights.current_platform.is_cuda = lambda: False
known |= {"bits": 4, "group_size": 32, "zero_point": True}
method = weights.FewRowsLinearMethod(weights.BundleAwqWeights.from_config(known), False)
layer = torch.nn.Module()
method.create_weights(layer, 64, [64], 64, 64, torch.bfloat16, weight_loader=print)
print("SAID", layer.scales.dtype, method.dtype)
"""
    )
    ended = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, timeout=300)
    said = [line.removeprefix("SAID ") for line in ended.stdout.splitlines() if line.startswith("SAID")]
    neither, other = "[None, None]", "['kvconvert', None]"
    on_gpus = "[None, 'kvconvert_awq']"
    # Loaded as they are stored, of which vLLM would warn otherwise.
    scales = "torch.float16 torch.bfloat16"
    assert said == [neither, neither, other, neither, on_gpus, neither, other, neither, scales], ended.stderr


def test_a_bias_that_vllms_kernel_keeps_in_its_own_order_is_added_in_the_models():
    script = (
        ONE_RANK
        + """
import torch
from types import SimpleNamespace
from kvconvert.kernels.device import interpreted
from kvconvert.vllm import weights

# Weights of zeros, and a kernel that keeps a bias backwards and all else in parameters of its own.
def take(method, layer):
    bias = layer.bias.data.flip(0)
    for name, _ in list(layer.named_parameters()):
        delattr(layer, name)
    layer.bias = torch.nn.Parameter(bias)
    method.kernel = SimpleNamespace(apply_weights=lambda layer, x, bias: x.new_zeros(len(x), 64) + bias.flip(0))

weights.AutoAWQMarlinLinearMethod.process_weights_after_loading = take
known = {"quant_method": "awq", "version": "gemm", "kvconvert": {}, "bits": 4, "group_size": 32, "zero_point": True}
method = weights.FewRowsLinearMethod(weights.BundleAwqWeights.from_config(known), True)
layer = torch.nn.Module()
method.create_weights(layer, 64, [64], 64, 64, torch.bfloat16, weight_loader=print)
for part in layer.parameters():
    part.data.zero_()
bias = torch.arange(64, dtype=torch.bfloat16)
layer.bias = torch.nn.Parameter(bias.clone())
with interpreted(), torch.no_grad():
    method.process_weights_after_loading(layer)
    for rows in (1, 17):
        x = torch.ones(rows, 64, dtype=torch.bfloat16)
        y, without = method.apply(layer, x, layer.bias), method.apply(layer, x[:1])
        print("SAID", layer.few_rows is not None, torch.equal(y, bias.expand(rows, -1)), without.any().item())
"""
    )
    ended = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, timeout=300)
    said = [line.removeprefix("SAID ") for line in ended.stdout.splitlines() if line.startswith("SAID")]
    assert said == ["True True False"] * 2, ended.stderr


def test_layers_that_draft_do_not_inherit_our_backend_in_either_model_runner():
    script = """
from dataclasses import dataclass
from types import SimpleNamespace
from vllm.config import AttentionConfig, SpeculativeConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backend
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from kvconvert.vllm import plugin

@dataclass
class Config:
    attention_config: AttentionConfig

plugin.register()
kinds = {"backend_per_kind": {"full_attention": Backend.CUSTOM}}
for own in ({"backend": Backend.CUSTOM}, kinds, {"backend": Backend.TRITON_ATTN}):
    for asked in (None, Backend.FLASH_ATTN):
        base = Config(AttentionConfig(**own))
        drafts = SimpleNamespace(attention_backend=asked, moe_backend=None, kv_cache_dtype=None)
        proposer = SimpleNamespace(speculative_config=drafts, vllm_config=base)
        first = SpecDecodeBaseProposer._create_draft_vllm_config(proposer)
        second = SpeculativeConfig.apply_draft_overrides(drafts, base)
        for made in (first.attention_config, second.attention_config):
            print("SAID", made.backend and made.backend.name, len(made.backend_per_kind))
"""
    ended = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, timeout=300)
    said = [line.removeprefix("SAID ") for line in ended.stdout.splitlines() if line.startswith("SAID")]
    ours = ["None 0"] * 2 + ["FLASH_ATTN 0"] * 2
    assert said == [*ours, *ours, "None 0", "TRITON_ATTN 0", "FLASH_ATTN 0", "FLASH_ATTN 0"], ended.stderr


def test_kernels_of_all_bundles_are_compiled_into_one_folder():
    script = """
import os
from types import SimpleNamespace
import vllm.platforms
from kvconvert.vllm import plugin

for is_gpu, own in ((False, None), (True, None), (True, "/mine")):
    vllm.platforms.current_platform = SimpleNamespace(is_cuda=lambda: is_gpu)
    os.environ.pop("TRITON_CACHE_DIR", None)
    if own:
        os.environ["TRITON_CACHE_DIR"] = own
    plugin._share_kernels()
    print("SAID", os.environ.get("TRITON_CACHE_DIR"))
"""
    ended = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, timeout=300)
    said = [line.removeprefix("SAID ") for line in ended.stdout.splitlines() if line.startswith("SAID")]
    assert said == ["None", str(Path.home() / ".triton" / "cache"), "/mine"], ended.stderr


def test_attention_that_is_not_served_is_refused():
    cases = {
        "alibi_slopes": ([0.5], "ALiBi slopes"),
        "sliding_window": (512, "a sliding window"),
        "kv_sharing_target_layer_name": ("model.layers.0.self_attn.attn", "another layer's cache"),
    }
    script = """
import json, sys
from kvconvert.errors import BundleError
from kvconvert.vllm.backend import LowBitAttention
for name, value in json.load(sys.stdin).items():
    try:
        LowBitAttention(4, 64, 1.0, 2, **{name: value})
    except BundleError as error:
        print("SAID", error)
"""
    asked = json.dumps({name: value for name, (value, _) in cases.items()})
    ended = subprocess.run([PYTHON, "-c", script], input=asked, capture_output=True, text=True, timeout=300)
    said = [line for line in ended.stdout.splitlines() if line.startswith("SAID")]
    assert len(said) == len(cases), ended.stderr
    for line, (_, words) in zip(said, cases.values(), strict=True):
        assert f"attention has {words}" in line
        assert "kvconvert serve" in line


def test_what_kernels_and_merged_weights_cannot_serve_is_refused():
    script = """
import torch
from types import SimpleNamespace
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from kvconvert.errors import BundleError
from kvconvert.kernels.device import GPU, imagined
from kvconvert.methods import KVScheme
from kvconvert.vllm import weights
from kvconvert.vllm.backend import LowBitAttention, LowBitBackend
from kvconvert.vllm.bundle import ServedBundle

def said(refuse):
    try:
        refuse()
    except BundleError as error:
        print("SAID", error)

layers = [SimpleNamespace(num_key_value_heads=1, head_dim=64, value_head_dim=None)]
manifest = SimpleNamespace(schemes=lambda: [KVScheme.preset("kivi")], layers=layers, modules=[])
attention = LowBitAttention.__new__(LowBitAttention)
found = SimpleNamespace(manifest=manifest, plan={}, config={})
attention.served, attention.rank, attention.ranks = ServedBundle(found), 0, 1
attention._blocks, attention.num_heads, attention.head_size = None, 4096, 64
size = attention.served.layouts(torch.bfloat16)[0].block_bytes
memory = torch.zeros(2, size, dtype=torch.int8)
layer = SimpleNamespace(kv_cache=memory, layer_name="model.layers.0.attn", dtype=torch.bfloat16)
with imagined(GPU((9, 0), 132)):
    said(lambda: attention.blocks(layer))

windowed = SlidingWindowSpec(block_size=128, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=512)
said(lambda: LowBitBackend.spec("model.layers.0.attn", windowed))

method = weights.BundleWeights()
q = SimpleNamespace(name="model.layers.0.self_attn.q_proj", method="rtn")
method.__dict__["_modules"] = {q.name: q}
method.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
said(lambda: method.get_quant_method(torch.nn.Linear(1, 1), "model.layers.0.self_attn.qkv_proj"))
said(lambda: method.get_quant_method(torch.nn.Embedding(1, 1), q.name))
"""
    ended = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, timeout=300)
    said = [line for line in ended.stdout.splitlines() if line.startswith("SAID")]
    expected = (
        "4096 query heads per KV head are more than",
        "SlidingWindowSpec",
        "self_attn.qkv_proj",
        "self_attn.q_proj",
    )
    assert len(said) == len(expected), ended.stderr
    for line, words in zip(said, expected, strict=True):
        assert words in line


def test_a_refusal_is_what_ends_the_start(tmp_path):
    bundle = bundle_of(tmp_path, SCHEMES["windows"])
    said = in_vllm(bundle, [], block_size=16)
    assert said.splitlines()[-1].startswith("BundleError: A kvconvert bundle cannot be served with --block-size 16")
