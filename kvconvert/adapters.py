"""Architecture adapters: the names of a model's parts and what may be done to them, as data.

Adding an architecture means one entry in `ADAPTERS`, and a test that folding and scaling leave its function unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import nn
from transformers import PretrainedConfig

from kvconvert.calibration.protocol import LayerStructure, NormGroup
from kvconvert.errors import UnsupportedModelError


@dataclass(frozen=True)
class Adapter:
    """One architecture.

    Attributes:
        model_type: of the configuration.
        architecture: class of the causal language model.
        base: the model without its head.
        layers, embeddings, rotary, final_norm: module names within the causal language model.
        attention, query, key, value, output, norm_groups, up_down: names within a decoder layer, see `LayerStructure`.
        fold_obstacle: why values cannot be rotated in the weights, or None.
        skipped_pairs: AWQ scaling pairs ruled out, with the reason.
    """

    model_type: str
    architecture: str
    base: str = "model"
    layers: str = "model.layers"
    embeddings: str = "model.embed_tokens"
    rotary: str = "model.rotary_emb"
    final_norm: str = "model.norm"
    attention: str = "self_attn"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    norm_groups: tuple[NormGroup, ...] = (
        NormGroup("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn"),
        NormGroup("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), "mlp"),
    )
    up_down: tuple[str, str] | None = ("mlp.up_proj", "mlp.down_proj")
    fold_obstacle: str | None = None
    skipped_pairs: dict[str, str] = field(default_factory=dict)

    def structure(self, config: PretrainedConfig) -> LayerStructure:
        """Names and attention shape of this model's decoder layers."""
        heads = config.num_attention_heads
        return LayerStructure(
            attention=self.attention,
            query=self.query,
            key=self.key,
            value=self.value,
            output=self.output,
            norm_groups=self.norm_groups,
            up_down=self.up_down,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim(config),
            fold_obstacle=self.fold_obstacle,
            skipped_pairs=self.skipped_pairs,
        )

    def check(self, model: nn.Module) -> None:
        """Compare the names with a model (on any device), so that no part of it is passed over without a word.

        Raises:
            UnsupportedModelError: a named part is absent, or a layer owns a Linear or parameter that has no name here.
        """
        problems = []
        modules = dict(model.named_modules())
        for name in (self.base, self.layers, self.embeddings, self.rotary, self.final_norm):
            if name not in modules:
                problems.append(f"no module {name}")
        structure = self.structure(model.config)
        for index, layer in enumerate(modules.get(self.layers, ())):
            inside = dict(layer.named_modules())
            problems += [f"layer {index} has no {name}" for name in structure.linears if name not in inside]
            problems += [
                f"layer {index} has a Linear {name} of unknown use"
                for name, module in inside.items()
                if isinstance(module, nn.Linear) and name not in structure.linears
            ]
            # Fused experts and the like are parameters of modules that are not Linears; norms are vectors.
            problems += [
                f"layer {index} has a weight {name} of unknown use"
                for name, parameter in layer.named_parameters()
                if parameter.ndim > 1 and name.rpartition(".")[0] not in structure.linears
            ]
        if problems:
            raise UnsupportedModelError(
                f"This {self.model_type} model is not built as its adapter says ({'; '.join(problems[:4])}); it can be "
                'converted with [weights] method = "none" only.'
            )


_LLAMA = Adapter("llama", "LlamaForCausalLM")

ADAPTERS = {
    adapter.model_type: adapter
    for adapter in (
        _LLAMA,
        replace(_LLAMA, model_type="mistral", architecture="MistralForCausalLM"),
        replace(_LLAMA, model_type="qwen2", architecture="Qwen2ForCausalLM"),
        replace(_LLAMA, model_type="qwen3", architecture="Qwen3ForCausalLM"),
    )
}


def find_adapter(config: PretrainedConfig) -> Adapter | None:
    """The adapter of a configuration, or None for an architecture that has none."""
    adapter = ADAPTERS.get(config.model_type)
    stated = getattr(config, "architectures", None) or []
    return adapter if adapter is not None and (not stated or adapter.architecture in stated) else None


def require_adapter(config: PretrainedConfig) -> Adapter:
    """The adapter of a configuration; UnsupportedModelError says what is missing where there is none."""
    adapter = find_adapter(config)
    if adapter is None:
        stated = ", ".join(getattr(config, "architectures", None) or [config.model_type])
        raise UnsupportedModelError(
            f"No adapter describes {stated} (model type {config.model_type}): the names of its decoder layers, norms "
            "and Linears, which Linears read each norm, and whether values may be rotated in the weights are missing; "
            f"known are {', '.join(a.architecture for a in ADAPTERS.values())}, and other models convert with "
            '[weights] method = "none".'
        )
    return adapter


def head_dim(config: PretrainedConfig) -> int:
    """Channels per attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
