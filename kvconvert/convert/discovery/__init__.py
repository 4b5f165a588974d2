"""The structure of a model's decoder layers, found by an experiment instead of being declared.

A decoder layer of the model's own class is run with random weights while it is watched, once for each kind of layer;
what follows from that, folding and scaling, is tried on the same layer before it is believed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from kvconvert.convert.discovery.experiment import Experiment
from kvconvert.convert.discovery.finder import Finder
from kvconvert.convert.input_capture import CalibrationInputs, InputCapture, compute_buffers
from kvconvert.errors import UnsupportedModelError, first_line
from kvconvert.models.configuration import layer_config
from kvconvert.models.experts import EXPERT_ROLES, ExpertRoles, is_fused, separate_experts
from kvconvert.models.structure import LayerStructure

TOKENS = 16  # of the experiment
# Checkpoints of these hold experts in a form of their own; engines know them by Mixtral's names once they are separate.
MIXTRAL_NAMES = ("granitemoe", "granitemoeshared", "granitemoehybrid")
SHARED = "some of its layers have no keys and values of their own"


@dataclass(frozen=True)
class Architecture:
    """Where a model's decoder layers are, and what is in them.

    Attributes:
        model_type: the model type of the configuration.
        base: the model without its head, which takes token ids and returns hidden states.
        layers: list of decoder layers. Both are module names within the model.
        structures: the structure of each layer.
    """

    model_type: str
    base: str
    layers: str
    structures: tuple[LayerStructure, ...]


@torch.inference_mode(False)  # gradients tell what depends on what, whatever the caller computes in
@torch.enable_grad()
def discover(model: PreTrainedModel) -> Architecture:
    """Find the structure of a model's decoder layers, and replace fused experts in them by separate ones.

    Args:
        model: on the meta device, built with `RECORDING_ATTENTION`.

    Raises:
        UnsupportedModelError: the layers are not found, or cannot be run one by one.
    """
    config = model.config
    kind = type(model).__name__
    stated = getattr(config, "architectures", None) or []
    # Published names differ in case and underscores from the classes that transformers builds: LLaMAForCausalLM,
    # PhiMoEForCausalLM, KimiK25ForConditionalGeneration.
    if stated and _bare(kind) not in map(_bare, stated):
        raise UnsupportedModelError(
            f"config.json states the architecture {', '.join(stated)}, and transformers generates text with {kind}."
        )
    base, layers = _places(model)
    roles = _expert_roles(model)
    for layer in model.get_submodule(layers):
        separate_experts(layer, roles)
    text = config.get_text_config()
    _check_layers(text)
    arguments = _arguments(model, base, layers)
    structures: list[LayerStructure] = []
    known: dict[Any, LayerStructure] = {}
    for index, layer in enumerate(model.get_submodule(layers)):
        signature = _signature(layer, text, index)
        if signature not in known:
            known[signature] = _structure(model, f"{layers}.{index}", index, arguments[index])
        structures.append(known[signature])
    return Architecture(config.model_type, base, layers, tuple(structures))


def _bare(name: str) -> str:
    return name.replace("_", "").casefold()


def _check_layers(config: PretrainedConfig) -> None:
    """Refuse layers that read what others computed, which they do not get where each runs by itself."""
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(f"The weights of this {config.model_type} model cannot be converted ({SHARED}).")


def _places(model: PreTrainedModel) -> tuple[str, str]:
    """Names of the model without its head and of its list of decoder layers."""
    text = model.config.get_text_config()
    found: list[tuple[str, PreTrainedModel]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)  # a list of heads, say, in one of the layers
        if isinstance(module, nn.ModuleList) and len(module) == text.num_hidden_layers and not inside:
            around = _models_around(model, name)
            if around[-1].config.model_type == text.model_type and len(around) > 1:
                found.append((name, around[1]))
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(found)} lists of {text.num_hidden_layers} decoder layers in a model "
            "beneath its head, instead of one."
        )
    layers, base = found[0]
    return next(name for name, module in model.named_modules() if module is base), layers


def _models_around(model: PreTrainedModel, name: str) -> list[PreTrainedModel]:
    """The model, and those inside it that a module lies in, from the outermost on."""
    parts = name.split(".")[:-1]
    around = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1)]
    return [module for module in around if isinstance(module, PreTrainedModel)]


def _expert_roles(model: PreTrainedModel) -> ExpertRoles:
    """Names of an expert's Linears in checkpoints of this model, as transformers reads them; Llama's by default."""
    if model.config.get_text_config().model_type in MIXTRAL_NAMES:
        return EXPERT_ROLES[1]
    first: list[str] = []
    second: list[str] = []
    for entry in get_model_conversion_mapping(model):
        if isinstance(entry, WeightConverter):
            found = [re.search(r"experts\.\*\.(\w+)\.weight", pattern) for pattern in entry.source_patterns]
            roles = [match[1] for match in found if match is not None]
            target = str(entry.target_patterns)
            if len(roles) == 2 and "gate_up_proj" in target:
                first = roles
            elif len(roles) == 1 and "down_proj" in target:
                second = roles
    return ExpertRoles(*first, *second) if first and second else EXPERT_ROLES[0]


def _arguments(model: PreTrainedModel, base_name: str, layers_name: str) -> list[dict[str, Any]]:
    """Arguments that the model passes to each layer beside hidden states, for random tokens."""
    base = copy.deepcopy(model.get_submodule(base_name))
    inside = layers_name.removeprefix(f"{base_name}.")
    random = torch.Generator().manual_seed(0)
    state = {key: value for key, value in base.state_dict().items() if not key.startswith(f"{inside}.")}
    base.load_state_dict({key: _stand_in(value, random) for key, value in state.items()}, strict=False, assign=True)
    compute_buffers(base, base, torch.device("cpu"), lambda name, buffer: _stand_in(buffer, random))
    capture = InputCapture(CalibrationInputs(_ids(model.config)), layers_name)
    try:
        (hidden,) = capture.run(base, base.get_submodule(inside), torch.device("cpu"))
    except UnsupportedModelError:
        raise
    except Exception as error:  # code of any model, which may take more than token ids
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run on token ids alone ({first_line(error)})."
        ) from error
    expected = (1, TOKENS, model.config.get_text_config().hidden_size)
    if tuple(hidden.shape) != expected:
        raise UnsupportedModelError(
            f"The layers of {type(model).__name__} take hidden states of shape {list(hidden.shape)}, not one stream "
            f"{list(expected)}."
        )
    return [capture.arguments(index, 0) for index in range(len(base.get_submodule(inside)))]


def _stand_in(tensor: Tensor, random: torch.Generator) -> Tensor:
    """Numbers of a tensor's shape that take no room: those of a vector, along its diagonals."""
    if not tensor.is_floating_point():
        return torch.zeros_like(tensor, device="cpu")
    vector = torch.randn(max(1, sum(tensor.shape)), generator=random)
    return vector.as_strided(tensor.shape, (1,) * tensor.ndim)


