"""Dense text models. An architecture is one entry; docs/models.md says how to write it."""

from __future__ import annotations

from dataclasses import replace

from kvconvert.models.adapters.adapter import Adapter, LayerNames, Variant
from kvconvert.models.structure import NormGroup, Projection, ScalingPair

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj")

NONLINEAR = "an activation function lies between them"
STREAM = "they read the residual stream itself, which no norm precedes"
SHARED_KV = "some of its layers have no keys and values of their own"
PER_LAYER = "embeddings of their own are added in every layer"
CLAMPED = "values are clamped after their projection"

LLAMA = LayerNames()
# Norms before and after both attention and MLP; those after feed nothing but the residual stream.
GEMMA_GROUPS = (
    NormGroup("input_layernorm", ATTENTION, ("self_attn",), unit_offset=True),
    NormGroup("pre_feedforward_layernorm", MLP, ("mlp",), unit_offset=True),
)
SANDWICH = LayerNames(norm_groups=GEMMA_GROUPS, adds_to_stream=False)
UNSCALED = LayerNames(
    norm_groups=(
        NormGroup(None, ATTENTION, ("self_attn",), unsupported_reason=STREAM),
        NormGroup(None, MLP, ("mlp",), unsupported_reason=STREAM),
    )
)
PARALLEL = LayerNames(norm_groups=(NormGroup("input_layernorm", (*ATTENTION, *MLP), ("self_attn", "mlp")),))
GATE_UP = {
    "norm_groups": (LLAMA.norm_groups[0], NormGroup("post_attention_layernorm", ("mlp.gate_up_proj",), ("mlp",))),
    "pairs": (ScalingPair(Projection("mlp.gate_up_proj", (1, 1), 1), "mlp.down_proj"),),
}
GEMMA4_LAYER = replace(
    SANDWICH,
    norm_groups=tuple(replace(group, unit_offset=False) for group in GEMMA_GROUPS),
    value_scaling_unsupported_reason="values are normalised after their projection",
)
GEMMA4_SAME = {"layer_types": "full_attention", "attention_k_eq_v": True}
GEMMA4_SAME_KV = replace(
    GEMMA4_LAYER,
    value=None,
    norm_groups=(replace(GEMMA4_LAYER.norm_groups[0], readers=ATTENTION[:2]), GEMMA4_LAYER.norm_groups[1]),
    fold_unsupported_reason="keys serve as values",
    value_scaling_unsupported_reason="keys serve as values",
)
GPT_NEOX_LAYER = LayerNames(
    attention="attention",
    query="attention.query_key_value",
    key="attention.query_key_value",
    value="attention.query_key_value",
    interleaved=True,
    output="attention.dense",
    norm_groups=(
        NormGroup("input_layernorm", ("attention.query_key_value",), ("attention",)),
        NormGroup("post_attention_layernorm", ("mlp.dense_h_to_4h",), ("mlp",)),
    ),
    pairs=(ScalingPair(Projection("mlp.dense_h_to_4h"), "mlp.dense_4h_to_h", NONLINEAR),),
    adds_to_stream=False,
)
OPT_LAYER = LayerNames(
    output="self_attn.out_proj",
    norm_groups=(
        NormGroup("self_attn_layer_norm", ATTENTION, ("self_attn",)),
        NormGroup("final_layer_norm", ("fc1",), ("fc1",)),
    ),
    pairs=(ScalingPair(Projection("fc1"), "fc2", NONLINEAR),),
    adds_to_stream=False,
)
# ReLU lets positive scales pass, as if it were linear.
OPT_RELU = replace(OPT_LAYER, pairs=(ScalingPair(Projection("fc1"), "fc2"),))
OPT_POST_NORM = replace(
    OPT_RELU, norm_groups=tuple(replace(group, norm=None, unsupported_reason=STREAM) for group in OPT_LAYER.norm_groups)
)

