"""Which tokens of a model's input are visual, or audio: what schemes of one modality have to know.

Processors of transformers put one placeholder token into a prompt for every vector that an image, a video or a sound
becomes, so ids say which columns these take. `watch_inputs` looks at the ids of every forward pass and tells the cache;
models of a bundle are watched from the start.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel

from kvconvert.errors import CacheError, UnsupportedModelError

Modality = Literal["visual", "audio"]
# Configs name placeholder tokens after their medium, followed by one of the endings.
MEDIA: dict[str, tuple[str, ...]] = {"visual": ("image", "video"), "audio": ("audio",)}
ENDINGS = ("token_id", "token_index")


@dataclass(frozen=True)
class ModalityMask:
    """The tokens of one modality in one forward pass.

    Attributes:
        chosen: bool [B, T], T the tokens of the pass, padding included. Read only where a prompt needs it, so that
            single steps on a GPU wait for nothing.
    """

    chosen: torch.Tensor

    @cached_property
    def runs(self) -> list[list[tuple[int, int]]]:
        """Per row, (first, how many) of consecutive tokens, ascending."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.chosen]
        edges = torch.nn.functional.pad(self.chosen.to("cpu", torch.int8), (1, 1)).diff(dim=1)
        begins, ends = ((edges == sign).nonzero().tolist() for sign in (1, -1))
        for (row, first), (_, end) in zip(begins, ends, strict=True):
            found[row].append((first, end - first))
        return found

    def of_row(self, row: int, rows: int, length: int, layer: int) -> list[tuple[int, int]]:
        """Runs of one of `rows` rows, in a pass that brought `length` new tokens to `layer`.

        Raises:
            CacheError: the marks are of another pass.
        """
        if tuple(self.chosen.shape) != (rows, length):
            raise CacheError(
                f"The tokens marked for layer {layer} of the cache are of shape {list(self.chosen.shape)}, and {rows} "
                f"sequences of {length} tokens arrived; mark the input whose keys and values the cache receives, one "
                "placeholder token for each."
            )
        return self.runs[row]


def placeholder_ids(config: PretrainedConfig, modality: Modality) -> tuple[int, ...]:
    """Ids of the tokens that stand for a modality, from the config or, if it has none, from those nested in it.

    Raises:
        UnsupportedModelError: the config knows no such token.
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


def watch_inputs(model: PreTrainedModel) -> RemovableHandle:
    """Tell a `KVCache` that is passed to this model which tokens of each forward pass are visual, or audio.

    For a cache made by hand; models loaded from a bundle are watched already. Give the module whose `forward` takes
    `input_ids` and `past_key_values` (of Qwen-Omni models the thinker). Returns the hook's handle; `.remove()` ends it.

    Raises:
        UnsupportedModelError: the model's forward takes no such arguments.
    """
    parameters = list(inspect.signature(type(model).forward).parameters)[1:]
    missing = {"input_ids", "past_key_values"} - {*parameters}
    if missing:
        raise UnsupportedModelError(
            f"{type(model).__name__}.forward takes no {' and no '.join(sorted(missing))}, so that nobody can tell "
            "which of its tokens are visual; watch the module that takes both, or call KVCache.mark before each prompt."
        )
    positions = {name: parameters.index(name) for name in ("input_ids", "past_key_values")}

    def tell(module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
        ids, cache = (
            args[position] if position < len(args) else kwargs.get(name) for name, position in positions.items()
        )
        for modality, placeholders in getattr(cache, "placeholders", {}).items():
            chosen = None if ids is None else sum(ids == placeholder for placeholder in placeholders).bool()
            cache.mark(chosen, modality)

    return model.register_forward_pre_hook(tell, with_kwargs=True)
