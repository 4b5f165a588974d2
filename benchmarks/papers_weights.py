"""AWQ's tables 1 to 3 on a model: rounding, 1% of the channels kept, fixed scales for them, and the search."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
import weights_measure
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvconvert.calibration.weight_grid import WeightGrid
from kvconvert.convert.discovery import discover
from kvconvert.convert.layer_runner import build_without_weights
from kvconvert.data.text import load_token_samples
from kvconvert.methods.awq import AUTO_GROUP_SIZES

BITS = 3  # as in the paper's tables


@dataclass(frozen=True)
class Case:
    """What becomes of the decoder layers' Linears, 3 bits in the largest groups that fit the model.

    Attributes:
        method: "rtn" rounds, "keep" leaves some input channels in full precision, "scale" multiplies their weights by
            a number before rounding and divides them by it afterwards, "awq" is the product's search.
        share: of each Linear's input channels that are kept or scaled.
        by: what chooses them: the mean magnitude of their inputs or of their weights, or chance.
        scale: the number.
    """

    method: Literal["rtn", "keep", "scale", "awq"]
    share: float = 0.0
    by: Literal["activation", "weight", "chance"] = "activation"
    scale: float = 1.0

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"weights: {self.method} {self.share:g} {self.by} {self.scale:g}"


@torch.no_grad()
def quantized(case: Case, directory: Path, samples: int, device: str) -> PreTrainedModel:
    """The model in float32 with the weights that would be stored, dequantized; dense models only."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    linears = _linears(model)
    group = next(
        size for size in AUTO_GROUP_SIZES if all(linear.in_features % size == 0 for linear in linears.values())
    )
    if case.method == "awq":
        text = f"awq:bits={BITS},samples={samples}"
        return weights_measure.quantized_model(directory, weights_measure.Case.parse(text, group), None, 0, device)
    activations = _activations(directory, samples, device) if case.by == "activation" and case.share else {}
    generator = torch.Generator().manual_seed(0)
    for name, linear in linears.items():
        weight, channels = linear.weight, linear.in_features
        score = {
            "activation": lambda name=name: activations[name],
            "weight": lambda weight=weight: weight.abs().mean(0).cpu(),
            "chance": lambda channels=channels: torch.rand(channels, generator=generator),
        }[case.by]
        count = max(1, round(case.share * channels)) if case.share else 0
        chosen = score().topk(count).indices if count else torch.empty(0, dtype=torch.int64)
        factor = torch.ones(channels)
        factor[chosen] = case.scale
        factor = factor.to(weight)
        rounded = WeightGrid.of(weight * factor, BITS, group).round(weight * factor) / factor
        if case.method == "keep":
            rounded[:, chosen] = weight[:, chosen]
        weight.copy_(rounded)
    return model


def _linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The Linears that conversions quantize."""
    structures, found = discover(build_without_weights(model.config)).structures, {}
    for index, (layer, structure) in enumerate(zip(model.model.layers, structures, strict=True)):
        found |= {f"{index}.{name}": layer.get_submodule(name) for name in structure.linears}
    return found


@lru_cache(maxsize=1)
def _activations(directory: Path, samples: int, device: str) -> Mapping[str, Tensor]:
    """Mean magnitude of each input channel of each Linear over calibration text."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    ids = load_token_samples(None, AutoTokenizer.from_pretrained(directory), samples, 512, 0).ids
    linears = _linears(model)
    sums = {name: torch.zeros(linear.in_features, dtype=torch.float64) for name, linear in linears.items()}

    def observer(name: str):
        def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            sums[name] += inputs[0].abs().flatten(0, -2).mean(0).double().cpu()

        return add

    with ExitStack() as hooks:
        for name, linear in linears.items():
            handle = linear.register_forward_pre_hook(observer(name))
            hooks.callback(handle.remove)
        for sample in ids:
            model(input_ids=sample[None].to(device), use_cache=False, logits_to_keep=1)
    return {name: total.float() for name, total in sums.items()}
