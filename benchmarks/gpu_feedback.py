"""What error feedback costs when key pages are written, on a GPU: checked against the reference, then timed.

Run: python benchmarks/gpu_feedback.py     under a minute on one GPU
     add --check to compare codes with the reference's and stop; with TRITON_INTERPRET=1 it needs no GPU

A layer of 8 KV heads of 128 channels in bfloat16. Flush: one page of each of 32 layers in one launch, as a sequence's
step does that completes a page; its time for one layer, shared by the 128 steps of a page, against a layer's decode
step. Prompt: 256 pages of one layer, against the fastest attention of torch for 32 query heads and as many tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "test_gpu"))
from gpu_timing import buffers_beyond_cache, graph_time
from page_writes import page_writes

from kvconvert.kernels.pages import (
    PAGE_SIZE,
    KeyFormat,
    empty_keys,
    key_codes,
    new_flag,
    quantize_keys,
    raise_if_flagged,
)
from kvconvert.kernels.pages.triton import feedback as kernel
from kvconvert.kernels.pages.triton import launch

HEADS, QUERY_HEADS, DIM, LAYERS, PROMPT = 8, 32, 128, 32, 32768
# A layer's decode step of such a model with 4-bit weights, one sequence.
LAYER_STEP_US, FLUSH_STEPS = 85.0, 128
FLUSH_BAR, PROMPT_BAR = 0.01, 0.03
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = {
    "oscar-g128": KeyFormat(HEADS, DIM, PAGE_SIZE, 2, 128, "joint"),
    "kivi": KeyFormat(HEADS, DIM, PAGE_SIZE, 2, 32),
    "kitty": KeyFormat(HEADS, DIM, PAGE_SIZE, 2, 128, boosted=DIM // 8),
    "1 bit": KeyFormat(HEADS, DIM, PAGE_SIZE, 1, 128, "joint"),
    "3 bits": KeyFormat(HEADS, DIM, PAGE_SIZE, 3, 128, "joint"),
}


def _keys(pages: int) -> torch.Tensor:
    """[H, pages P, D]."""
    x = torch.randn(HEADS, pages * PAGE_SIZE, DIM, device=DEVICE) * (1 + torch.rand(DIM, device=DEVICE))
    return x.bfloat16()


def _matrices() -> torch.Tensor:
    upper = torch.randn(HEADS, DIM, DIM, device=DEVICE).mul_(0.05).triu_(1) + torch.eye(DIM, device=DEVICE)
    return upper.half()


class Pages:
    """Some pages of keys, the tables of their launch, and their records."""

    def __init__(self, f: KeyFormat, pages: int, matrices: int):
        self.f, self.keys = f, _keys(pages)
        self.pages, self.flag = empty_keys(pages, f, torch.bfloat16, self.keys.device), new_flag(self.keys.device)
        self.matrices = [_matrices() for _ in range(matrices)]
        writes = page_writes([self.keys], [self.pages], self.matrices)
        self.launch = launch.page_launch(writes, self.keys, self.pages, self.flag)

    def write(self, feedback: bool) -> None:
        launch.quantize_key_pages(self.launch if feedback else self.launch._replace(feedback=None), self.f)


def _seconds(f: KeyFormat, pages: int, matrices: int, feedback: bool) -> float:
    copies = [Pages(f, pages, matrices) for _ in range(buffers_beyond_cache(pages * PAGE_SIZE * HEADS * DIM * 2, 8))]
    return graph_time([lambda copy=copy: copy.write(feedback) for copy in copies])


def _attention_seconds() -> float:
    q = torch.randn(1, QUERY_HEADS, PROMPT, DIM, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(1, QUERY_HEADS, PROMPT, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    times, attend = {}, torch.nn.functional.scaled_dot_product_attention
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                times[backend.name] = graph_time([lambda: attend(q, k, v, is_causal=True)] * 2, repeats=3)
        except RuntimeError as error:
            print(f"{backend.name}: {str(error).splitlines()[0]}")
    return min(times.values())


def check() -> None:
    """Codes of two pages against the reference on the CPU."""
    for name, f in FORMATS.items():
        case = Pages(f, 2, 1)
        case.write(True)
        raise_if_flagged(case.flag, HEADS)
        keys = case.keys.unflatten(1, (2, PAGE_SIZE)).transpose(0, 1)
        found = key_codes(case.pages, f).cpu()
        fed, near = (key_codes(quantize_keys(keys.cpu(), f, feedback=m), f) for m in (case.matrices[0].cpu(), None))
        apart, changed = ((found != other).any(2).float().mean().item() for other in (fed, near))
        print(
            f"{name:12s} tokens whose codes differ from the reference's: {apart:.4f}, from the nearest: {changed:.4f}"
        )
        assert apart < 0.02, name


def main() -> None:
    """Check, time, and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare codes, and time nothing")
    torch.manual_seed(0)
    only_check = parser.parse_args().check
    if DEVICE == "cpu" and not only_check:
        parser.error("there is no GPU to time; --check compares codes under TRITON_INTERPRET=1")
    check()
    if only_check:
        return
    attention = _attention_seconds()
    print(f"attention of a prompt of {PROMPT} tokens: {attention * 1e3:.2f} ms")
    for name, f in FORMATS.items():
        near, fed = (_seconds(f, LAYERS, LAYERS, feedback) for feedback in (False, True))
        extra = (fed - near) / LAYERS
        single = _seconds(f, 1, 1, True) - _seconds(f, 1, 1, False)
        share = extra / FLUSH_STEPS / (LAYER_STEP_US * 1e-6)
        alone = single / FLUSH_STEPS / (LAYER_STEP_US * 1e-6)
        print(
            f"{name:12s} flush of {LAYERS} layers {near * 1e6:6.1f} -> {fed * 1e6:6.1f} us: {share:.4%} of a layer's "
            f"step; one layer alone +{single * 1e6:.1f} us: {alone:.3%} (bar {FLUSH_BAR:.0%})"
        )
        near, fed = (_seconds(f, PROMPT // PAGE_SIZE, 1, feedback) for feedback in (False, True))
        print(
            f"{name:12s} prompt {near * 1e6:7.1f} -> {fed * 1e6:7.1f} us: quantizing takes {fed / attention:.2%} "
            f"of the attention (bar {PROMPT_BAR:.0%})"
        )
    for tokens in (32, 64):
        kernel.FEEDBACK_TOKENS = tokens
        fed = _seconds(FORMATS["oscar-g128"], PROMPT // PAGE_SIZE, 1, True)
        print(f"oscar-g128, {tokens} tokens a program: prompt {fed * 1e6:.1f} us")


if __name__ == "__main__":
    main()
