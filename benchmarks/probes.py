"""Which probes of `kvconvert eval` tell `kivi` at 2 bits from 4, on real models.

    python benchmarks/probes.py MODEL... [--only PROBE,...] [--prompts 12] [--context 1024] [--device cpu]

The cache alone is quantized; nothing is calibrated. Writes benchmarks/results/probes.json, in which what was measured
replaces rows of the same model and probe, and prints a table of what it holds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from runner import RESULTS, option_parser, read, save
from tables import table
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert.data.text import load_token_samples
from kvconvert.fidelity.bootstrap import bootstrap_mean
from kvconvert.fidelity.probes import PROBES, Writer, ask, probe_tokens
from kvconvert.fidelity.recall import agreement
from kvconvert.fidelity.scoring import Decoder, generate_greedily
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import KVScheme
from kvconvert.runtime import KVCache

OUTPUT = RESULTS / "probes.json"
BITS = (4, 2)
FREE, FREE_TOKENS = "free-running", 64
NAMES = [*(probe.name for probe in PROBES), FREE]


def measure(
    directory: str, names: list[str], prompts: int, context: int, device: str, dtype: str, seed: int
) -> Iterator[tuple[str, dict]]:
    """By probe, shares of right answers of the source and of both caches, and the lead of 4 bits over 2."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(device).eval()
    ids = load_token_samples(None, tokenizer, 16, 1024, seed, "evaluation").ids
    writer = Writer(tokenizer, ids.flatten().tolist(), seed)
    scheme = KVScheme.preset("kivi")
    length = probe_tokens(context)
    rows = 1 if device == "cpu" else 16

    def decoder(bits: int | None) -> Decoder:
        if bits is None:
            model.set_attn_implementation("sdpa")
            return Decoder.plain(model)
        model.set_attn_implementation("kvconvert")
        own = dataclasses.replace(scheme, key_bits=bits, value_bits=bits)
        return Decoder(model, lambda: KVCache(model.config, own))

    how = {"device": device, "dtype": dtype, "seed": seed, "chat template": writer.is_templated}
    for probe in (probe for probe in PROBES if probe.name in names):
        begun = time.perf_counter()
        asked = writer.prompts(probe, length, prompts)
        right = {b: torch.tensor(ask(decoder(b), asked, rows, f"{probe.name}, {b} bits")) for b in (None, *BITS)}
        source, four, two = (answers.double().mean(1) for answers in right.values())
        row = _row(source.mean(), four, two, seed) | {"tokens": length} | how
        yield probe.name, row | {"seconds": round(time.perf_counter() - begun, 1)}
    if FREE not in names:
        return
    beginnings = ids[:prompts]
    cut = 4 * PAGE_SIZE
    texts = {
        b: generate_greedily(decoder(b), beginnings[:, :cut], beginnings[:, cut : cut + 1], FREE_TOKENS)
        for b in (None, *BITS)
    }
    until = [agreement(texts[None], texts[b]).double() for b in BITS]
    yield FREE, _row(torch.tensor(float(FREE_TOKENS)), *until, seed) | {"tokens": cut} | how


def _row(source: torch.Tensor, four: torch.Tensor, two: torch.Tensor, seed: int) -> dict:
    lead = bootstrap_mean(four - two, seed)
    return {
        "source": float(source),
        "4 bits": float(four.mean()),
        "2 bits": float(two.mean()),
        "lead": [lead.mean, lead.low, lead.high],
        "separates": lead.above_zero,
        "prompts": len(four),
    }


def shown(results: dict) -> str:
    """A probe per row and model."""
    rows = []
    for name, model in product(NAMES, results):
        if row := results[model].get(name):
            form = ".1f" if name == FREE else ".0%"
            mean, low, high = (format(value, form) for value in row["lead"])
            shares = (format(row[key], form) for key in ("source", "4 bits", "2 bits"))
            rows.append((name, model, *shares, f"{mean} ({low} to {high})"))
    return table(("probe", "model", "source", "4 bits", "2 bits", "4 bits ahead by"), rows)


def main() -> None:
    """Measure each model, write after each probe, print everything."""
    parser = option_parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--only", default=",".join(NAMES), metavar="PROBE,...")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(NAMES):
        parser.error(f"--only: {', '.join(sorted(unknown))}; choose among {', '.join(NAMES)}")
    for model in args.models:
        options = (args.prompts, args.context, args.device, args.dtype, args.seed)
        for name, row in measure(model, names, *options):
            results = read(OUTPUT)
            results.setdefault(Path(model).name, {})[name] = row
            save(OUTPUT, results)
    print(shown(read(OUTPUT)))


if __name__ == "__main__":
    main()
