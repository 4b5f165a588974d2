"""A model's generation_config.json as transformers' object, with every token that ends a text."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from kvconvert.bundle.generation import GenerationSettings, read_generation, stop_tokens
from kvconvert.errors import BundleError, first_line

logger = logging.getLogger(__name__)


def generation_settings(
    stated: Any, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> GenerationSettings:
    """The fields of a generation_config.json, checked and translated; its end-of-sequence tokens are all there are.

    Args:
        stated: contents of the file, or of transformers' object.
        config: of the model.
        tokenizer: the model's tokenizer; None leaves its end-of-sequence token out.

    Raises:
        BundleError: a field that nothing can apply.
    """
    if not isinstance(stated, Mapping):
        raise BundleError(
            f"generation_config.json holds {stated!r:.40} and no object; correct the source and export it."
        )
    parts = (config, config.get_text_config(decoder=True))
    configured = [getattr(part, "eos_token_id", None) for part in parts]
    if tokenizer is None:
        return read_generation(stated, stop_tokens(stated, configured))
    special = {*getattr(tokenizer, "added_tokens_decoder", ()), *getattr(tokenizer, "all_special_ids", ())}
    end = getattr(tokenizer, "eos_token_id", None)
    return read_generation(stated, stop_tokens(stated, configured, end, special))


def read_generation_config(
    stated: Any, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    """The same as transformers' object; warns of fields that are left out.

    Args:
        stated: contents of the file; None where there is none, so that the configuration tells.
        config, tokenizer: of the model.

    Raises:
        BundleError: a field that nothing can apply.
    """
    if stated is None:
        stated = GenerationConfig.from_model_config(config).to_dict()
    settings = generation_settings(stated, config, tokenizer)
    if warning := settings.warning("kvconvert"):
        logger.warning("%s", warning)
    try:
        return GenerationConfig(**settings.values)
    except (ValueError, TypeError, AttributeError) as error:
        raise BundleError(
            f"transformers does not accept generation_config.json ({first_line(error)}); correct the source and "
            "export it."
        ) from error
