"""Text models whose layers are of several kinds: attention among linear attention or short convolutions."""

from __future__ import annotations

from dataclasses import replace

from kvconvert.adapters.adapter import Adapter, LayerNames, Variant
from kvconvert.adapters.dense import LLAMA
from kvconvert.calibration.protocol import NormGroup, Projection, ScalingPair

NO_VALUES = "the layer has no keys and values"
CONVOLUTION = "a short convolution over neighbouring tokens"
DECAY = "it makes a few numbers per token, which say how fast the state forgets"

QWEN_GROUPS = tuple(replace(group, unit_offset=True) for group in LLAMA.norm_groups)
QWEN_ATTENTION = LayerNames(
    norm_groups=QWEN_GROUPS, fold_obstacle="a gate weighs each channel of the values before the output projection"
)
QWEN3_5_LINEAR = LayerNames(
    attention="linear_attn",
    query=None,
    key=None,
    value=None,
    output="linear_attn.out_proj",
    norm_groups=(
        NormGroup(
            "input_layernorm",
            (
                "linear_attn.in_proj_qkv",
                "linear_attn.in_proj_z",
                "linear_attn.in_proj_b",
                "linear_attn.in_proj_a",
            ),
            ("linear_attn",),
            unit_offset=True,
        ),
        QWEN_GROUPS[1],
    ),
    fold_obstacle=NO_VALUES,
    value_obstacle="a norm over each head lies between the state and the output projection",
    unquantized={
        "linear_attn.in_proj_b": DECAY,
        "linear_attn.in_proj_a": DECAY,
        "linear_attn.conv1d": CONVOLUTION,
    },
)

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
    fold_obstacle=NO_VALUES,
    unquantized={"conv.conv": CONVOLUTION},
)

HYBRIDS = (
    Adapter(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        QWEN_ATTENTION,
        (Variant({"layer_types": "linear_attention"}, QWEN3_5_LINEAR),),
    ),
    Adapter("lfm2", "Lfm2ForCausalLM", LFM2_ATTENTION, (Variant({"layer_types": "conv"}, LFM2_CONVOLUTION),)),
)
