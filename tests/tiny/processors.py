"""Processors for the tiny vision-language models, written beside their tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tiny.media import IMAGE
from tiny.models import ARCHITECTURES
from tiny.texts import TOKENS

NORMALIZE = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SQUARE = NORMALIZE | {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
BOTH = NORMALIZE | {"size": {"height": 28, "width": 28}}
LLAVA = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
PATCHES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
QWEN = NORMALIZE | PATCHES | {"size": {"shortest_edge": 60 * 60, "longest_edge": 60 * 60}}
GEMMA = {"boi_token": "<vision_start>", "eoi_token": "<vision_end>"}
IMG = {"start_image_token": "<vision_start>", "end_image_token": "<vision_end>"}
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# name: (processor class, image processor class, its settings, the processor's settings, tokens by attribute, how a
# chat template writes an image)
PROCESSORS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, str], str]] = {
    "llava": ("LlavaProcessor", "CLIPImageProcessor", SQUARE, LLAVA, {}, "<image>"),
    "llava_next": (
        "LlavaNextProcessor",
        "LlavaNextImageProcessor",
        SQUARE | {"image_grid_pinpoints": [[28, 28]]},
        LLAVA,
        {},
        "<image>",
    ),
    "llava_onevision": (
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessor",
        BOTH | {"image_grid_pinpoints": [[28, 28]]},
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
        {},
        "<image>",
    ),
    "internvl": (
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        BOTH | {"crop_to_patches": False},
        {"image_seq_length": 4},
        IMG | {"context_image_token": "<image>", "video_token": "<video>"},
        "<image>",
    ),
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLImageProcessor", QWEN, {}, {}, "<vision_start><image><vision_end>"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", QWEN, {}, {}, "<vision_start><image><vision_end>"),
    "qwen3_vl": (
        "Qwen3VLProcessor",
        "Qwen2VLImageProcessor",
        QWEN,
        {},
        {"vision_start_token": "<vision_start>", "vision_end_token": "<vision_end>"},
        "<vision_start><image><vision_end>",
    ),
    "qwen3_vl_moe": (
        "Qwen3VLProcessor",
        "Qwen2VLImageProcessor",
        QWEN,
        {},
        {"vision_start_token": "<vision_start>", "vision_end_token": "<vision_end>"},
        "<vision_start><image><vision_end>",
    ),
    "gemma3": (
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        NORMALIZE | {"size": {"height": 56, "width": 56}},
        {"image_seq_length": 4},
        GEMMA,
        "<vision_start>",
    ),
    "gemma4": (
        "Gemma4Processor",
        "Gemma4ImageProcessor",
        NORMALIZE | {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 70},
        {"feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}},
        GEMMA | {"audio_token": "<audio>", "boa_token": "<audio_start>", "eoa_token": "<audio_end>"},
        "<image>",
    ),
    "paligemma": ("PaliGemmaProcessor", "SiglipImageProcessor", BOTH | {"image_seq_length": 4}, {}, {}, "<image>"),
    "smolvlm": (
        "SmolVLMProcessor",
        "SmolVLMImageProcessor",
        NORMALIZE | {"size": {"longest_edge": 28}, "max_image_size": {"longest_edge": 28}, "do_image_splitting": False},
        {"image_seq_len": 4},
        {"fake_image_token": "<vision_start>", "global_image_token": "<vision_end>"},
        "<image>",
    ),
    # Loads with torchvision alone.
    "mistral3": ("PixtralProcessor", "PixtralImageProcessor", BOTH | {"patch_size": 14}, {}, {}, "<image>"),
}


LOADABLE = [name for name in PROCESSORS if name != "mistral3"]


def quick_and_full(names: Iterable[str], *quick: str) -> list[Any]:
    """Parameters of which some are always tested, the others by `make test-full`."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.full) for name in names]


def write_processor(directory: Path, name: str, templated: bool = True) -> Path:
    """Give a checkpoint of `tiny.models` its processor, with a chat template or without."""
    processor, image_processor, settings, rest, tokens, written = PROCESSORS[name]
    images = {"image_processor_type": image_processor, "processor_class": processor, "do_convert_rgb": True}
    _write(directory / "preprocessor_config.json", images | settings)
    _write(directory / "processor_config.json", {"processor_class": processor} | rest)
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["extra_special_tokens"] = {"image_token": "<image>", "video_token": "<video>"} | tokens
    _write(file, config)
    if templated:
        (directory / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", written))
    assert TOKENS["<image>"] == IMAGE
    return directory


def write_vision_model(directory: Path, name: str = "llava", templated: bool = True, **overrides: Any) -> Path:
    """A tiny vision-language checkpoint with its processor."""
    return write_processor(ARCHITECTURES[name].write(directory, **overrides), name, templated)


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=1))
