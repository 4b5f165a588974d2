"""Architecture adapters, in tables by type of model, and the search for the adapter of a configuration."""

from __future__ import annotations

from transformers import PretrainedConfig

from kvconvert.errors import UnsupportedModelError
from kvconvert.models.adapters.adapter import Adapter, LayerNames, Variant
from kvconvert.models.adapters.dense import DENSE
from kvconvert.models.adapters.hybrid import HYBRIDS
from kvconvert.models.adapters.mixture import MIXTURES
from kvconvert.models.adapters.vision import VISION, vision_adapter

__all__ = [
    "ADAPTERS",
    "Adapter",
    "LayerNames",
    "Variant",
    "find_adapter",
    "require_adapter",
]

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
