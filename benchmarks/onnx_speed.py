"""Decoding on a CPU by ONNX Runtime and by kvconvert's own runtime, from the same bundles.

    python benchmarks/onnx_speed.py BUNDLE... [--text FILE] [--tokens 512] [--steps 8] [--json FILE]

Each bundle has static scales (recipe static-int8 or static-int4). It is exported with a float32 cache, with its own
cache, and with its own cache and int8 activations, and loaded by `kvconvert.load` in float32 and bfloat16. A prompt of
--tokens tokens is followed by greedy steps; all contenders take turns, and a step's time is the fastest of its own, in
processor time of one thread, to which other processes add little. --text is a held-out text: the KL divergence of
the logits over two segments of --tokens tokens, from ONNX Runtime with the float32 cache to the other graphs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from runner import option_parser, save
from transformers import PreTrainedTokenizerBase

from kvconvert import load
from kvconvert.onnx.export import export_onnx
from kvconvert.tables import markdown_table as table

GRAPHS = {
    "ONNX Runtime, float32 cache": {"kv_cache": "float"},
    "ONNX Runtime, static cache": {},
    "ONNX Runtime, static cache, int8 activations": {"int8_activations": True},
}
RUNTIMES = {"kvconvert, float32": torch.float32, "kvconvert, bfloat16": torch.bfloat16}
DTYPES = {"tensor(float)": np.float32, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8}
PROMPT = "It was a dark night, and the old house stood by the sea. "


class Session:
    """One graph with past and present in one buffer, as onnxruntime-genai runs it."""

    def __init__(self, directory: Path, capacity: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            directory / "model.onnx", options, providers=["CPUExecutionProvider"]
        )
        self.caches = {}
        for port in self.session.get_inputs()[2:]:
            empty = np.zeros((1, port.shape[1], capacity, port.shape[3]), DTYPES[port.type])
            self.caches[port.name] = onnxruntime.OrtValue.ortvalue_from_numpy(empty)
        self.length = 0

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Logits [tokens, vocabulary] of new token ids."""
        self.length += len(ids)
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", ids[None])
        binding.bind_cpu_input("attention_mask", np.ones((1, self.length), np.int64))
        binding.bind_output("logits")
        for name, cache in self.caches.items():
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), cache)
        self.session.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy()[0]


def steps(step: Callable[[np.ndarray], Any], ids: np.ndarray) -> Iterator[float]:
    """Read the prompt, then time one greedy step after another."""
    token = step(ids)
    while True:
        began = time.process_time()
        token = step(np.array([token]))
        yield time.process_time() - began


def by_graph(session: Session) -> Callable[[np.ndarray], int]:
    return lambda ids: int(session(ids)[-1].argmax())


def by_runtime(model: Any) -> Callable[[np.ndarray], int]:
    cache = model.new_kv_cache()

    @torch.no_grad()
    def step(ids: np.ndarray) -> int:
        logits = model(input_ids=torch.tensor(ids)[None], past_key_values=cache, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())

    return step


def divergence(exact: np.ndarray, other: np.ndarray) -> float:
    """Mean KL divergence in nats per token of logits [tokens, vocabulary]."""
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (exact, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def divergences(
    graphs: dict[str, Path], tokenizer: PreTrainedTokenizerBase, text: Path, tokens: int
) -> dict[str, float]:
    """Of every graph from the first one, over two segments of a text."""
    ids = tokenizer(text.read_text(encoding="utf-8")[: 40 * tokens]).input_ids
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for segment in range(2):
        part = np.array(ids[segment * tokens : (segment + 1) * tokens])
        exact = None
        for name, directory in graphs.items():
            logits = Session(directory, tokens)(part)
            exact = logits if exact is None else exact
            found[name].append(divergence(exact, logits))
    return {name: float(np.mean(values)) for name, values in found.items()}


def measure(bundle: Path, tokens: int, count: int, text: Path | None, folder: Path) -> dict[str, dict[str, float]]:
    """Milliseconds per step, tokens per second and, with a text, KL of every contender."""
    graphs = {}
    for number, (name, options) in enumerate(GRAPHS.items()):
        graphs[name] = export_onnx(bundle, folder / str(number), **options)
    contenders = {}
    for name, dtype in RUNTIMES.items():
        model, tokenizer = load(bundle, dtype=dtype, verify="headers")
        contenders[name] = by_runtime(model)
    ids = np.array((tokenizer(PROMPT).input_ids * tokens)[:tokens])
    contenders |= {name: by_graph(Session(path, tokens + count + 8)) for name, path in graphs.items()}
    timed = {name: steps(step, ids) for name, step in contenders.items()}
    for clock in timed.values():
        next(clock)  # warm up
    seconds = dict.fromkeys(timed, float("inf"))
    for _ in range(count):
        for name, clock in timed.items():
            seconds[name] = min(seconds[name], next(clock))
    results = {name: {"ms": 1e3 * value, "tokens_per_second": 1 / value} for name, value in seconds.items()}
    if text is not None:
        for name, value in divergences(graphs, tokenizer, text, tokens).items():
            results[name]["kl"] = value
    return results


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for bundle in options.bundles:
        with tempfile.TemporaryDirectory() as folder:
            results[bundle.name] = measure(bundle, options.tokens, options.steps, options.text, Path(folder))
        best = max(results[bundle.name][name]["tokens_per_second"] for name in RUNTIMES)
        print(f"\n{bundle.name}, {options.tokens} tokens stored, one thread")
        rows = [
            (name, f"{row['ms']:.2f}", f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_second'] / best:.2f}",
             f"{row['kl']:.5f}" if "kl" in row else "")
            for name, row in results[bundle.name].items()
        ]  # fmt: skip
        head = ("", "ms per step", "tokens per second", "over kvconvert's faster dtype", "KL to the float32 cache")
        print(table(head, rows), flush=True)
        save(options.json, results)


if __name__ == "__main__":
    main()
