"""Decode attention by widths of keys and values on a GPU: time in proportion to bytes between 2 and 4 bits.

    python benchmarks/gpu.py --only widths

takes less than 40 seconds.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import torch
from gpu_decode import Case, Layer
from gpu_timing import buffers_beyond_cache, copy_bandwidth, graph_time

SHAPES = ((1, 131072), (32, 8192))
# Bits of keys and of values; the first and the last are what the others lie between.
WIDTHS = ((2, 2), (3, 2), (3, 3), (4, 4))


def check(device: torch.device) -> list[dict]:
    """Every pair of widths against float64 attention over what the pages dequantize to."""
    from decode_cases import Case as Stored
    from decode_cases import compare

    results = []
    for key_bits, value_bits in (*WIDTHS, (2, 3), (4, 3)):
        case = Stored(key_bits=key_bits, value_bits=value_bits, norm="joint", dtype=torch.bfloat16)
        error, _ = compare(case, device)
        results.append(
            {"kernel": "decode", "case": str(case), "error": error, "tolerance": 5e-2, "passed": error < 5e-2}
        )
    return results


def measure(device: torch.device) -> list[dict]:
    """Times at groups of 128 with joint norms, and what they would be if time beyond 2 bits were that of bytes."""
    bandwidth = copy_bandwidth()
    rows = []
    for batch, tokens in SHAPES:
        here = []
        for key_bits, value_bits in WIDTHS:
            name = f"K {key_bits} V {value_bits}, {batch} x {tokens:,}"
            case = replace(Case(name, batch, tokens, None), bits=key_bits, value_bits=value_bits)
            first = Layer(case)
            layers = [first] + [Layer(case) for _ in range(buffers_beyond_cache(first.bytes, most=24) - 1)]
            seconds = graph_time([layer.step for layer in layers])
            here.append(
                {
                    "operation": "decode attention",
                    "case": name,
                    "ours_us": seconds * 1e6,
                    "bytes": first.bytes,
                    "of_copy_bandwidth": first.bytes / seconds / bandwidth,
                }
            )
            del first, layers
            gc.collect()
            torch.cuda.empty_cache()
        least, most = here[0], here[-1]
        for row in here:
            share = (row["bytes"] - least["bytes"]) / (most["bytes"] - least["bytes"])
            row["by_bytes_us"] = least["ours_us"] + share * (most["ours_us"] - least["ours_us"])
            print(
                f"{row['case']:24s} {row['ours_us']:8.1f} us, by bytes {row['by_bytes_us']:8.1f} us, "
                f"{row['bytes'] / 1e6:6.1f} MB, {row['of_copy_bandwidth']:.0%} of copy bandwidth",
                flush=True,
            )
        rows += here
    return rows
