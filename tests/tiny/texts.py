"""The configurations of tiny text models, as data; `tiny.models.ARCHITECTURES` is made of them."""

from __future__ import annotations

from typing import Any

VOCABULARY = 4096  # of the reference model's tokenizer
# Added for vision-language and audio-language models.
TOKENS = {
    "<image>": 4096,
    "<video>": 4097,
    "<vision_start>": 4098,
    "<vision_end>": 4099,
    "<audio>": 4100,
    "<audio_start>": 4101,
    "<audio_end>": 4102,
    "<fake_token_around_image>": 4103,
}
WINDOW = 40

SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
BASE = SPECIAL | {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
NO_HEAD_DIM = {k: v for k, v in BASE.items() if k != "head_dim"}
MHA = {k: v for k, v in NO_HEAD_DIM.items() if k != "num_key_value_heads"}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
BOTH_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
}
SCALED = 1 / 8  # embeddings that the model multiplies by the square root of 64


def partial_rope(factor: float = 0.5) -> dict[str, Any]:
    """Rotary positions on part of each head."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}}


def experts(width: int = 32, **names: Any) -> dict[str, Any]:
    """Four experts of which two answer."""
    return {"num_experts_per_tok": 2, "moe_intermediate_size": width} | names


LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
GEMMA4 = (
    BASE
    | ALTERNATING
    | {
        "sliding_window": WINDOW,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "tie_word_embeddings": True,
        "global_head_dim": 32,
    }
)
GEMMA3N = BASE | {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [128] * 4,
    "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "laurel_rank": 8,
    "rope_parameters": BOTH_ROPES,
    "tie_word_embeddings": True,
}


def text(
    features: str, config: dict[str, Any], scale: float = 0.5, kind: str = ""
) -> tuple[str, str, float, dict[str, Any]]:
    """Model type, if it is not the name; features; standard deviation of the embeddings; configuration."""
    return kind, features, scale, config


TEXTS: dict[str, tuple[str, str, float, dict[str, Any]]] = {
    "llama": text("", BASE),
    "mistral": text("sliding", BASE | {"sliding_window": WINDOW}),
    "ministral": text("sliding", BASE | ALTERNATING),
    "ministral3": text("", BASE),
    "qwen2": text("", NO_HEAD_DIM),
    "qwen3": text("qk_norm", BASE),
    "gemma": text("", BASE | {"tie_word_embeddings": True}, scale=SCALED),
    "gemma2": text(
        "sliding softcap",
        BASE | ALTERNATING | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "tie_word_embeddings": True},
        scale=SCALED,
    ),
    "gemma3_text": text(
        "sliding qk_norm",
        BASE | ALTERNATING | {"query_pre_attn_scalar": 16, "rope_parameters": BOTH_ROPES, "tie_word_embeddings": True},
        scale=SCALED,
    ),
    "gemma3n_text": text("sliding kv_sharing qk_norm", GEMMA3N, scale=SCALED),
    "gemma4_text": text("sliding partial_rotary qk_norm", GEMMA4, scale=SCALED),
    "gemma4_text_shared": text(
        "sliding partial_rotary kv_sharing qk_norm",
        GEMMA4
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
        },
        scale=SCALED,
        kind="gemma4_text",
    ),
    "gemma4_text_same_kv": text(
        "sliding partial_rotary qk_norm values_are_keys",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        scale=SCALED,
        kind="gemma4_text",
    ),
    "gemma4_text_moe": text(
        "sliding partial_rotary qk_norm moe",
        GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        scale=SCALED,
        kind="gemma4_text",
    ),
    "phi": text("partial_rotary parallel", MHA | partial_rope()),
    "phi3": text(
        "partial_rotary fused_projections", NO_HEAD_DIM | partial_rope() | {"original_max_position_embeddings": 1024}
    ),
    "olmo": text("", NO_HEAD_DIM),
    "olmo2": text("qk_norm no_pre_norm", NO_HEAD_DIM),
    "olmo3": text("sliding qk_norm no_pre_norm", NO_HEAD_DIM | ALTERNATING),
    "granite": text(
        "",
        NO_HEAD_DIM
        | {"embedding_multiplier": 4.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 2.0},
        scale=0.5 / 4,
    ),
    "cohere": text("parallel", NO_HEAD_DIM | {"tie_word_embeddings": True, "logit_scale": 0.25}),
    "cohere2": text("sliding parallel", BASE | ALTERNATING | {"tie_word_embeddings": True, "logit_scale": 0.25}),
    "glm": text("partial_rotary fused_projections", BASE | partial_rope()),
    "glm4": text("partial_rotary fused_projections", BASE | partial_rope()),
    "smollm3": text("no_rotary", NO_HEAD_DIM | {"no_rope_layers": [1, 0]}),
    "mixtral": text("moe", BASE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": text(
        "moe", NO_HEAD_DIM | experts(num_experts=4, shared_expert_intermediate_size=32, decoder_sparse_step=1)
    ),
    "qwen3_moe": text("moe qk_norm", BASE | experts(num_experts=4)),
    "gpt_oss": text(
        "moe sinks sliding",
        BASE
        | ALTERNATING
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4_text": text(
        "moe chunked no_rotary qk_norm",
        BASE
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
            "interleave_moe_layer_step": 2,
        },
    ),
    "ernie4_5_moe": text(
        "moe",
        BASE
        | {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    ),
    "glm4_moe": text(
        "moe partial_rotary qk_norm",
        BASE
        | partial_rope()
        | experts(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=True),
    ),
    "dots1": text(
        "moe qk_norm",
        BASE | experts(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, sliding_window=None),
    ),
    "exaone_moe": text(
        "moe qk_norm sliding no_rotary",
        BASE
        | ALTERNATING
        | experts(num_experts=4, num_shared_experts=1, n_group=1, topk_group=1)
        | {"mlp_layer_types": ["dense", "sparse"]},
    ),
    "mellum": text(
        "moe qk_norm",
        BASE | experts(num_experts=4) | {"layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "solar_open": text("moe", BASE | experts(n_routed_experts=4, n_shared_experts=1, n_group=1)),
    "minimax_m2": text(
        "moe qk_norm", BASE | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    ),
    "phimoe": text("moe", NO_HEAD_DIM | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}),
    "olmoe": text("moe qk_norm", NO_HEAD_DIM | {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": text(
        "moe", NO_HEAD_DIM | {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.25}
    ),
    "granitemoeshared": text(
        "moe",
        NO_HEAD_DIM
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.25,
            "shared_intermediate_size": 64,
        },
    ),
    "hunyuan_v1_moe": text("moe qk_norm", BASE | {"num_experts": 4, "moe_topk": 2}),
    "deepseek_v2": text(
        "mla moe", BASE | LATENT | experts(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1)
    ),
    "deepseek_v3": text(
        "mla moe",
        BASE
        | LATENT
        | experts(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1),
    ),
    "glm4_moe_lite": text(
        "mla moe",
        BASE
        | LATENT
        | experts(n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1)
        | {"mlp_layer_types": ["dense", "sparse"]},
    ),
    "starcoder2": text("sliding", NO_HEAD_DIM | {"sliding_window": WINDOW}),
    "stablelm": text("partial_rotary", NO_HEAD_DIM | partial_rope()),
    "gpt_neox": text("partial_rotary parallel fused_projections", MHA | partial_rope()),
    "opt": text(
        "learned_positions",
        SPECIAL
        | {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 1024,
            "dropout": 0.0,
            "pad_token_id": 1,
        },
    ),
    "gpt2": text(
        "learned_positions fused_projections",
        SPECIAL | {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024},
    ),
    "exaone4": text("sliding qk_norm no_pre_norm no_rotary", NO_HEAD_DIM | ALTERNATING),
    "hunyuan_v1_dense": text("qk_norm", BASE),
    "ernie4_5": text("", BASE),
    "nemotron": text("partial_rotary", BASE | partial_rope()),
    "seed_oss": text("", BASE),
    "bloom": text(
        "alibi fused_projections", SPECIAL | {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4}
    ),
    "mpt": text(
        "alibi fused_projections",
        SPECIAL | {"vocab_size": VOCABULARY, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 1024},
    ),
    "falcon": text(
        "parallel fused_projections",
        MHA | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 128},
    ),
    "falcon_alibi": text(
        "alibi fused_projections",
        MHA | {"alibi": True, "num_kv_heads": 2, "parallel_attn": False, "ffn_hidden_size": 128},
        kind="falcon",
    ),
    "qwen3_next": text(
        "linear_attention moe qk_norm partial_rotary",
        BASE
        | LINEAR
        | partial_rope()
        | experts(num_experts=4, shared_expert_intermediate_size=32, decoder_sparse_step=1),
    ),
    "qwen3_5_text": text("linear_attention qk_norm partial_rotary", BASE | LINEAR | partial_rope()),
    "qwen3_5_moe_text": text(
        "linear_attention moe qk_norm partial_rotary",
        BASE | LINEAR | partial_rope() | experts(num_experts=4, shared_expert_intermediate_size=32),
    ),
    "lfm2": text(
        "linear_attention qk_norm", NO_HEAD_DIM | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}
    ),
    "jamba": text(
        "linear_attention moe no_rotary",
        NO_HEAD_DIM
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": text(
        "linear_attention partial_rotary", NO_HEAD_DIM | MAMBA | partial_rope() | {"attn_layer_indices": [1]}
    ),
    "granitemoehybrid": text(
        "linear_attention moe no_rotary",
        NO_HEAD_DIM
        | MAMBA
        | {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "shared_intermediate_size": 64,
            "attention_multiplier": 0.25,
        },
    ),
    "falcon_h1": text("linear_attention", NO_HEAD_DIM | MAMBA | {"mamba_d_ssm": 128}),
}
