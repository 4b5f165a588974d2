"""Loading a bundle."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from kvconvert.bundle.manifest import MANIFEST_NAME
from kvconvert.errors import BundleError
from kvconvert.models.processors import has_processor, load_processor, load_tokenizer
from kvconvert.runtime.hf.quantizer import BundleQuantizer

_CLASSES = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForMultimodalLM: MODEL_FOR_MULTIMODAL_LM_MAPPING,
}


def load(
    bundle: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device_map: str | dict[str, Any] | None = None,
    verify: Literal["full", "headers"] = "full",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | ProcessorMixin]:
    """Load a bundle's model and its tokenizer; of a vision-language model its processor, if the bundle has one.

    `model.generate(...)` then uses the bundle's KV plan by itself, and `model.new_kv_cache()` makes a cache for other
    loops.

    Args:
        bundle: a directory, or the id of a repository on the Hub.
        dtype: of everything that is not packed; None takes the one in the bundle's config.json.
        device_map: as in `from_pretrained`.
        verify: "full" hashes every file; "headers" trusts the contents and checks everything else.

    Raises:
        BundleError: there is no bundle, or it does not hold what its manifest says.
        UsageError: the processor needs a package that is not installed.
        CheckpointError: transformers cannot load the tokenizer or the processor.
    """
    directory = Path(bundle)
    if not directory.exists() and str(bundle).count("/") == 1:
        directory = Path(snapshot_download(str(bundle)))
    if not (directory / MANIFEST_NAME).is_file():
        raise BundleError(
            f"{bundle} is not a kvconvert bundle: it has no {MANIFEST_NAME}; kvconvert export writes one."
        )
    previous = BundleQuantizer.verify
    BundleQuantizer.verify = verify
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        model, found = model_class(config).from_pretrained(
            directory, dtype=dtype or "auto", device_map=device_map, output_loading_info=True
        )
    finally:
        BundleQuantizer.verify = previous
    _require_complete(bundle, found["missing_keys"])
    processes = supports_images(config) and has_processor(directory)
    return model, load_processor(directory) if processes else load_tokenizer(directory)


def _require_complete(bundle: str | Path, absent: Iterable[str]) -> None:
    """Refuse a model of which transformers had to draw parts at random."""
    names = sorted(absent)
    if names:
        more = f" and {len(names) - 1} more tensors" if names[1:] else ""
        raise BundleError(f"The bundle {bundle} lacks {names[0]}{more}, which the model needs; export it again.")


def model_class(config: PretrainedConfig) -> type:
    """The Auto class that loads a model: of causal language models, or of those that also see or hear.

    A configuration that several of them know is decided by the class that it says its weights belong to.
    """
    sees = getattr(config, "vision_config", None) is not None
    order = sorted(_CLASSES, key=lambda auto: sees and auto is not AutoModelForImageTextToText)
    known = {auto: _built(auto, config) for auto in order if type(config) in _CLASSES[auto]}
    stated = set(getattr(config, "architectures", None) or [])
    return next((auto for auto, names in known.items() if names & stated), next(iter(known), AutoModelForCausalLM))


def supports_images(config: PretrainedConfig) -> bool:
    """Whether the model of a configuration has a vision tower."""
    return getattr(config, "vision_config", None) is not None and model_class(config) is AutoModelForImageTextToText


def _built(auto: type, config: PretrainedConfig) -> set[str]:
    """Names of the classes that an Auto class builds from a configuration."""
    built = _CLASSES[auto][type(config)]
    return {model.__name__ for model in (built if isinstance(built, tuple) else (built,))}
