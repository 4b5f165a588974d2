"""Packed experts at run time: `SeparateExperts` over packed Linears in the place of transformers' fused experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import WeightConverter

from kvconvert.bundle.manifest import MANIFEST_NAME, ModuleCoverage
from kvconvert.errors import BundleError
from kvconvert.kernels.linear import QuantizedLinear
from kvconvert.models.experts import (
    EXPERT_ROLES,
    FUSED_BIASES,
    FUSED_WEIGHTS,
    SeparateExperts,
    expert_names,
    fused_layout,
    is_fused,
)


def place_packed_experts(model: nn.Module, modules: Iterable[ModuleCoverage]) -> None:
    """Replace, on the meta device, fused experts by packed ones wherever a manifest calls them quantized.

    Args:
        model: with transformers' fused experts.
        modules: the manifest's coverage.

    Raises:
        BundleError: the coverage names some of a layer's experts and not others, or passes over them.
    """
    coverage = {module.name: module for module in modules}
    quantizes = any(module.method != "kept" for module in coverage.values())
    for name, fused in [(name, module) for name, module in model.named_modules() if is_fused(module)]:
        roles = next((roles for roles in EXPERT_ROLES if f"{name}.0.{roles.down}" in coverage), None)
        if roles is None:
            if quantizes and name not in coverage and not any(other.startswith(f"{name}.") for other in coverage):
                raise BundleError(
                    f"{MANIFEST_NAME} does not list {name}, the experts of a layer of {type(model).__name__}; "
                    "the bundle belongs to another architecture or version of transformers."
                )
            continue
        parts = expert_names(name, fused_layout(fused), roles)
        missing = [part for part in parts if part not in coverage]
        kept = [part for part in parts if part not in missing and coverage[part].method == "kept"]
        if len(kept) == len(parts):
            continue  # transformers fuses what it reads
        if missing or kept:
            part, fault = (missing[0], "does not list") if missing else (kept[0], "keeps unquantized")
            raise BundleError(
                f"{MANIFEST_NAME} {fault} {part}, an expert beside quantized ones; experts of a layer are quantized "
                "together, so the bundle is damaged or belongs to another version of transformers."
            )
        group_size = coverage[f"{name}.0.{roles.down}"].group_size
        with torch.device("meta"):
            packed = SeparateExperts(fused, roles, lambda i, o, bias, g=group_size: QuantizedLinear(i, o, g, bias))
        model.set_submodule(name, packed)


def merges_experts(conversion: Any) -> bool:
    """Whether one of transformers' weight conversions makes fused experts."""
    return isinstance(conversion, WeightConverter) and any(
        target.rpartition(".")[2] in FUSED_WEIGHTS + FUSED_BIASES for target in conversion.target_patterns
    )
