"""What an architecture adapter is: the names of a model's parts and what may be done to them, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from kvconvert.errors import UnsupportedModelError
from kvconvert.models.configuration import head_dim, key_value_heads, layer_config
from kvconvert.models.structure import LayerStructure, NormGroup, Projection, ScalingPair


@dataclass(frozen=True)
class LayerNames:
    """The names of one type of decoder layer; those of a Llama layer by default.

    Attributes:
        attention, query, key, value, output, norm_groups, pairs, fold_unsupported_reason,
            value_scaling_unsupported_reason, unquantized, adds_to_stream: see `LayerStructure`. Query, key and value
            are names of Linears; the same name three times is a fused Linear.
        interleaved: a fused Linear holds query, key and value of one head after the other, not all queries first.
    """

    attention: str = "self_attn"
    query: str | None = "self_attn.q_proj"
    key: str | None = "self_attn.k_proj"
    value: str | None = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    norm_groups: tuple[NormGroup, ...] = (
        NormGroup("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn",)),
        NormGroup("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), ("mlp",)),
    )
    pairs: tuple[ScalingPair, ...] = (ScalingPair(Projection("mlp.up_proj"), "mlp.down_proj"),)
    fold_unsupported_reason: str | None = None
    value_scaling_unsupported_reason: str | None = None
    unquantized: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    adds_to_stream: bool = True

    def structure(self, config: PretrainedConfig) -> LayerStructure:
        """With the attention shape of a text configuration, see `layer_config`."""
        heads = config.num_attention_heads
        kv_heads = key_value_heads(config)
        names = (self.query, self.key, self.value)
        if self.query is None or self.query != self.value:
            parts = [None if name is None else Projection(name) for name in names]
        elif self.interleaved:
            parts = [Projection(self.query, (1, 1, 1), index, heads) for index in range(3)]
        else:
            parts = [Projection(self.query, (heads, kv_heads, kv_heads), index) for index in range(3)]
        return LayerStructure(
            self.attention,
            *parts,
            output=self.output,
            norm_groups=self.norm_groups,
            pairs=self.pairs,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim(config),
            fold_unsupported_reason=self.fold_unsupported_reason,
            value_scaling_unsupported_reason=self.value_scaling_unsupported_reason,
            unquantized=dict(self.unquantized),
            adds_to_stream=self.adds_to_stream,
        )


@dataclass(frozen=True)
class Variant:
    """Other names for the layers of models or indices that a configuration selects.

    Attributes:
        where: fields of the text configuration and the value that each must have; a list of as many entries as layers
            is compared at the layer's index.
        layer: their names.
    """

    where: Mapping[str, Any]
    layer: LayerNames

    def applies(self, config: PretrainedConfig, index: int) -> bool:
        """Whether layer `index` is of this type."""
        for name, wanted in self.where.items():
            value = getattr(config, name, None)
            if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers:
                value = value[index]
            if value != wanted:
                return False
        return True


@dataclass(frozen=True)
class Adapter:
    """One architecture.

    Attributes:
        model_type: of the configuration.
        architecture: class of the model.
        layer: names within a decoder layer.
        variants: other types of layers; the first that applies is used.
        base: the model without its head, which takes token ids and returns hidden states.
        layers: list of decoder layers. Both are module names within the model.
        refusals: fields of the text configuration that, when neither 0 nor absent, rule out converting weights and
            folding, with the reason.
        fixed_values: the same, where values may not be rotated or scaled in the weights, and all else stays possible.
    """

    model_type: str
    architecture: str
    layer: LayerNames = field(default_factory=LayerNames)
    variants: tuple[Variant, ...] = ()
    base: str = "model"
    layers: str = "model.layers"
    refusals: Mapping[str, str] = field(default_factory=dict)
    fixed_values: Mapping[str, str] = field(default_factory=dict)

    def structure(self, config: PretrainedConfig, index: int) -> LayerStructure:
        """Names and attention shape of decoder layer `index`."""
        config = config.get_text_config()
        names = next((variant.layer for variant in self.variants if variant.applies(config, index)), self.layer)
        structure = names.structure(layer_config(config, index))
        fixed = _reason_set(config, self.fixed_values)
        return (
            structure
            if fixed is None
            else replace(structure, fold_unsupported_reason=fixed, value_scaling_unsupported_reason=fixed)
        )

    def refusal(self, config: PretrainedConfig) -> str | None:
        """Why this model's layers cannot be converted one by one, or None."""
        return _reason_set(config.get_text_config(), self.refusals)

    def check(self, model: nn.Module) -> None:
        """Compare the names with a model (on any device), so that no part of it is skipped silently.

        Raises:
            UnsupportedModelError: a named part is absent, or a layer owns a Linear or parameter that has no name here.
        """
        modules = dict(model.named_modules())
        problems = [f"no module {name}" for name in (self.base, self.layers) if name not in modules]
        for index, layer in enumerate(modules.get(self.layers, ())):
            structure = self.structure(model.config, index)
            inside = dict(layer.named_modules())
            named = {structure.attention, *structure.named}
            for group in structure.norm_groups:
                named |= {*group.inspected, *filter(None, (group.norm,))}
            problems += [f"layer {index} has no {name}" for name in sorted(named - inside.keys())]
            problems += [
                f"{group.norm} of layer {index} has no weight to scale"
                for group in structure.norm_groups
                if group.unsupported_reason is None and getattr(inside.get(group.norm), "weight", None) is None
            ]
            problems += [
                f"{name} of layer {index} is no Linear"
                for name in structure.linears
                if name in inside and not isinstance(inside[name], nn.Linear)
            ]
            problems += [
                f"layer {index} has a Linear {name} of unknown use"
                for name, module in inside.items()
                if isinstance(module, nn.Linear) and name not in structure.named
            ]
            # Fused experts and the like are parameters of modules that are not Linears; norms are vectors, or have one
            # for each head.
            problems += [
                f"layer {index} has a weight {name} of unknown use"
                for name, parameter in layer.named_parameters()
                if parameter.ndim > 1
                and name.rpartition(".")[0] not in structure.named
                and "norm" not in type(inside[name.rpartition(".")[0]]).__name__.lower()
            ]
        if problems:
            raise UnsupportedModelError(
                f"This {self.model_type} model is not built as its adapter says ({'; '.join(problems[:4])}); it can be "
                'converted with [weights] method = "none" only.'
            )


def _reason_set(config: PretrainedConfig, reasons: Mapping[str, str]) -> str | None:
    return next((reason for name, reason in reasons.items() if getattr(config, name, None)), None)
