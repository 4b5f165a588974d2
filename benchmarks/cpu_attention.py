"""Decode attention over quantized pages against torch's SDPA over full-precision keys and values, on this machine's
CPU.

    python benchmarks/cpu_attention.py [--json benchmarks/results/cpu_attention.json]

Everything is measured in one run and one thread, as CPU time of the process, by turns; the figure is the ratio of
medians. SDPA reads bfloat16 K and V, which is what an unconverted model would hold. Quantizing the prompt's pages is
timed as well.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from kvconvert.runtime import KVCache
from kvconvert.runtime.cache.append import commit
from kvconvert.runtime.cache.attend import attend
from kvconvert.runtime.cache.compress import end_forward
from kvconvert.runtime.cache.forward_pass import Chunk

# KV heads, query heads per KV head, head size, tokens
SHAPES = [(2, 2, 64, 2048), (8, 4, 128, 1024), (8, 4, 128, 8192), (8, 4, 128, 32768)]
PRESETS = ("oscar", "oscar-g128", "kivi")


def cpu_milliseconds(run: Callable[[], object]) -> float:
    begun = time.process_time()
    run()
    return 1e3 * (time.process_time() - begun)


def measure(heads: int, group: int, dim: int, tokens: int, repeats: int) -> dict:
    config = LlamaConfig(
        hidden_size=heads * group * dim,
        num_hidden_layers=1,
        num_attention_heads=heads * group,
        num_key_value_heads=heads,
        head_dim=dim,
    )
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, heads, tokens, dim).bfloat16()
    query = torch.randn(1, heads * group, 1, dim).bfloat16()
    runs: dict[str, Callable[[], object]] = {
        "sdpa bf16": lambda: scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    }
    result: dict = {"kv_heads": heads, "query_heads": heads * group, "head_dim": dim, "tokens": tokens}
    now = Chunk(torch.tensor([tokens - 1]))
    for preset in PRESETS:
        layer = KVCache(config, preset).layers[0]
        layer.update(keys, values)
        store = layer.store
        commit(store, Chunk(torch.arange(tokens)))
        flush_ms = cpu_milliseconds(lambda store=store: end_forward(store))
        result[f"{preset}: quantize the prompt, ms"] = round(flush_ms, 1)
        runs[preset] = lambda store=store: attend(store, query, now, dim**-0.5)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            times[name].append(cpu_milliseconds(run))
    medians = {name: median(all_times[1:]) for name, all_times in times.items()}
    result["ms"] = {name: round(value, 2) for name, value in medians.items()}
    result["speed over sdpa bf16"] = {p: round(medians["sdpa bf16"] / medians[p], 2) for p in PRESETS}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        results = [measure(*shape, args.repeats) for shape in SHAPES]
    for row in results:
        print(json.dumps(row))
    if args.json:
        versions = {"torch": torch.__version__, "python": platform.python_version(), "threads": 1}
        versions["cpu"] = torch.backends.cpu.get_cpu_capability()
        args.json.write_text(json.dumps({"versions": versions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
