"""Packed experts at run time, in the place of transformers' fused experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter

from kvconvert.bundle.locate import MANIFEST_NAME
from kvconvert.bundle.manifest import ModuleCoverage
from kvconvert.errors import BundleError
from kvconvert.kernels import device as devices
from kvconvert.kernels.experts import routed_experts, scored_experts, store_experts, unsupported
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
from kvconvert.runtime.hf.fused_modules import find_gate


class PackedExperts(SeparateExperts):
    """Experts of packed Linears: on a GPU a fixed number of kernels without the host, elsewhere one after another.

    What the kernels do not serve (see `kvconvert.kernels.experts.unsupported`) is computed expert by expert, too; the
    first such call on a GPU logs a warning.
    """

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """As in `SeparateExperts`."""
        if not devices.runs_triton(hidden_states.device):
            return super().forward(hidden_states, top_k_index, top_k_weights)
        if "stored" not in self.__dict__:
            linears = [tuple(expert[role] for role in self.roles.linears) for expert in self.experts()]
            self.gate = find_gate(self._joined, self.gating) if self.layout.gated else self.gating.act_fn
            self.stored = store_experts(linears)
        reason = unsupported(hidden_states, self.stored, self.gate)
        if reason is not None:
            devices.fall_back("Experts with quantized weights", reason)
            return super().forward(hidden_states, top_k_index, top_k_weights)
        if self.layout.scored_before:
            return scored_experts(hidden_states, self.stored, self.gate)
        return routed_experts(hidden_states, top_k_index, top_k_weights, self.stored, self.gate)

    def __getstate__(self) -> dict[str, Any]:
        # Buffers belong to these Linears; a copy's make their own.
        return {name: value for name, value in self.__dict__.items() if name not in ("stored", "gate")}


def place_packed_experts(model: nn.Module, modules: Iterable[ModuleCoverage]) -> None:
    """Replace, on the meta device, fused experts by packed ones wherever a manifest calls them quantized.

    Args:
        model: with transformers' fused experts.
        modules: the manifest's coverage.

    Raises:
        BundleError: the coverage names some of a layer's experts and not others, or passes over them.
    """
    coverage = {module.name: module for module in modules}
    if all(module.method == "kept" for module in coverage.values()):
        return
    for name, fused in [(name, module) for name, module in model.named_modules() if is_fused(module)]:
        roles = next((roles for roles in EXPERT_ROLES if f"{name}.0.{roles.down}" in coverage), None)
        if roles is None:
            if name not in coverage and not any(other.startswith(f"{name}.") for other in coverage):
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
        made = iter([coverage[part] for part in parts])  # each expert's Linears in the order of its roles

        def make(inputs: int, outputs: int, bias: bool, made: Iterator[ModuleCoverage] = made) -> QuantizedLinear:
            module = next(made)
            return QuantizedLinear(inputs, outputs, module.group_size, bias, bits=module.bits)

        with torch.device("meta"):
            packed = PackedExperts(fused, roles, make)
        model.set_submodule(name, packed)


def merges_experts(conversion: Any) -> bool:
    """Whether one of transformers' weight conversions makes fused experts."""
    return isinstance(conversion, WeightConverter) and any(
        target.rpartition(".")[2] in FUSED_WEIGHTS + FUSED_BIASES for target in conversion.target_patterns
    )
