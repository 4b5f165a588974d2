"""Tiny random models with experts, of every family with experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

_SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 32, "mlp_only_layers": [0]},
    "qwen3_moe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 64} | _ROPE,
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "moe_layers": [1]},
    "deepseek_v2": _SHARED | _LATENT | {"q_lora_rank": None, "num_key_value_heads": 4},
    "deepseek_v3": _SHARED | _LATENT | {"q_lora_rank": 32, "num_key_value_heads": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    "glm4_moe": _SHARED,
    "dots1": _SHARED,
    "glm4_moe_lite": _SHARED | _LATENT | {"q_lora_rank": 32, "num_key_value_heads": 4},
    "exaone_moe": {"num_experts": 4, "num_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "mellum": {"num_experts": 4},
    "solar_open": _SHARED,
    "minimax_m2": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4} | _ROPE,
    "olmoe": {"num_experts": 4},
    "granitemoe": {"num_local_experts": 4},
    "granitemoeshared": {"num_local_experts": 4, "shared_intermediate_size": 32},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
}


def tiny_mixture(model_type: str, **overrides: Any) -> nn.Module:
    """Two layers of 64 channels, four experts in one or both, with weights large enough that routing matters."""
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 4096,
        "max_position_embeddings": 128,
        "num_experts_per_tok": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(model_type, **settings | MIXTURES[model_type] | overrides)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.normal_(1, 0.3)
            parameter[::16] *= 5
        else:
            parameter.normal_(0, 0.15)
    return model


def few_and_full() -> list[Any]:
    """Every family as a parameter of tests; those that differ most run always, the others in the full suite."""
    few = ("qwen2_moe", "gpt_oss", "llama4_text", "deepseek_v3")
    return [name if name in few else pytest.param(name, marks=pytest.mark.full) for name in MIXTURES]
