"""Fused experts taken apart: the same function, the names that checkpoints give to experts, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from kvconvert.errors import CheckpointError, UnsupportedModelError
from kvconvert.experts import separate_experts, split_fused
from kvconvert.runtime.experts import EXPERT_ROLES

SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
MODELS = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "max_position_embeddings": 4096 * 32},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64},
    "deepseek_v2": SHARED | LATENT | {"q_lora_rank": None, "num_key_value_heads": 4},
    "deepseek_v3": SHARED | LATENT | {"q_lora_rank": 32, "num_key_value_heads": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "glm4_moe": SHARED,
    "olmoe": {"num_experts": 4, "eos_token_id": 0},
    "granitemoe": {"num_local_experts": 4},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
}


def tiny(model_type: str) -> nn.Module:
    """Two layers of 64 channels with four experts, weights large enough that routing and biases matter."""
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "max_position_embeddings": 128,
        "num_experts_per_tok": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = AutoConfig.for_model(model_type, **settings | MODELS[model_type])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.1) if parameter.ndim > 1 else parameter.normal_(1, 0.3)
    return model


@pytest.mark.parametrize("model_type", MODELS)
@torch.no_grad()
def test_separate_experts_compute_what_the_fused_ones_do(model_type):
    model, ids = tiny(model_type), torch.randint(0, 128, (2, 24), generator=torch.manual_seed(1))
    expected, single = model(ids).logits, model(ids[:1, :1]).logits
    parameters = sum(parameter.numel() for parameter in model.parameters())
    separate_experts(model, EXPERT_ROLES[0])
    assert not [name for name, parameter in model.named_parameters() if parameter.ndim > 2]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    # Sums over an expert's tokens are taken in another order than grouped products take them.
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(ids[:1, :1]).logits, single, rtol=1e-5, atol=1e-5)


def test_the_names_are_the_ones_that_were_asked_for():
    layer = separate_experts(tiny("mixtral").model.layers[0], EXPERT_ROLES[1])
    assert isinstance(layer.mlp.experts.get_submodule("3.w2"), nn.Linear)
    assert {name.rpartition(".experts.")[2] for name in layer.state_dict() if ".experts.3." in name} == {
        "3.w1.weight",
        "3.w3.weight",
        "3.w2.weight",
    }


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "llama4_text"])
def test_fused_tensors_fill_a_layer_without_weights_and_separate_ones_pass_through(model_type):
    source = tiny(model_type).model.layers[1]
    fused = source.state_dict()
    with torch.device("meta"):
        empty = separate_experts(tiny(model_type).model.layers[1].to("meta"), EXPERT_ROLES[0])
    split = split_fused(empty, fused, "layers.1")
    expected = separate_experts(source, EXPERT_ROLES[0]).state_dict()
    assert split.keys() == expected.keys() == empty.state_dict().keys()
    assert all(torch.equal(split[name], expected[name]) for name in expected)
    assert split_fused(empty, split, "layers.1") == split


def test_a_fused_tensor_of_another_shape_is_refused_by_name():
    layer = tiny("mixtral").model.layers[0]
    tensors = layer.state_dict()
    tensors["mlp.experts.down_proj"] = tensors["mlp.experts.down_proj"][:3]
    separate_experts(layer, EXPERT_ROLES[0])
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.down_proj has shape \[3, 64, 96\] .*\[4, "):
        split_fused(layer, tensors, "layers.0")


def test_experts_of_an_unknown_kind_are_refused():
    class OddExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = nn.Parameter(torch.zeros(4, 8, 8))

    with pytest.raises(UnsupportedModelError, match="OddExperts with up_proj"):
        separate_experts(nn.Sequential(OddExperts()), EXPERT_ROLES[0])