def _ids(config: PretrainedConfig) -> Tensor:
    """Token ids that stand for text."""
    special = {value for key, value in _fields(config.to_dict()) if key.endswith(("token_id", "token_index"))}
    size = config.get_text_config().vocab_size
    found = [number for number in range(1, min(size, 10 * TOKENS + len(special))) if number not in special]
    return torch.tensor((found * TOKENS)[:TOKENS])[None]


def _fields(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [found for key, entry in value.items() for found in _fields(entry, str(key))]
    if isinstance(value, list | tuple):
        return [found for entry in value for found in _fields(entry, name)]
    return [(name, value)] if isinstance(value, int) else []


def _signature(layer: nn.Module, config: PretrainedConfig, index: int) -> Any:
    """The kind of a layer: its modules with shapes and settings, and its type in the configuration."""
    types = getattr(config, "layer_types", None)
    parts = [types[index] if types else None]
    for name, module in layer.named_modules():
        shapes = tuple((key, tuple(value.shape)) for key, value in module.named_parameters(recurse=False))
        settings = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, bool | int | float | str) and "idx" not in key and "index" not in key
        )
        parts.append((name, type(module), shapes, settings))
    return tuple(parts)


def _structure(model: PreTrainedModel, name: str, index: int, arguments: Mapping[str, Any]) -> LayerStructure:
    layer, config = model.get_submodule(name), layer_config(model.config.get_text_config(), index)
    fused = next((path for path, module in layer.named_modules() if is_fused(module)), None)
    if fused is not None:
        raise UnsupportedModelError(f"The experts {name}.{fused} cannot be separated.")
    owner, hidden = _models_around(model, name)[-1], model.config.get_text_config().hidden_size
    try:
        experiment = Experiment(layer, owner, arguments, TOKENS, hidden)
        if not experiment.takes_batches():
            raise UnsupportedModelError(f"{name} takes arguments that fit one sequence alone.")
        return Finder(experiment, config, name).structure()
    except UnsupportedModelError:
        raise
    except Exception as error:  # of the model's own code
        raise UnsupportedModelError(f"{name} cannot be run by itself ({first_line(error)}).") from error
