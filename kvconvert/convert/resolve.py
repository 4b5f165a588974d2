"""What can only be decided when every layer is measured: each pass's `resolve`, over all layers.

A pure function of the recipe and of what the layers' passes wrote into their plans, so that repeating it after a kill,
even on records that it changed before, gives the same records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from kvconvert.calibration.protocol import MeasuredLayer
from kvconvert.convert.passes import PASSES
from kvconvert.convert.work_records import LayerRecord
from kvconvert.methods import KVScheme
from kvconvert.recipes.recipe import Recipe


def resolve_layers(
    recipe: Recipe, records: list[LayerRecord], plan: Callable[[int], dict[str, Tensor]]
) -> list[LayerRecord]:
    """The layers' final records.

    Args:
        recipe: of the calibration.
        records: of all layers.
        plan: reads a layer's plan tensors, by the names layers.{i}.{what}.
    """
    layers = {
        record.index: MeasuredLayer(
            recipe.scheme(record.index),
            KVScheme.from_dict(record.scheme),
            {name.split(".", 2)[2]: tensor for name, tensor in plan(record.index).items()},
        )
        for record in records
        if record.scheme is not None
    }
    resolved = {record.index: record for record in records}
    for kind in PASSES:
        for index, (chosen, statistics) in kind.resolve(layers, recipe.calibration).items():
            scheme = replace(layers[index].scheme, **chosen)
            layers[index] = replace(layers[index], scheme=scheme)
            record = resolved[index]
            resolved[index] = record.model_copy(
                update={"scheme": scheme.to_dict(), "statistics": record.statistics | {kind.name: statistics}}
            )
    return [*resolved.values()]
