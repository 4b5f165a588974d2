"""Tiny random models whose attention really looks around, for comparing one cache with another."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def tiny_model(model_type: str, attention: str = "eager", gain: float = 4.0, **overrides):
    """A random causal model of a type; matrices are scaled up so that attention is peaked and tokens matter."""
    config = AutoConfig.for_model(model_type)
    for name, value in (SHAPE | overrides).items():
        setattr(config, name, value)
    if model_type == "gpt_oss":
        config.num_local_experts, config.num_experts_per_tok = 4, 2
    if getattr(config, "layer_types", None):
        sliding = "sliding_attention" in config.layer_types
        pattern = ["sliding_attention", "full_attention"] * 2 if sliding else config.layer_types
        config.layer_types = pattern[: config.num_hidden_layers]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(gain)
    return model.requires_grad_(False)


def random_ids(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 100, (batch, length), generator=torch.Generator().manual_seed(seed))
