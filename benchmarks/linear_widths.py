"""Decoding one row with weights of 2, 3, 4 and 8 bits on a GPU: times against bytes and torch's bf16 product.

    python benchmarks/linear_widths.py --json benchmarks/results/linear_widths.json

Takes less than a minute on one GPU with 16 cores beside it, compilation included. Every figure is of a product that was
first compared with float64, and every kernel over awkward shapes with it. `share` is the time over that of the bytes at
the bandwidth of a copy; `to_4_bits` and `bytes_to_4_bits` are the ratios of times and of bytes to those of 4 bits. Of
several launch shapes the dispatch's is in `us`, all others are in `candidates`: what FEW_ROWS_SHAPES and k blocks of 2
and 3 bits are to be chosen from.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from gpu_linear import TOLERANCE
from gpu_timing import buffers_beyond_cache, copy_bandwidth, graph_time
from torch import Tensor

from kvconvert.kernels.device import multiprocessors
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight
from kvconvert.kernels.linear.packed_layout import PackedWeight, pack_weight, unpack_codes
from kvconvert.kernels.linear.triton.few_rows import FewRowsShape, few_rows, few_rows_shape
from kvconvert.kernels.linear.triton.many_rows import dequantize, prompt, unpacked

SHAPES = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]
BITS = (2, 3, 4, 8)
GROUP_SIZE = 128
DTYPE = torch.bfloat16
# Inputs, outputs and group size of what is compared with float64.
CHECKED = [(576, 200, 64), (1024, 72, 32), (1536, 264, 128), (1024, 520, 512)]
CHECKED_ROWS = (1, 5, 33, 200)
# k block (None: the usual one), tiles per program, warps and stages that are tried for one row.
CANDIDATES = [
    (k_block, *shape)
    for k_block in (None, 256)
    for shape in ((1, 4, 4), (1, 4, 6), (1, 8, 4), (2, 2, 4), (2, 2, 6), (2, 4, 4))
]


def random_weight(inputs: int, outputs: int, group_size: int, bits: int, device: torch.device) -> AwqWeight:
    """Any bits are codes and zeros."""
    generator = torch.Generator(device).manual_seed(bits)

    def stored(rows: int) -> Tensor:
        shape = (rows, outputs * bits // 8)
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
        return codes.view(torch.int32) if bits == 4 else codes

    scales = torch.rand(inputs // group_size, outputs, device=device, generator=generator)
    return AwqWeight(stored(inputs), stored(inputs // group_size), (scales * 0.01 + 0.001).half())


def takes(bits: int, k_block: int | None) -> bool:
    """Whether a width has such k blocks of groups of 128: two groups at 2 and 3 bits."""
    return k_block is None or bits in (2, 3)


def compile_one(task: tuple[int, tuple[int, int, int, int] | None]) -> None:
    """Leave one kernel in Triton's cache."""
    bits, candidate = task
    device = torch.device("cuda")
    if candidate is not None:
        k_block, tiles, warps, stages = candidate
        packed = pack_weight(random_weight(2048, 512, GROUP_SIZE, bits, device), k_block=k_block)
        few_rows(torch.ones(1, 2048, device=device, dtype=DTYPE), packed, FewRowsShape(8, tiles, warps, stages))
        return
    for inputs, outputs, group_size in CHECKED:
        check(inputs, outputs, group_size, bits, device)


def compiled(jobs: int) -> None:
    """Compile everything, in processes of their own."""
    tasks = [(bits, None) for bits in BITS]
    tasks += [(bits, one) for bits in BITS for one in CANDIDATES if takes(bits, one[0])]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        list(pool.map(compile_one, tasks))


def check(inputs: int, outputs: int, group_size: int, bits: int, device: torch.device) -> list[dict]:
    """Every kernel against float64, and the layout turned back."""
    weight = random_weight(inputs, outputs, group_size, bits, device)
    packed, exact_weight, results = pack_weight(weight), dequantize_weight(weight, torch.float64), []
    intact = torch.equal(unpack_codes(packed.lanes, outputs, bits=bits), weight.qweight)
    for dtype in (torch.float16, torch.bfloat16):
        rounded = torch.equal(dequantize(packed, dtype), dequantize_weight(weight, dtype))
        for rows in CHECKED_ROWS:
            x = torch.randn(rows, inputs, device=device).to(dtype)
            exact = x.double() @ exact_weight.T
            for kernel in (few_rows, prompt, unpacked):
                y = kernel(x, packed)
                error = float((y.double() - exact).norm() / exact.norm())
                same = all(torch.equal(kernel(x, packed), y) for _ in range(3))
                case = f"{bits} bits, {inputs} x {outputs}, groups of {group_size}, {dtype}, {rows} rows"
                passed = intact and rounded and same and error <= TOLERANCE[dtype]
                results.append({"kernel": kernel.__name__, "case": case, "error": error, "passed": passed})
    return results


