"""What is refused before any work: recipes that the model at hand cannot have."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from kvconvert.calibration.structure import LayerStructure
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.convert.recipe import Recipe
from kvconvert.errors import RecipeError, UnsupportedModelError
from kvconvert.methods.awq import WeightsRecipe
from kvconvert.models.adapters import head_dim, layer_config
from kvconvert.models.layer_types import layer_types_of, pages_unsupported
from kvconvert.models.modality import placeholder_ids
from kvconvert.runtime.cache.formats import layer_format


def check_purpose(config: PretrainedConfig, recipe: Recipe) -> None:
    """Refuse a recipe that would change nothing: it keeps the weights, and the model can have no cache of ours."""
    text = config.get_text_config(decoder=True)
    unsupported_reasons = [pages_unsupported(text, kind) for kind in layer_types_of(text)[0]]
    if not recipe.weights.quantizes and all(unsupported_reasons):
        raise UnsupportedModelError(
            f"There is nothing to convert: the recipe leaves the weights alone, and no layer of this {text.model_type} "
            f"model can keep its keys and values in a kvconvert cache ({unsupported_reasons[0]})."
        )


def check_recipe(runner: LayerRunner, recipe: Recipe) -> None:
    """Refuse, before any work, a cache that this model cannot have or whose calibration it does not allow."""
    listed = max((index for override in recipe.layers for index in override.index), default=0)
    if listed >= runner.num_layers:
        raise RecipeError(
            f"[[kv.layers]] lists layer {listed}, but this model has layers 0 to {runner.num_layers - 1}."
        )
    shapes = [layer_config(runner.config, index) for index in range(runner.num_layers)]
    for scheme in recipe.schemes():
        for channels in dict.fromkeys(map(head_dim, shapes)):
            layer_format(replace(scheme, **scheme.before_calibration()), 1, channels, channels)
        only = scheme.only_tokens()
        if only is not None:
            placeholder_ids(runner.source.config, only)
        field = scheme.needs_calibration()
        if runner.adapter is None and field is not None:
            raise RecipeError(
                f"[kv] {field} = {getattr(scheme, field)!r} follows from calibration, and no adapter describes this "
                "architecture's layers; choose a value that needs none."
            )


def check_group_size(runner: LayerRunner, weights: WeightsRecipe) -> None:
    """Refuse, before any work, weights that the recipe's groups do not fit."""
    if not weights.quantizes:
        return
    checked: list[LayerStructure] = []
    for index in range(runner.num_layers):
        structure = runner.structure(index)
        if structure in checked:
            continue
        checked.append(structure)
        layer = runner.model.get_submodule(runner.layer_name(index))
        linears = {name: layer.get_submodule(name) for name in structure.linears}
        for name, linear in linears.items():
            if linear.in_features % weights.group_size:
                fitting = [g for g in (128, 64, 32, 16) if all(x.in_features % g == 0 for x in linears.values())]
                advice = (
                    f"set group_size = {fitting[0]}" if fitting else "no group size from 16 to 128 fits all of them"
                )
                raise RecipeError(
                    f"[weights] group_size = {weights.group_size} does not divide the {linear.in_features} inputs of "
                    f"{runner.layer_name(index)}.{name}; {advice}."
                )
            if linear.out_features % 8:
                raise RecipeError(
                    f"{runner.layer_name(index)}.{name} has {linear.out_features} outputs, which AWQ's layout cannot "
                    'pack by eight; set [weights] method = "none".'
                )
