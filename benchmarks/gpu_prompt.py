"""Selective flash attention on a GPU: checked against float64, timed against torch's fastest attention.

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
from runner import checked
from torch import Tensor

from kvconvert.kernels.attention.reference import attention_reference
from kvconvert.kernels.prompt import prompt_attention
from kvconvert.kernels.prompt.triton import launch as kernels
from kvconvert.kernels.select import selective_attention

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}

QUERY_HEADS, KEY_HEADS, HEAD_SIZE = 32, 8, 128
SCALING = HEAD_SIZE**-0.5
ROUNDS = 5
LENGTHS = [1024, 4096, 8192, 16384, 32768]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
SUMS_TOLERANCE = 1e-5
# Query heads, KV heads, T, n, D, E, softcap, with sinks, window.
CASES = [
    (4, 2, 1000, 1000, 128, 128, None, False, None),
    (32, 8, 2048, 2048, 128, 128, None, False, None),
    (8, 1, 129, 129, 64, 64, None, False, None),
    (16, 1, 1, 333, 96, 96, None, False, None),
    (2, 2, 63, 700, 80, 48, None, True, None),
    (4, 2, 515, 1111, 256, 256, 30.0, False, None),
    (4, 2, 700, 700, 192, 128, None, False, None),
    (8, 2, 640, 1111, 64, 64, None, True, 128),
    (4, 4, 1025, 2050, 128, 128, 5.0, True, 1000),
    (2, 1, 200, 4000, 48, 48, None, False, 7),
]


def inputs(
    length: int,
    tokens: int | None = None,
    heads: tuple[int, int] = (QUERY_HEADS, KEY_HEADS),
    sizes: tuple[int, int] = (HEAD_SIZE, HEAD_SIZE),
    dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:
    tokens = tokens or length
    shapes = ((heads[0], length, sizes[0]), (heads[1], tokens, sizes[0]), (heads[1], tokens, sizes[1]))
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


def check(device: torch.device) -> list[dict[str, Any]]:
    """Output and sums of every case in both dtypes."""
    results = []
    for dtype in DTYPES:
        for heads, key_heads, length, tokens, size, value_size, softcap, with_sinks, window in CASES:
            tensors = inputs(length, tokens, (heads, key_heads), (size, value_size), dtype)
            scaling = size**-0.5
            sinks = torch.randn(heads, device=device) * 2 if with_sinks else None
            output, sums = selective_attention(*tensors, scaling, softcap, sinks, window)
            columns = torch.arange(tokens, device=device)
            own = columns[tokens - length :].unsqueeze(1)
            visible = (columns <= own) & (columns > own - (window or tokens))
            exact = attention_reference(*tensors, visible, scaling, softcap, sinks)
            exact = {
                "output": (output, exact.output, TOLERANCE[dtype]),
                "sums": (sums, exact.mass, SUMS_TOLERANCE),
            }
            case = f"{heads}/{key_heads} heads of {size}/{value_size}, last {length} of {tokens} tokens"
            case += (
                f", softcap {softcap}" * bool(softcap) + ", sinks" * with_sinks + f", window {window}" * bool(window)
            )
            for name, (got, reference, tolerance) in exact.items():
                error = float((got.double() - reference).norm() / reference.norm())
                results.append(checked(f"selective attention, {name}", f"{case}, {DTYPES[dtype]}", error, tolerance))
    return results


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    """Times by length; `ratio` is ours over the peer's here."""
    for length in LENGTHS:
        copies = beyond_cache(partial(inputs, length), lambda one: sum(x.nbytes for x in one), most=8)
        peers = attention_launches([[x[None] for x in one] for one in copies], is_causal=True, scale=SCALING)
        log_sum_exp = kernels.attention(copies[0][0], copies[0][1], None, SCALING)[1]
        # What is computed, and how many products it takes.
        parts: dict[str, tuple[Callable, int]] = {
            "output and sums": (lambda one: selective_attention(*one, SCALING), 3),
            "output alone": (lambda one: prompt_attention(*one, SCALING), 2),
            "sums alone": (lambda one, known=log_sum_exp: kernels.column_sums(one[0], one[1], known, SCALING), 1),
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
