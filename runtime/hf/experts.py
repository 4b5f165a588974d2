"""Mixture-of-experts layers whose experts are Linears of their own, each computed for the tokens routed to it.

transformers holds the experts of a layer fused: one 3-D parameter for all gate and up projections, one for all down
projections, in one of several layouts. `SeparateExperts` computes the same function from two or three Linears per
expert, ordinary ones for calibration and packed ones at run time, under the names that checkpoints give to them
("experts.3.gate_proj", or Mixtral's "experts.3.w1"). An expert that no token was routed to is not called, so its packed
weights are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter

from kvconvert.bundle.manifest import MANIFEST_NAME, ModuleCoverage
from kvconvert.errors import BundleError, UnsupportedModelError
from kvconvert.kernels.linear import QuantizedLinear


class ExpertRoles(NamedTuple):
    """What a checkpoint calls an expert's three Linears."""

    gate: str
    up: str
    down: str


# Llama's words, and those of Mixtral's first implementation.
EXPERT_ROLES = (ExpertRoles("gate_proj", "up_proj", "down_proj"), ExpertRoles("w1", "w3", "w2"))
# Fused experts that get every token for every expert, already multiplied by the router's score: zeros where the token
# was routed elsewhere.
SCORED_BEFORE = ("Llama4TextExperts",)
FUSED_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
FUSED_BIASES = ("gate_up_proj_bias", "up_proj_bias", "down_proj_bias")

MakeLinear = Callable[[int, int, bool], nn.Module]


class FusedLayout(NamedTuple):
    """Shape and layout of a fused module's parameters.

    Attributes:
        num_experts, hidden, intermediate: sizes.
        transposed: weights are [experts, in, out] instead of [experts, out, in].
        interleaved: outputs of the first projection alternate gate, up, gate, up; else all gates come first.
        bias: both projections have one, [experts, out].
        scored_before: see `SCORED_BEFORE`.
    """

    num_experts: int
    hidden: int
    intermediate: int
    transposed: bool
    interleaved: bool
    bias: bool
    scored_before: bool


def is_fused(module: nn.Module) -> bool:
    """Whether a module holds the weights of several experts in 3-D parameters, under transformers' names for them."""
    return any(name in FUSED_WEIGHTS and weight.ndim == 3 for name, weight in module.named_parameters(recurse=False))


def fused_layout(fused: nn.Module) -> FusedLayout:
    """The layout of transformers' fused experts, from what the module itself declares.

    Raises:
        UnsupportedModelError: a kind of experts that cannot be taken apart here.
    """
    kind = type(fused).__name__
    scored_before = kind in SCORED_BEFORE
    names = {name for name, _ in fused.named_parameters(recurse=False)}
    gated = {"gate_up_proj", "down_proj"}
    standard = scored_before or getattr(fused, "has_gate", False)
    if not standard or names not in (gated, gated | {f"{name}_bias" for name in gated}):
        raise UnsupportedModelError(
            f"{kind} with {', '.join(sorted(names))} is a kind of fused experts that kvconvert cannot take apart; use "
            '[weights] method = "none".'
        )
    if getattr(fused, "has_post_expert_norm", False):
        raise UnsupportedModelError(
            f'{kind} normalises what its experts compute, which is not supported; use [weights] method = "none".'
        )
    transposed = scored_before or fused.is_transposed
    experts, rows, columns = fused.down_proj.shape
    return FusedLayout(
        num_experts=experts,
        hidden=columns if transposed else rows,
        intermediate=rows if transposed else columns,
        transposed=transposed,
        interleaved=not scored_before and not fused.is_concatenated,
        bias="down_proj_bias" in names,
        scored_before=scored_before,
    )


