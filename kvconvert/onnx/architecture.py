"""Which decoders, and which caches of them, the ONNX graph can express.

The quantized cache of ONNX Runtime's GroupQueryAttention gets a bundle's static scales. It is symmetric: it stores
clamp(round(x / scale), -2^(b-1), 2^(b-1) - 1). The bundle's grid has a zero point:

    x = code scale + zero_point = (code - 2^(b-1)) scale + center,    center = zero_point + 2^(b-1) scale

So the operator is given keys and values less their centers, which makes both grids the same. The values' center is
added to the attention output, whose weights sum to 1. The keys' center needs nothing: it adds the same number to all
scores of a query, which the softmax does not notice, unless a soft cap comes between.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvconvert.bundle.manifest import LayerPlan
from kvconvert.bundle.reader import Bundle
from kvconvert.errors import UnsupportedModelError
from kvconvert.methods import KVScheme
from kvconvert.models.configuration import layer_types_of


@dataclass(frozen=True)
class _Family:
    """What configurations of one model type leave unsaid.

    Attributes:
        rotary: transformers' module that computes cosines and sines, "file.Class" below `transformers.models`.
        qk_norm: queries and keys of every head go through an RMSNorm before RoPE.
        gemma: norms multiply by 1 + weight, and embeddings are multiplied by sqrt(hidden_size).
        output_norms: attention and MLP have a second norm each, at their output, and scores their own factor.
        soft_caps: those of the two soft caps that the model applies; others of its configuration mean nothing.
        rotary_by_type: layers of each type have a RoPE of their own.
    """

    rotary: str
    qk_norm: bool = False
    gemma: bool = False
    output_norms: bool = False
    soft_caps: tuple[str, ...] = ()
    rotary_by_type: bool = False


FAMILIES: dict[str, _Family] = {
    "llama": _Family("llama.modeling_llama.LlamaRotaryEmbedding"),
    "mistral": _Family("mistral.modeling_mistral.MistralRotaryEmbedding"),
    "qwen2": _Family("qwen2.modeling_qwen2.Qwen2RotaryEmbedding"),
    "qwen3": _Family("qwen3.modeling_qwen3.Qwen3RotaryEmbedding", qk_norm=True),
    "gemma": _Family("gemma.modeling_gemma.GemmaRotaryEmbedding", gemma=True),
    "gemma2": _Family(
        "gemma2.modeling_gemma2.Gemma2RotaryEmbedding",
        gemma=True,
        output_norms=True,
        soft_caps=("attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3_text": _Family(
        "gemma3.modeling_gemma3.Gemma3RotaryEmbedding",
        gemma=True,
        output_norms=True,
        qk_norm=True,
        soft_caps=("final_logit_softcapping",),
        rotary_by_type=True,
    ),
}
# The angles of every position are tables in the graph: 512 MiB at this length with heads of 128 channels.
MOST_POSITIONS = 2**20
HEAD_MULTIPLE = 16  # of a head's channels, in ONNX Runtime's GroupQueryAttention with RoPE
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class DecoderShape:
    """Shape and arithmetic of a decoder that the graph can express.

    Attributes:
        config: transformers' configuration.
        model_type: of the configuration.
        hidden_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size: sizes.
        max_positions: tokens of the longest sequence.
        norm_epsilon: of every RMSNorm.
        norm_offset: what is added to a norm's weight.
        embedding_scale: factor of the embeddings, 1 for none.
        activation: of the gate, one of `ACTIVATIONS`.
        attention_scale: factor of the scores.
        attention_softcap, final_softcap: soft caps of scores and logits; 0 for none.
        windows: tokens that each layer attends to, itself included; None for all.
        rotary: for each layer, the name of its table of cosines and sines.
        qk_norm, output_norms: which norms there are besides the two of every layer.
    """

    config: PretrainedConfig
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    norm_offset: float
    embedding_scale: float
    activation: str
    attention_scale: float
    attention_softcap: float
    final_softcap: float
    windows: tuple[int | None, ...]
    rotary: tuple[str, ...]
    qk_norm: bool
    output_norms: bool

    @classmethod
    def of(cls, config: PretrainedConfig) -> DecoderShape:
        """Read a configuration.

        Raises:
            UnsupportedModelError: the graph cannot express the model; the message says what is in the way.
        """
        family = FAMILIES.get(config.model_type)
        if family is None:
            raise _unsupported(
                f"models of type {config.model_type} are not among those it serves ({', '.join(FAMILIES)})"
            )
        layer_types, settings = layer_types_of(config)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        activation = config.hidden_activation if family.output_norms else config.hidden_act
        if activation not in ACTIVATIONS:
            raise _unsupported(f"its activation is {activation}, not {', '.join(ACTIVATIONS)}")
        if getattr(config, "use_bidirectional_attention", None):
            raise _unsupported("its attention is bidirectional")
        caps = {name: getattr(config, name, None) or 0.0 for name in family.soft_caps}
        scalar = config.query_pre_attn_scalar if family.output_norms else head_dim
        for kind in set(layer_types) - {"full_attention", "sliding_attention"}:
            raise _unsupported(f"it has {kind} layers")
        ropes: dict[str, Any] = config.rope_parameters
        _check_rope([ropes[kind] for kind in layer_types] if family.rotary_by_type else [ropes])
        if head_dim % HEAD_MULTIPLE:
            raise _unsupported(f"its heads have {head_dim} channels, no multiple of {HEAD_MULTIPLE}")
        if not 1 <= config.max_position_embeddings <= MOST_POSITIONS:
            raise _unsupported(f"it has {config.max_position_embeddings:,} positions, not 1 to {MOST_POSITIONS:,}")
        return cls(
            config=config,
            model_type=config.model_type,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            norm_epsilon=config.rms_norm_eps,
            norm_offset=1.0 if family.gemma else 0.0,
            embedding_scale=config.hidden_size**0.5 if family.gemma else 1.0,
            activation=activation,
            attention_scale=scalar**-0.5,
            attention_softcap=caps.get("attn_logit_softcapping", 0.0),
            final_softcap=caps.get("final_logit_softcapping", 0.0),
            windows=tuple(
                setting["sliding_window"] if kind == "sliding_attention" else None
                for kind, setting in zip(layer_types, settings, strict=True)
            ),
            rotary=tuple(kind if family.rotary_by_type else "all" for kind in layer_types),
            qk_norm=family.qk_norm,
            output_norms=family.output_norms,
        )

    def rotary_table(self, name: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [max_positions, head_dim / 2] each, as transformers computes them.

        Args:
            name: one of `rotary`.
        """
        file, _, kind = FAMILIES[self.model_type].rotary.rpartition(".")
        module = getattr(importlib.import_module(f"transformers.models.{file}"), kind)(self.config)
        layer_type = () if name == "all" else (name,)
        cos, sin = module(torch.zeros(1), torch.arange(self.max_positions)[None], *layer_type)
        half = self.head_dim // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def _check_rope(ropes: list[dict[str, Any]]) -> None:
    """Refuse rotations that no fixed table of cosines and sines over whole heads describes."""
    for rope in ropes:
        if rope.get("rope_type") not in ROPE_TYPES:
            raise _unsupported(f"its RoPE is of type {rope.get('rope_type')!s:.80}, not {', '.join(ROPE_TYPES)}")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise _unsupported("its RoPE turns only a part of each head (partial_rotary_factor)")


