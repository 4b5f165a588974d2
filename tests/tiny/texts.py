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

# name: (model type, features, standard deviation of the embeddings, configuration)
TEXTS: dict[str, tuple[str, str, float, dict[str, Any]]] = {
    "llama": ("llama", "", 0.5, BASE),
    "mistral": ("mistral", "sliding", 0.5, BASE | {"sliding_window": WINDOW}),
    "ministral": ("ministral", "sliding", 0.5, BASE | ALTERNATING),
    "ministral3": ("ministral3", "", 0.5, BASE),
    "qwen2": ("qwen2", "", 0.5, NO_HEAD_DIM),
    "qwen3": ("qwen3", "qk_norm", 0.5, BASE),
    "gemma": ("gemma", "", SCALED, BASE | {"tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        "sliding softcap",
        SCALED,
        BASE | ALTERNATING | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "tie_word_embeddings": True},
    ),
    "gemma3_text": (
        "gemma3_text",
        "sliding qk_norm",
        SCALED,
        BASE | ALTERNATING | {"query_pre_attn_scalar": 16, "rope_parameters": BOTH_ROPES, "tie_word_embeddings": True},
    ),
    "gemma3n_text": ("gemma3n_text", "sliding kv_sharing qk_norm", SCALED, GEMMA3N),
    "gemma4_text": ("gemma4_text", "sliding partial_rotary qk_norm", SCALED, GEMMA4),
    "gemma4_text_shared": (
        "gemma4_text",
        "sliding partial_rotary kv_sharing qk_norm",
        SCALED,
        GEMMA4
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "gemma4_text_same_kv": (
        "gemma4_text",
        "sliding partial_rotary qk_norm values_are_keys",
        SCALED,
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4_text_moe": (
        "gemma4_text",
        "sliding partial_rotary qk_norm moe",
        SCALED,
        GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "phi": ("phi", "partial_rotary parallel", 0.5, MHA | partial_rope()),
    "phi3": (
        "phi3",
        "partial_rotary fused_projections",
        0.5,
        NO_HEAD_DIM | partial_rope() | {"original_max_position_embeddings": 1024},
    ),
    "olmo": ("olmo", "", 0.5, NO_HEAD_DIM),
    "olmo2": ("olmo2", "qk_norm no_pre_norm", 0.5, NO_HEAD_DIM),
    "olmo3": ("olmo3", "sliding qk_norm no_pre_norm", 0.5, NO_HEAD_DIM | ALTERNATING),
    "granite": (
        "granite",
        "",
        0.5 / 4,
        NO_HEAD_DIM
        | {"embedding_multiplier": 4.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "cohere": ("cohere", "parallel", 0.5, NO_HEAD_DIM | {"tie_word_embeddings": True, "logit_scale": 0.25}),
    "cohere2": (
        "cohere2",
        "sliding parallel",
        0.5,
        BASE | ALTERNATING | {"tie_word_embeddings": True, "logit_scale": 0.25},
    ),
    "glm": ("glm", "partial_rotary fused_projections", 0.5, BASE | partial_rope()),
    "glm4": ("glm4", "partial_rotary fused_projections", 0.5, BASE | partial_rope()),
    "smollm3": ("smollm3", "no_rotary", 0.5, NO_HEAD_DIM | {"no_rope_layers": [1, 0]}),
    "mixtral": ("mixtral", "moe", 0.5, BASE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "qwen2_moe",
        "moe",
        0.5,
        NO_HEAD_DIM | experts(num_experts=4, shared_expert_intermediate_size=32, decoder_sparse_step=1),
    ),
    "qwen3_moe": ("qwen3_moe", "moe qk_norm", 0.5, BASE | experts(num_experts=4)),
    "gpt_oss": (
        "gpt_oss",
        "moe sinks sliding",
        0.5,
        BASE
        | ALTERNATING
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4_text": (
        "llama4_text",
        "moe chunked no_rotary qk_norm",
        0.5,
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
    "ernie4_5_moe": (
        "ernie4_5_moe",
        "moe",
        0.5,
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
    "glm4_moe": (
        "glm4_moe",
        "moe partial_rotary qk_norm",
        0.5,
        BASE
        | partial_rope()
        | experts(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=True),
    ),
    "dots1": (
        "dots1",
        "moe qk_norm",
        0.5,
        BASE | experts(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, sliding_window=None),
    ),
    "exaone_moe": (
        "exaone_moe",
        "moe qk_norm sliding no_rotary",
        0.5,
        BASE
        | ALTERNATING
        | experts(num_experts=4, num_shared_experts=1, n_group=1, topk_group=1)
        | {"mlp_layer_types": ["dense", "sparse"]},
    ),
    "mellum": (
        "mellum",
        "moe qk_norm",
        0.5,
        BASE | experts(num_experts=4) | {"layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "solar_open": ("solar_open", "moe", 0.5, BASE | experts(n_routed_experts=4, n_shared_experts=1, n_group=1)),
    "minimax_m2": (
        "minimax_m2",
        "moe qk_norm",
        0.5,
        BASE | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    ),
    "phimoe": (
        "phimoe",
        "moe",
        0.5,
        NO_HEAD_DIM | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    ),
    "olmoe": ("olmoe", "moe qk_norm", 0.5, NO_HEAD_DIM | {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": (
        "granitemoe",
        "moe",
        0.5,
        NO_HEAD_DIM | {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.25},
    ),
    "granitemoeshared": (
        "granitemoeshared",
        "moe",
        0.5,
        NO_HEAD_DIM
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.25,
            "shared_intermediate_size": 64,
        },
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", "moe qk_norm", 0.5, BASE | {"num_experts": 4, "moe_topk": 2}),
    "deepseek_v2": (
        "deepseek_v2",
        "mla moe",
        0.5,
        BASE | LATENT | experts(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1),
    ),
    "deepseek_v3": (
        "deepseek_v3",
        "mla moe",
        0.5,
        BASE
        | LATENT
        | experts(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1),
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        "mla moe",
        0.5,
        BASE
        | LATENT
        | experts(n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1)
        | {"mlp_layer_types": ["dense", "sparse"]},
    ),
    "starcoder2": ("starcoder2", "sliding", 0.5, NO_HEAD_DIM | {"sliding_window": WINDOW}),
    "stablelm": ("stablelm", "partial_rotary", 0.5, NO_HEAD_DIM | partial_rope()),
    "gpt_neox": ("gpt_neox", "partial_rotary parallel fused_projections", 0.5, MHA | partial_rope()),
    "opt": (
        "opt",
        "learned_positions",
        0.5,
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
    "gpt2": (
        "gpt2",
        "learned_positions fused_projections",
        0.5,
        SPECIAL | {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024},
    ),
    "exaone4": ("exaone4", "sliding qk_norm no_pre_norm no_rotary", 0.5, NO_HEAD_DIM | ALTERNATING),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", "qk_norm", 0.5, BASE),
    "ernie4_5": ("ernie4_5", "", 0.5, BASE),
    "nemotron": ("nemotron", "partial_rotary", 0.5, BASE | partial_rope()),
    "seed_oss": ("seed_oss", "", 0.5, BASE),
    "bloom": (
        "bloom",
        "alibi fused_projections",
        0.5,
        SPECIAL | {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    ),
    "mpt": (
        "mpt",
        "alibi fused_projections",
        0.5,
        SPECIAL | {"vocab_size": VOCABULARY, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 1024},
    ),
    "falcon": (
        "falcon",
        "parallel fused_projections",
        0.5,
        MHA | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 128},
    ),
    "falcon_alibi": (
        "falcon",
        "alibi fused_projections",
        0.5,
        MHA | {"alibi": True, "num_kv_heads": 2, "parallel_attn": False, "ffn_hidden_size": 128},
    ),
    "qwen3_next": (
        "qwen3_next",
        "linear_attention moe qk_norm partial_rotary",
        0.5,
        BASE
        | LINEAR
        | partial_rope()
        | experts(num_experts=4, shared_expert_intermediate_size=32, decoder_sparse_step=1),
    ),
    "qwen3_5_text": ("qwen3_5_text", "linear_attention qk_norm partial_rotary", 0.5, BASE | LINEAR | partial_rope()),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        "linear_attention moe qk_norm partial_rotary",
        0.5,
        BASE | LINEAR | partial_rope() | experts(num_experts=4, shared_expert_intermediate_size=32),
    ),
    "lfm2": (
        "lfm2",
        "linear_attention qk_norm",
        0.5,
        NO_HEAD_DIM | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
    ),
    "jamba": (
        "jamba",
        "linear_attention moe no_rotary",
        0.5,
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
    "bamba": (
        "bamba",
        "linear_attention partial_rotary",
        0.5,
        NO_HEAD_DIM | MAMBA | partial_rope() | {"attn_layer_indices": [1]},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        "linear_attention moe no_rotary",
        0.5,
        NO_HEAD_DIM
        | MAMBA
        | {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "shared_intermediate_size": 64,
            "attention_multiplier": 0.25,
        },
    ),
    "falcon_h1": ("falcon_h1", "linear_attention", 0.5, NO_HEAD_DIM | MAMBA | {"mamba_d_ssm": 128}),
}
