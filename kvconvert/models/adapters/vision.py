"""Vision-language and audio-language models: where they hold a text model's decoder layers. Only these are converted.

An entry names the model and the list of its language model's layers; what is in a layer is the text adapter's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from transformers import PretrainedConfig

from kvconvert.models.adapters.adapter import Adapter

LAYERS, TEXT_LAYERS = "model.language_model.layers", "model.text_model.layers"
# Model type: class of the model, and its language model's decoder layers.
VISION: dict[str, tuple[str, str]] = {
    "llava": ("LlavaForConditionalGeneration", LAYERS),
    "llava_next": ("LlavaNextForConditionalGeneration", LAYERS),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", LAYERS),
    "internvl": ("InternVLForConditionalGeneration", LAYERS),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", LAYERS),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", LAYERS),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", LAYERS),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", LAYERS),
    "gemma3": ("Gemma3ForConditionalGeneration", LAYERS),
    "gemma4": ("Gemma4ForConditionalGeneration", LAYERS),
    "paligemma": ("PaliGemmaForConditionalGeneration", LAYERS),
    "mistral3": ("Mistral3ForConditionalGeneration", LAYERS),
    "idefics3": ("Idefics3ForConditionalGeneration", TEXT_LAYERS),
    "smolvlm": ("SmolVLMForConditionalGeneration", TEXT_LAYERS),
    "qwen2_audio": ("Qwen2AudioForConditionalGeneration", LAYERS),
    "qwen2_5_omni_thinker": ("Qwen2_5OmniThinkerForConditionalGeneration", LAYERS),
}
# Text configurations that have a type of their own, and the text model whose layers they describe.
SAME_LAYERS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}


def vision_adapter(config: PretrainedConfig, text: Mapping[str, Adapter]) -> Adapter | None:
    """The adapter of a vision-language model around one of these text models, by model type; None for any other."""
    if config.model_type not in VISION:
        return None
    inner = config.get_text_config().model_type
    adapter = text.get(SAME_LAYERS.get(inner, inner))
    architecture, layers = VISION[config.model_type]
    if adapter is None:
        return None
    return replace(adapter, model_type=config.model_type, architecture=architecture, layers=layers)
