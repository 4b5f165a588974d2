"""One row and more times weights of 2, 3, 4 and 8 bits on a GPU: times against bytes and torch's bf16 product.

    python benchmarks/linear_widths.py --json benchmarks/results/linear_widths.json

Takes less than a minute on one GPU with 16 cores beside it, compilation included. Every figure is of a product that was
first compared with float64, and every kernel over awkward shapes with it. `share` is the time over that of the bytes at
the bandwidth of a copy; `to_4_bits` and `bytes_to_4_bits` are the ratios of times and of bytes to those of 4 bits. Of
several launch shapes for one row the dispatch's is in `us`, all others are in `candidates`: what FEW_ROWS_SHAPES and k
blocks of 2 and 3 bits are to be chosen from. `more_rows` has the dispatch's times by length of k blocks and rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from gpu_linear import TOLERANCE
from gpu_timing import buffers_beyond_cache, copy_bandwidth, graph_time
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kvconvert.kernels.device import multiprocessors
from kvconvert.kernels.linear import packed_product
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
MORE_ROWS = (2, 8, 16, 64, 256)
# Rows, tiles per program, warps and stages that are tried.
CANDIDATES = [
    FewRowsShape(*shape) for shape in product((2, 8), (1, 2), (1, 2, 4, 8), (2, 3, 4)) if shape[1] * shape[2] < 9
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


# Lengths of k blocks that are tried.
K_BLOCKS = {2: (128, 256), 3: (128, 256), 4: (128,), 8: (64, 128)}


def launched(x: Tensor, packed: PackedWeight, shape: FewRowsShape | None = None) -> Tensor:
    """What the dispatch or a launch shape computes; NaN where that does not fit into shared memory."""
    try:
        return packed_product(x, packed) if shape is None else few_rows(x, packed, shape)
    except OutOfResources:
        return x.new_full((len(x), packed.outputs), float("nan"))


def compile_one(task: tuple) -> None:
    """Leave the kernels of one launch shape, of the checks or of one weight's rows in Triton's cache."""
    bits, k_block, shape, size = task
    device = torch.device("cuda")
    if k_block is None:
        for inputs, outputs, group_size in CHECKED:
            check(inputs, outputs, group_size, bits, device)
        return
    packed = pack_weight(random_weight(*size, GROUP_SIZE, bits, device), k_block=k_block)
    for rows in MORE_ROWS if shape is None else (1,):
        launched(torch.ones(rows, size[0], device=device, dtype=DTYPE), packed, shape)


def compiled(jobs: int) -> None:
    """Compile everything, in processes of their own."""
    tasks = [(bits, None, None, None) for bits in BITS]
    layouts = [(bits, k_block) for bits in BITS for k_block in K_BLOCKS[bits]]
    tasks += [(*one, None, size) for one in layouts for size in SHAPES]
    tasks += [(*one, shape, (2048, 512)) for one in layouts for shape in CANDIDATES]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        list(pool.map(compile_one, tasks))


def check(inputs: int, outputs: int, group_size: int, bits: int, device: torch.device) -> list[dict]:
    """Every kernel against float64, and the layout turned back."""
    weight = random_weight(inputs, outputs, group_size, bits, device)
    packed, exact_weight, results = pack_weight(weight), dequantize_weight(weight, torch.float64), []
    intact = torch.equal(unpack_codes(packed), weight.qweight)
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
    """Times over copies of a weight, none of which is still in the L2 cache."""

    def __init__(self, rows: int, dense: Tensor) -> None:
        self.x = torch.randn(rows, dense.shape[1], device=dense.device).to(DTYPE)
        self.exact = self.x.double() @ dense.T

    def __call__(self, function: Callable[..., Tensor], weights: list, *arguments: object) -> float:
        """Microseconds per call, NaN if the first one is wrong."""
        calls = [partial(function, self.x, one, *arguments) for one in weights]
        error = float((calls[0]().double() - self.exact).norm() / self.exact.norm())
        return graph_time(calls, repeats=7) * 1e6 if error <= TOLERANCE[DTYPE] else float("nan")


def measure(inputs: int, outputs: int, device: torch.device, bandwidth: float) -> list[dict]:
    """All widths of one shape."""
    rows = []
    for bits in BITS:
        weight = random_weight(inputs, outputs, GROUP_SIZE, bits, device)
        dense = dequantize_weight(weight, torch.float64)
        timer, packed = Timer(1, dense), pack_weight(weight)
        more = {count: Timer(count, dense) for count in MORE_ROWS}
        if not rows:
            plain = [dense.to(DTYPE) for _ in range(buffers_beyond_cache(2 * dense.numel(), 8))]
            nbytes = plain[0].nbytes
            bf16 = timer(lambda x, one: x @ one.T, plain)
            rows.append({"case": f"{inputs} x {outputs}", "bits": 16, "bytes": nbytes, "us": bf16})
            rows[0]["more_rows"] = {count: timed(lambda x, one: x @ one.T, plain) for count, timed in more.items()}
            del plain
        del dense
        nbytes, candidates, more_rows = packed.lanes.nbytes + packed.grid.nbytes, {}, {}
        for k_block in K_BLOCKS[bits]:
            one = pack_weight(weight, k_block=k_block)
            copies = [
                replace(one, lanes=one.lanes.clone(), grid=one.grid.clone())
                for _ in range(buffers_beyond_cache(nbytes, 16))
            ]
            if k_block == packed.k_block:
                us = timer(few_rows, copies)
            for shape in CANDIDATES:
                name = f"k{k_block} {shape.rows}r {shape.tiles}t {shape.warps}w {shape.stages}s"
                candidates[name] = timer(launched, copies, shape)
            more_rows[f"k{k_block}"] = {count: timed(launched, copies) for count, timed in more.items()}
        shape = few_rows_shape(1, packed.lanes.shape[0], packed, multiprocessors(device))
        name = f"k{packed.k_block} {shape.rows}r {shape.tiles}t {shape.warps}w {shape.stages}s"
        row = {"case": f"{inputs} x {outputs}", "bits": bits, "bytes": nbytes, "us": us, "to_bf16": bf16 / us}
        row |= {"shape": name, "candidates": candidates, "more_rows": more_rows}
        rows.append(row | {"share": us * 1e-6 * bandwidth / nbytes})
    four = next(row for row in rows if row["bits"] == 4)
    for row in rows:
        row |= {"to_4_bits": row["us"] / four["us"], "bytes_to_4_bits": row["bytes"] / four["bytes"]}
    return rows


def line(row: dict) -> str:
    """One line of the printed table, with the best three launch shapes of two rows and of eight."""
    ratios = f"{row['to_4_bits']:.2f} of 4 bits' time, {row['bytes_to_4_bits']:.2f} of its bytes"
    parts = [f"{row['case']:>13}, {row['bits']:>2} bits: {row['us']:7.2f} us, {ratios}"]
    for rows in (2, 8):
        found = [(time, name) for name, time in row.get("candidates", {}).items() if f" {rows}r " in name]
        parts.append(
            "; ".join(f"{name} {time:.2f}" for time, name in sorted(one for one in found if one[0] == one[0])[:3])
        )
    return " | ".join(parts) + f" | {row['more_rows']}"


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
