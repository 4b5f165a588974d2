"""genai_config.json: how onnxruntime-genai runs the graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvconvert.onnx.architecture import Decoder

# Of generation_config.json, what onnxruntime-genai knows by the same names.
_SEARCH = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "min_length", "num_beams")


def genai_config(decoder: Decoder, directory: Path, model_file: str) -> dict[str, Any]:
    """The configuration of onnxruntime-genai.

    Args:
        decoder: the model's shape.
        directory: where generation_config.json lies, if there is one.
        model_file: name of the graph's file.
    """
    path = directory / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def token(name: str) -> Any:
        return generation.get(name, getattr(decoder.config, name, None))

    end = token("eos_token_id")
    first_end = end[0] if isinstance(end, list) else end
    padding = token("pad_token_id")
    tokens = {
        "bos_token_id": token("bos_token_id"),
        "eos_token_id": end,
        "pad_token_id": first_end if padding is None else padding,
    }
    search = {name: generation[name] for name in _SEARCH if generation.get(name) is not None}
    return {
        "model": {
            "type": decoder.model_type,
            "vocab_size": decoder.vocab_size,
            "context_length": decoder.max_positions,
            **{name: value for name, value in tokens.items() if value is not None},
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": model_file,
                "hidden_size": decoder.hidden_size,
                "head_size": decoder.head_dim,
                "num_attention_heads": decoder.num_heads,
                "num_key_value_heads": decoder.num_kv_heads,
                "num_hidden_layers": decoder.num_layers,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"max_length": decoder.max_positions, "past_present_share_buffer": True} | search,
    }
