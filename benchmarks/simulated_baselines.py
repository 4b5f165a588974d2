"""Baselines that the cache's formats do not hold, beside those they do, all by fake quantization of a whole prompt.

    python benchmarks/simulated_baselines.py MODEL --text FILE --calibration FILE [--prompts 2] [--length 2048]
        [--scored 256] [--device cuda] [--only NAME ...] [--json FILE]

A prompt is read in full precision, its keys and values are replaced by what a method would read back, or some of them
are dropped, and the next tokens are scored over them. Nothing is stored at low bits, so bits per value are nominal:
codes, scales and zero points in float16, norms and indices, and what stays exact. The first tokens and what does not
fill a page of 128 stay exact in every row, and uniform grids have one clip ratio per width that is not calibrated, but
for the rows of `simulated_feedback.py`: rows compare with each other, not with the tables of real models, which
measure the cache itself.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from simulated_feedback import Known
from simulated_methods import METHODS, PAGE, ROTATIONS, SINKS, Layer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvconvert.calibration.attention_sample import RECORDING_ATTENTION, attention_observed
from kvconvert.calibration.error_feedback import QueryMoments
from kvconvert.fidelity.bootstrap import bootstrap_mean


@dataclass
class Captured:
    """Queries of each layer, [Hq, n, D], of the latest forward pass."""

    queries: list[Tensor] = field(default_factory=list)

    def of(self, model: torch.nn.Module) -> ExitStack:
        """Capture within the context."""
        stack = ExitStack()
        for layer in model.model.layers:
            stack.enter_context(attention_observed(layer.self_attn, lambda q, k, v: self.queries.append(q[0].float())))
        return stack


def read(model: torch.nn.Module, ids: Tensor) -> list[Layer]:
    """The layers after a prompt, ids [1, n]."""
    captured, cache = Captured(), DynamicCache()
    with captured.of(model):
        model(ids, past_key_values=cache, logits_to_keep=1)
    sides = [(layer.keys[0].float(), layer.values[0].float()) for layer in cache.layers]
    return [Layer(queries, *side) for queries, side in zip(captured.queries, sides, strict=True)]


def calibrated(layers: list[Layer]) -> list[Known]:
    """What the layers after a calibration prompt say; sensitivity is E|q_d| E[range of channel d in a page] (Kitty,
    equations 4 and 5)."""
    found = []
    for layer in layers:
        heads, n, _ = layer.keys.shape
        groups = layer.keys[:, : n // PAGE * PAGE].unflatten(1, (-1, PAGE))
        extent = (groups.amax(2) - groups.amin(2)).mean(1)
        sensitivity = layer.queries.abs().unflatten(0, (heads, -1)).mean((1, 2)) * extent
        moments = QueryMoments()
        moments.update(layer.queries[None], heads)
        found.append(Known(sensitivity, moments.result(), layer.keys[:, SINKS : SINKS + (n - SINKS) // PAGE * PAGE]))
    return found


def scores(model: torch.nn.Module, sides: list[tuple[Tensor, Tensor]], ids: Tensor, position: int) -> Tensor:
    """Log-probabilities [n, vocabulary] of ids [1, n] from `position` on, over keys and values [H, kept, D]."""
    cache = DynamicCache()
    for index, side in enumerate(sides):
        cache.update(*(x[None].to(model.dtype) for x in side), index)
    positions = torch.arange(position, position + ids.shape[1], device=ids.device)[None]
    return model(ids, past_key_values=cache, position_ids=positions).logits[0].float().log_softmax(-1)


@torch.no_grad()
def measure(model: torch.nn.Module, text: Tensor, calibration: Tensor, options: argparse.Namespace) -> dict:
    """KL and perplexity of every method, averaged over evenly spaced prompts of a text, KL also of each prompt."""
    length, scored = options.length, options.scored
    known = calibrated(read(model, calibration[None, :length].to(model.device)))
    names = [name for name in METHODS if not options.only or any(part in name for part in options.only)]
    result: dict[str, dict] = {name: {"kl": [], "nll": 0.0, "bits_per_value": 0.0} for name in names}
    source = 0.0
    for prompt in range(options.prompts):
        start = prompt * (len(text) - length - scored - 1) // max(options.prompts - 1, 1)
        part = text[start : start + length + scored + 1].to(model.device)
        ids, targets = part[None, length : length + scored], part[length + 1 :, None]
        layers = read(model, part[None, :length])
        reference = scores(model, [(layer.keys, layer.values) for layer in layers], ids, length)
        source += float(-reference.gather(1, targets).mean()) / options.prompts
        for name in names:
            outcomes = []
            for layer, layer.known in zip(layers, known, strict=True):
                outcomes.append(METHODS[name](layer))
            got = scores(model, [(outcome.keys, outcome.values) for outcome in outcomes], ids, length)
            row = result[name]
            row["kl"].append(float((reference.exp() * (reference - got)).sum(-1).mean()))
            row["nll"] += float(-got.gather(1, targets).mean()) / options.prompts
            row["bits_per_value"] += sum(o.bits for o in outcomes) / len(outcomes) / options.prompts
            print(f"prompt {prompt + 1}: {name}: KL so far {sum(row['kl']) / (prompt + 1):.4f}", flush=True)
    rows = {
        name: {
            "kl": sum(row["kl"]) / options.prompts,
            "perplexity": float(torch.tensor(row["nll"]).exp()),
            "bits": row["bits_per_value"],
            "kl_by_prompt": row["kl"],
        }
        for name, row in result.items()
    }
    return {"source_perplexity": float(torch.tensor(source).exp()), "rows": rows}


def pairs(rows: dict[str, dict]) -> list[tuple[tuple[str, dict], tuple[str, dict]]]:
    """Rows with the calibrated rotation, each with the same in the Hadamard rotation."""
    one, two = ROTATIONS[True], ROTATIONS[False]
    return [
        ((name, row), (other, rows[other]))
        for name, row in rows.items()
        if name.startswith(one) and (other := name.replace(one, two, 1)) in rows and len(row["kl_by_prompt"]) > 1
    ]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True, help="another text, on which channels are chosen")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--scored", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of rows")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation=RECORDING_ATTENTION
    )
    model = model.eval().to(options.device)
    texts = [
        tokenizer(path.read_text(encoding="utf8"), return_tensors="pt").input_ids[0]
        for path in (options.text, options.calibration)
    ]
    found = measure(model, *texts, options)
    found |= {key: getattr(options, key) for key in ("prompts", "length", "scored")} | {"text": options.text.name}
    print(f"\nsource perplexity {found['source_perplexity']:.2f}\n\n| baseline | bits per value | KL | perplexity |")
    print("|---|---|---|---|")
    for name, row in found["rows"].items():
        print(f"| {name} | {row['bits']:.2f} | {row['kl']:.4f} | {row['perplexity']:.2f} |")
    for (name, one), (other, two) in pairs(found["rows"]):
        by_prompt = torch.tensor([one["kl_by_prompt"], two["kl_by_prompt"]], dtype=torch.float64)
        gain = bootstrap_mean(by_prompt[0] - by_prompt[1], 0)
        print(f"{name} less {other}: {gain.mean:+.4f} ({gain.low:+.4f} to {gain.high:+.4f})")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
