"""Whole models on one GPU: steps, prompts and continuous batching, each beside bf16 in the same run.

    python benchmarks/engine.py --json benchmarks/results/engine.json

Takes at most nine minutes on an H200. Models are random, of an 8B Llama's shape (32 layers, 4-bit weights in groups of
128, `oscar-g128`). Where a case begins with tokens in the cache, these are random numbers that went through the cache's
own path (quantized, packed), because a prompt would cost minutes and change no time. `--only` runs some sections and
keeps the others' figures in the file.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from engine_models import dense_model, filled, llama_8b, packed_model
from gpu_timing import timed
from runner import run_sections
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicCache

from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import KVScheme
from kvconvert.runtime import Engine
from kvconvert.runtime.engine.model_steps import PromptChunk
from kvconvert.runtime.hf.fuse import fuse
from kvconvert.runtime.hf.generation import adopt

GPU = torch.device("cuda")
TWO_BITS = KVScheme.preset("oscar-g128").with_online_rotation()
# One bit as pages, with the range that measured best on the reference model (docs/methods.md).
ONE_BIT = replace(TWO_BITS, key_bits=1, value_bits=1, key_clip_ratio=0.5, value_clip_ratio=0.5)
UNQUANTIZED = KVScheme(key_bits=16, value_bits=16)
STEPS = 64
CASES = ((1, 1024), (1, 131072), (32, 8192))


def record(rows: dict, case: str, **figures: Any) -> None:
    """Keep and print a case's figures."""
    rows[case] = rows.get(case, {}) | figures
    print(case, json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}), flush=True)


@contextmanager
def freed() -> Iterator[None]:
    """Within the context there may be models; after it their memory is free."""
    try:
        yield
    finally:
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def seconds(run: Callable[[], object]) -> float:
    """Seconds of one call, with all that it launched."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def per_step(model: PreTrainedModel, batch: int, tokens: int, cache: Any, steps: int = STEPS, **options: Any) -> float:
    """Seconds per token of `model.generate` that goes on from a filled cache, without its first tokens.

    The cache keeps what was generated, so that both calls begin where the one before ended.
    """
    lengths, begun = [], tokens
    for count in (4, 4, 4 + steps):
        ids = torch.randint(5, 30000, (batch, begun + 1), device=GPU)
        arguments = {"past_key_values": cache, "max_new_tokens": count, "do_sample": False} | options
        lengths.append(seconds(lambda ids=ids, arguments=arguments: model.generate(ids, **arguments)))
        begun += count
    return (lengths[2] - lengths[1]) / steps


def replay_seconds(model: PreTrainedModel, repeats: int = 20) -> float:
    """Median seconds of the newest recorded step's kernels."""
    recording = list(model.captured._recordings.values())[-1]
    return statistics.median(timed(recording.graph.replay) for _ in range(repeats))


def steps(rows: dict) -> None:
    """Milliseconds per token of `model.generate`, against bf16: transformers' fastest way, and our own."""
    config = llama_8b()
    with freed():
        model = packed_model(config, [TWO_BITS] * config.num_hidden_layers, GPU)
        for batch, tokens in CASES:
            case = f"{batch} x {tokens:,}"
            cache = filled(model, batch, tokens)
            ours = per_step(model, batch, tokens, cache)
            kernels = replay_seconds(model)
            record(rows, case, ours_ms=ours * 1e3, kernels_ms=kernels * 1e3, over_kernels=ours / kernels)
            del cache
        del model
    with freed():
        model = dense_model(config, GPU)
        for batch, tokens in CASES:
            case = f"{batch} x {tokens:,}"
            cache = StaticCache(config=config, max_cache_len=tokens + STEPS + 64)
            try:
                filled(model, batch, tokens, cache)
                static = per_step(model, batch, tokens, cache)
                record(rows, case, bf16_static_compiled_ms=static * 1e3)
            except Exception as error:
                record(rows, case, bf16_static_compiled_failed=str(error).split("\n")[0][:200])
            del cache
            gc.collect()
            torch.cuda.empty_cache()
        torch._dynamo.reset()
        fuse(model)
        adopt(model, [UNQUANTIZED] * config.num_hidden_layers, {})
        for batch, tokens in CASES:
            case = f"{batch} x {tokens:,}"
            cache = filled(model, batch, tokens)
            own = per_step(model, batch, tokens, cache) * 1e3
            peers = [own, *(rows[case][k] for k in ("bf16_static_compiled_ms",) if k in rows[case])]
            record(rows, case, bf16_own_step_ms=own, ratio=min(peers) / rows[case]["ours_ms"])
            del cache
        del model


