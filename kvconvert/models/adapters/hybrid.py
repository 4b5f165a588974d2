"""Hybrid text models: layers of several types, attention among linear attention or short convolutions."""

from __future__ import annotations

from dataclasses import fields, replace

from kvconvert.models.adapters.adapter import Adapter, LayerNames, Variant
from kvconvert.models.adapters.dense import LLAMA
from kvconvert.models.adapters.mixture import GRANITE_SHARED, Mixture, MixtureNames, SparseLayers, by_step, shared_mlp
from kvconvert.models.structure import NormGroup, Projection, ScalingPair

NO_VALUES = "the layer has no keys and values"
CONVOLUTION = "a short convolution over neighbouring tokens"
DECAY = "it makes a few numbers per token, which say how fast the state forgets"

QWEN_GROUPS = tuple(replace(group, unit_offset=True) for group in LLAMA.norm_groups)
QWEN_GATED = "a gate weighs each channel of the values before the output projection"
QWEN_EXPERTS = Mixture(**shared_mlp("mlp.shared_expert", shared_gate="mlp.shared_expert_gate"), unit_offset=True)
QWEN_ATTENTION = LayerNames(norm_groups=QWEN_GROUPS, fold_unsupported_reason=QWEN_GATED)


def qwen_linear(readers: tuple[str, ...], decay: tuple[str, ...]) -> LayerNames:
    """Layers of gated linear attention: what reads the norm, and those of them that make the decay."""
    inputs = NormGroup("input_layernorm", (*readers, *decay), ("linear_attn",), unit_offset=True)
    return LayerNames(
        attention="linear_attn",
        query=None,
        key=None,
        value=None,
        output="linear_attn.out_proj",
        norm_groups=(inputs, QWEN_GROUPS[1]),
        fold_unsupported_reason=NO_VALUES,
        value_scaling_unsupported_reason="a norm over each head lies between the state and the output projection",
        unquantized=dict.fromkeys(decay, DECAY) | {"linear_attn.conv1d": CONVOLUTION},
    )


QWEN3_5_LINEAR = qwen_linear(
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"), ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
)
QWEN3_NEXT_LINEAR = qwen_linear(("linear_attn.in_proj_qkvz",), ("linear_attn.in_proj_ba",))


def with_experts(layer: LayerNames, mixture: Mixture = QWEN_EXPERTS) -> MixtureNames:
    """The same layer with experts in the place of its MLP, the last of its norm groups and pairs."""
    names = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return MixtureNames(**names | {"norm_groups": layer.norm_groups[:-1], "pairs": layer.pairs[:-1]}, mixture=mixture)


LINEAR_LAYERS = {"layer_types": "linear_attention"}

LFM2_MLP = NormGroup("ffn_norm", ("feed_forward.w1", "feed_forward.w3"), ("feed_forward",))
LFM2_PAIR = ScalingPair(Projection("feed_forward.w3"), "feed_forward.w2")
LFM2_ATTENTION = LayerNames(
    output="self_attn.out_proj",
    norm_groups=(replace(LLAMA.norm_groups[0], norm="operator_norm"), LFM2_MLP),
    pairs=(LFM2_PAIR,),
)
LFM2_CONVOLUTION = LayerNames(
    attention="conv",
    query=None,
    key=None,
    value=None,
    output="conv.out_proj",
    norm_groups=(NormGroup("operator_norm", ("conv.in_proj",), ("conv",)), LFM2_MLP),
    # The second third of in_proj's outputs weighs the convolution's result channel by channel.
    pairs=(ScalingPair(Projection("conv.in_proj", (1, 1, 1), 1), "conv.out_proj"), LFM2_PAIR),
    fold_unsupported_reason=NO_VALUES,
    unquantized={"conv.conv": CONVOLUTION},
)


def mamba(layer: LayerNames) -> LayerNames:
    """The same layer with a state space (Mamba 2) in the place of attention."""
    groups = (
        NormGroup("input_layernorm", ("mamba.in_proj",), ("mamba",)),
        NormGroup("mamba.norm", ("mamba.out_proj",), ("mamba.out_proj",)),
        layer.norm_groups[1],
    )
    return replace(
        layer,
        attention="mamba",
        query=None,
        key=None,
        value=None,
        output="mamba.out_proj",
        norm_groups=groups,
        fold_unsupported_reason=NO_VALUES,
        unquantized={"mamba.conv1d": CONVOLUTION},
    )


BAMBA = LayerNames(
    norm_groups=(
        LLAMA.norm_groups[0],
        NormGroup("pre_ff_layernorm", ("feed_forward.gate_proj", "feed_forward.up_proj"), ("feed_forward",)),
    ),
    pairs=(ScalingPair(Projection("feed_forward.up_proj"), "feed_forward.down_proj"),),
)
GRANITE = LayerNames(
    norm_groups=(
        LLAMA.norm_groups[0],
        NormGroup("post_attention_layernorm", ("shared_mlp.input_linear",), ("shared_mlp",)),
    ),
    pairs=GRANITE_SHARED.shared_pairs,
)

HYBRIDS = (
    Adapter("qwen3_5_text", "Qwen3_5ForCausalLM", QWEN_ATTENTION, (Variant(LINEAR_LAYERS, QWEN3_5_LINEAR),)),
    Adapter(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        with_experts(QWEN_ATTENTION),
        (Variant(LINEAR_LAYERS, with_experts(QWEN3_5_LINEAR)),),
    ),
    Adapter(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        QWEN_ATTENTION,
        (
            SparseLayers(LINEAR_LAYERS, with_experts(QWEN3_NEXT_LINEAR), by_step),
            Variant(LINEAR_LAYERS, QWEN3_NEXT_LINEAR),
            SparseLayers({}, with_experts(QWEN_ATTENTION), by_step),
        ),
    ),
    Adapter("bamba", "BambaForCausalLM", BAMBA, (Variant(LINEAR_LAYERS, mamba(BAMBA)),)),
    Adapter(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        with_experts(GRANITE, GRANITE_SHARED),
        (
            Variant(LINEAR_LAYERS | {"num_local_experts": 0}, mamba(GRANITE)),
            Variant(LINEAR_LAYERS, with_experts(mamba(GRANITE), GRANITE_SHARED)),
            Variant({"num_local_experts": 0}, GRANITE),
        ),
    ),
    Adapter("lfm2", "Lfm2ForCausalLM", LFM2_ATTENTION, (Variant({"layer_types": "conv"}, LFM2_CONVOLUTION),)),
)
