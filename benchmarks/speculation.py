"""Prompt lookup in the Engine on a real model and code: tokens per second with drafts over without.

    python benchmarks/speculation.py MODEL --context 32768 --json benchmarks/results/speculation.json
    python benchmarks/speculation.py MODEL --device cpu --context 2048 --new 128

MODEL is a directory or an id of the Hub, of transformers' weights; its cache is `oscar-g128`'s. The prompt is code of
Python's own library, from argparse on, cut to --context tokens. "goes on" continues it, "rewrites" has the first lines
of one of its classes once more at its end, so that the answer repeats the class; "prose" continues Python's reference.
Greedy; every answer is generated twice and the second time measured. Says how many drafts were accepted, and how many
of the first tokens are the same: all in float32, while in 16 bits rounding decides between close ones.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from runner import machine, option_parser, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert.methods import KVScheme
from kvconvert.runtime import Engine
from kvconvert.runtime.hf.fuse import fuse
from kvconvert.runtime.hf.generation import adopt

REPEATED_LINES = 12
SOURCES = ("argparse", "ast", "calendar", "configparser", "csv", "difflib", "doctest", "inspect")


def code(tokenizer: Any, tokens: int) -> list[int]:
    """So many tokens of Python's library."""
    folder = Path(json.__file__).parent.parent
    text = "\n".join((folder / f"{name}.py").read_text(encoding="utf8") for name in SOURCES)
    return tokenizer(text).input_ids[:tokens]


def prompts_of(tokenizer: Any, tokens: int) -> dict[str, list[int]]:
    """What is continued: the code, the code with the first lines of a class once more at its end, and prose."""
    whole = code(tokenizer, tokens)
    text = (Path(json.__file__).parent.parent / f"{SOURCES[0]}.py").read_text(encoding="utf8")
    begin = text.index("class HelpFormatter")
    again = tokenizer("\n\n" + "".join(text[begin:].splitlines(keepends=True)[:REPEATED_LINES])).input_ids
    prose = tokenizer("\n\n".join(topics.values())).input_ids[:tokens]
    return {"goes on": whole, "rewrites": whole[: tokens - len(again)] + again, "prose": prose}


def measure(
    model: Any, prompts: dict[str, list[int]], new: int, **options: Any
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Of each prompt, tokens per second after the first token of one request, the second time; and the tokens."""
    engine, report, tokens = Engine(model, max_batch=1, prefix_caching=False, **options), {}, {}
    for name, prompt in prompts.items():
        for _ in range(2):
            request = engine.add(prompt, max_new_tokens=new, stop_token_ids=[])
            while not request.tokens:
                engine.step()
            begin, before, steps = time.perf_counter(), len(request.tokens), engine.stats().steps
            engine.run()
            took = time.perf_counter() - begin
        report[name] = {
            "tokens_per_second": (new - before) / took,
            "tokens_per_step": (new - before) / (engine.stats().steps - steps),
            "drafted": request.drafted,
            "accepted": request.accepted,
        }
        tokens[name] = request.tokens
    return report, tokens


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and activations (default: bfloat16)")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--drafts", type=int, nargs="*", default=[4, 8, 16], help="prompt_lookup_num_tokens")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    model.to(arguments.device).eval()
    if arguments.device == "cuda":
        fuse(model)
    scheme = KVScheme.preset("oscar-g128").with_online_rotation()
    adopt(model, [scheme] * model.config.num_hidden_layers, {})
    most = min(arguments.context, model.config.max_position_embeddings - arguments.new)
    prompts = prompts_of(tokenizer, most)
    results: dict[str, Any] = {
        "machine": machine() if arguments.device == "cuda" else "CPU",
        "model": arguments.model,
        "context": most,
    }
    results["without"], expected = measure(model, prompts, arguments.new)
    for count in arguments.drafts:
        report, tokens = measure(model, prompts, arguments.new, prompt_lookup_num_tokens=count)
        for name, found in report.items():
            pairs = enumerate(zip(tokens[name], expected[name], strict=True))
            found["same_tokens"] = next((number for number, (a, b) in pairs if a != b), arguments.new)
            found["over_without"] = found["tokens_per_second"] / results["without"][name]["tokens_per_second"]
        results[f"drafts of {count}"] = report
    print(json.dumps(results, indent=1))
    save(arguments.json, results)


if __name__ == "__main__":
    main()