@torch.no_grad()
def read_prompt(model: PreTrainedModel, tokens: int, chunk: int, new_cache: Callable[[], Any]) -> float:
    """Seconds until the last logits of a prompt, in chunks."""
    ids = torch.randint(5, 30000, (1, tokens), device=GPU)

    def run() -> None:
        cache = new_cache()
        for part in ids.split(chunk, 1):
            model(part, past_key_values=cache, logits_to_keep=1)

    return seconds(run)


def prompts(rows: dict) -> None:
    """Prompts in one pass and in chunks of 4,096, against bf16 with transformers' own cache and torch's attention."""
    config = llama_8b()
    cases = ((8192, 8192), (32768, 4096), (131072, 4096))
    with freed():
        model = packed_model(config, [TWO_BITS] * config.num_hidden_layers, GPU)
        for tokens, chunk in cases:
            # A model's first tokens are read layer by layer, and every length of a history compiles kernels once.
            read_prompt(model, chunk, chunk, model.new_kv_cache)
            read_prompt(model, tokens, chunk, model.new_kv_cache)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            ours = read_prompt(model, tokens, chunk, model.new_kv_cache)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
            record(rows, f"{tokens:,} in chunks of {chunk:,}", ours_s=ours, ours_peak_gib=peak)
        del model
    with freed():
        model = dense_model(config, GPU)
        for tokens, chunk in cases:
            read_prompt(model, min(tokens, 32768), chunk, lambda: DynamicCache(config=config))
            peer = read_prompt(model, tokens, chunk, lambda: DynamicCache(config=config))
            case = f"{tokens:,} in chunks of {chunk:,}"
            record(rows, case, bf16_s=peer, ratio=rows[case]["ours_s"] / peer)
        del model


def engine(rows: dict, memory: int = 30 << 30, prompt: int = 8192, steps: int = PAGE_SIZE) -> None:
    """Tokens per second of an Engine at the largest batch that the memory for pages holds.

    Over as many steps as a page has tokens: every request completes one page within them.
    """
    config = llama_8b()
    layers = config.num_hidden_layers
    for name, scheme in (("bf16", UNQUANTIZED), ("2 bits", TWO_BITS), ("1 bit", ONE_BIT)):
        with freed():
            if scheme is UNQUANTIZED:
                model = dense_model(config, GPU)
                fuse(model)
                adopt(model, [scheme] * layers, {})
            else:
                model = packed_model(config, [scheme] * layers, GPU)
            record(rows, name, **_throughput(model, memory, prompt, steps))
            del model
    for name in ("2 bits", "1 bit"):
        record(rows, name, ratio=rows[name]["tokens_per_second"] / rows["bf16"]["tokens_per_second"])


def _throughput(model: PreTrainedModel, memory: int, prompt: int, steps: int) -> dict[str, float]:
    """Fill an Engine with requests whose prompts are random keys and values, and time its steps."""
    probe = Engine(model, kv_memory=memory, max_batch=1)
    new_tokens = 5 * PAGE_SIZE
    batch = probe.stats().pages_free // (-(-(prompt + new_tokens) // PAGE_SIZE))
    del probe
    gc.collect()
    torch.cuda.empty_cache()
    served = Engine(model, kv_memory=memory, max_batch=batch, prompt_chunk=prompt)
    forward = served._steps.forward

    def random_prompts(ids: torch.Tensor, positions: torch.Tensor, decodes: bool, chunks: list[PromptChunk]) -> tuple:
        for chunk in chunks:
            filled(model, 1, len(chunk.ids), chunk.cache)
            chunk.cache.seal()
        logits = torch.randn(batch, model.config.vocab_size, device=GPU, dtype=model.dtype)
        if decodes:
            read, _ = forward(ids, positions, True, [])
            logits[: len(read)] = read
        return logits, {}

    served._steps.forward = random_prompts
    for _ in range(batch):
        served.add([7] * prompt, max_new_tokens=new_tokens, stop_token_ids=[])
    while served.stats().waiting or served.stats().prompt_tokens < batch * prompt:
        served.step()
    for _ in range(6):
        served.step()
    before = served.stats().generated_tokens
    took = seconds(lambda: [served.step() for _ in range(steps)])
    generated = served.stats().generated_tokens - before
    return {
        "batch": batch,
        "tokens_per_second": generated / took,
        "ms_per_step": took / steps * 1e3,
        "requests_running": served.stats().running,
        "gpu_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def section(measure: Callable[[dict], None], report: dict[str, Any]) -> None:
    """Rows of one section, which stay there as far as they came if it fails."""
    rows = report.setdefault("rows", {})[measure.__name__] = {}
    measure(rows)


if __name__ == "__main__":
    sections = {measure.__name__: partial(section, measure) for measure in (steps, prompts, engine)}
    sys.exit(run_sections(__doc__, sections, lambda: {"transformers": transformers.__version__}))
