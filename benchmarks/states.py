"""The loss of a model whose recurrent states are stored in few bits, token by token:

    python benchmarks/states.py MODEL TEXT [--prompt 128] [--tokens 512] [--sequences 8]

The text's sequences are read as decoding reads them, after a prompt, by a model of transformers in float32 whose cache
has pages of each scheme and states of each width; KL to the model with transformers' own cache, in nats per token.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert.methods import UNQUANTIZED, KVScheme
from kvconvert.runtime.hf.generation import adopt
from kvconvert.runtime.hf.layer import RecurrentStates, StateLayer
from kvconvert.tables import markdown_table

CACHES = {"16 bits": UNQUANTIZED, "kivi": KVScheme.preset("kivi"), "default": KVScheme.preset("default")}
WIDTHS = {"32": 16, "12": 12, "8": 12}


class Coarse(RecurrentStates):
    """States that are rounded to 8 bits first."""

    def write(self, number: int, states: Tensor) -> None:
        scale = states.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        super().write(number, (states / scale).round() * scale)


@torch.no_grad()
def logits_of(directory: Path, ids: Tensor, prompt: int, scheme: KVScheme | None, width: str) -> Tensor:
    """Of all tokens after the prompt, [B, T, V]."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    cache = None
    if scheme is not None:
        own = replace(scheme.uncalibrated().with_online_rotation(), state_bits=WIDTHS[width])
        adopt(model, [own] * model.config.num_hidden_layers, {})
        cache = model.new_kv_cache()
        for layer in cache.layers:
            if isinstance(layer, StateLayer) and width == "8":
                layer.recurrent_states = Coarse(layer.recurrent_states, 12)
    found, begin = [], 0
    for end in (prompt, *range(prompt + 1, ids.shape[1] + 1)):
        output = model(ids[:, begin:end], past_key_values=cache, use_cache=True)
        cache, begin = output.past_key_values, end
        found.append(output.logits[:, -1])
    return torch.stack(found, 1)


def main() -> None:
    """Print a table: one row per cache, one column per width of states."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=8)
    arguments = parser.parse_args()
    length = arguments.prompt + arguments.tokens
    text = arguments.text.read_text(encoding="utf-8")[: 12 * length * arguments.sequences]
    ids = torch.tensor(AutoTokenizer.from_pretrained(arguments.model)(text)["input_ids"])
    ids = ids[: length * arguments.sequences].view(arguments.sequences, length)
    exact = logits_of(arguments.model, ids, arguments.prompt, None, "32").log_softmax(-1)
    rows = []
    for name, scheme in CACHES.items():
        row = [name]
        for width in WIDTHS:
            found = logits_of(arguments.model, ids, arguments.prompt, scheme, width).log_softmax(-1)
            kl = (exact.exp() * (exact - found)).sum(-1)
            row.append(f"{kl.mean():.6f} / {kl.flatten().quantile(0.999):.4f}")
        print(*row, flush=True)
        rows.append(row)
    print(markdown_table(("keys and values", *(f"states of {width} bits" for width in WIDTHS)), rows))


if __name__ == "__main__":
    main()
