"""What the headers of a checkpoint's files say, against the model that config.json describes; no weights are read.

Names are compared as transformers renames them on loading (`TensorNames`), experts fused or separate. Tensors beyond
the model's are tolerated as transformers tolerates them, with two exceptions, in which a wrong model would result:
decoder layers beyond `num_hidden_layers`, and tensors inside a decoder layer that is to be converted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvconvert.errors import CheckpointError
from kvconvert.models.experts import split_fused
from kvconvert.models.source import SourceModel


def check_headers(source: SourceModel, model: PreTrainedModel, layers: str | None) -> None:
    """Refuse a checkpoint that does not hold the model's tensors in the model's shapes.

    Args:
        source: the checkpoint, named as in `model`.
        model: built from its configuration on the meta device; with `layers`, with separate experts.
        layers: name of the module that holds the decoder layers to be converted ("model.layers"), or None where none
            are: then only what transformers itself would miss is refused.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or there are more decoder layers than
            `num_hidden_layers` says.
    """
    stored = source.tensor_names.stored
    shapes = {name: tuple(source.tensors[full].shape) for name, full in stored.items()}
    count = model.config.get_text_config().num_hidden_layers
    containers = [layers] if layers else [name for name, module in model.named_modules() if _holds(module, count)]
    for container in containers:
        _check_count(model, container, count, shapes)
    for index in range(count) if layers else ():
        prefix = f"{layers}.{index}."
        inside = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
        tensors = {name: torch.empty(shape, device="meta") for name, shape in inside.items()}
        fitting(model.get_submodule(prefix[:-1]), prefix[:-1], tensors, model)
    merged = source.tensor_names.merged
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    required = {name for name, _ in model.named_parameters()} - {*_tied(model)} - merged
    for name, shape in expected.items():
        if (layers and name.startswith(f"{layers}.")) or name in merged:
            continue
        if name not in shapes:
            if name in required and not _matches(name, model._keys_to_ignore_on_load_missing):
                raise _missing(name)
        elif shapes[name] != shape:
            raise _misshapen(name, shapes[name], shape)


def fitting(layer: nn.Module, name: str, tensors: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """A decoder layer's tensors by the names of its state dict, without those that models compute themselves.

    Args:
        layer: with separate experts.
        name: of the layer in `model`.
        tensors: of the checkpoint, by name within the layer; on the meta device where only shapes are of interest.
        model: that the layer belongs to.

    Raises:
        CheckpointError: one is missing, left over, or of another shape.
    """
    expected = {key: tuple(value.shape) for key, value in layer.state_dict().items()}
    kept = {key: value for key, value in tensors.items() if key in expected or not is_derived(model, f"{name}.{key}")}
    kept = split_fused(layer, kept, name)
    for key in sorted({*expected, *kept}):
        if key not in kept:
            raise _missing(f"{name}.{key}")
        if key not in expected:
            kind = model.config.get_text_config().model_type
            raise CheckpointError(f"The checkpoint holds {name}.{key}, which a {kind} model does not have.")
        if tuple(kept[key].shape) != expected[key]:
            raise _misshapen(f"{name}.{key}", tuple(kept[key].shape), expected[key])
    return kept


def is_derived(model: PreTrainedModel, name: str) -> bool:
    """Buffers that old checkpoints store although models compute them, and what a model says that it ignores."""
    return name.endswith(".rotary_emb.inv_freq") or _matches(name, model._keys_to_ignore_on_load_unexpected)


def _check_count(model: PreTrainedModel, container: str, count: int, names: Iterable[str]) -> None:
    """Layers for predicting several tokens may follow those of the model: its code or its configuration says so."""
    predicted = getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0
    for name in names:
        rest = name.removeprefix(f"{container}.")
        number = rest.partition(".")[0]
        if rest == name or not number.isdecimal() or int(number) < count + predicted:
            continue
        if not is_derived(model, name):
            raise CheckpointError(
                f"The checkpoint holds {name}, but config.json says num_hidden_layers = {count}, so that layers from "
                f"{count} on would be dropped; repair config.json."
            )


def _holds(module: nn.Module, count: int) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == count


def _tied(model: PreTrainedModel) -> dict[str, str]:
    return getattr(model, "all_tied_weights_keys", None) or {}


def _matches(name: str, patterns: Iterable[str] | None) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _missing(name: str) -> CheckpointError:
    return CheckpointError(f"The checkpoint lacks {name}; it does not fit its config.json.")


def _misshapen(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(f"{name} has shape {list(found)} where config.json expects {list(expected)}.")
