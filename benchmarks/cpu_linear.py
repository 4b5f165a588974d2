"""Where torch's int4 product stops beating dequantize-and-multiply on a CPU, and how large tiles should be.

Run: python benchmarks/cpu_linear.py, in half a minute.

Every ratio is of two ways run in turns on one thread, by the processor time they take, so that waiting for a core on a
busy machine does not count; below 1, the first is faster. The results go to benchmarks/results/cpu_linear.json;
kernels/linear/__init__.py takes INT4PACK_ROWS and TILE_WEIGHTS from there.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvconvert.kernels.linear import QuantizedLinear, w4a16_reference
from kvconvert.kernels.linear.awq_format import dequantize_weight, quantize_weight
from kvconvert.kernels.linear.cpu import TILE_WEIGHTS, tiled_product

RESULTS = Path(__file__).parent / "results" / "cpu_linear.json"
SHAPES = [(256, 256), (256, 768), (2048, 2048), (4096, 4096)]
ROWS = [1, 4, 8, 16, 32, 48, 64, 128]
GROUP_SIZE = 128
SECONDS_PER_PAIR = 0.25


def paired_ratio(first: Callable[[], Tensor], second: Callable[[], Tensor]) -> tuple[float, float]:
    """Median of time(first) / time(second) over alternating calls, and the median processor seconds of `second`."""
    first(), second()
    ratios, seconds, deadline = [], [], time.perf_counter() + SECONDS_PER_PAIR
    while len(ratios) < 3 or (time.perf_counter() < deadline and len(ratios) < 200):
        start = time.thread_time()
        first()
        middle = time.thread_time()
        second()
        end = time.thread_time()
        ratios.append((middle - start) / (end - middle))
        seconds.append(end - middle)
    return statistics.median(ratios), statistics.median(seconds)


def by_tiles(module: QuantizedLinear, x: Tensor, tile_weights: int = TILE_WEIGHTS) -> Tensor:
    return tiled_product(x, module.qweight, module.int4pack, module.qzeros, module.scales, tile_weights)


def crossover(outputs: int, inputs: int) -> list[dict[str, float]]:
    """bfloat16, both paths from torch's layout, as a decoding model holds it; dense is an unquantized Linear."""
    weight = quantize_weight(torch.randn(outputs, inputs) / inputs**0.5, 4, GROUP_SIZE)
    module = QuantizedLinear.from_weight(weight)
    module(torch.zeros(1, inputs, dtype=torch.bfloat16))
    dense = dequantize_weight(weight, torch.bfloat16)
    results = []
    for rows in ROWS:
        x = torch.randn(rows, inputs, dtype=torch.bfloat16)
        int4, grid = module.int4pack, module.int4pack_grid

        def by_int4pack(x: Tensor = x, int4: Tensor = int4, grid: Tensor = grid) -> Tensor:
            return torch.ops.aten._weight_int4pack_mm_for_cpu(x, int4, GROUP_SIZE, grid)

        to_tiled, tiled_seconds = paired_ratio(by_int4pack, lambda x=x: by_tiles(module, x))
        to_dense, _ = paired_ratio(by_int4pack, lambda x=x: x @ dense.T)
        results.append(
            {
                "rows": rows,
                "int4pack / tiled": round(to_tiled, 3),
                "int4pack / dense bfloat16": round(to_dense, 3),
                "tiled microseconds": round(tiled_seconds * 1e6, 1),
            }
        )
        print(f"bfloat16 {outputs} x {inputs}", *(f"{name} {value}" for name, value in results[-1].items()), sep=", ")
    return results


def full_precision(outputs: int, inputs: int) -> list[dict[str, float]]:
    """float32, which always goes by tiles, against an unquantized float32 Linear and against the reference."""
    module = QuantizedLinear.from_weight(quantize_weight(torch.randn(outputs, inputs) / inputs**0.5, 4, GROUP_SIZE))
    weight = module.awq_weight()
    dense = dequantize_weight(weight)
    results = []
    for rows in (1, 64):
        x = torch.randn(rows, inputs)
        to_dense, _ = paired_ratio(lambda x=x: module(x), lambda x=x: x @ dense.T)
        to_reference, _ = paired_ratio(lambda x=x: module(x), lambda x=x: w4a16_reference(x, weight))
        results.append(
            {
                "rows": rows,
                "tiled / dense float32": round(to_dense, 3),
                "tiled / reference": round(to_reference, 3),
            }
        )
        print(f"float32 {outputs} x {inputs}", *(f"{name} {value}" for name, value in results[-1].items()), sep=", ")
    return results


def tile_sizes(outputs: int, inputs: int) -> dict[str, float]:
    """Time with other tile sizes over time with the chosen one, float32, one row."""
    module = QuantizedLinear.from_weight(quantize_weight(torch.randn(outputs, inputs) / inputs**0.5, 4, GROUP_SIZE))
    x, results = torch.randn(1, inputs), {}
    for power in range(18, 23):
        ratio, _ = paired_ratio(lambda size=2**power: by_tiles(module, x, size), lambda: by_tiles(module, x))
        results[f"2^{power}"] = round(ratio, 3)
    print(f"float32 {outputs} x {inputs}, weights per tile:", results)
    return results


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,
        "group_size": GROUP_SIZE,
        "bfloat16": {f"{outputs} x {inputs}": crossover(outputs, inputs) for outputs, inputs in SHAPES},
        "float32": {f"{outputs} x {inputs}": full_precision(outputs, inputs) for outputs, inputs in SHAPES[1:3]},
        "tile_weights": {f"{outputs} x {inputs}": tile_sizes(outputs, inputs) for outputs, inputs in SHAPES[2:]},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
