"""Whole models on this machine's CPU: 4-bit weights and a 2-bit cache against the source with DynamicCache.

    python benchmarks/cpu_models.py SMOLLM2 [--only NAME] [--threads 1 2] [--json FILE]

SMOLLM2 is a directory with SmolLM2-135M; the other model is a Llama of the shape of a 1B (hidden 2048, 16 layers, 32
query and 8 KV heads of 64) with random weights. Each is measured as source and as bundle, in float32 and bfloat16: a
bundle's weights in groups of 128 (64 where that does not divide), its cache `oscar-g128`. Caches are filled through
their own update path with random keys and values, which changes no time: decoding does the same whatever it reads.
Values count as rotated by the weights, as in a bundle.

Times of one thread are processor time, of several wall-clock time, for which the machine has to be idle. Decoding is
the fastest of a few steps of one token, since other processes only ever add to a time. The prompt to the
first token is measured once, of the source only in the dtype that is faster for a short one, and of the larger model
only with the last number of threads. With two idle cores it takes about a
quarter of an hour; results go to benchmarks/results/cpu_models.json.
"""

from __future__ import annotations

import copy
import gc
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine_models import dense_model, filled, llama_1b
from runner import option_parser, save
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from kvconvert.kernels.linear import QuantizedLinear
from kvconvert.kernels.linear.awq_format import quantize_weight
from kvconvert.methods import KVScheme
from kvconvert.runtime import KVCache
from kvconvert.runtime.hf.bundle_quantizer import BundleConfig, place_dense_linears
from kvconvert.tables import markdown_table as table

SCHEME = "oscar-g128"
PROMPT, PILOT = 2048, 64
# (batch, stored tokens) with the steps that are timed after the first one.
CASES = {
    "SmolLM2-135M": {(1, 2048): 6, (1, 16384): 4, (8, 2048): 3, (32, 2048): 2},
    "1B": {(1, 2048): 5, (1, 16384): 3, (8, 2048): 2},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def quantized(model: PreTrainedModel, repeat: bool) -> PreTrainedModel:
    """The same model with 4-bit weights in every layer's Linears; with `repeat` all layers have those of the first."""
    packed: dict[str, Any] = {}
    for layer in model.model.layers:
        for name, linear in list(layer.named_modules()):
            if not isinstance(linear, torch.nn.Linear):
                continue
            if name not in packed or not repeat:
                size = 128 if linear.in_features % 128 == 0 else 64
                packed[name] = quantize_weight(linear.weight, 4, size)
            layer.set_submodule(name, QuantizedLinear.from_weight(copy.deepcopy(packed[name])))
    place_dense_linears(model)
    config = BundleConfig({})
    config.kv_schemes = (KVScheme.preset(SCHEME),) * model.config.num_hidden_layers
    model.config.quantization_config = config
    model.set_attn_implementation("kvconvert")
    return model


def new_cache(model: PreTrainedModel) -> DynamicCache | KVCache:
    """The cache that goes with the model's attention."""
    if isinstance(getattr(model.config, "quantization_config", None), BundleConfig):
        return KVCache(model.config, SCHEME)
    return DynamicCache(config=model.config)


def seconds(run: Callable[[], object]) -> float:
    """Seconds of one call: with one thread of the processor's, so that waiting for a core does not count."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begun = clock()
    run()
    return clock() - begun


def decode(model: PreTrainedModel, batch: int, tokens: int, steps: int) -> float:
    """Milliseconds of the fastest of some steps of one token for each sequence."""
    cache = new_cache(model)
    filled(model, batch, tokens, cache)
    token = torch.ones(batch, 1, dtype=torch.int64)
    times = [seconds(lambda: model(token, past_key_values=cache)) for _ in range(steps + 1)]
    return 1e3 * min(times[1:])


def first_token(model: PreTrainedModel, tokens: int) -> float:
    """Seconds from a prompt to the logits of its last token."""
    ids = torch.randint(100, 30000, (1, tokens), generator=torch.Generator().manual_seed(0))
    cache = new_cache(model)
    return seconds(lambda: model(ids, past_key_values=cache, logits_to_keep=1))


def measure(name: str, make: Callable[[], PreTrainedModel], threads: list[int], prompts: list[int]) -> list[dict]:
    """All figures of one model, one entry for each way to run it and number of threads."""
    results = []
    for kind in ("source", "bundle"):
        model = make()
        if kind == "bundle":
            model = quantized(model, repeat=name == "1B")
        pilots: dict[tuple[str, int], float] = {}
        for dtype, torch_dtype in DTYPES.items():
            model = model.to(torch_dtype)
            for count in threads:
                torch.set_num_threads(count)
                row: dict[str, Any] = {"model": name, "kind": kind, "dtype": dtype, "threads": count}
                first_token(model, PILOT)
                pilots[dtype, count] = row[f"first token of {PILOT}, s"] = round(first_token(model, PILOT), 3)
                slower = pilots[dtype, count] > 1.5 * pilots["float32", count]
                if count in prompts and not (kind == "source" and slower):
                    row[f"first token of {PROMPT}, s"] = round(first_token(model, PROMPT), 2)
                for (batch, tokens), steps in CASES[name].items():
                    row[f"{batch} x {tokens}, ms"] = round(decode(model, batch, tokens, steps), 1)
                    gc.collect()
                results.append(row)
                print(json.dumps(row), flush=True)
        del model
        gc.collect()
    return results


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("smollm2", type=Path)
    parser.add_argument("--only", choices=[*CASES])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    makers = {
        "SmolLM2-135M": lambda: AutoModelForCausalLM.from_pretrained(args.smollm2, dtype=torch.float32).eval(),
        "1B": lambda: dense_model(llama_1b(), "cpu").float(),
    }
    torch.manual_seed(0)
    results = []
    with torch.no_grad():
        for name, make in makers.items():
            if args.only in (None, name):
                prompts = args.threads if name != "1B" else args.threads[-1:]
                results += measure(name, make, args.threads, prompts)
    names = list(dict.fromkeys(name for row in results for name in row))
    print(table(names, [[row.get(name, "") for name in names] for row in results]))
    if args.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        versions["cpu"] = torch.backends.cpu.get_cpu_capability()
        save(args.json, {"versions": versions, "results": results})


if __name__ == "__main__":
    main()
