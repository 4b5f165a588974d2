"""Checks before any work: recipes that the model at hand cannot have are refused."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from kvconvert.cache import layer_format
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.errors import CheckpointError, RecipeError, UnsupportedModelError, UsageError
from kvconvert.methods.awq import AUTO_GROUP_SIZES, KEPT_BITS, WeightsRecipe, auto_group_sizes, auto_kept_share
from kvconvert.models.configuration import (
    is_latent,
    layer_config,
    layer_types_of,
    not_generating,
    pages_unsupported,
    placeholder_ids,
    stored_shape,
)
from kvconvert.models.structure import LayerStructure
from kvconvert.recipes.recipe import Recipe


def check_purpose(config: PretrainedConfig, recipe: Recipe) -> None:
    """Refuse a model that generates no text, and a recipe that would change nothing.

    That is one which keeps the weights of a model that can have no cache of ours.
    """
    if (stated := not_generating(config)) is not None:
        raise UnsupportedModelError(
            f"config.json states the architecture {stated}, which generates no text; choose a model that does."
        )
    text = config.get_text_config(decoder=True)
    unsupported_reasons = [
        pages_unsupported(text, kind, recipe.scheme(index)) for index, kind in enumerate(layer_types_of(text)[0])
    ]
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
    latent = is_latent(runner.config)
    shapes = [layer_config(runner.config, index) for index in range(runner.num_layers)]
    for scheme in recipe.schemes():
        if not latent or scheme.fits_latents:
            for heads, key_dim, value_dim in dict.fromkeys(map(stored_shape, shapes)):
                layer_format(scheme.uncalibrated(), heads=heads, key_dim=key_dim, value_dim=value_dim)
        only = scheme.only_tokens()
        if only is not None:
            placeholder_ids(runner.source.config, only)
        field = scheme.needs_calibration()
        if runner.architecture is None and field is not None:
            raise RecipeError(
                f"[kv] {field} = {getattr(scheme, field)!r} follows from calibration, and the structure of this "
                "model's layers is unknown; choose a value that needs none."
            )


def check_layers_fit(runner: LayerRunner, memory: int) -> None:
    """Refuse a layer whose weights alone, in float32, are more than the `memory` bytes of the GPU that computes it."""
    for index in range(runner.num_layers) if runner.architecture is not None else ():
        layer = runner.model.get_submodule(runner.layer_name(index))
        size = 4 * sum(parameter.numel() for parameter in layer.parameters())
        if size > memory:
            raise UsageError(
                f"{runner.layer_name(index)} takes {size / 1e9:.1f} GB in float32, more than the GPU's "
                f"{memory / 1e9:.1f} GB; give `device` cpu, where experts are kept in files."
            )


def check_packed(runner: LayerRunner, recipe: Recipe) -> None:
    """Refuse, for a source with quantized weights, a recipe that would quantize them again, and what is not kept."""
    source = runner.source
    packings = source.packings()
    if packings and recipe.weights.quantizes:
        raise RecipeError(
            f"The weights of {source.id} are quantized already ({source.stored_as}), and the recipe {recipe.name} "
            'would quantize them again; choose one that keeps them, [weights] method = "none": kv-only, for example.'
        )
    inside = () if runner.architecture is None else tuple(f"{runner.layer_name(i)}." for i in range(runner.num_layers))
    modules, experts = dict(runner.model.named_modules()), runner.expert_modules()
    for name in packings:
        module = modules.get(name.removesuffix(".weight"))
        if not name.startswith(inside) or name.startswith(experts) or not isinstance(module, nn.Linear):
            raise CheckpointError(
                f"{source.directory} holds {name.removesuffix('.weight')} quantized, and quantized weights are kept in "
                "the Linears of decoder layers, experts excepted; convert the model that it was made from."
            )


def check_widths(runner: LayerRunner, weights: WeightsRecipe) -> None:
    """Refuse rules of [[weights.modules]] that mean no Linear of this model."""
    for rule in weights.modules:
        beyond = next((layer for layer in rule.index or () if not 0 <= layer < runner.num_layers), None)
        if beyond is not None:
            raise RecipeError(f"{rule} names layer {beyond}, but this model has layers 0 to {runner.num_layers - 1}.")
        found = [
            (linear, index)
            for index in rule.index or range(runner.num_layers)
            for linear in runner.structure(index).linears
            if rule.applies(f"{runner.layer_name(index)}.{linear}", index)
        ]
        experts = runner.structure(found[0][1]).experts if found else None
        if rule.bits == KEPT_BITS and experts is not None and any(experts.owner(name) is not None for name, _ in found):
            raise RecipeError(f"{rule} keeps routed experts at 16 bits, which have to have one width; leave these out.")
        if not found:
            raise RecipeError(
                f"{rule} matches no Linear that is quantized in this model; {runner.layer_name(0)}."
                f"{runner.structure(0).linears[-1]} is the name of one."
            )


def fitted_weights(runner: LayerRunner, weights: WeightsRecipe) -> WeightsRecipe:
    """The weights' recipe with what it leaves to the model: the method, and a group size that divides the inputs of
    every Linear to be quantized.

    Raises:
        RecipeError: the recipe's does not, or none of `auto_group_sizes` does; or a Linear's outputs cannot be packed.
    """
    if not weights.quantizes:
        return weights
    structures = [runner.structure(index) for index in range(runner.num_layers)]
    routed = any(structure.experts is not None for structure in structures)
    chosen = weights.method == "auto" and weights.plain and not weights.modules and not routed
    if weights.kept_share is None and chosen:
        weights = weights.model_copy(update={"kept_share": auto_kept_share(runner.config.hidden_size)})
    if weights.kept_share and routed:
        raise RecipeError("[weights] kept_share is for dense models, and this one has routed experts; leave it out.")
    if weights.method == "auto":
        weights = weights.model_copy(update={"method": "awq" if routed else "awq+gptq"})
    inputs: dict[int, str] = {}
    checked: list[LayerStructure] = []
    for index in range(runner.num_layers):
        structure = runner.structure(index)
        if structure in checked:
            continue
        checked.append(structure)
        layer = runner.model.get_submodule(runner.layer_name(index))
        for name in structure.linears:
            linear, full = layer.get_submodule(name), f"{runner.layer_name(index)}.{name}"
            inputs.setdefault(linear.in_features, full)
            if linear.out_features % 8:
                raise RecipeError(
                    f"{full} has {linear.out_features} outputs, which cannot be packed by eight; set [weights] "
                    'method = "none".'
                )
    own = auto_group_sizes(runner.config.hidden_size)
    candidates = own if weights.group_size == "auto" else (weights.group_size,)
    for size in candidates:
        if not any(count % size for count in inputs):
            return weights.model_copy(update={"group_size": size})
    fitting = [size for size in (*AUTO_GROUP_SIZES, 16) if not any(count % size for count in inputs)]
    advice = f"set group_size = {fitting[0]}" if fitting else "no group size from 16 to 128 fits all of them"
    count, full = next((count, name) for count, name in inputs.items() if count % candidates[-1])
    what = f"{candidates[-1]} does not divide" if len(candidates) == 1 else f"none of {candidates} divides"
    raise RecipeError(f"[weights] group_size = {weights.group_size}: {what} the {count:,} inputs of {full}; {advice}.")
