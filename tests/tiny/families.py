"""Tiny models of families beyond `ARCHITECTURES`: latent attention beside linear attention, and sparse attention."""

from tiny.models import TinyModel

LATENTS = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 4, "vocab_size": 128, "max_position_embeddings": 2048, "pad_token_id": 0}
SMALL |= {"num_hidden_layers": 2}
EXPERTS = {"n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
TURNS = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2}
# Latent attention elsewhere, alone and beside linear attention.
KIMI = TURNS | {"linear_num_heads": 4, "linear_head_dim": 16}
MIXED = {"kimi_linear": KIMI, "bailing_hybrid": TURNS, "axk1": {}, "minicpm3": {}, "youtu": {}}
MIXED = {name: TinyModel(name, LATENTS | SMALL | EXPERTS | own) for name, own in MIXED.items()}

# Token 0 of a model that pads with it has an embedding of zeros, to which all tokens are alike.
CHOOSING = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 24, "pad_token_id": None, "num_local_experts": 4}
CHOOSING |= {"bos_token_id": 1, "eos_token_id": 2}
TURN_BY_TURN = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
BLOCKS = {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_key_value_heads": 2,
    "head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 8,
    "index_topk_blocks": 4,
    "index_local_blocks": 1,
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
SPARSE = {"deepseek_v32": {}, "glm_moe_dsa": TURN_BY_TURN, "axk2": {}, "hy_v4": TURN_BY_TURN}
SPARSE = {name: TinyModel(name, LATENTS | SMALL | EXPERTS | CHOOSING | own) for name, own in SPARSE.items()}
SPARSE["minimax_m3_vl_text"] = TinyModel("minimax_m3_vl_text", SMALL | EXPERTS | CHOOSING | BLOCKS)

FAMILIES = MIXED | SPARSE
