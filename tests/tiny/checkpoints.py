"""Tiny random models of every supported family, with the reference model's tokenizer, for tests of the pipeline."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

REFERENCE = Path(__file__).parents[2] / "examples" / "reference-lm"
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
TEXT = " ".join(f"The {word} walked {i} miles to town." for i in range(60) for word in ("miller", "parson", "captain"))


def tiny_model(family: str, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A float32 model whose biases and norms are not trivial and whose activations have a few large channels."""
    config_class, model_class = FAMILIES[family]
    settings: dict[str, object] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 4096,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**settings | overrides)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0, 0.2)
        elif "norm" in name:
            parameter.normal_(1, 0.3)
            parameter[:: max(1, parameter.numel() // 4)] *= 6
    return model


def save_checkpoint(
    directory: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **overrides: object
) -> Path:
    """Save a tiny model with tokenizer; `max_shard_size` among the overrides goes to save_pretrained."""
    shards = {"max_shard_size": overrides.pop("max_shard_size")} if "max_shard_size" in overrides else {}
    tiny_model(family, **overrides).to(dtype).save_pretrained(directory, **shards)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(REFERENCE / name, directory / name)
    return directory


def save_text(directory: Path) -> str:
    """A text file long enough for a handful of short samples."""
    file = directory / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return str(file)
