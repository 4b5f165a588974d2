"""Selective flash attention on a GPU against torch's fastest attention.

A section of benchmarks/gpu.py. The peer is the fastest of torch's scaled_dot_product_attention backends on the same
inputs, forward only; ours gives the output and what each token receives. Memory is what a call allocates at its peak
beyond its inputs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from gpu_timing import attention_launches, beyond_cache, graph_time
from torch import Tensor

from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.prompt import prompt_attention
from kvconvert.kernels.prompt import triton as kernels
from kvconvert.kernels.select import selective_attention

QUERY_HEADS, KEY_HEADS, HEAD_SIZE = 32, 8, 128
SCALING = HEAD_SIZE**-0.5
ROUNDS = 5
LENGTHS = [1024, 4096, 8192, 16384, 32768]


def inputs(length: int) -> list[Tensor]:
    """Queries, keys, and values of a prompt."""
    heads = (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    return [torch.randn(count, length, HEAD_SIZE, device="cuda", dtype=torch.bfloat16) for count in heads]


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    """Times by length; `ratio` is ours over the peer's here."""
    for length in LENGTHS:
        copies = beyond_cache(partial(inputs, length), lambda one: sum(x.nbytes for x in one), most=8)
        peers = attention_launches([[x[None] for x in one] for one in copies], is_causal=True, scale=SCALING)
        log_sum_exp = kernels.attention(copies[0][0], copies[0][1], None, Scoring(SCALING))[1]
        # What is computed, and how many products it takes.
        parts: dict[str, tuple[Callable, int]] = {
            "output and sums": (lambda one: selective_attention(*one, Scoring(SCALING)), 3),
            "output alone": (lambda one: prompt_attention(*one, Scoring(SCALING))[0], 2),
            "sums alone": (lambda one, known=log_sum_exp: kernels.column_sums(*one[:2], known, Scoring(SCALING)), 1),
        }
        ours = {part: [partial(call, one) for one in copies] for part, (call, _) in parts.items()}
        seconds = _in_turn(peers | ours)
        fastest = min(peers, key=seconds.get)
        for part, (_, products) in parts.items():
            operations = products * QUERY_HEADS * HEAD_SIZE * length * (length + 1)
            row = {
                "case": f"prompt of {length} tokens, {part}",
                "ours_us": seconds[part] * 1e6,
                "peer": f"torch, {fastest}",
                "ratio": seconds[part] / seconds[fastest],
                "teraflops": operations / seconds[part] / 1e12,
                "peers_us": {name: seconds[name] * 1e6 for name in peers},
            }
            if part == "output and sums":
                row["peak_bytes"] = _peak_bytes(ours[part][0])
                row["bytes_per_token"] = row["peak_bytes"] / length
            yield row
        del copies, peers, ours, log_sum_exp, parts


def _in_turn(calls: dict[str, list[Callable]]) -> dict[str, float]:
    """Seconds of each, the median of rounds that take turns: under its power limit a GPU slows down as it goes on."""
    rounds = [{name: graph_time(launches, repeats=4) for name, launches in calls.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(one[name] for one in rounds) for name in calls}


def _peak_bytes(call: Callable) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
