"""Modality masks: which tokens of a model's input are visual, or audio, for schemes that compress one modality.

`watch_inputs` looks for placeholder tokens in the ids of every forward pass and sets the cache's masks; models of a
bundle are watched from the start.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvconvert.errors import UnsupportedModelError


def watch_inputs(model: PreTrainedModel) -> RemovableHandle:
    """Tell a `KVCache` that is passed to this model which tokens of each forward pass are visual, or audio.

    For a cache made by hand; models loaded from a bundle are watched already. Pass the module whose `forward` takes
    `input_ids` and `past_key_values` (of Qwen-Omni models the thinker). The hook's handle is returned; `.remove()` it
    to stop.

    Raises:
        UnsupportedModelError: the model's forward takes no such arguments.
    """
    parameters = list(inspect.signature(type(model).forward).parameters)[1:]
    missing = {"input_ids", "past_key_values"} - {*parameters}
    if missing:
        raise UnsupportedModelError(
            f"{type(model).__name__}.forward takes no {' and no '.join(sorted(missing))}, so its visual tokens "
            "cannot be found; watch the module that takes both, or call KVCache.set_modality_mask before each prompt."
        )
    positions = {name: parameters.index(name) for name in ("input_ids", "past_key_values")}

    def set_masks(module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
        ids, cache = (
            args[position] if position < len(args) else kwargs.get(name) for name, position in positions.items()
        )
        for modality, placeholders in getattr(cache, "placeholders", {}).items():
            chosen = None if ids is None else sum(ids == placeholder for placeholder in placeholders).bool()
            cache.set_modality_mask(chosen, modality)

    return model.register_forward_pre_hook(set_masks, with_kwargs=True)
