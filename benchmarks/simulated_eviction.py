"""Numbers found when a cache keeps a share of the prompt, by the score that decides and by who shares the budget.

    python benchmarks/simulated_eviction.py MODEL --text FILE --length 4096 [--plain]

Nothing is evicted: attention of the question is masked to the kept tokens, whose keys and values are quantized to 3 and
2 bits in groups of 128 and back. Scores are the attention mass of the prompt (MiniKV, H2O), the cosine distance of a
key to the mean of its head's (KeyDiff), and the largest weight from a repetition of the prompt
(`kernels/reconstruct.py`). The newest 2% are kept besides. A number counts as found where its digits are the likeliest
tokens, one after another.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import AttentionMaskInterface

from kvconvert.fidelity.recall import Drill, NumberBook
from kvconvert.kernels.pages import PageFormat, dequantize_keys, dequantize_values, quantize_keys, quantize_values
from kvconvert.kernels.prompt import prompt_attention
from kvconvert.kernels.reconstruct import repeated_attention
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.kernels.select import column_sums

PART, SINKS, RECENT, PAGE = 512, 4, 0.02, 128


class Simulation:
    """What the attention function does, and what it holds of each layer.

    Attributes:
        mode: "prompt", "repetition", or "question".
        stored: keys and values [H, n, D] of each layer.
        scores: by name, of each layer [H, n].
        kept: of each layer and head, keys and values [k, D].
    """

    def __init__(self) -> None:
        self.mode = "prompt"
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        self.scores: dict[str, dict[int, Tensor]] = {"attention mass": {}, "KeyDiff": {}, "repetition": {}}
        self.kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, scaling: float, **kwargs: Any):
        (q, k, v), layer = (part[0] for part in (query, key, value)), module.layer_idx
        if self.mode == "prompt":
            self.stored[layer] = k.clone(), v.clone()
            directions = torch.nn.functional.normalize(k.float(), dim=-1)
            mean = torch.nn.functional.normalize(directions.mean(1, keepdim=True), dim=-1)
            self.scores["attention mass"][layer] = column_sums(q, k, None, scaling)
            self.scores["KeyDiff"][layer] = -(directions * mean).sum(-1)
            output = prompt_attention(q, k, v, scaling)
        elif self.mode == "repetition":
            grouped = q.unflatten(0, (len(k), -1))
            output, scores = repeated_attention(grouped, (k, v), self.stored[layer], SINKS, PART, SINKS, scaling)
            self.scores["repetition"][layer] = torch.nn.functional.pad(scores, (SINKS, 0), value=torch.inf)
            output = output.flatten(0, 1)
        else:
            output = torch.cat(
                [
                    prompt_attention(asked, torch.cat([old, new])[None], torch.cat([held, own])[None], scaling)
                    for asked, (old, held), new, own in zip(
                        q.split(len(q) // len(k)), self.kept[layer], k, v, strict=True
                    )
                ]
            )
        return output.transpose(0, 1)[None], None


def quantized(keys: Tensor, values: Tensor, plain: bool) -> tuple[Tensor, Tensor]:
    """One head's tokens [n, D] after complete pages were quantized; sink tokens and the rest are exact."""
    n, dim = len(keys) // PAGE * PAGE, keys.shape[1]
    if not n:
        return keys, values
    key_format = PageFormat.keys(1, dim, PAGE, 3, PAGE, "none" if plain else "per_head", clip_ratio=0.95)
    value_format = PageFormat.values(1, dim, PAGE, 2, dim, clip_ratio=0.85)
    k, v = (part[:n].float().view(-1, 1, PAGE, dim) for part in (keys, values))
    k = dequantize_keys(quantize_keys(k if plain else hadamard_transform(k), key_format, hidden=SINKS), key_format)
    k = k.transpose(2, 3).reshape(n, dim)
    k = k if plain else hadamard_transform(k, inverse=True)
    v = dequantize_values(quantize_values(hadamard_transform(v), value_format, hidden=SINKS), value_format)
    v = hadamard_transform(v.reshape(n, dim), inverse=True)
    return tuple(
        torch.cat([exact[:SINKS], stored[SINKS:].to(exact.dtype), exact[n:]])
        for exact, stored in ((keys, k), (values, v))
    )


def select(scores: dict[int, Tensor], share: float, pooled: bool) -> list[list[Tensor]]:
    """Tokens that each head of each layer keeps: as many in all, or those with the best scores of all."""
    every = torch.stack([scores[layer] for layer in sorted(scores)]).clone()
    n = every.shape[2]
    every[..., :SINKS] = every[..., n - round(RECENT * n) :] = torch.inf
    count = round(share * n)
    counts = torch.full(every.shape[:2], count)
    if pooled:
        least = every.flatten().topk(count * counts.numel()).values[-1]
        counts = (every >= least).sum(-1)
    return [
        [row.topk(int(k)).indices.sort().values for row, k in zip(heads, own, strict=True)]
        for heads, own in zip(every, counts, strict=True)
    ]


def finds(model: Any, simulation: Simulation, drill: Drill, answer: list[int]) -> bool:
    """Whether the answer's tokens are the likeliest after the question."""
    simulation.mode, ids, n = "question", drill.cue + answer, len(drill.context)
    positions = torch.arange(n, n + len(ids))[None]
    logits = model(torch.tensor([ids]), position_ids=positions, use_cache=False).logits[0]
    return logits[len(drill.cue) - 1 : -1].argmax(-1).tolist() == answer


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--plain", action="store_true", help="keys neither rotated nor divided by their norms")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    simulation = Simulation()
    AttentionInterface.register("simulated_eviction", simulation.attend)
    AttentionMaskInterface.register("simulated_eviction", lambda *args, **kwargs: None)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation="simulated_eviction"
    ).eval()
    prose = tokenizer(args.text.read_text(encoding="utf8")[: 400 * args.length], add_special_tokens=False)["input_ids"]
    found: Counter[str] = Counter()
    for drill in NumberBook(tokenizer, prose, args.seed).drills(args.length, args.prompts):
        context = torch.tensor([drill.context])
        positions = torch.arange(args.length)[None]
        for mode in ("prompt", "repetition"):
            simulation.mode, first = mode, SINKS * (mode == "repetition")
            # The repetition of a part begins where the part ends.
            own = positions[:, first:] + (PART if first else 0)
            model.model(context[:, first:], position_ids=own, use_cache=False)
        answer = tokenizer(" " + drill.expected, add_special_tokens=False)["input_ids"]
        everything = [[torch.arange(args.length)] * len(keys) for keys, _ in simulation.stored.values()]
        choices = {"everything": everything}
        for name, scores in simulation.scores.items():
            for share in (0.3, 0.2):
                choices[f"{name}, {share} of each head"] = select(scores, share, False)
                choices[f"{name}, {share} of all heads"] = select(scores, share, True)
        for name, chosen in choices.items():
            for layer, heads in enumerate(chosen):
                keys, values = simulation.stored[layer]
                simulation.kept[layer] = [quantized(keys[h, i], values[h, i], args.plain) for h, i in enumerate(heads)]
            found[name] += finds(model, simulation, drill, answer)
    print(f"| {args.model.name}, {args.length:,} tokens | found of {args.prompts} |\n| --- | --- |")
    for name, count in found.items():
        print(f"| {name} | {count} |")


if __name__ == "__main__":
    main()
