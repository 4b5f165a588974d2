"""A tiny configuration of every text-generating model type of transformers, made from its own defaults.

Sizes are found by the names that configurations give them, so that a new type needs no entry; `SETTINGS` holds what
some types need besides.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tiny.models import ARCHITECTURES
from tiny.structures import REFUSED_WEIGHTS
from tiny.texts import VOCABULARY

HIDDEN, HEADS, KV_HEADS, CHANNELS = 64, 4, 2, 16
SIZES: dict[str, Any] = (
    dict.fromkeys(("hidden_size", "n_embd", "d_model", "n_embed", "embed_dim", "dim", "lru_width", "block_dim"), HIDDEN)
    | dict.fromkeys(("conv_dim", "word_embed_proj_dim", "projection_dim", "hidden_dim", "embed_hidden_size"), HIDDEN)
    | dict.fromkeys(("out_hidden_size", "output_dim", "text_hidden_size", "mm_hidden_size", "lm_hidden_size"), HIDDEN)
    | dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp", "mlp_dim"), 128)
    | dict.fromkeys(("block_ff_dim", "n_inner", "ff_dim", "dense_intermediate_size", "feed_forward_dim"), 128)
    | dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32)
    | dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size", "expert_dim"), 32)
    | dict.fromkeys(("share_expert_dim", "ffn_expert_size", "routed_intermediate_size"), 32)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS)
    | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "encoder_heads"), HEADS)
    | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128)
    | dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "n_kv_heads"), KV_HEADS)
    | dict.fromkeys(("swa_num_attention_heads",), HEADS)
    | dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim", "swa_head_dim", "v_head_dim"), CHANNELS)
    | dict.fromkeys(("swa_v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "global_head_dim"), CHANNELS)
    | dict.fromkeys(("rotary_dim", "index_head_dim", "attention_hidden_size"), CHANNELS)
    | {"qk_head_dim": 2 * CHANNELS, "index_topk": 512}
    | dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "laurel_rank"), 32)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
    | dict.fromkeys(("moe_num_primary_experts", "num_moe_experts"), 4)
    | dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "num_experts_per_token", "top_k"), 2)
    | dict.fromkeys(("n_group", "topk_group", "num_expert_group", "num_limited_groups"), 1)
    | dict.fromkeys(("index_n_heads", "num_lm_heads"), 2)
    | dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size", "unpadded_vocab_size"), VOCABULARY)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length"), 1024)
    | dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "sliding_window_size"), 40)
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2}
    | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16, "mamba_chunk_size": 32}
    | {"n_mamba_heads": 2, "chunk_size": 32, "mamba_d_ssm": 128, "mamba_headdim": 16, "mamba_ngroups": 1}
    | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "first_k_dense_replace": 1, "mamba_dt_rank": 8}
    | {"moe_layer_start_index": 1, "num_nextn_predict_layers": 0, "num_mtp_layers": 0, "time_step_rank": 8}
    | {"image_size": 28, "patch_size": 14, "depth": 2, "image_seq_length": 4, "num_image_tokens": 4}
    | {"dtype": "float32", "tie_word_embeddings": False}
)
GLM_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
LISTED = {"intermediate_size": 128, "moe_intermediate_size": 32, "ffn_dim": 128}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_blocks")
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"text_config": {"rope_parameters": GLM_ROPE}} for name in ("glm4v", "glm4v_moe", "glm46v", "glmga")},
    "paddleocr_vl": {
        "text_config": {"rope_parameters": GLM_ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [2, 3, 3]}}
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": DEFAULT_ROPE}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": DEFAULT_ROPE}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "zamba": {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * CHANNELS, "num_key_value_heads": HEADS},
    "zamba2": {
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * CHANNELS,
        "num_key_value_heads": HEADS,
        "n_mamba_heads": 8,
        "hybrid_layer_ids": [1],
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 4000, "audio_start_token_id": 4001},
    "zaya": {"num_experts_per_tok": 1},
    "chameleon": {"vocabulary_map": {"<image>": 8, "IMGIMGA": 9}},
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "mistral4": {"head_dim": 2 * CHANNELS},
    "mimo_v2_flash": {"head_dim": 2 * CHANNELS},
    "moshi": {"sliding_window": 1024},  # as many as it has positions: its masks know no window
    "recurrent_gemma": {"num_hidden_layers": 3},
    "step3p7": {"text_config": {"sliding_window": 40}},
    "glm_ocr": {
        "text_config": {"rope_parameters": GLM_ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [2, 3, 3]}}
    },
}


# Types that generate text and have no decoder of keys and values: encoders, encoder-decoders, recurrent models.
WITHOUT = dict.fromkeys(
    (
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
        *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl"),
        *("xlnet", "xmod", "reformer"),
    ),
    "an encoder",
)
WITHOUT |= dict.fromkeys(
    (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "florence2", "marian", "mbart", "musicgen"),
        *("musicgen_melody", "mvp", "pegasus", "pix2struct", "plbart", "pp_formulanet", "prophetnet", "t5gemma2"),
        *("trocr", "udop", "vision-encoder-decoder", "whisper", "blip"),
    ),
    "an encoder and a decoder",
)
WITHOUT |= dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), "recurrent states alone")


# Types that are not tried, and why: those whose defaults do not shrink to a tiny model come last.
UNTRIED = dict.fromkeys(
    (
        *("blip-2", "deepseek_ocr2", "granite4_vision", "hunyuan_vl", "idefics", "instructblip", "instructblipvideo"),
        *("kosmos-2", "llama4", "pi0", "voxtral_realtime"),
    ),
    "its forward pass takes images or audio beside text",
)
UNTRIED |= dict.fromkeys(("fast_vlm", "gemma3n", "inkling_mm_model", "perception_lm"), "it needs timm or scipy")
UNTRIED |= dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "it drafts with another model's states")
UNTRIED |= {"evolla": "no Auto class generates with it", "diffusion_gemma": "it denoises blocks of text"}
UNTRIED |= {"shieldgemma2": "it classifies images"}
UNTRIED |= dict.fromkeys(
    (
        *("apertus1p5", "blt", "dory", "dots3_note", "dots3_note_text", "ernie4_5_vl_moe", "fun_asr_nano"),
        *("gemma3n_text", "kyutai_speech_to_text", "molmo2", "muse_spark", "nemo_speechlm", "qwen2_5_omni"),
        *("qwen3_omni_moe", "qwen4_exp", "qwen4_exp_text"),
    ),
    "its defaults do not shrink to a tiny model",
)


def names() -> list[str]:
    """Every model type that transformers' Auto classes generate text with, encoders and the like included."""
    found = {
        **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    return sorted(name for name in found if name in CONFIG_MAPPING)


def tiny_config(model_type: str) -> PretrainedConfig:
    """The tiny configuration of a type."""
    own = next((tiny for tiny in ARCHITECTURES.values() if tiny.model_type == model_type), None)
    if own is not None and model_type not in REFUSED_WEIGHTS:
        return own.config()
    config = CONFIG_MAPPING[model_type]()
    settings = _smaller(config)
    for key, value in SETTINGS.get(model_type, {}).items():
        if isinstance(value, dict) and isinstance(settings.get(key), dict):
            settings[key] |= value
        else:
            settings[key] = value
    return AutoConfig.for_model(model_type, **settings)


def _smaller(config: PretrainedConfig) -> dict[str, Any]:
    """Fields of a configuration with tiny sizes, those of its parts included."""
    fields = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    fields.pop("model_type", None)
    fields.pop("transformers_version", None)
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, PretrainedConfig):
            fields[key] = {"model_type": part.model_type} | _smaller(part)
    fields |= {key: value for key, value in SIZES.items() if isinstance(fields.get(key), int | float | str)}
    if "head_dim" in fields:
        fields["head_dim"] = CHANNELS
    if fields.get("kv_lora_rank"):
        fields["num_key_value_heads"] = HEADS
    fields.pop("per_layer_config", None)
    types = fields.get("layer_types")
    count = max(2, 2 * len(set(types or ())))
    for key in LAYERS:
        if isinstance(fields.get(key), int):
            fields[key] = count
    original = getattr(config, "num_hidden_layers", None)
    for key, value in fields.items():
        if isinstance(value, list) and original and len(value) == original and original > 4:
            distinct = (
                list(dict.fromkeys(value)) if all(isinstance(v, str | int | bool) for v in value) else value[:count]
            )
            fields[key] = (distinct * count)[:count]
        elif key in LISTED and isinstance(value, list):
            fields[key] = [LISTED[key]] * (count if len(value) == original else len(value))
        elif key.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= VOCABULARY:
            fields[key] = VOCABULARY - 1 - sum(map(ord, key)) % 60
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(fields.get(key), dict) and "mrope_section" in fields[key]:
            fields[key] = fields[key] | {"mrope_section": [2, 3, 3]}
    return fields
