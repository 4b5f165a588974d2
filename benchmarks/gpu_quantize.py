"""Quantizing pages and rotating on a GPU. A section of benchmarks/gpu.py.

One layer of 8 KV heads of 128 channels in bfloat16, 32 query heads. Bytes are what has to move: tokens read once,
records written once. Error feedback is timed beside rounding to nearest: one page of each of 32 layers in one launch,
as a step does that completes a page, and the keys of a prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "test_gpu"))
from gpu_timing import attention_launches, beyond_cache, graph_time, timed
from page_writes import page_writes

from kvconvert.kernels.pages import (
    PAGE_SIZE,
    PageFormat,
    SideTensors,
    new_flag,
    new_pages,
)
from kvconvert.kernels.pages.triton import launch as gpu
from kvconvert.kernels.rotate import hadamard_matrix
from kvconvert.kernels.rotate.triton import rotate, rotate_and_append
from kvconvert.kernels.rotations import Rotations
from kvconvert.kernels.spans import SpanFormat, quantize_span

HEADS, QUERY_HEADS, DIM = 8, 32, 128
PROMPT, LAYERS = 32768, 32
# A decode step's attention over 32 x 8,192 tokens of 2-bit pages takes at least this; a flush serves 128 steps.
STEP_US, FLUSH_STEPS = 40.0, 128

FORMATS = {
    "oscar": (
        PageFormat.keys(HEADS, DIM, PAGE_SIZE, 2, 32, token_norm="joint"),
        PageFormat.values(HEADS, DIM, PAGE_SIZE, 2, 32),
    ),
    "oscar-g128": (
        PageFormat.keys(HEADS, DIM, PAGE_SIZE, 2, 128, token_norm="joint"),
        PageFormat.values(HEADS, DIM, PAGE_SIZE, 2, 128),
    ),
    "kitty": (
        PageFormat.keys(HEADS, DIM, PAGE_SIZE, 2, 128, boosted=DIM // 8),
        PageFormat.values(HEADS, DIM, PAGE_SIZE, 2, 128),
    ),
}


def _tokens(pages: int, f: PageFormat, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Pages [N, H, P, D] as views of a prompt [H, N P, D], with channels and tokens of different size."""
    x = torch.randn(f.heads, pages * PAGE_SIZE, f.head_dim, device="cuda") * (1 + torch.rand(f.head_dim, device="cuda"))
    x = x * (0.5 + torch.rand(pages * PAGE_SIZE, 1, device="cuda"))
    return x.to(dtype).unflatten(1, (pages, PAGE_SIZE)).transpose(0, 1)


def _matrices() -> torch.Tensor:
    """Matrices of error feedback float16 [H, D, D] of a layer."""
    return (torch.randn(HEADS, DIM, DIM, device="cuda").mul_(0.05).triu_(1) + torch.eye(DIM, device="cuda")).half()


def append_table(
    keys: list[torch.Tensor], key_base: torch.Tensor, values: list[torch.Tensor], value_base: torch.Tensor
) -> torch.Tensor:
    """Where `rotate_and_append` finds buffers [H, capacity, channels] of each sequence: int64 [B, 4] on the device."""

    def entry(buffer: torch.Tensor, base: torch.Tensor) -> tuple[int, int]:
        return (buffer.data_ptr() - base.data_ptr()) // base.element_size(), buffer.stride(0)

    rows = [(*entry(key, key_base), *entry(value, value_base)) for key, value in zip(keys, values, strict=True)]
    return torch.tensor(rows, dtype=torch.int64).to(key_base.device)


class DecodeStep:
    """The tensors that one decode step rotates and appends."""

    def __init__(self, batch: int, capacity: int):
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        self.queries = normal(batch, QUERY_HEADS, 1, DIM)
        self.keys, self.values = normal(batch, HEADS, 1, DIM), normal(batch, HEADS, 1, DIM)
        self.buffers = [[normal(HEADS, capacity, DIM) for _ in range(batch)] for _ in range(2)]
        self.base = self.buffers[0][0]
        self.table = append_table(self.buffers[0], self.base, self.buffers[1], self.base)
        self.first = torch.full((batch,), 40, device="cuda")

    def run(self) -> torch.Tensor:
        """One launch."""
        tokens, rotations = (self.queries, self.keys, self.values), Rotations(True, False)
        return rotate_and_append(*tokens, self.base, self.table, self.first, rotations)

    def apart(self) -> None:
        """The same by the rotation kernel and one copy for each sequence's keys and values."""
        rotate(self.queries)
        keys = rotate(self.keys)
        for row, (key, value) in enumerate(zip(*self.buffers, strict=True)):
            key[:, 40:41] = keys[row]
            value[:, 40:41] = self.values[row]


