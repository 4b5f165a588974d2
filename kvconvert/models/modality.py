"""Which token ids stand for images, videos or audio in a model's input.

transformers' processors put one placeholder token into a prompt for every vector that an image, a video or an audio
clip becomes.
"""

from __future__ import annotations

from typing import Literal

from transformers import PretrainedConfig

from kvconvert.errors import UnsupportedModelError

Modality = Literal["visual", "audio"]
# Configs name placeholder tokens after their medium, followed by one of the endings.
MEDIA: dict[str, tuple[str, ...]] = {"visual": ("image", "video"), "audio": ("audio",)}
ENDINGS = ("token_id", "token_index")


def placeholder_ids(config: PretrainedConfig, modality: Modality) -> tuple[int, ...]:
    """Ids of a modality's placeholder tokens, from the config or, if it names none, from those nested in it.

    Raises:
        UnsupportedModelError: the config names no such token.
    """
    text = config.get_text_config(decoder=True)
    nested = [part for name in config.sub_configs if isinstance(part := getattr(config, name, None), PretrainedConfig)]
    # Qwen-Omni has several language models with ids of their own; the cache is that of the one with the text config.
    around_text = [part for part in nested if part.get_text_config(decoder=True) is text]
    names = [f"{medium}_{ending}" for medium in MEDIA[modality] for ending in ENDINGS]
    for parts in ([config], around_text, nested):
        found = {getattr(part, name, None) for part in parts for name in names}
        ids = sorted(i for i in found if isinstance(i, int) and i >= 0)
        if ids:
            return tuple(ids)
    media = " or ".join(MEDIA[modality])
    raise UnsupportedModelError(
        f'[kv] modality = "{modality}" is not possible for {config.model_type}: its config names no {media} token '
        f'({MEDIA[modality][0]}_token_id); set modality = "all", or give the config of the whole model.'
    )
