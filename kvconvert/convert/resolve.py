"""What can only be decided when every layer is measured: one pair (tau1, tau2) for all, and how budgets are spread.

A pure function of the recipe and of what the layers' passes wrote into their plans, so that repeating it after a kill,
even on records that it changed before, gives the same records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from kvconvert.bundle.scheme import KVScheme
from kvconvert.calibration.calibquant import choose_taus
from kvconvert.calibration.minikv import allocate
from kvconvert.convert.recipe import Recipe
from kvconvert.convert.workdir import LayerRecord


def resolve_layers(
    recipe: Recipe, records: list[LayerRecord], plan: Callable[[int], dict[str, Tensor]]
) -> list[LayerRecord]:
    """The layers' final records.

    Args:
        recipe: of the calibration.
        records: of all layers.
        plan: reads a layer's plan tensors, by the names layers.{i}.{what}.
    """
    return _spread_budgets(recipe, _choose_taus(recipe, records, plan), plan)


def _choose_taus(
    recipe: Recipe, records: list[LayerRecord], plan: Callable[[int], dict[str, Tensor]]
) -> list[LayerRecord]:
    tables = {}
    for record in records:
        if record.scheme is not None and KVScheme.from_dict(record.scheme).is_span:
            found = {name.split(".", 2)[2]: tensor for name, tensor in plan(record.index).items()}
            if "tau_grid" in found:
                tables[record.index] = found
    groups = [[index] for index in tables] if recipe.calibration.tau_per_layer else [[*tables]] if tables else []
    resolved = list(records)
    for group in groups:
        row, column = choose_taus(
            [tables[i]["tau_error"] for i in group], [tables[i]["tau_output_error"] for i in group]
        )
        for index in group:
            found, scheme = tables[index], KVScheme.from_dict(records[index].scheme)
            grid, errors = found["tau_grid"], found["tau_error"]
            chosen = {"tau1": round(float(grid[row]), 6), "tau2": round(float(grid[column]), 6)}
            if "tau_clip_ratio_grid" in found:
                chosen["key_clip_ratio"] = round(float(found["tau_key_clip_ratio"][row, column]), 6)
            unshifted = [i for i, tau in enumerate(grid.tolist()) if tau == 0]
            statistics = {"weights_error": _figure(errors[row, column])}
            if unshifted:
                statistics["weights_error_without_tau"] = _figure(errors[unshifted[0], unshifted[0]])
            resolved[index] = _updated(records[index], replace(scheme, **chosen), "calibquant", statistics)
    return resolved


def _spread_budgets(
    recipe: Recipe, records: list[LayerRecord], plan: Callable[[int], dict[str, Tensor]]
) -> list[LayerRecord]:
    spread = [
        record.index
        for record in records
        if record.scheme is not None and recipe.scheme(record.index).allocation != "uniform"
    ]
    if not spread:
        return records
    nominal = recipe.scheme(spread[0])  # the recipe allows one budget only
    measured = {i: plan(i) for i in spread}
    ratios = allocate(
        nominal.allocation,
        nominal.heavy_ratio,
        nominal.recent_ratio,
        # A pyramid is a formula, which needs no measurement and may have none.
        [float(measured[i].get(f"layers.{i}.attention_variance", 0.0)) for i in spread],
        [measured[i].get(f"layers.{i}.lost_output") for i in spread],
        nominal.pyramid_depth,
    )
    resolved = list(records)
    for index, ratio in zip(spread, ratios, strict=True):
        scheme = replace(KVScheme.from_dict(records[index].scheme), heavy_ratio=min(1.0, ratio), allocation="uniform")
        resolved[index] = _updated(records[index], scheme, "minikv", {"allocation": nominal.allocation})
    return resolved


def _updated(record: LayerRecord, scheme: KVScheme, method: str, statistics: dict[str, object]) -> LayerRecord:
    return record.model_copy(
        update={"scheme": scheme.to_dict(), "statistics": record.statistics | {method: statistics}}
    )


def _figure(value: Tensor) -> float:
    return float(f"{float(value):.6g}")