class SeparateExperts(nn.Module):
    """Experts as Linears: the function of transformers' fused experts, whose place this module takes.

    Children are named "0", "1", ..., and theirs by `roles`.

    Args:
        fused: transformers' module, on any device; it is not changed. Its activation is kept, its weights are not.
        roles: names of each expert's Linears.
        make_linear: makes one of them from its inputs, its outputs and whether it has a bias.
    """

    def __init__(self, fused: nn.Module, roles: ExpertRoles, make_linear: MakeLinear) -> None:
        super().__init__()
        self.layout, self.roles = fused_layout(fused), roles
        hidden, intermediate, bias = self.layout.hidden, self.layout.intermediate, self.layout.bias
        for expert in range(self.layout.num_experts):
            linears = {
                roles.gate: make_linear(hidden, intermediate, bias),
                roles.up: make_linear(hidden, intermediate, bias),
                roles.down: make_linear(intermediate, hidden, bias),
            }
            self.add_module(str(expert), nn.ModuleDict(linears))
        # Not a child: transformers would initialise the weights that a module of this class ought to have.
        self.__dict__["gating"] = _without_weights(fused)

    def experts(self) -> Iterator[nn.ModuleDict]:
        """The experts in order."""
        return (self.get_submodule(str(expert)) for expert in range(self.layout.num_experts))

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """What the fused module computes from the same arguments: [tokens, hidden] in the input's dtype.

        Args:
            hidden_states: [tokens, hidden]; where scores are applied before, [experts * tokens, hidden] in order of
                experts.
            top_k_index, top_k_weights: experts of each token and their weights, [tokens, k]; absent where scores are
                applied before. An index beyond the last expert stands for none.
        """
        if self.layout.scored_before:
            return self._scored(hidden_states)
        tokens, k = top_k_index.shape
        chosen = top_k_index.flatten()
        counts = torch.bincount(chosen, minlength=self.layout.num_experts).tolist()
        order = chosen.argsort(stable=True)
        outputs = hidden_states.new_zeros(tokens * k, self.layout.hidden)
        start = 0
        for expert, count in zip(self.experts(), counts, strict=False):
            if count:
                slots = order[start : start + count]
                outputs[slots] = self._expert(expert, hidden_states[slots // k])
            start += count
        weighted = outputs * top_k_weights.reshape(-1, 1)
        return weighted.view(tokens, k, -1).sum(1).to(hidden_states.dtype)

    def compute(self, number: int, tokens: Tensor) -> Tensor:
        """What one expert makes of tokens [n, hidden], before any score."""
        return self._expert(self.get_submodule(str(number)), tokens)

    def _scored(self, hidden_states: Tensor) -> Tensor:
        # Without biases an expert makes zeros of zeros: only its own tokens, which are not zero, need to be computed.
        routed = hidden_states.ne(0).any(-1).view(self.layout.num_experts, -1)
        outputs = torch.zeros_like(hidden_states)
        for number, (expert, count) in enumerate(zip(self.experts(), routed.sum(1).tolist(), strict=True)):
            if count:
                rows = routed[number].nonzero().flatten() + number * routed.shape[1]
                outputs[rows] = self._expert(expert, hidden_states[rows])
        return outputs

    def _expert(self, expert: nn.ModuleDict, x: Tensor) -> Tensor:
        gate, up = expert[self.roles.gate](x), expert[self.roles.up](x)
        if self.layout.scored_before:
            gated = up * self.gating.act_fn(gate)
        elif self.layout.interleaved:
            gated = self.gating._apply_gate(torch.stack((gate, up), -1).flatten(-2))
        else:
            gated = self.gating._apply_gate(torch.cat((gate, up), -1))
        return expert[self.roles.down](gated)


def _without_weights(fused: nn.Module) -> nn.Module:
    """A shallow copy of a fused module that keeps its settings and activation only."""
    bare = object.__new__(type(fused))
    bare.__dict__.update(fused.__dict__)
    bare._parameters = {}
    return bare


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
                    f"{MANIFEST_NAME} does not say what happened to {name}, whose experts {type(model).__name__} has; "
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


def expert_names(prefix: str, layout: FusedLayout, roles: ExpertRoles) -> list[str]:
    """Full names of the Linears of a layer's experts, in order."""
    return [f"{prefix}.{expert}.{role}" for expert in range(layout.num_experts) for role in roles]


def merges_experts(conversion: Any) -> bool:
    """Whether one of transformers' weight conversions makes fused experts."""
    return isinstance(conversion, WeightConverter) and any(
        target.rpartition(".")[2] in FUSED_WEIGHTS + FUSED_BIASES for target in conversion.target_patterns
    )
