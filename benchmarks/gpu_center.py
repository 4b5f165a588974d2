"""What keys without their constant part cost a step, on a GPU: checked against float64 attention, then timed.

Run: python benchmarks/gpu_center.py [--json benchmarks/results/gpu_center.json]     two minutes on one GPU
     add --check to compare results and stop; with TRITON_INTERPRET=1 it needs no GPU

A layer of 8 KV heads for 32 query heads of 128 channels in bfloat16, as benchmarks/gpu_steps.py steps it: new tokens
are stored and attended to, pages flushed when they are complete, and with Linears the layer's 4-bit products follow.
Each time is that of one layer's part of a step in a CUDA graph; the bar is a whole step with centers over one without.
Flushes of all rows' pages, and the kernel that computes what centers add to scores, are timed alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import gpu_steps
from gpu_steps import DIM, DTYPE, GROUP, HEADS, SCHEMES, Linears, Scheme, SteppedLayer
from gpu_timing import buffers_beyond_cache, graph_time

from kvconvert.kernels.attention.reference import attention_reference
from kvconvert.kernels.decode.triton.center import launch_center_scores
from kvconvert.kernels.decode.triton.launch import decode_shape
from kvconvert.kernels.pages import PAGE_SIZE, KeyCenter, page_centers
from kvconvert.kernels.pages.center import rope_matrix
from kvconvert.kernels.pages.triton.center import launch_centers

SIZES = ((1, 131072), (32, 8192))
BAR = 1.1
CYCLES = 12
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class CenteredLayer(SteppedLayer):
    """`SteppedLayer` of keys that lack a constant part of length `size`."""

    size = 30.0

    def __init__(self, scheme: Scheme, batch: int, tokens: int, staggered: bool, device: torch.device):
        super().__init__(scheme, batch, tokens, staggered, device)
        half = torch.arange(DIM // 2)
        mean = torch.randn(HEADS, DIM)
        matrix = rope_matrix(
            mean * (self.size / mean.norm(dim=1, keepdim=True)),
            10_000.0 ** (-half / len(half)),
            torch.stack([half, half + len(half)], 1),
        )
        self.center = KeyCenter(matrix.half().to(device), (10_000.0 ** (-half / len(half))).to(device))
        self.format = replace(self.format, key_center=self.center)
        rows = [[row * self.stored, self.stored, scheme.sink_tokens] for row in range(batch)]
        self.tables = replace(self.tables, center=self.center, key_rows=self._tensor(rows))
        self.centers = {
            step: self._tensor([[scheme.sink_tokens + self.stored * PAGE_SIZE, 0, 0]] * len(table[0]))
            for step, table in self._flush_tables.items()
        }

    def flush(self, step: int) -> None:
        """Take the constant part away, then flush."""
        launch_centers(self.keys, DIM, self._flush_tables[step][0], self.centers[step], self.center, PAGE_SIZE, -1)
        super().flush(step)


def check() -> list[dict[str, Any]]:
    """Steps against float64 attention over whole keys."""
    rows = []
    for name, scheme in SCHEMES.items():
        layer = CenteredLayer(scheme, 2, 3 * PAGE_SIZE + scheme.sink_tokens, True, DEVICE)
        cpu = KeyCenter(layer.center.matrix.cpu(), layer.center.frequencies.cpu())
        starts = scheme.sink_tokens + PAGE_SIZE * torch.arange(layer.stored)
        added = page_centers(starts, PAGE_SIZE, cpu).transpose(0, 1).flatten(1, 2)
        for step in (0, 64):
            queries, output = layer.attend(step)
            error = 0.0
            for row in range(layer.batch):
                keys, values = gpu_steps._stored(layer, row, step)
                keys[:, : added.shape[1]] += added
                wanted = attention_reference(queries[row].cpu(), keys, values, None, DIM**-0.5).output
                found = output[row].double().cpu()
                error = max(error, float((found - wanted).abs().max() / wanted.square().mean().sqrt()))
            rows.append({"case": f"{name}, step {step}", "error": error, "tolerance": 5e-2, "passed": error < 5e-2})
            print(f"{rows[-1]['case']}: largest error {error:.1e} of the outputs' RMS")
    return rows


def measure() -> list[dict[str, Any]]:
    """Steps with and without centers, flushes, and the kernel before decoding, each alone."""
    rows = []
    for name, scheme in SCHEMES.items():
        for batch, tokens in SIZES:
            linears, us, flush_us = Linears(batch, DEVICE), {False: [], True: []}, []
            for kind in (SteppedLayer, CenteredLayer):
                layers = [kind(scheme, batch, tokens, False, DEVICE)]
                count = buffers_beyond_cache(layers[0].nbytes)
                layers += [kind(scheme, batch, tokens, False, DEVICE) for _ in range(count - 1)]
                for whole, times in us.items():
                    times.append(_step_us(layers, linears if whole else None))
                flush_us.append(1e6 * graph_time([lambda x=x: x.flush(PAGE_SIZE - 1) for x in layers]))
                if kind is CenteredLayer:
                    kernel_us = 1e6 * graph_time([lambda x=x: _scores(x) for x in layers])
                del layers
                gc.collect()
                torch.cuda.empty_cache()
            for whole, times in us.items():
                row = {"scheme": name, "batch": batch, "tokens": tokens, "linears": whole, "us": times}
                rows.append(row | {"ratio": times[1] / times[0]})
                part = f"layer of a step (bar {BAR})" if whole else "attention alone"
                print(f"{name}, {batch} x {tokens:,}, {part}: {times[0]:.1f} -> {times[1]:.1f} us, ", end="")
                print(f"{times[1] / times[0]:.3f}x", flush=True)
            rows[-1] |= {"flush_us": flush_us, "kernel_us": kernel_us}
            print(f"  flush {flush_us[0]:.1f} -> {flush_us[1]:.1f} us; its own kernel {kernel_us:.1f} us", flush=True)
    return rows


def _step_us(layers: list[SteppedLayer], linears: Linears | None) -> float:
    """Median microseconds of steps without flushes, at residual windows of all lengths."""
    pool, stream, graphs = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), []
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for layer in layers:
            layer.step(0, linears, False)
        torch.cuda.synchronize()
        for i in range(8 * len(layers)):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool)
            layers[i % len(layers)].step(i * 16 // len(layers) % PAGE_SIZE, linears, False)
            graph.capture_end()
            graphs.append(graph.replay)
    torch.cuda.synchronize()
    return statistics.median(gpu_steps.step_times(graphs))


def _scores(layer: CenteredLayer) -> None:
    shape = decode_shape(layer.format, None, DTYPE, GROUP, 1)
    launch_center_scores(layer.new[0], layer.tables, DIM**-0.5, 1, shape, False)


def prompts() -> dict[str, float]:
    """Adding centers to 128 dequantized pages, what a tile of a history has."""
    pages = 128
    tokens = torch.randn(HEADS, pages * PAGE_SIZE, DIM, device=DEVICE).to(DTYPE)
    layer = CenteredLayer(SCHEMES["oscar"], 1, 2 * PAGE_SIZE, False, DEVICE)
    table = np.zeros((pages, 4), dtype=np.int64)
    table[:, 0], table[:, 1] = PAGE_SIZE * DIM * np.arange(pages), tokens.stride(0)
    centers = np.zeros((pages, 3), dtype=np.int64)
    centers[:, 0] = 4 + PAGE_SIZE * np.arange(pages)
    on_device = [torch.from_numpy(x).to(DEVICE) for x in (table, centers)]
    us = 1e6 * graph_time([lambda: launch_centers(tokens, DIM, *on_device, layer.center, PAGE_SIZE, 1)] * 4)
    print(f"adding centers to {pages} dequantized pages: {us:.1f} us")
    return {"pages": pages, "us": us}


def main() -> None:
    """Check, time, print, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare results, and time nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures there")
    args = parser.parse_args()
    torch.manual_seed(0)
    if DEVICE.type == "cpu" and not args.check:
        parser.error("there is no GPU to time; --check compares results under TRITON_INTERPRET=1")
    checks = check()
    if not args.check:
        gpu_steps.CYCLES = CYCLES
        found = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "checks": checks,
            "steps": measure(),
            "prompts": prompts(),
        }
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf8")
    sys.exit(not all(row["passed"] for row in checks))


if __name__ == "__main__":
    main()
