"""Mixture-of-experts layers whose experts are Linears of their own, each computed for the tokens routed to it.

transformers fuses the experts of a layer: one 3-D parameter for all gate and up projections, one for all down
projections, in one of several layouts. `SeparateExperts` computes the same function from two or three Linears per
expert, ordinary ones for calibration and packed ones at run time, named as in checkpoints ("experts.3.gate_proj", or
Mixtral's "experts.3.w1"). An expert that no token is routed to is not called, so its packed weights are not read.

Checkpoints store experts fused or separate, whichever form the library in use prefers: `split_fused` brings the fused
form to the separate one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvconvert.errors import CheckpointError, UnsupportedModelError


class ExpertRoles(NamedTuple):
    """Names of an expert's Linears in a checkpoint; some experts have no gate."""

    gate: str | None
    up: str
    down: str

    @property
    def linears(self) -> tuple[str, ...]:
        """Those that there are, in order."""
        return tuple(role for role in self if role is not None)


# Llama's names, and those of Mixtral's first implementation.
EXPERT_ROLES = (ExpertRoles("gate_proj", "up_proj", "down_proj"), ExpertRoles("w1", "w3", "w2"))
# Fused experts whose input holds every token once per expert, multiplied by the router's score beforehand: zeros where
# the token was routed elsewhere.
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
        gated: whether there is a gate beside the up projection.
    """

    num_experts: int
    hidden: int
    intermediate: int
    transposed: bool
    interleaved: bool
    bias: bool
    scored_before: bool
    gated: bool = True

    def roles(self, roles: ExpertRoles) -> ExpertRoles:
        """Those of these names that such experts have."""
        return roles if self.gated else roles._replace(gate=None)


def is_fused(module: nn.Module) -> bool:
    """Whether a module holds the weights of several experts in 3-D parameters, under transformers' names for them."""
    return any(name in FUSED_WEIGHTS and weight.ndim == 3 for name, weight in module.named_parameters(recurse=False))


def fused_layout(fused: nn.Module) -> FusedLayout:
    """The layout of transformers' fused experts, as the module itself declares it.

    Raises:
        UnsupportedModelError: these experts cannot be split.
    """
    name = type(fused).__name__
    scored_before = name in SCORED_BEFORE
    names = {name for name, _ in fused.named_parameters(recurse=False)}
    both = {"gate_up_proj", "down_proj"}
    plain = names == {"up_proj", "down_proj"} and not getattr(fused, "has_gate", True)
    declared = scored_before or hasattr(fused, "has_gate")
    known = plain or (names in (both, both | {f"{name}_bias" for name in both}) and getattr(fused, "has_gate", True))
    if not known or not (declared or hasattr(fused, "_apply_gate")):
        raise UnsupportedModelError(
            f"{name} with {', '.join(sorted(names))} are fused experts that kvconvert cannot split."
        )
    if getattr(fused, "has_post_expert_norm", False):
        raise UnsupportedModelError(f"{name} normalises the output of its experts, which is not supported.")
    transposed = scored_before or getattr(fused, "is_transposed", False)
    experts, rows, columns = fused.down_proj.shape
    return FusedLayout(
        num_experts=experts,
        hidden=columns if transposed else rows,
        intermediate=rows if transposed else columns,
        transposed=transposed,
        interleaved=not scored_before and not getattr(fused, "is_concatenated", True),
        bias="down_proj_bias" in names,
        scored_before=scored_before,
        gated=not plain,
    )


