"""Passes of an Engine over prompts beside decoding rows: how long the host works on one, and how long the GPU.

    python benchmarks/passes.py --json benchmarks/results/passes.json
    python benchmarks/passes.py --tiny                  # seconds on a CPU: does everything, measures nothing

The model is random, of an 8B Llama's shape (4-bit weights in groups of 128, `oscar-g128`). 48 rows of 1,000 tokens
decode while prompts are read: one, or four of a quarter of the tokens, from their beginning or after 2,048 tokens.

`host_ms` is from the call until it returns with the GPU idle before, `pass_ms` until the GPU has ended, `serving_ms` of
one of --repeats passes that follow one another, as an Engine launches them before it has read the tokens of the one
before; `kernels_ms` the sum of what its kernels take in a pass that is profiled, and `largest` of these by name.
Medians of --repeats passes; "layer by layer" is without the plan of `runtime/cache/prompt_pass.py`. No prompt has more
than 2,048 tokens in a pass.

"first token of generate" is from the call of `generate` with `max_new_tokens=1` until its token is on the host, after
four calls that are not measured; of a batch half of the rows have an eighth of padding. `--first-token` measures only
that, and `--tokens 256` only planned passes over so many.
"""

from __future__ import annotations

import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from engine_models import llama_8b, packed_model
from runner import machine, need_gpu, option_parser, save
from torch.profiler import ProfilerActivity, profile

from kvconvert.methods import KVScheme
from kvconvert.runtime.engine.model_steps import ModelSteps, PromptChunk
from kvconvert.runtime.hf import packed

TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
CHUNK, LARGEST = 2048, 8
HISTORY, ROW_TOKENS = 2048, 1000
# Rows and tokens of prompts of `generate`.
PROMPTS = ((1, 128), (1, 1000), (1, 8000), (8, 128), (8, 1000))


