"""The configurations of tiny vision-language and audio-language models, and their inputs, as data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiny.texts import BASE, GEMMA4, NO_HEAD_DIM, SCALED, TEXTS, TOKENS, VOCABULARY, experts

IMAGE, VIDEO, VISION_START, VISION_END = 4096, 4097, 4098, 4099
AUDIO, AUDIO_START, AUDIO_END = 4100, 4101, 4102
SEEING = {"vocab_size": VOCABULARY + len(TOKENS)}


def square_pictures(side: int, *, wrapped: bool = False) -> Any:
    """`pixel_values` [n, 3, side, side], or [n, 1, 3, side, side] when each row's pictures are wrapped."""

    def pictures(count: int, generator: torch.Generator) -> dict[str, Tensor]:
        pixels = torch.randn(count, 3, side, side, generator=generator)
        return {"pixel_values": pixels[:, None] if wrapped else pixels}

    return pictures


def tiled_pictures(tiles: int, side: int) -> Any:
    """`pixel_values` [n, tiles, 3, side, side] with `image_sizes` [n, 2] of one crop."""

    def pictures(count: int, generator: torch.Generator) -> dict[str, Tensor]:
        pixels = torch.randn(count, tiles, 3, side, side, generator=generator)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[side, side]] * count)}

    return pictures


def sized_pictures(side: int) -> Any:
    """`pixel_values` [n, 3, side, side] with `image_sizes` [n, 2]."""

    def pictures(count: int, generator: torch.Generator) -> dict[str, Tensor]:
        pixels = torch.randn(count, 3, side, side, generator=generator)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[side, side]] * count)}

    return pictures


def patches(grid: tuple[int, int], values: int) -> Any:
    """`pixel_values` [n * h * w, values] of clamped_rows patches with `image_grid_thw` [n, 3]."""

    def pictures(count: int, generator: torch.Generator) -> dict[str, Tensor]:
        height, width = grid
        return {
            "pixel_values": torch.randn(count * height * width, values, generator=generator),
            "image_grid_thw": torch.tensor([[1, height, width]] * count),
        }

    return pictures


def placed_patches(side: int, values: int) -> Any:
    """Gemma 4's patches [n, side * side, values] with their positions [n, side * side, 2]."""

    def pictures(count: int, generator: torch.Generator) -> dict[str, Tensor]:
        positions = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        return {
            "pixel_values": torch.rand(count, side * side, values, generator=generator),
            "image_position_ids": positions.expand(count, -1, -1).clone(),
        }

    return pictures


def recordings(bins: int, frames: int) -> Any:
    """`input_features` [n, bins, frames] with a mask of ones."""

    def features(count: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "input_features": torch.randn(count, bins, frames, generator=generator),
            "feature_attention_mask": torch.ones(count, frames, dtype=torch.long),
        }

    return features


TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN_TEXT = NO_HEAD_DIM | SEEING
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
BRACKETED = {"start": VISION_START, "end": VISION_END}
QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
SIGLIP = {"model_type": "siglip_vision_model"} | TOWER
CLIP = {"model_type": "clip_vision_model"} | TOWER | {"projection_dim": 32}

QWEN_MEDIA = BRACKETED | {
    "token": IMAGE,
    "count": 4,
    "features": patches((4, 4), 3 * 2 * 14 * 14),
    "token_types": "mm_token_type_ids",
}
# 64 mel frames become 32 after the convolution's stride and 16 after pooling.
HEARD = {"token": AUDIO, "count": 16, "features": recordings(16, 64), "start": AUDIO_START, "end": AUDIO_END}
AUDIO_TOWER = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "d_model": 32,
    "max_source_positions": 32,
}


def seen(
    features: str,
    media: dict[str, Any],
    config: dict[str, Any],
    scale: float = 0.5,
    built: str = "image",
    kind: str = "",
) -> tuple[str, str, float, str, dict[str, Any], dict[str, Any]]:
    """Model type, if it is not the name; features; standard deviation of the embeddings; how it is built; media;
    configuration.
    """
    return kind, features, scale, built, media, config


