"""Random models for the benchmarks of whole models: with 4-bit weights and a cache, or in bf16; and filled caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, NemotronHConfig, PreTrainedModel, Qwen3_5TextConfig
from transformers.initialization import no_init_weights
from transformers.models.auto import AutoModelForCausalLM

from kvconvert.kernels.linear import QuantizedLinear
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import KVScheme
from kvconvert.models.experts import EXPERT_ROLES, is_fused
from kvconvert.runtime import KVCache
from kvconvert.runtime.cache.attend import commit
from kvconvert.runtime.cache.compress import end_forward
from kvconvert.runtime.cache.forward_pass import PassTokens
from kvconvert.runtime.hf.fuse import fuse
from kvconvert.runtime.hf.fused_modules import PackedExperts
from kvconvert.runtime.hf.generation import adopt

GROUP_SIZE = 128
# So that weights have the standard deviation of transformers' initialisation, 0.02.
SCALE = 0.02 / 4.6
STORED_AT_ONCE = {"cuda": 1 << 18, "cpu": 1 << 13}  # tokens of all rows


SHAPE_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 1 << 18,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def llama_8b(**changes: int) -> LlamaConfig:
    """The shape of an 8B Llama, with positions for the longest case."""
    return LlamaConfig(**SHAPE_8B | changes)


def llama_1b() -> LlamaConfig:
    """The shape of a 1B Llama."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    return llama_8b(**sizes, max_position_embeddings=32768)


def hybrid_9b(**changes: Any) -> Qwen3_5TextConfig:
    """The shape of Qwen3.5-9B: three layers of linear attention, one of full attention, and so on."""
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "max_position_embeddings": 1 << 18,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    return Qwen3_5TextConfig(**shape | changes)


def nemotron_30b(**changes: Any) -> NemotronHConfig:
    """The shape of Nemotron 3 Nano: Mamba 2 and mixtures of 128 experts in turns, and six layers of attention."""
    letters = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
    shape = {
        "hidden_size": 2688,
        "layers_block_type": [letters[x] for x in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"],
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5,
        "intermediate_size": 1856,
        "vocab_size": 131072,
        "max_position_embeddings": 1 << 18,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    return NemotronHConfig(**shape | changes)


SHAPES = {"llama-8b": llama_8b, "qwen3.5-9b": hybrid_9b, "nemotron-3-nano": nemotron_30b}


@torch.no_grad()
def dense_model(config: LlamaConfig, device: torch.device | str) -> PreTrainedModel:
    """A bf16 model with random weights."""
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    _fill(model, torch.Generator(device).manual_seed(0))
    return model.eval()


def _fill(model: PreTrainedModel, generator: torch.Generator) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(1.0)


@torch.no_grad()
def packed_model(
    config: LlamaConfig | Qwen3_5TextConfig | NemotronHConfig, schemes: Sequence[KVScheme], device: torch.device | str
) -> PreTrainedModel:
    """A model with random 4-bit weights in all Linears and experts of its layers, and a cache of these schemes by
    default; as a bundle is once it is loaded on a GPU.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)

    def packed(inputs: int, outputs: int, bias: bool = False) -> QuantizedLinear:
        return random_linear(inputs, outputs, device, generator)

    for name, module in list(model.model.layers.named_modules(prefix="model.layers")):
        if isinstance(module, torch.nn.Linear) and module.out_features % 64 == 0:
            model.set_submodule(name, packed(module.in_features, module.out_features))
        elif is_fused(module):
            model.set_submodule(name, PackedExperts(module, EXPERT_ROLES[0], packed))
    _materialise(model, device)
    _fill(model, generator)
    if hasattr(model.model, "rotary_emb"):
        with torch.device(device):
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.eval()
    fuse(model)
    adopt(model, schemes, {})
    return model


def _materialise(model: PreTrainedModel, device: torch.device | str) -> None:
    """Room for what is still on the meta device; packed Linears have theirs."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                room = torch.nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
                setattr(module, name, room)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:  # such as a router's corrections
                setattr(module, name, torch.zeros_like(buffer, device=device))


def random_linear(inputs: int, outputs: int, device: torch.device | str, generator: torch.Generator) -> QuantizedLinear:
    """A Linear with random 4-bit weights."""
    linear = QuantizedLinear(inputs, outputs, GROUP_SIZE if inputs % GROUP_SIZE == 0 else 64, device=device)
    linear.qweight.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
    linear.qzeros.fill_(-2004318072)  # eight times the zero point 8
    linear.scales.fill_(SCALE)
    return linear


@torch.no_grad()
def filled(model: PreTrainedModel, batch: int, tokens: int, cache: Any = None) -> Any:
    """A cache with `tokens` random tokens in every row, which went the cache's own way, in parts, as a prompt in chunks
    would: the bundle's, or one of transformers'.
    """
    cache, config = model.new_kv_cache() if cache is None else cache, model.config
    at_once = max(PAGE_SIZE, STORED_AT_ONCE[model.device.type] // batch)
    for start in range(0, tokens, at_once):
        shape = (batch, config.num_key_value_heads, min(at_once, tokens - start), config.head_dim)
        for index, layer in enumerate(cache.layers):
            keys, values = (torch.randn(shape, device=model.device, dtype=model.dtype) for _ in range(2))
            if isinstance(cache, KVCache):
                layer.update(keys, values)
                commit(layer.store, PassTokens(torch.arange(start, start + shape[2], device=model.device)))
                end_forward(layer.store)
            else:
                cache.update(keys, values, index)
    return cache