class Passes:
    """Decoding rows, and prompts beside them.

    Args:
        model: of a bundle.
        rows: that decode; some more are free for prompts.
        tokens: that each row has stored.
    """

    def __init__(self, model: Any, rows: int, tokens: int):
        self.steps = ModelSteps(model, rows + 4, None)
        self.steps.prepare(CHUNK, most_tokens=TOKENS[-1])
        self.rows, self.device = rows, model.device
        self.ids = torch.full((rows + 4,), 7, device=self.device)
        self.positions = torch.full((rows + 4,), tokens, device=self.device)
        for row in range(rows):
            prompt = self.steps.new_prompt()
            self.run(False, [PromptChunk(row, prompt, [7] * tokens, 0, last=True)])
            self.steps.join(row, prompt)

    def run(self, decodes: bool, chunks: list[PromptChunk]) -> None:
        """One pass, not waited for."""
        _, failures = self.steps.forward(self.ids, self.positions, decodes, chunks)
        for error in failures.values():
            raise error

    def chunks(self, tokens: int, prompts: int, before: int) -> list[PromptChunk]:
        """The next tokens of new prompts, `before` tokens of each of which are read now."""
        found = []
        for row in range(self.rows, self.rows + prompts):
            prompt = self.steps.new_prompt()
            if before:
                self.run(False, [PromptChunk(row, prompt, [7] * before, 0, last=False)])
            found.append(PromptChunk(row, prompt, [7] * (tokens // prompts), before, last=False))
        return found

    def measure(self, repeats: int, tokens: int, prompts: int, before: int) -> dict[str, Any]:
        """Milliseconds of a pass, after two that are not measured."""
        times = []
        for _ in range(repeats + 2):
            chunks = self.chunks(tokens, prompts, before)
            self._wait()
            begin = time.perf_counter()
            self.run(True, chunks)
            host = time.perf_counter() - begin
            self._wait()
            times.append((host, time.perf_counter() - begin))
            self._discard(chunks)
        host, whole = (statistics.median(part) * 1e3 for part in zip(*times[2:], strict=True))
        queue = [self.chunks(tokens, prompts, before) for _ in range(repeats)]
        self._wait()
        begin = time.perf_counter()
        for chunks in queue:
            self.run(True, chunks)
        self._wait()
        found: dict[str, Any] = {
            "host_ms": host,
            "pass_ms": whole,
            "serving_ms": (time.perf_counter() - begin) / repeats * 1e3,
        }
        for chunks in queue:
            self._discard(chunks)
        if self.device.type == "cuda":
            chunks = self.chunks(tokens, prompts, before)
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                self.run(True, chunks)
                self._wait()
            self._discard(chunks)
            kernels = {event.key: event.self_device_time_total / 1e3 for event in profiled.key_averages()}
            found["kernels_ms"] = sum(kernels.values())
            largest = sorted(kernels, key=kernels.__getitem__, reverse=True)[:LARGEST]
            found["largest"] = {name[:80]: round(kernels[name], 2) for name in largest}
        return found

    def _discard(self, chunks: list[PromptChunk]) -> None:
        for chunk in chunks:
            self.steps.discard(chunk.cache)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def first_token(model: Any, rows: int, tokens: int, repeats: int) -> float:
    """Median milliseconds until the first token of `generate` is known."""
    ids = torch.full((rows, tokens), 7, device=model.device)
    mask = torch.ones_like(ids)
    mask[1::2, : tokens // 8] = 0
    times = []
    for _ in range(repeats + 4):
        begin = time.perf_counter()
        model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False).tolist()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[4:])


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU, and few tokens")
    parser.add_argument("--first-token", action="store_true", help="measure the first token of generate only")
    parser.add_argument("--tokens", type=int, nargs="+", help="measure passes over so many prompt tokens only")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    device, tokens, history, row_tokens, config = "cuda", TOKENS, HISTORY, ROW_TOKENS, llama_8b()
    if arguments.tiny:
        device, tokens, history, row_tokens = "cpu", (64, 128), 128, 20
        shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
        config = llama_8b(**shape, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    else:
        need_gpu()
    scheme = KVScheme.preset("oscar-g128").with_online_rotation()
    model = packed_model(config, [scheme] * config.num_hidden_layers, device)
    results: dict[str, Any] = {"machine": machine() if device == "cuda" else "CPU", "rows": arguments.rows}
    # Passes are recorded once steps are.
    model.generate(torch.full((1, 4), 7, device=device), max_new_tokens=4, do_sample=False)
    for way in () if arguments.tokens else ("packed", "layer by layer"):
        found = results[f"first token of generate, {way}"] = {}
        for rows, count in ((1, 32), (2, 32)) if arguments.tiny else PROMPTS:
            with nullcontext() if way == "packed" else model.prompts.layer_by_layer():
                milliseconds = first_token(model, rows, count, arguments.repeats)
            found[f"{rows} x {count}"] = {"first_token_ms": milliseconds}
            print("first token of generate,", way, f"{rows} x {count}: {milliseconds:.2f} ms", flush=True)
    if arguments.first_token:
        save(arguments.json, results)
        return
    passes = Passes(model, arguments.rows, row_tokens)
    unplanned = packed.unplanned
    ways = {"planned": None} if arguments.tokens else {"planned": None, "layer by layer": "it is measured"}
    for way, reason in ways.items():
        packed.unplanned = unplanned if reason is None else lambda groups, length: "it is measured"
        found = results[way] = {}
        for count in arguments.tokens or tokens:
            for prompts, before in ((1, 0), (4, 0), (1, history), (4, history)):
                if count > prompts * CHUNK:
                    continue
                case = f"{count} tokens of {prompts} after {before}"
                found[case] = passes.measure(arguments.repeats, count, prompts, before)
                print(way, case, json.dumps(found[case]), flush=True)
    results["recorded passes"] = model.captured.passes.recorded, model.captured.passes.replayed
    save(arguments.json, results)
    print(json.dumps({name: results[name] for name in ("machine", "recorded passes")}))


if __name__ == "__main__":
    main()