DENSE = (
    Adapter("llama", "LlamaForCausalLM"),
    Adapter("mistral", "MistralForCausalLM"),
    Adapter("ministral", "MinistralForCausalLM"),
    Adapter("ministral3", "Ministral3ForCausalLM"),
    Adapter("qwen2", "Qwen2ForCausalLM"),
    Adapter("qwen3", "Qwen3ForCausalLM"),
    Adapter("granite", "GraniteForCausalLM", replace(LLAMA, adds_to_stream=False)),
    Adapter("smollm3", "SmolLM3ForCausalLM"),
    Adapter("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    Adapter("ernie4_5", "Ernie4_5ForCausalLM"),
    Adapter("seed_oss", "SeedOssForCausalLM"),
    Adapter(
        "gemma",
        "GemmaForCausalLM",
        LayerNames(norm_groups=tuple(replace(group, unit_offset=True) for group in LLAMA.norm_groups)),
    ),
    Adapter("gemma2", "Gemma2ForCausalLM", SANDWICH),
    Adapter("gemma3_text", "Gemma3ForCausalLM", SANDWICH),
    Adapter(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        refusals={"num_kv_shared_layers": SHARED_KV, "hidden_size_per_layer_input": PER_LAYER},
    ),
    Adapter("cohere", "CohereForCausalLM", PARALLEL),
    Adapter("cohere2", "Cohere2ForCausalLM", PARALLEL),
    Adapter(
        "phi",
        "PhiForCausalLM",
        LayerNames(
            output="self_attn.dense",
            norm_groups=(NormGroup("input_layernorm", (*ATTENTION, "mlp.fc1"), ("self_attn", "mlp")),),
            pairs=(ScalingPair(Projection("mlp.fc1"), "mlp.fc2", NONLINEAR),),
        ),
    ),
    Adapter(
        "phi3",
        "Phi3ForCausalLM",
        LayerNames(
            query="self_attn.qkv_proj",
            key="self_attn.qkv_proj",
            value="self_attn.qkv_proj",
            norm_groups=(
                NormGroup("input_layernorm", ("self_attn.qkv_proj",), ("self_attn",)),
                GATE_UP["norm_groups"][1],
            ),
            pairs=GATE_UP["pairs"],
        ),
    ),
    Adapter("glm", "GlmForCausalLM", LayerNames(**GATE_UP)),
    Adapter("glm4", "Glm4ForCausalLM", LayerNames(**GATE_UP, adds_to_stream=False)),
    Adapter(
        "olmo",
        "OlmoForCausalLM",
        LayerNames(
            norm_groups=tuple(
                replace(group, unsupported_reason="the norm has no weight that could be scaled")
                for group in LLAMA.norm_groups
            )
        ),
        fixed_values={"clip_qkv": CLAMPED},
    ),
    Adapter("olmo2", "Olmo2ForCausalLM", UNSCALED),
    Adapter("olmo3", "Olmo3ForCausalLM", UNSCALED),
    Adapter("exaone4", "Exaone4ForCausalLM", UNSCALED),
    Adapter(
        "starcoder2",
        "Starcoder2ForCausalLM",
        LayerNames(
            norm_groups=(LLAMA.norm_groups[0], NormGroup("post_attention_layernorm", ("mlp.c_fc",), ("mlp",))),
            pairs=(ScalingPair(Projection("mlp.c_fc"), "mlp.c_proj", NONLINEAR),),
        ),
    ),
    Adapter(
        "nemotron",
        "NemotronForCausalLM",
        LayerNames(
            norm_groups=(
                replace(LLAMA.norm_groups[0], unit_offset=True),
                NormGroup("post_attention_layernorm", ("mlp.up_proj",), ("mlp",), unit_offset=True),
            ),
            pairs=(ScalingPair(Projection("mlp.up_proj"), "mlp.down_proj", NONLINEAR),),
        ),
    ),
    Adapter("stablelm", "StableLmForCausalLM", LLAMA, (Variant({"use_parallel_residual": True}, PARALLEL),)),
    Adapter("gpt_neox", "GPTNeoXForCausalLM", GPT_NEOX_LAYER, base="gpt_neox", layers="gpt_neox.layers"),
    Adapter(
        "opt",
        "OPTForCausalLM",
        OPT_LAYER,
        (
            Variant({"activation_function": "relu", "do_layer_norm_before": True}, OPT_RELU),
            Variant({"activation_function": "relu", "do_layer_norm_before": False}, OPT_POST_NORM),
        ),
        layers="model.decoder.layers",
    ),
)
