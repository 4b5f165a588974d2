"""Bundles of tiny models without a calibration, and the torch model that each stands for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny.bundle import describe_files
from tiny.models import ARCHITECTURES, random_ids
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvconvert.bundle.locate import PLAN_NAME
from kvconvert.bundle.manifest import (
    FORMAT_VERSION,
    LayerPlan,
    Manifest,
    ModuleCoverage,
    quantization_config,
)
from kvconvert.bundle.statements import weights_info
from kvconvert.bundle.writer import write_json, write_manifest, write_weights
from kvconvert.io.records import SourceInfo
from kvconvert.io.tensorfile import tensor_info, write_tensors
from kvconvert.kernels.linear.awq_format import dequantize_weight, quantize_weight
from kvconvert.methods import KVScheme

GROUP = 32


class StaticCache(DynamicCache):
    """Keys and values as a cache of static scales gives them back, every token from the first on.

    Args:
        plan: the KV plan's tensors.
        bits: of a code.
    """

    def __init__(self, plan: dict[str, Tensor], bits: int) -> None:
        super().__init__()
        self.plan, self.bits = plan, bits

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        stored = (self._stored(x, layer_idx, side) for x, side in ((key_states, "key"), (value_states, "value")))
        return super().update(*stored, layer_idx, *args, **kwargs)

    def _stored(self, x: Tensor, layer: int, side: str) -> Tensor:
        scale, zero_point = (
            self.plan[f"layers.{layer}.static_{side}_{part}"].float()[:, None] for part in ("scale", "zero_point")
        )
        codes = ((x - zero_point) / scale).round().clamp(0, 2**self.bits - 1)
        return torch.where(scale == 0, zero_point, codes * scale + zero_point)


@torch.no_grad()
def greedy(model: PreTrainedModel, ids: list[int], count: int, cache: DynamicCache) -> tuple[list[int], Tensor]:
    """Greedy tokens of a torch model, and the logits [count, vocabulary] that each was chosen from."""
    new, tokens, logits = torch.tensor([ids]), [], []
    for _ in range(count):
        logits.append(model(input_ids=new, past_key_values=cache).logits[0, -1])
        tokens.append(int(logits[-1].argmax()))
        new = torch.tensor([[tokens[-1]]])
    return tokens, torch.stack(logits)


def static_plan(model: PreTrainedModel, bits: int, ids: Tensor) -> dict[str, Tensor]:
    """Scales and zero points of the keys and values of token ids [1, n]; one channel of each side is a constant."""
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    plan = {}
    for index, layer in enumerate(cache.layers):
        for side, x in (("key", layer.keys), ("value", layer.values)):
            low, high = x.amin((0, 2)), x.amax((0, 2))
            high[0, 3] = low[0, 3]
            plan[f"layers.{index}.static_{side}_scale"] = ((high - low) / (2**bits - 1)).half()
            plan[f"layers.{index}.static_{side}_zero_point"] = low.half()
    return plan


def converted_tiny(
    name: str,
    directory: Path,
    bits: int = 8,
    scheme: dict[str, Any] | None = None,
    widths: Sequence[int] = (4,),
    **settings: Any,
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """`converted` of a tiny architecture; `settings` are configuration values."""
    return converted(
        ARCHITECTURES[name].build(**settings), directory, random_ids(1, 96, seed=5), bits, scheme, widths=widths
    )


def converted(
    model: PreTrainedModel,
    directory: Path,
    ids: Tensor,
    bits: int = 8,
    scheme: dict[str, Any] | None = None,
    group: int = GROUP,
    widths: Sequence[int] = (4,),
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Write a bundle with rounded weights and static scales.

    Args:
        model: in float32; its weights are rounded in place.
        directory: the bundle's.
        ids: token ids [1, n] whose keys and values set the scales.
        bits: of the cache.
        scheme: fields of the KV scheme besides those of static scales.
        group: inputs that share a scale of weights.
        widths: of the Linears' weights, in turn.

    Returns:
        the torch model with the bundle's weights, and the KV plan.
    """
    model.requires_grad_(False)
    tensors, modules = {}, []
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in module_name:
            width = widths[len(modules) % len(widths)]
            packed = quantize_weight(module.weight, width, group)
            module.weight.copy_(dequantize_weight(packed))
            tensors |= {f"{module_name}.{part}": tensor for part, tensor in packed._asdict().items()}
            modules.append(
                ModuleCoverage(
                    name=module_name,
                    method="rtn",
                    bits=width,
                    group_size=group,
                    in_features=module.in_features,
                    out_features=module.out_features,
                )
            )
        elif isinstance(module, nn.Linear | nn.Embedding):
            kind = "embedding" if isinstance(module, nn.Embedding) else "linear"
            modules.append(ModuleCoverage(name=module_name, kind=kind, method="kept", reason="outside the layers"))
    packed_names = {module.name for module in modules if module.method == "rtn"}
    for tensor_name, parameter in model.named_parameters():
        module_name, _, part = tensor_name.rpartition(".")
        if part != "weight" or module_name not in packed_names:
            # Halves keep what norms and embeddings are tested with: not only float32 is stored.
            parameter.copy_(parameter.bfloat16())
            tensors[tensor_name] = parameter.bfloat16()
    plan = static_plan(model, bits, ids)
    _write(directory, model, tensors, modules, plan, bits, scheme or {})
    return model, plan


def _write(
    directory: Path,
    model: PreTrainedModel,
    tensors: dict[str, Tensor],
    modules: list[ModuleCoverage],
    plan: dict[str, Tensor],
    bits: int,
    scheme: dict[str, Any],
) -> None:
    directory.mkdir(parents=True)
    config = model.config
    fields = {"key_bits": bits, "value_bits": bits, "static_scales": "calibrated"} | scheme
    heads, size = plan["layers.0.static_key_scale"].shape
    stored = KVScheme(**fields)
    layer = {"kv": stored.to_dict(), "head_dim": size, "num_key_value_heads": heads}
    layer |= {"value_group_size": min(size, stored.value_group_size), "rotation": None}
    infos = {name: tensor_info(tensor) for name, tensor in tensors.items()}
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        kvconvert_version="0.1.0",
        versions={},
        source=SourceInfo(id="tiny", config_sha256="0" * 64, weights_sha256={}),
        recipe={"name": "tiny"},
        data=None,
        transforms=["quantize_weights"],
        conventions={},
        layers=[LayerPlan(index=index, **layer) for index in range(config.num_hidden_layers)],
        modules=modules,
        weights=weights_info(modules, infos),
        tensors=infos,
        plan={name: tensor_info(tensor) for name, tensor in plan.items()},
        files={},
    )
    files = write_weights(directory, infos, tensors.__getitem__)
    (directory / PLAN_NAME).parent.mkdir(exist_ok=True)
    write_tensors(directory / PLAN_NAME, manifest.plan, plan.__getitem__)
    written = config.to_dict() | {"quantization_config": quantization_config(manifest.weights, manifest.modules)}
    write_json(directory / "config.json", written)
    names = [*files, PLAN_NAME, "config.json"]
    write_manifest(directory, manifest.model_copy(update={"files": describe_files(directory, names)}))
