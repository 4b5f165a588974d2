"""One job per decoder layer: what a recipe asks for there, resolved for the model at hand."""

from __future__ import annotations

from kvconvert.calibration.protocol import LayerJob
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.methods import KVScheme
from kvconvert.models.configuration import head_dim, key_value_heads, layer_config, layer_types_of, pages_unsupported
from kvconvert.recipes.recipe import Recipe


def layer_jobs(runner: LayerRunner, recipe: Recipe) -> list[LayerJob]:
    """The jobs of all layers, in order."""
    kinds = layer_types_of(runner.config)[0]
    jobs = []
    for index in range(runner.num_layers):
        structure, shape, name = runner.structure(index), layer_config(runner.config, index), runner.layer_name(index)
        scheme, reason = _scheme(runner, recipe.scheme(index), index, kinds[index])
        jobs.append(
            LayerJob(
                index=index,
                name=name,
                weights=recipe.weights,
                scheme=scheme,
                search=recipe.calibration_of(index),
                structure=structure,
                reason=reason,
                heads=key_value_heads(shape),
                head_dim=head_dim(shape),
                bits={
                    linear: recipe.weights.bits_of(f"{name}.{linear}", index)
                    for linear in (() if structure is None else structure.linears)
                },
            )
        )
    return jobs


def _scheme(runner: LayerRunner, scheme: KVScheme | None, index: int, layer_type: str) -> tuple[KVScheme | None, str]:
    """The recipe's scheme as one layer can have it, and why it differs."""
    if scheme is None:
        return None, ""
    unsupported_reason = pages_unsupported(runner.config, layer_type)
    if unsupported_reason:
        return None, unsupported_reason
    if scheme.folds_values and runner.has_packed(index):
        return scheme.with_online_rotation(), "values are rotated at run time: the source's quantized weights are kept"
    if scheme.folds_values:
        structure = runner.structure(index)
        unsupported_reason = (
            "no adapter says that this architecture's values may be rotated in the weights"
            if structure is None
            else structure.fold_unsupported_reason
        )
        if unsupported_reason:
            return scheme.with_online_rotation(), f"values are rotated at run time: {unsupported_reason}"
    return scheme, ""
