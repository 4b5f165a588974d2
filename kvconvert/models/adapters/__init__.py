"""Architecture adapters, in tables by type of model, and the search for the adapter of a configuration.

Of vision-language and audio-language models the text model's decoder layers are converted, and nothing else. An entry
of `VISION` names the model and the list of these layers; what is in a layer is the text adapter's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from transformers import PretrainedConfig

from kvconvert.errors import UnsupportedModelError
from kvconvert.models.adapters.adapter import Adapter
from kvconvert.models.adapters.dense import DENSE
from kvconvert.models.adapters.hybrid import HYBRIDS
from kvconvert.models.adapters.mixture import MIXTURES

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


ADAPTERS = {adapter.model_type: adapter for adapter in (*DENSE, *HYBRIDS, *MIXTURES)}


def find_adapter(config: PretrainedConfig) -> Adapter | None:
    """The adapter of a configuration, or None for an architecture that has none or a model that it refuses."""
    adapter = _known(config)
    # Published names differ in case from the classes that transformers builds: LLaMAForCausalLM, PhiMoEForCausalLM.
    stated = [name.casefold() for name in getattr(config, "architectures", None) or []]
    if adapter is None or (stated and adapter.architecture.casefold() not in stated) or adapter.refusal(config):
        return None
    return adapter


def require_adapter(config: PretrainedConfig) -> Adapter:
    """The adapter of a configuration; UnsupportedModelError says what is missing where there is none."""
    adapter = find_adapter(config)
    if adapter is not None:
        return adapter
    stated = ", ".join(getattr(config, "architectures", None) or [config.model_type])
    known = _known(config)
    if known is not None and known.refusal(config):
        raise UnsupportedModelError(
            f"The weights of this {stated} cannot be converted ({known.refusal(config)}); set [weights] method = "
            '"none".'
        )
    raise UnsupportedModelError(
        f"No adapter describes {stated} (model type {config.model_type}): the names of its decoder layers, norms and "
        "Linears, which Linears read each norm, and whether values may be rotated in the weights are missing; "
        f"docs/models.md lists the {len(ADAPTERS) + len(VISION)} architectures that have one, and others convert "
        'with [weights] method = "none".'
    )


def _known(config: PretrainedConfig) -> Adapter | None:
    return ADAPTERS.get(config.model_type) or vision_adapter(config, ADAPTERS)