class Job:
    """Key and value pages of one layer, ready to be quantized in three launches."""

    def __init__(self, f: PageFormat, g: PageFormat, pages: int, sequences: int = 1, feedback: bool = False):
        per_sequence = pages // sequences
        self.keys = [_tokens(per_sequence, f) for _ in range(sequences)]
        self.values = [_tokens(per_sequence, g) for _ in range(sequences)]
        cuda, self.launches = torch.device("cuda"), []
        # Of as many layers as there are sequences; launches know their addresses alone.
        self.matrices = [_matrices() for _ in range(sequences)] if feedback else None
        for tokens, records, matrices in (
            (self.keys, new_pages(pages, f, torch.bfloat16, cuda), self.matrices),
            (self.values, new_pages(pages, g, torch.bfloat16, cuda), None),
        ):
            each = [page for sequence in tokens for page in sequence]
            layers = [SideTensors(feedback=own) for own in matrices or [None]]
            writes = page_writes(each, [records], len(layers))
            tables = gpu.listed(writes, each[0], records.buffer, records.format, layers)
            arguments = each[0], tables.pop("table"), records.buffer, records.format, new_flag(cuda)
            self.launches.append(partial(gpu.quantize_listed, *arguments, tensors=layers[0], **tables))

    def quantize_keys(self) -> None:
        """The norm's launch and the keys'."""
        self.launches[0]()

    def quantize_values(self) -> None:
        """The values' launch."""
        self.launches[1]()

    def run(self) -> None:
        """All of them."""
        self.quantize_keys()
        self.quantize_values()

    @property
    def nbytes(self) -> int:
        """Bytes read and written, each once."""
        read = sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))
        return read + sum(launch.args[2].nbytes for launch in self.launches)


def _peer(name: str, us: float, peer_us: float) -> dict[str, Any]:
    return {"ours_us": us, "peer": name, "peer_us": peer_us, "ratio": us / peer_us}


def _moved(nbytes: int, us: float) -> dict[str, float]:
    return {"bytes": nbytes, "bandwidth": nbytes / us * 1e6}


def _timed(make: Callable[[], Job], run: Callable[[Job], None] = Job.run) -> tuple[Job, float]:
    """One of the jobs, and the median microseconds of its launches over buffers that no cache holds."""
    jobs = beyond_cache(make, lambda job: job.nbytes)
    return jobs[0], graph_time([partial(run, job) for job in jobs]) * 1e6


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    """Prompts and flushes by format, spans, and rotations."""
    return chain(_measure_pages(), _measure_feedback(), _measure_spans(), _measure_rotations())


def _measure_pages() -> Iterator[dict[str, Any]]:
    tensors = [torch.randn(1, heads, PROMPT, DIM, device="cuda").bfloat16() for heads in (QUERY_HEADS, HEADS, HEADS)]
    prefill = graph_time(attention_launches([tensors], is_causal=True)["flash"], repeats=5) * 1e6
    for name, formats in FORMATS.items():
        job, ours = _timed(lambda formats=formats: Job(*formats, PROMPT // PAGE_SIZE))
        peer = _peer("causal flash attention of that layer", ours, prefill)
        yield {"case": f"quantize a prompt of {PROMPT} tokens, {name}"} | peer | _moved(job.nbytes, ours)
    for name, batch in product(("oscar", "kitty"), (1, 32)):
        job, ours = _timed(lambda name=name, batch=batch: Job(*FORMATS[name], batch, batch))
        peer = _peer(f"attention of {FLUSH_STEPS} decode steps of {STEP_US:.0f} us", ours, STEP_US * FLUSH_STEPS)
        yield {"case": f"page flush, batch {batch}, {name}"} | peer | _moved(job.nbytes, ours)


def _measure_feedback() -> Iterator[dict[str, Any]]:
    for name, formats in FORMATS.items():
        for case, pages, layers in ((f"a page of each of {LAYERS} layers", LAYERS, LAYERS), ("a prompt", None, 1)):
            arguments = (*formats, pages or PROMPT // PAGE_SIZE, layers)
            near, fed = (
                _timed(lambda feedback=feedback, arguments=arguments: Job(*arguments, feedback), Job.quantize_keys)[1]
                for feedback in (False, True)
            )
            yield {"case": f"keys of {case} with error feedback, {name}"} | _peer("rounding to nearest", fed, near)


def _measure_spans() -> Iterator[dict[str, Any]]:
    keys, values = (torch.randn(HEADS, PROMPT, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    quantize_span(keys, values, SpanFormat(1, 1))
    yield {
        "case": f"quantize a span of {PROMPT} tokens, 1 bit, host included",
        "ours_us": timed(lambda: quantize_span(keys, values, SpanFormat(1, 1))) * 1e6,
        "bytes": 2 * keys.nbytes + 2 * values.nbytes + keys.numel() // 4,
    }


def _measure_rotations() -> Iterator[dict[str, Any]]:
    for batch in (1, 32):
        steps = [DecodeStep(batch, 64) for _ in range(8)]
        ours = graph_time([step.run for step in steps]) * 1e6
        apart = graph_time([step.apart for step in steps]) * 1e6
        peer = _peer("two rotations and a copy per sequence and side", ours, apart)
        yield {"case": f"rotate and append a decode step, batch {batch}"} | peer
    rows = [torch.randn(1, QUERY_HEADS, 8192, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    matrix = hadamard_matrix(DIM, torch.bfloat16, torch.device("cuda"))
    ours = graph_time([lambda x=x: rotate(x) for x in rows]) * 1e6
    peer = _peer("torch bf16 matmul", ours, graph_time([lambda x=x: x @ matrix for x in rows]) * 1e6)
    yield {"case": "rotate the queries of 8,192 tokens"} | peer | _moved(2 * rows[0].nbytes, ours)
