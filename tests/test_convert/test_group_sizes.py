"""The group size "auto" fits the shapes that models come in."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvconvert.convert.checks import fitted_weights
from kvconvert.convert.discovery import discover
from kvconvert.convert.layer_runner import build_without_weights
from kvconvert.errors import RecipeError
from kvconvert.methods.awq import WeightsRecipe

# hidden, intermediate (of experts where they are routed), query heads, KV heads, head size, and the group size.
SHAPES = {
    "SmolLM2-135M": (576, 1536, 9, 3, 64, 32),
    "Gemma-3-270M": (640, 2048, 4, 1, 256, 32),
    "Qwen2.5-0.5B": (896, 4864, 14, 2, 64, 32),
    "SmolLM2-360M": (960, 2560, 15, 5, 64, 32),
    "Gemma-3-1B": (1152, 6912, 4, 1, 256, 32),
    "Qwen2.5-1.5B": (1536, 8960, 12, 2, 128, 32),
    "Llama-3.2-1B": (2048, 8192, 32, 8, 64, 64),
    "Qwen3-30B-A3B": (2048, 768, 32, 4, 128, 64),
    "Qwen1.5-MoE-A2.7B": (2048, 1408, 16, 16, 128, 64),
    "Gemma-2-2B": (2304, 9216, 8, 4, 256, 64),
    "MiniCPM-2B": (2304, 5760, 36, 36, 64, 64),
    "Phi-2": (2560, 10240, 32, 32, 80, 64),
    "gpt-oss-20b": (2880, 2880, 64, 8, 64, 64),
    "Llama-3.2-3B": (3072, 8192, 24, 8, 128, 64),
    "Gemma-7B": (3072, 24576, 16, 16, 256, 64),
    "Qwen2.5-7B": (3584, 18944, 28, 4, 128, 128),
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128, 128),
    "GLM-4-9B": (4096, 13696, 32, 2, 128, 128),
    "Falcon-7B": (4544, 18176, 71, 1, 64, 64),
    "Mistral-Nemo-12B": (5120, 14336, 32, 8, 128, 128),
    "Llama-2-13B": (5120, 13824, 40, 40, 128, 128),
    "Gemma-3-27B": (5376, 21504, 32, 16, 128, 128),
}


@cache
def structure():
    """Of a Llama layer, whatever its size."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return discover(build_without_weights(LlamaConfig(vocab_size=8, num_hidden_layers=1, **sizes))).structures[0]


def runner_of(hidden, intermediate, heads, kv_heads, head_dim):
    """A one-layer Llama of this shape on the meta device, as much of a runner as the check reads."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=1,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return SimpleNamespace(
        model=model,
        config=config,
        num_layers=1,
        structure=lambda index: structure(),
        layer_name=lambda index: f"model.layers.{index}",
    )


@pytest.mark.parametrize("name", SHAPES)
def test_auto_fits_common_shapes(name):
    *shape, expected = SHAPES[name]
    assert fitted_weights(runner_of(*shape), WeightsRecipe()).group_size == expected


def test_auto_weights_are_compensated_but_for_mixtures_of_experts():
    runner = runner_of(*SHAPES["SmolLM2-135M"][:5])
    assert fitted_weights(runner, WeightsRecipe()).method == "awq+gptq"
    assert fitted_weights(runner, WeightsRecipe(method="rtn")).method == "rtn"
    plain, number = runner.structure, iter(range(2))
    # A mixture's first layers may be dense.
    runner.structure = lambda index: replace(plain(0), experts=object() if next(number, 0) else None)
    runner.num_layers = 2
    assert fitted_weights(runner, WeightsRecipe()).method == "awq"


def test_a_stated_group_size_that_does_not_fit_is_refused_with_one_that_does():
    with pytest.raises(RecipeError, match=r"128 does not divide the 576 inputs.*set group_size = 64"):
        fitted_weights(runner_of(*SHAPES["SmolLM2-135M"][:5]), WeightsRecipe(group_size=128))
