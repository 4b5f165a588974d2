"""Random models for the benchmarks of whole models: with 4-bit weights and a bundle's cache, or in bf16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaConfig, MixtralConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto import AutoModelForCausalLM

from kvconvert.kernels.linear import QuantizedLinear
from kvconvert.methods import KVScheme
from kvconvert.models.experts import EXPERT_ROLES, is_fused
from kvconvert.runtime.hf.fuse import fuse
from kvconvert.runtime.hf.generation import adopt
from kvconvert.runtime.hf.packed_experts import PackedExperts

GROUP_SIZE = 128
# So that weights have the standard deviation of transformers' initialisation, 0.02.
SCALE = 0.02 / 4.6


def llama_8b(**changes: int) -> LlamaConfig:
    """The shape of an 8B Llama, with positions for the longest case."""
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 1 << 18,
    }
    return LlamaConfig(**shape | changes, tie_word_embeddings=False, pad_token_id=0, eos_token_id=None)


def mixtral(**changes: int) -> MixtralConfig:
    """Eight layers of a Mixtral-like mixture: 8 experts, 2 of them active."""
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 1 << 18,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    config = MixtralConfig(**shape | changes, tie_word_embeddings=False, pad_token_id=0, eos_token_id=None)
    config.sliding_window = None
    return config


@torch.no_grad()
def dense_model(config: LlamaConfig | MixtralConfig, device: torch.device | str, seed: int = 0) -> PreTrainedModel:
    """A bf16 model with random weights."""
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(1.0)
    return model.eval()


@torch.no_grad()
def packed_model(
    config: LlamaConfig | MixtralConfig,
    schemes: Sequence[KVScheme],
    device: torch.device | str,
    seed: int = 0,
    fused: bool = True,
) -> PreTrainedModel:
    """A model with random 4-bit weights in all Linears of its layers, and a cache of these schemes by default; as a
    bundle is once it is loaded on a GPU, unless it is not to be fused.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(seed)
    for name, fused_experts in [(n, m) for n, m in model.named_modules() if is_fused(m)]:
        packed = PackedExperts(
            fused_experts, EXPERT_ROLES[0], lambda i, o, bias: random_linear(i, o, device, generator)
        )
        model.set_submodule(name, packed)
    for name, linear in list(model.model.layers.named_modules(prefix="model.layers")):
        if isinstance(linear, torch.nn.Linear) and linear.out_features % 128 == 0:
            model.set_submodule(name, random_linear(linear.in_features, linear.out_features, device, generator))
    _materialise(model, device)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(1.0)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.eval()
    if fused:
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


def random_linear(inputs: int, outputs: int, device: torch.device | str, generator: torch.Generator) -> QuantizedLinear:
    """A Linear with random 4-bit weights."""
    linear = QuantizedLinear(inputs, outputs, GROUP_SIZE, device=device)
    linear.qweight.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
    linear.qzeros.fill_(-2004318072)  # eight times the zero point 8
    linear.scales.fill_(SCALE)
    return linear
