"""Families of models in vLLM, each layer by itself: where pages of two bits begin, tokens part by the order of sums.

Keys that differ in their last bits round to another scale or code now and then, which moves logits by hundredths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_vllm.test_tokens import PYTHON, SCHEMES, converted, in_runtime, in_vllm, prompts
from tiny.llama import RECIPE
from tiny.models import TinyModel
from tiny.texts import TEXTS

from kvconvert import load
from kvconvert.kernels.attention import attention_reference
from kvconvert.kernels.pages import dequantize_pages, quantize_pages
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.vllm.bundle import served_bundle

pytestmark = pytest.mark.skipif(not PYTHON, reason="KVCONVERT_VLLM_PYTHON names no Python with vLLM and kvconvert")
BASE = TEXTS["llama"][3] | {"max_position_embeddings": 2048}
# In words of its authors besides, which vLLM reads; its layers with windows vLLM attends to on GPUs alone.
MIMO = {"layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense"] * 2, "head_dim": 64, "v_head_dim": 32}
MIMO |= {"hybrid_layer_pattern": [0, 0], "moe_layer_freq": [0, 0], "layernorm_epsilon": 1e-5}
ROPE = {"rope_theta": 5e6, "partial_rotary_factor": 0.5}
MIMO |= ROPE | {"rope_parameters": {"full_attention": {"rope_type": "default"} | ROPE}}
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"truncate": False, "original_max_position_embeddings": 1024}
# vLLM keeps layers with windows in full precision.
EXACT = "[[kv.layers]]\nindex = [0]\nkey_bits = 16\nvalue_bits = 16\n"
# What each is besides `BASE`, and lines of a recipe's [kv].
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "glm4_moe": (TEXTS["glm4_moe"][3], SCHEMES["kivi"]),
    "gemma4_text": (TEXTS["gemma4_text"][3] | {"head_dim": 32}, EXACT),
    "gpt_oss": (TEXTS["gpt_oss"][3] | {"head_dim": 32, "rope_parameters": YARN}, EXACT),
    "mimo_v2_flash": (MIMO, SCHEMES["rotated"]),
}
# DeepSeek V3 with its own sizes of latents, which vLLM wants on CPUs.
LATENTS = {"kv_lora_rank": 512, "q_lora_rank": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32}
LATENTS |= {"head_dim": 64, "v_head_dim": 32, "num_key_value_heads": 4, "first_k_dense_replace": 2}


def bundle_of(folder: Path, family: str, config: dict[str, Any], recipe: str) -> Path:
    """A random model of a type, with these fields of its config.json besides `BASE`, as a bundle."""
    embedding = TEXTS[family][2] if family in TEXTS else 0.5
    TinyModel(family, BASE | config, embedding=embedding).write(folder / "model")
    return converted(folder, recipe)


def as_stored(tokens: torch.Tensor, pages: int, format: Any, is_key: bool) -> torch.Tensor:
    """Keys or values [H, T, channels] whose first pages are replaced by their quantized form, except sink tokens."""
    stored, sinks, (f, tensors) = tokens.clone(), format.sink_tokens, format.side(is_key)
    for page in range(pages):
        part = slice(128 * page, 128 * page + 128)
        quantized = quantize_pages(tokens[None, :, part], f, tensors, 0 if page else sinks)
        stored[:, part] = dequantize_pages(quantized, tensors)[0]
    stored[:, :sinks] = tokens[:, :sinks]
    return stored


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_attends_to_pages_of_the_tokens_that_it_was_given(family, tmp_path):
    config, settings = FAMILIES[family]
    bundle = bundle_of(tmp_path, family, config, RECIPE.format(method="none", kv="kivi") + settings)
    asked, new = prompts(3, 130), 40
    found, _ = in_vllm(bundle, [[prompt] for prompt in asked], new, records=tmp_path / "records")
    # Without a complete page nothing is quantized, and tokens are those of the runtime.
    assert found[:1] == [tokens[:new] for tokens in in_runtime(bundle, asked[:1])]
    records, served = torch.load(tmp_path / "records", weights_only=False), served_bundle(str(bundle))
    assert {record[0] for record in records} == set(served.attending)
    for layer in served.attending:
        passes = [record[1:] for record in records if record[0] == layer]
        # The last are those of the second prompt.
        passes = passes[-new:]
        assert len(passes[0][0]) == len(asked[1])
        format, layout = served.layer(layer, torch.device("cpu"), torch.float32)
        keys, values = (torch.cat([given[side] for given in passes]).transpose(0, 1) for side in (1, 2))
        keys = hadamard_transform(keys) if format.rotations.keys else keys
        values = hadamard_transform(values) if format.rotations.values else values
        for step, (queries, _, _, output, scoring) in enumerate(passes[1:]):
            stored = len(asked[1]) + step
            counts = layout.quantized(stored)
            assert counts == (1, 1)
            every = [
                as_stored(side[:, : stored + 1], count, format, is_key)
                for side, count, is_key in zip((keys, values), counts, (True, False), strict=True)
            ]
            queries = queries.transpose(0, 1)
            queries = hadamard_transform(queries) if format.rotations.keys else queries
            expected = attention_reference(queries, *every, torch.ones(1, stored + 1).bool(), *scoring).output.float()
            expected = hadamard_transform(expected, inverse=True) if format.rotations.values else expected
            torch.testing.assert_close(output.transpose(0, 1), expected, atol=2e-5, rtol=0)


def test_latents_are_left_to_vllm(tmp_path):
    """Weights are the bundle's, and tokens those of its full-precision latents."""
    recipe = RECIPE.format(method="rtn", kv="latent-4bit").replace("group_size", "bits = 8\ngroup_size")
    bundle, asked = bundle_of(tmp_path, "deepseek_v3", LATENTS, recipe), prompts(3, 100)
    # vLLM's own operator for rotary positions errs here on CPUs, also with the source.
    found, _ = in_vllm(bundle, [asked], 20, compilation_config={"custom_ops": ["none"]})
    model, _ = load(bundle, dtype=torch.float32)
    for prompt, tokens in zip(asked, found, strict=True):
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(1).tolist() == tokens