class Timer:
    """Times of one row over copies of a weight, none of which is still in the L2 cache."""

    def __init__(self, x: Tensor, exact: Tensor) -> None:
        self.x, self.exact = x, exact

    def __call__(self, function: Callable[..., Tensor], weights: list, *arguments: object) -> float:
        """Microseconds per call, NaN if the first one is wrong."""
        calls = [partial(function, self.x, one, *arguments) for one in weights]
        error = float((calls[0]().double() - self.exact).norm() / self.exact.norm())
        return graph_time(calls, repeats=7) * 1e6 if error <= TOLERANCE[DTYPE] else float("nan")


def measure(inputs: int, outputs: int, device: torch.device, bandwidth: float) -> list[dict]:
    """All widths of one shape."""
    x, rows = torch.randn(1, inputs, device=device).to(DTYPE), []
    for bits in BITS:
        weight = random_weight(inputs, outputs, GROUP_SIZE, bits, device)
        dense = dequantize_weight(weight, torch.float64)
        timer, packed = Timer(x, x.double() @ dense.T), pack_weight(weight)
        if not rows:
            plain = [dense.to(DTYPE) for _ in range(buffers_beyond_cache(2 * dense.numel(), 8))]
            nbytes = plain[0].nbytes
            bf16 = timer(lambda x, one: x @ one.T, plain)
            rows.append({"case": f"{inputs} x {outputs}", "bits": 16, "bytes": nbytes, "us": bf16})
            del plain
        del dense
        nbytes, candidates = packed.lanes.nbytes + packed.grid.nbytes, {}
        for k_block in dict.fromkeys(candidate[0] for candidate in CANDIDATES if takes(bits, candidate[0])):
            one = packed if k_block is None else pack_weight(weight, k_block=k_block)
            copies = [
                PackedWeight(one.lanes.clone(), one.grid.clone(), outputs, bits)
                for _ in range(buffers_beyond_cache(nbytes, 16))
            ]
            if k_block is None:
                us = timer(few_rows, copies)
            for _, tiles, warps, stages in (c for c in CANDIDATES if c[0] == k_block):
                name = f"k{one.k_block} {tiles}t {warps}w {stages}s"
                candidates[name] = timer(few_rows, copies, FewRowsShape(8, tiles, warps, stages))
        shape = few_rows_shape(1, packed.lanes.shape[0], multiprocessors(device))
        row = {"case": f"{inputs} x {outputs}", "bits": bits, "bytes": nbytes, "us": us, "to_bf16": bf16 / us}
        row |= {"shape": f"k{packed.k_block} {shape.tiles}t {shape.warps}w {shape.stages}s", "candidates": candidates}
        rows.append(row | {"share": us * 1e-6 * bandwidth / nbytes})
    four = next(row for row in rows if row["bits"] == 4)
    for row in rows:
        row |= {"to_4_bits": row["us"] / four["us"], "bytes_to_4_bits": row["bytes"] / four["bytes"]}
    return rows


def line(row: dict) -> str:
    """One line of the printed table, with the best three launch shapes."""
    best = sorted((time, name) for name, time in row.get("candidates", {}).items() if time == time)[:3]
    ratios = f"{row['to_4_bits']:.2f} of 4 bits' time, {row['bytes_to_4_bits']:.2f} of its bytes"
    return f"{row['case']:>13}, {row['bits']:>2} bits: {row['us']:7.2f} us, {ratios} | " + "; ".join(
        f"{name} {time:.2f}" for time, name in best
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/linear_widths.py needs a CUDA device, and torch finds none here.", file=sys.stderr)
        return 1
    begin, device = time.perf_counter(), torch.device("cuda")
    compiled(arguments.jobs)
    print(f"{torch.cuda.get_device_name()}, compiled after {time.perf_counter() - begin:.0f} s", flush=True)
    checks = [one for bits in BITS for shape in CHECKED for one in check(*shape, bits, device)]
    failed = [one for one in checks if not one["passed"]]
    for one in failed:
        print(f"WRONG: {one['kernel']}, {one['case']}, error {one['error']:.1e}", flush=True)
    bandwidth = copy_bandwidth()
    results = {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__, "bandwidth": bandwidth, "rows": []}
    results |= {"checks": len(checks), "failed": failed}
    for shape in SHAPES:
        rows = measure(*shape, device, bandwidth)
        results["rows"] += rows
        print("\n".join(map(line, rows)), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf8")
    wrong = len(failed) + sum(row["us"] != row["us"] for row in results["rows"])
    print(f"{len(checks)} checks, {wrong} wrong; {time.perf_counter() - begin:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