class SeparateExperts(nn.Module):
    """Experts as Linears, in the place of transformers' fused experts; the function is the same.

    Experts are named "0", "1", ..., and their Linears by `roles`.

    Args:
        fused: transformers' module, on any device; it is not changed. Its activation is kept, its weights are not.
        roles: names of each expert's Linears.
        make_linear: makes one of them, given its number of inputs and of outputs and whether it has a bias.
    """

    def __init__(self, fused: nn.Module, roles: ExpertRoles, make_linear: MakeLinear) -> None:
        super().__init__()
        self.layout = fused_layout(fused)
        self.roles = roles = self.layout.roles(roles)
        hidden, intermediate, bias = self.layout.hidden, self.layout.intermediate, self.layout.bias
        for expert in range(self.layout.num_experts):
            linears = {role: make_linear(hidden, intermediate, bias) for role in roles.linears[:-1]}
            linears[roles.down] = make_linear(intermediate, hidden, bias)
            self.add_module(str(expert), nn.ModuleDict(linears))
        # Not a submodule: transformers would initialise the weights that it expects in a module of this class.
        self.__dict__["gating"] = _without_weights(fused)

    def experts(self) -> Iterator[nn.ModuleDict]:
        """The experts in order."""
        return (self.get_submodule(str(expert)) for expert in range(self.layout.num_experts))

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """The output of the fused module for the same arguments: [tokens, hidden] in the input's dtype.

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
        """One expert's output for tokens [n, hidden], before any score."""
        return self._expert(self.get_submodule(str(number)), tokens)

    def _scored(self, hidden_states: Tensor) -> Tensor:
        # Without biases, zeros give zeros: only the expert's own tokens, which are not zero, need to be computed.
        routed = hidden_states.ne(0).any(-1).view(self.layout.num_experts, -1)
        outputs = torch.zeros_like(hidden_states)
        for number, (expert, count) in enumerate(zip(self.experts(), routed.sum(1).tolist(), strict=True)):
            if count:
                rows = routed[number].nonzero().flatten() + number * routed.shape[1]
                outputs[rows] = self._expert(expert, hidden_states[rows])
        return outputs

    def _expert(self, expert: nn.ModuleDict, x: Tensor) -> Tensor:
        if not self.layout.gated:
            return expert[self.roles.down](self.gating.act_fn(expert[self.roles.up](x)))
        return expert[self.roles.down](self._joined(expert[self.roles.gate](x), expert[self.roles.up](x)))

    def _joined(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine the outputs of an expert's first two projections, of one shape."""
        if self.layout.scored_before:
            return up * self.gating.act_fn(gate)
        if self.layout.interleaved:
            return self.gating._apply_gate(torch.stack((gate, up), -1).flatten(-2))
        return self.gating._apply_gate(torch.cat((gate, up), -1))


def _without_weights(fused: nn.Module) -> nn.Module:
    """A shallow copy of a fused module that keeps its settings and activation only."""
    bare = object.__new__(type(fused))
    bare.__dict__.update(fused.__dict__)
    bare._parameters = {}
    return bare


def expert_names(prefix: str, layout: FusedLayout, roles: ExpertRoles) -> list[str]:
    """Full names of the Linears of a layer's experts, in order."""
    linears = layout.roles(roles).linears
    return [f"{prefix}.{expert}.{role}" for expert in range(layout.num_experts) for role in linears]


def separate_experts(layer: nn.Module, roles: ExpertRoles) -> nn.Module:
    """Replace a layer's fused experts by Linears with the same weights, in place.

    Args:
        layer: a decoder layer, on any device; without fused experts it is left unchanged.
        roles: names of each expert's Linears in the bundle.

    Returns:
        `layer`.

    Raises:
        UnsupportedModelError: experts that cannot be split.
    """
    for name, fused in [(name, module) for name, module in layer.named_modules() if is_fused(module)]:
        with torch.device("meta"):
            separate = SeparateExperts(fused, roles, lambda i, o, bias: nn.Linear(i, o, bias))
        if not hasattr(fused, "has_gate") and not separate.layout.scored_before:
            _check_alike(fused)
        weights = {f"{name}.{key}": parameter for key, parameter in fused.named_parameters(recurse=False)}
        layer.set_submodule(name, separate)
        split = split_fused(layer, weights, type(layer).__name__)
        separate.load_state_dict({key.removeprefix(f"{name}."): value for key, value in split.items()}, assign=True)
        separate.train(fused.training)
    return layer


@torch.no_grad()
def _check_alike(fused: nn.Module) -> None:
    """Try whether experts that declare no layout compute what `SeparateExperts` does, with a few small weights.

    Raises:
        UnsupportedModelError: they do not.
    """
    small, random = _without_weights(fused), torch.Generator().manual_seed(0)
    small._parameters = {
        name: nn.Parameter(torch.randn(len(own), 16 if name.startswith("gate_up") else 8, 8, generator=random))
        for name, own in fused.named_parameters(recurse=False)
    }
    tokens = torch.randn(6, 8, generator=random)
    chosen, weights = torch.randint(len(fused.down_proj), (6, 2), generator=random), torch.rand(6, 2, generator=random)
    separate = SeparateExperts(small, EXPERT_ROLES[0], lambda i, o, bias: nn.Linear(i, o, bias))
    own = {f"experts.{name}": parameter for name, parameter in small._parameters.items()}
    split = split_fused(nn.ModuleDict({"experts": separate}), own, type(fused).__name__)
    separate.load_state_dict({key.removeprefix("experts."): value for key, value in split.items()})
    try:
        expected = small(tokens, chosen, weights)
    except Exception:  # code of any model, which may take other arguments
        expected = None
    if expected is None or not torch.allclose(separate(tokens, chosen, weights), expected, rtol=1e-3, atol=1e-4):
        raise UnsupportedModelError(
            f"{type(fused).__name__} computes otherwise than its weights say, so that kvconvert cannot split its fused "
            "experts."
        )


def expert_modules(layer: nn.Module) -> tuple[str, ...]:
    """Name prefixes of a layer's separate experts ("mlp.experts.")."""
    return tuple(f"{name}." for name, module in layer.named_modules() if isinstance(module, SeparateExperts))


def split_fused(layer: nn.Module, tensors: Mapping[str, Tensor], layer_name: str) -> dict[str, Tensor]:
    """Tensors of a layer, those of fused experts split into one per expert and projection (views).

    Args:
        layer: with separate experts.
        tensors: by name within the layer; experts fused as in transformers, or separate.
        layer_name: for messages.

    Raises:
        CheckpointError: a fused tensor has a shape that does not fit the layer's experts.
    """
    result = dict(tensors)
    for name, module in layer.named_modules():
        if isinstance(module, SeparateExperts):
            for fused_name, shape in _fused_shapes(module.layout).items():
                tensor = result.pop(f"{name}.{fused_name}", None)
                if tensor is None:
                    continue
                if tensor.ndim == 3 and tuple(tensor.transpose(1, 2).shape) == shape != tuple(tensor.shape):
                    tensor = tensor.transpose(1, 2)  # as Qwen3-VL's published mixtures have them
                if tuple(tensor.shape) != shape:
                    raise CheckpointError(
                        f"{layer_name}.{name}.{fused_name} has shape {list(tensor.shape)} where config.json asks for "
                        f"{list(shape)}."
                    )
                result |= {f"{name}.{part}": value for part, value in _split(module, fused_name, tensor).items()}
    return result


class FusedShapes:
    """A model with separate experts in the place of one with fused experts, whose parameters' shapes are asked for.

    Args:
        model: with `SeparateExperts`, or none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def get_parameter(self, name: str) -> nn.Parameter:
        """As of the model; fused weights are on the meta device."""
        module, _, part = name.rpartition(".")
        experts = self._model.get_submodule(module)
        if not isinstance(experts, SeparateExperts):
            return self._model.get_parameter(name)
        return nn.Parameter(torch.empty(_fused_shapes(experts.layout)[part], device="meta"))


def _fused_shapes(layout: FusedLayout) -> dict[str, tuple[int, ...]]:
    experts, hidden, intermediate = layout.num_experts, layout.hidden, layout.intermediate
    up, down = (2 * intermediate, hidden), (hidden, intermediate)
    if not layout.gated:
        return {"up_proj": (experts, intermediate, hidden), "down_proj": (experts, *down)}
    shapes = {"gate_up_proj": (experts, *up), "down_proj": (experts, *down)}
    if layout.transposed:
        shapes = {"gate_up_proj": (experts, *up[::-1]), "down_proj": (experts, *down[::-1])}
    if layout.bias:
        shapes |= {"gate_up_proj_bias": (experts, up[0]), "down_proj_bias": (experts, down[0])}
    return shapes


def _split(module: SeparateExperts, fused_name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The parts of one fused tensor, by name within the module of experts."""
    layout, roles = module.layout, module.roles
    part = "bias" if fused_name.endswith("_bias") else "weight"
    if part == "weight" and layout.transposed:
        tensor = tensor.transpose(1, 2)
    if fused_name.startswith("down_proj"):
        split = {roles.down: tensor}
    elif not layout.gated:
        split = {roles.up: tensor}
    elif layout.interleaved:
        split = {roles.gate: tensor[:, ::2], roles.up: tensor[:, 1::2]}
    else:
        split = dict(zip((roles.gate, roles.up), tensor.chunk(2, dim=1), strict=True))
    return {
        f"{expert}.{role}.{part}": values[expert] for role, values in split.items() for expert in range(len(values))
    }
