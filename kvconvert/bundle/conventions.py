"""Everything that would be open to interpretation, as data for the manifest."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvconvert.bundle.manifest import LayerPlan
from kvconvert.methods import awq, layer_conventions


def conventions(layers: list[LayerPlan], weights_method: awq.StoredMethod, widths: Collection[int]) -> dict[str, Any]:
    """What a reader that shares no code with kvconvert has to know to compute the same numbers from this bundle."""
    planned = [(scheme, layer.shape()) for layer in layers if (scheme := layer.scheme()) is not None]
    return awq.conventions(weights_method, widths) | layer_conventions(planned)
