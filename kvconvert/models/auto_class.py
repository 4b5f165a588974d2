"""Which of transformers' Auto classes loads a model."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

_CLASSES = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForMultimodalLM: MODEL_FOR_MULTIMODAL_LM_MAPPING,
}


def model_class(config: PretrainedConfig) -> type:
    """The Auto class that loads a model: of causal, vision-language, or audio-language and other multimodal models.

    Where several of them know the configuration, its `architectures` decide.
    """
    has_vision = getattr(config, "vision_config", None) is not None
    order = sorted(_CLASSES, key=lambda auto: has_vision and auto is not AutoModelForImageTextToText)
    known = {auto: _built(auto, config) for auto in order if type(config) in _CLASSES[auto]}
    stated = set(getattr(config, "architectures", None) or [])
    return next((auto for auto, names in known.items() if names & stated), next(iter(known), AutoModelForCausalLM))


def supports_images(config: PretrainedConfig) -> bool:
    """Whether a model is loaded with its vision tower."""
    return getattr(config, "vision_config", None) is not None and model_class(config) is AutoModelForImageTextToText


def _built(auto: type, config: PretrainedConfig) -> set[str]:
    """Names of the classes that an Auto class builds from a configuration."""
    built = _CLASSES[auto][type(config)]
    return {model.__name__ for model in (built if isinstance(built, tuple) else (built,))}
