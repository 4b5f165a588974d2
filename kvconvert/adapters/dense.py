"""Dense text models. An architecture is one entry; see docs/adding-an-architecture.md."""

from __future__ import annotations

from kvconvert.adapters.adapter import Adapter

DENSE = (
    Adapter("llama", "LlamaForCausalLM"),
    Adapter("mistral", "MistralForCausalLM"),
    Adapter("qwen2", "Qwen2ForCausalLM"),
    Adapter("qwen3", "Qwen3ForCausalLM"),
)
