"""The fastest shape of the 4-bit Linear's kernels for 16 to 512 rows, against torch's bf16 product.

    python benchmarks/linear_shapes.py --json shapes.json

Takes about a minute on one GPU with 16 cores beside it, compilation included. Every figure is of a product that was
first compared with float64. What it prints is what `split_shape` and the thresholds in kvconvert.kernels.linear are
chosen from.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from gpu_linear import TOLERANCE, copies_of, dense_copies, product, random_weight
from gpu_timing import graph_time
from runner import need_gpu, option_parser, save
from torch import Tensor

from kvconvert.kernels.device import multiprocessors
from kvconvert.kernels.linear.awq_format import dequantize_weight
from kvconvert.kernels.linear.packed_layout import PackedWeight, pack_weight
from kvconvert.kernels.linear.triton.few_rows import few_rows
from kvconvert.kernels.linear.triton.many_rows import dequantize, prompt, unpacked
from kvconvert.kernels.linear.triton.prompt_shapes import PromptShape

SHAPES = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]
ROWS = [16, 32, 64, 128, 192, 256, 512]
GROUP_SIZE = 128
DTYPE = torch.bfloat16
# Rows and tiles per program, warps and stages, with the least and most rows of x that they are tried for.
CANDIDATES = {
    (16, 4, 4, 4): (1, 16),
    (32, 4, 4, 3): (17, 32),
    (32, 4, 4, 4): (17, 32),
    (32, 8, 4, 3): (17, 32),
    (64, 4, 4, 2): (33, 512),
    (64, 4, 4, 3): (33, 512),
    (64, 8, 4, 2): (33, 512),
    (64, 8, 4, 3): (33, 256),
    (128, 4, 4, 2): (65, 512),
    (128, 8, 8, 2): (65, 512),
    (128, 8, 8, 3): (65, 512),
}
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
# Programs per multiprocessor between which splits are tried.
FEWEST_PROGRAMS, MOST_PROGRAMS = 0.7, 6
CHUNKS = {"2^24": 1 << 24, "2^25": 1 << 25, "2^26": 1 << 26}


def shapes_for(rows: int, weight: PackedWeight, programs: int) -> list[PromptShape]:
    """What is tried for so many rows of a weight on a GPU with so many multiprocessors."""
    tiles, groups = weight.lanes.shape[0], weight.inputs // weight.group_size
    found = []
    for (block_rows, block_tiles, warps, stages), (least, most) in CANDIDATES.items():
        if not least <= rows <= most:
            continue
        blocks = triton.cdiv(tiles, block_tiles) * triton.cdiv(rows, block_rows)
        for splits in SPLITS:
            few, many = blocks * splits < FEWEST_PROGRAMS * programs, blocks * splits > MOST_PROGRAMS * programs
            if splits == 1 or (groups >= 2 * splits and not few and not many):
                found.append(PromptShape(block_rows, block_tiles, warps, stages, splits))
    return found


def compile_candidate(candidate: tuple[int, int, int, int]) -> None:
    """Leave one candidate's kernels in Triton's cache."""
    device = torch.device("cuda")
    packed = pack_weight(random_weight(512, 512, GROUP_SIZE, device))
    x = torch.randn(candidate[0], 512, device=device, dtype=DTYPE)
    for splits in (1, 2):
        prompt(x, packed, PromptShape(*candidate, splits))
    product(x, packed)


def compiled(jobs: int) -> None:
    """Compile all candidates, each in a process of its own."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        list(pool.map(compile_candidate, CANDIDATES))


class Case:
    """One weight in all its forms, with enough copies that none is still in the L2 cache."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self.name = f"{inputs} x {outputs}"
        self.inputs = inputs
        self.awq = random_weight(inputs, outputs, GROUP_SIZE, device)
        packed = pack_weight(self.awq)
        self.packed, self.dense = copies_of(packed, 16), dense_copies(packed, 8)
        self.exact = dequantize_weight(self.awq, torch.float64)

    def timed(self, calls: list[partial[Tensor]], x: Tensor, exact: Tensor) -> float:
        """Microseconds per call, NaN if the first one is wrong."""
        error = float((calls[0]().double() - exact).norm() / exact.norm())
        if not error <= TOLERANCE[DTYPE]:
            print(f"  WRONG: {self.name}, {len(x)} rows, error {error:.1e}: {calls[0]}"[:300], flush=True)
            return float("nan")
        return graph_time(calls, repeats=7) * 1e6

    def measured(self, rows: int) -> dict:
        """All times for so many rows, in microseconds."""
        x = torch.randn(rows, self.inputs, device=self.exact.device).to(DTYPE)
        exact = x.double() @ self.exact.T

        def timed(function, *arguments: object, weights: list = self.packed) -> float:
            calls = [partial(function, x, one, *arguments) for one in weights]
            return self.timed(calls, x, exact)

        times = {"bf16": timed(lambda x, one: x @ one.T, weights=self.dense), "dispatch": timed(product)}
        if rows <= 64:
            times["few rows"] = timed(few_rows)
        if rows >= 128:
            times |= {f"unpacked {name}": timed(unpacked, chunk) for name, chunk in CHUNKS.items()}
        fused = {}
        for shape in shapes_for(rows, self.packed[0], multiprocessors(x.device)):
            name = f"{shape.rows}x{shape.tiles}t {shape.warps}w {shape.stages}s /{shape.splits}"
            fused[name] = timed(prompt, shape)
        return {"case": self.name, "rows": rows, "times": times, "fused": fused}


def line(result: dict) -> str:
    """One line of the printed table, with the best five shapes."""
    times, fused = result["times"], result["fused"]
    best = sorted((time, name) for name, time in fused.items() if time == time)[:5]
    others = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
    return f"{result['case']:>13}, {result['rows']:>3} rows: {others} | " + "; ".join(f"{n} {t:.1f}" for t, n in best)


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument(
        "--weights", nargs="*", help="inputs and outputs, such as 4096x1024; of Llama's 8B if not given"
    )
    parser.add_argument("--jobs", type=int, default=len(CANDIDATES), help="processes that compile")
    arguments = parser.parse_args()
    need_gpu()
    begin, device = time.perf_counter(), torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    compiled(arguments.jobs)
    print(f"candidates compiled, {time.perf_counter() - begin:.0f} s", flush=True)
    results = {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__, "rows": []}
    weights = [tuple(map(int, name.split("x"))) for name in arguments.weights or []]
    cases = [Case(*weight, device) for weight in weights or SHAPES]
    results["our_bytes"] = {case.name: case.packed[0].lanes.nbytes + case.packed[0].grid.nbytes for case in cases}
    for case in cases:
        unpacking = [partial(dequantize, one, DTYPE) for one in case.packed]
        print(f"{case.name}: dequantization alone {graph_time(unpacking, repeats=7) * 1e6:.1f} us", flush=True)
        for rows in arguments.rows:
            results["rows"].append(case.measured(rows))
            print(line(results["rows"][-1]), flush=True)
            save(arguments.json, results)
    wrong = sum(time != time for row in results["rows"] for time in (row["times"] | row["fused"]).values())
    print(f"{wrong} wrong; {time.perf_counter() - begin:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