MODALITIES: dict[str, tuple[str, str, float, str, dict[str, Any], dict[str, Any]]] = {
    "llava": seen(
        "vision",
        {"token": IMAGE, "count": 4, "features": square_pictures(28)},
        {
            "vision_config": CLIP | {"image_size": 28, "patch_size": 14},
            "text_config": {"model_type": "llama"} | BASE | SEEING,
            "image_token_index": IMAGE,
            "image_seq_length": 4,
        },
    ),
    # One crop of 2 x 2 patches with a newline token per row, and the whole picture's 4.
    "llava_next": seen(
        "vision",
        {"token": IMAGE, "count": 10, "features": tiled_pictures(2, 28)},
        {
            "vision_config": CLIP | {"image_size": 28, "patch_size": 14},
            "text_config": {"model_type": "llama"} | BASE | SEEING,
            "image_token_index": IMAGE,
            "image_seq_length": 4,
            "image_grid_pinpoints": [[28, 28]],
        },
    ),
    "llava_onevision": seen(
        "vision",
        {"token": IMAGE, "count": 10, "features": tiled_pictures(2, 28)},
        {
            "vision_config": SIGLIP | {"image_size": 28, "patch_size": 14, "vision_use_head": False},
            "text_config": {"model_type": "qwen2"} | NO_HEAD_DIM | SEEING,
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "image_grid_pinpoints": [[28, 28]],
        },
    ),
    "internvl": seen(
        "vision",
        {"token": IMAGE, "count": 4, "features": square_pictures(28)},
        {
            "vision_config": TOWER | {"image_size": [28, 28], "patch_size": [7, 7]},
            "text_config": {"model_type": "qwen2"} | NO_HEAD_DIM | SEEING,
            "image_token_id": IMAGE,
            "image_seq_length": 4,
        },
    ),
    "qwen2_vl": seen(
        "vision",
        QWEN_MEDIA,
        QWEN_IDS
        | {
            "text_config": QWEN_TEXT | {"rope_parameters": MROPE},
            "vision_config": {k: v for k, v in QWEN_TOWER.items() if k not in ("out_hidden_size", "intermediate_size")}
            | {"hidden_size": 64, "embed_dim": 32},
        },
    ),
    "qwen2_5_vl": seen(
        "vision",
        QWEN_MEDIA,
        QWEN_IDS
        | {
            "text_config": QWEN_TEXT | {"rope_parameters": MROPE},
            "vision_config": QWEN_TOWER | {"fullatt_block_indexes": [1], "window_size": 28},
        },
    ),
    "qwen3_vl": seen(
        "vision qk_norm",
        QWEN_MEDIA,
        QWEN_IDS
        | {
            "text_config": BASE | SEEING | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
            "vision_config": QWEN_TOWER | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        },
    ),
    "qwen3_vl_moe": seen(
        "vision moe qk_norm",
        QWEN_MEDIA,
        QWEN_IDS
        | {
            "text_config": BASE
            | SEEING
            | experts(num_experts=4)
            | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
            "vision_config": QWEN_TOWER | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        },
    ),
    "gemma3": seen(
        "vision sliding qk_norm",
        BRACKETED | {"token": IMAGE, "count": 4, "features": square_pictures(56), "token_types": "token_type_ids"},
        {
            "text_config": TEXTS["gemma3_text"][3] | SEEING,
            "vision_config": SIGLIP | {"image_size": 56, "patch_size": 14, "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": VISION_START,
            "eoi_token_index": VISION_END,
        },
        scale=SCALED,
    ),
    "gemma4": seen(
        "vision sliding partial_rotary qk_norm",
        BRACKETED
        | {"token": IMAGE, "count": 4, "features": placed_patches(6, 3 * 16 * 16), "token_types": "mm_token_type_ids"},
        {
            "text_config": GEMMA4
            | SEEING
            | {"vocab_size_per_layer_input": VOCABULARY + len(TOKENS), "pad_token_id": 0},
            "vision_config": {"model_type": "gemma4_vision"}
            | TOWER
            | {
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 16,
                "pooling_kernel_size": 3,
                "position_embedding_size": 64,
            },
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "boi_token_id": VISION_START,
            "eoi_token_id": VISION_END,
            "audio_token_id": AUDIO,
            "boa_token_id": AUDIO_START,
            "eoa_token_index": AUDIO_END,
        },
        scale=SCALED,
    ),
    "smolvlm": seen(
        "vision",
        {"token": IMAGE, "count": 4, "features": square_pictures(28, wrapped=True)},
        {
            "vision_config": TOWER | {"image_size": 28, "patch_size": 7},
            "text_config": {"model_type": "llama"} | BASE | SEEING,
            "image_token_id": IMAGE,
            "scale_factor": 2,
            "pad_token_id": 0,
        },
    ),
    "paligemma": seen(
        "vision",
        {"token": IMAGE, "count": 4, "features": square_pictures(28), "token_types": "token_type_ids"},
        {
            "vision_config": SIGLIP
            | {"image_size": 28, "patch_size": 14, "vision_use_head": False, "projection_dim": 64},
            "text_config": {"model_type": "gemma"} | BASE | SEEING | {"tie_word_embeddings": True},
            "image_token_index": IMAGE,
            "projection_dim": 64,
            "hidden_size": 64,
        },
        scale=SCALED,
    ),
    "mistral3": seen(
        "vision",
        {"token": IMAGE, "count": 4, "features": sized_pictures(56)},
        {
            "vision_config": {"model_type": "pixtral"} | TOWER | {"image_size": 56, "patch_size": 14, "head_dim": 16},
            "text_config": {"model_type": "mistral"} | BASE | SEEING | {"sliding_window": None},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "spatial_merge_size": 2,
        },
    ),
    "qwen2_audio": seen(
        "audio",
        HEARD,
        {
            "text_config": {"model_type": "qwen2"} | NO_HEAD_DIM | SEEING,
            "audio_config": AUDIO_TOWER | {"model_type": "qwen2_audio_encoder"},
            "audio_token_index": AUDIO,
        },
        built="any",
    ),
    "qwen2_5_omni_thinker": seen(
        "audio vision",
        HEARD,
        {
            "text_config": QWEN_TEXT | {"rope_parameters": MROPE},
            "vision_config": QWEN_TOWER | {"fullatt_block_indexes": [1], "window_size": 28},
            "audio_config": AUDIO_TOWER | {"n_window": 16, "output_dim": 64},
            "audio_token_index": AUDIO,
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "audio_start_token_id": AUDIO_START,
            "audio_end_token_id": AUDIO_END,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
        },
        built="any",
    ),
}
