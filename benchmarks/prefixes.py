"""What stored prefixes and sessions save: first tokens, sessions that fit into memory, and files of them.

    python benchmarks/prefixes.py --json benchmarks/results/prefixes.json
    python benchmarks/prefixes.py --tiny                 # some seconds on a CPU: does everything, measures nothing

The model is random, of an 8B Llama's shape (4-bit weights in groups of 128, `oscar-g128`). A first token is timed from
`Engine.add` to its event, of prompts with 32,768 tokens and 64 more of their own: each of --repeats prompts is new, and
then comes again with other tokens at its end. Sessions have 32,768 tokens; how many fit is what all their bytes allow,
beside those of bf16, and by the way what the Engine has pages for.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from engine_models import filled, llama_8b, packed_model
from runner import machine, need_gpu, option_parser, save

from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import KVScheme
from kvconvert.models.configuration import model_cache
from kvconvert.runtime import Engine, KVCache

OWN = 64  # tokens that follow a prefix


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds to a prompt's first token, and how many of its tokens were not read."""
    heard: list[float] = []
    begin = time.perf_counter()
    request = engine.add(
        prompt, max_new_tokens=2, stop_token_ids=[], on_event=lambda _: heard.append(time.perf_counter())
    )
    engine.run()
    return heard[0] - begin, request.cached_tokens


def first_tokens(engine: Engine, tokens: int, vocabulary: int, repeats: int, seed: int) -> dict[str, Any]:
    """First tokens of prompts without and with a stored prefix of so many tokens."""
    dice = random.Random(seed)

    def drawn(count: int) -> list[int]:
        return dice.choices(range(5, vocabulary), k=count)

    times: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(repeats + 1):
        prefix = drawn(tokens)
        for name, expected in (("without", 0), ("with", tokens)):
            seconds, cached = first_token(engine, prefix + drawn(OWN))
            assert cached == expected, f"{cached} of {expected} tokens were stored"
            if number:  # the first round compiles what is missing
                times[name].append(seconds)
    medians = {f"{name}_s": statistics.median(seconds) for name, seconds in times.items()}
    return medians | {"ratio": medians["with_s"] / medians["without_s"], "bar": 0.1, "tokens": tokens, "each": times}


def sessions(engine: Engine, config: Any, schemes: list[KVScheme], tokens: int, memory: int) -> dict[str, Any]:
    """How many sessions of so many tokens `memory` bytes hold, by all their bytes or their pages, and in bf16."""
    pages = engine.stats().pages_free + engine.stats().prefix_pages
    sizes = model_cache(config, schemes)
    here, plain = (int(memory // size(tokens)) for size in (sizes.bytes, sizes.plain_bytes))
    return {
        "sessions": here,
        "bf16": plain,
        "ratio": here / max(1, plain),
        "bar": 6.0,
        "ratio_of_bytes": sizes.plain_bytes(tokens) / sizes.bytes(tokens),
        "by_pages": pages // (tokens // PAGE_SIZE),
    }


def files(model: Any, tokens: int) -> dict[str, Any]:
    """Seconds to save and load a session, and the file's bytes."""
    cache = filled(model, 1, tokens)
    with tempfile.TemporaryDirectory() as folder:
        file, begin = Path(folder) / "session.safetensors", time.perf_counter()
        cache.save(file)
        saved = time.perf_counter()
        loaded = KVCache.load(file, model)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        took = {"save_s": saved - begin, "load_s": time.perf_counter() - saved, "bytes": file.stat().st_size}
        assert loaded.stats().bytes_used == cache.stats().bytes_used
    return took


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU, and lengths by 32")
    parser.add_argument("--seed", type=int, default=0, help="of tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-bytes", type=int, default=30 * 10**9, help="memory for pages (default: 30 GB)")
    arguments = parser.parse_args()
    if not arguments.tiny:
        need_gpu()
    device, tokens, chunk, memory, config = "cuda", 32768, 2048, arguments.kv_bytes, llama_8b()
    if arguments.tiny:
        device, tokens, chunk, memory = "cpu", 1024, 256, 10**7
        shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
        config = llama_8b(**shape, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    schemes = [KVScheme.preset("oscar-g128").with_online_rotation()] * config.num_hidden_layers
    model = packed_model(config, schemes, device)
    engine = Engine(model, kv_memory=memory, max_batch=8, prompt_chunk=chunk, max_batch_tokens=chunk * 4)
    results = {
        "machine": machine() if device == "cuda" else "CPU",
        "options": {name: value for name, value in vars(arguments).items() if name != "json"},
        "sessions": sessions(engine, config, schemes, tokens, memory),
        "first_token": first_tokens(engine, tokens, config.vocab_size, arguments.repeats, arguments.seed),
        "files": files(model, tokens),
    }
    print(json.dumps(results, indent=1))
    save(arguments.json, results)


if __name__ == "__main__":
    main()