def _unsupported(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"The ONNX export cannot express this model: {reason}; use the bundle itself.")


# ONNX Runtime divides by the scale; a channel that was constant has scale 0, and is restored by its center alone.
_SMALLEST_SCALE = 1e-20


class StaticSide(NamedTuple):
    """Scale and center of keys or values, float32 [KV heads, head_dim]."""

    scale: Tensor
    center: Tensor


class StaticLayer(NamedTuple):
    """One layer's keys and values."""

    key: StaticSide
    value: StaticSide


class StaticCache(NamedTuple):
    """The quantized cache of a model: 8 or 4 bits in all layers."""

    bits: int
    layers: list[StaticLayer]


def has_plan(plans: Sequence[LayerPlan]) -> bool:
    """Whether the layers' plans say anything about the cache."""
    return any(layer.kv is not None for layer in plans)


def static_cache(bundle: Bundle, attention_softcap: float = 0.0) -> StaticCache:
    """The cache that the bundle's KV plan describes.

    Args:
        bundle: an open bundle.
        attention_softcap: the model's soft cap of scores, 0 for none.

    Raises:
        UnsupportedModelError: ONNX Runtime's cache cannot follow the plan; the message says why and what can be done.
    """
    plans = bundle.manifest.layers
    bits = static_bits(plans)
    if attention_softcap:
        raise _unsupported_plan(
            "the model's soft cap of scores comes between the keys' zero points and the softmax", advice=""
        )
    return StaticCache(
        bits,
        [
            StaticLayer(*(_side(bundle.plan, f"layers.{plan.index}.static_{side}", bits) for side in ("key", "value")))
            for plan in plans
        ],
    )


def _side(plan: dict[str, Tensor], name: str, bits: int) -> StaticSide:
    scale, zero_point = plan[f"{name}_scale"].float(), plan[f"{name}_zero_point"].float()
    return StaticSide(scale.clamp(min=_SMALLEST_SCALE), torch.add(zero_point, scale, alpha=2 ** (bits - 1)))


def static_bits(plans: Sequence[LayerPlan]) -> int:
    """Width of all layers' keys and values, 8 or 4 (UnsupportedModelError: see `static_cache`)."""
    widths = {served_bits(plan) for plan in plans}
    if len(widths) > 1:
        raise _unsupported_plan("its layers differ in their number of bits")
    return widths.pop()


def served_bits(plan: LayerPlan) -> int:
    """Width of a layer's keys and values, 8 or 4.

    Raises:
        UnsupportedModelError: something of the layer's scheme would be lost.
    """
    scheme = plan.scheme()
    if scheme is None or not scheme.is_static:
        raise _unsupported_plan(f"layer {plan.index} has no static scales")
    obstacle = _obstacle(scheme)
    if obstacle is not None:
        raise _unsupported_plan(f"layer {plan.index} has {obstacle}")
    return scheme.keys.bits


def _obstacle(scheme: KVScheme) -> str | None:
    """Settings of a scheme with static scales that the operator lacks."""
    keys, values = scheme.sides
    if keys.bits != values.bits or keys.bits not in (4, 8):
        return f"keys of {keys.bits} and values of {values.bits} bits, where both need 8 or both 4"
    if scheme.rotate_keys != "none" or scheme.rotate_values == "online":
        return "keys or values that are rotated at run time"
    if scheme.sink_tokens:
        return f"{scheme.sink_tokens} sink tokens, which its scales leave out"
    if keys.recent_tokens or values.recent_tokens:
        return "windows in full precision"
    if scheme.heavy_ratio is not None:
        return "a prompt budget (heavy_ratio)"
    if scheme.key_rounding != "nearest":
        return "error feedback (key_rounding)"
    return None


def _unsupported_plan(
    reason: str,
    advice: str = 'calibrate with static_scales = "calibrated" and 8 or 4 bits (docs/bundle.md has the recipe), or ',
) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"ONNX Runtime's quantized cache cannot follow this bundle's KV plan: {reason}; {advice}set `kv_cache` to "
        '"float", which leaves the plan out.'
    )
