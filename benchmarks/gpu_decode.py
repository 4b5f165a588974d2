"""Decode attention on a GPU: agreement with the float64 reference, and time against flash attention over bf16."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from gpu_timing import buffers_beyond_cache, copy_bandwidth, graph_time
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvconvert.kernels.decode import PageTables, ResidualWindows
from kvconvert.kernels.decode.plan import Segment, SequencePlan, plan_work
from kvconvert.kernels.decode.triton.launch import decode_attention, programs_for
from kvconvert.kernels.pages import PAGE_SIZE, KeyFormat, LayerFormat, ValueFormat, empty_keys, empty_values
from kvconvert.kernels.spans import SpanFormat

HEADS, GROUP, DIM = 8, 4, 128
DTYPE = torch.bfloat16
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Case:
    """One row of the table: `bits` and groups of keys and values, what the batch holds, and the bar.

    `value_bits` differ from those of keys unless they are None.
    """

    name: str
    batch: int
    tokens: int
    bar: float | None
    bits: int = 2
    key_group: int = 128
    value_group: int = 128
    norm: str = "joint"
    boosted: int = 0
    span: bool = False
    tau: float = 0.0
    residual: int = 64
    value_bits: int | None = None


CASES = (
    Case("oscar-g128 (norms), 1 x 131,072", 1, 131072, 4.5),
    Case("oscar-g128 (norms), 32 x 8,192", 32, 8192, 4.5),
    Case("oscar G = 32, 1 x 131,072", 1, 131072, 3.5, key_group=32, value_group=32),
    Case("oscar G = 32, 32 x 8,192", 32, 8192, 3.5, key_group=32, value_group=32),
    Case("kitty, 32 x 8,192", 32, 8192, None, norm="none", boosted=16),
    Case("4 bits G = 128, 32 x 8,192", 32, 8192, None, bits=4, norm="none"),
    Case("8 bits G = 128, 32 x 8,192", 32, 8192, None, bits=8, norm="none"),
    Case("1-bit pages, 32 x 8,192", 32, 8192, None, bits=1),
    Case("1-bit spans, 32 x 8,192", 32, 8192, 6.0, bits=1, norm="none", span=True),
    Case("1-bit spans with tau, 32 x 8,192", 32, 8192, 4.0, bits=1, norm="none", span=True, tau=0.5),
    Case("16 bits, our kernel, 32 x 8,192", 32, 8192, None, bits=16, norm="none"),
    Case("oscar-g128 (norms), 1 x 1,024", 1, 1024, 1.0),
    Case("oscar-g128 (norms), 1 x 8,192", 1, 8192, None),
    Case("oscar-g128 (norms), 8 x 8,192", 8, 8192, None),
)


class Layer:
    """Random pages and residual windows of one layer, laid out as the runtime lays them out."""

    def __init__(self, case: Case):
        static = case.span
        keys = KeyFormat(
            HEADS, DIM, PAGE_SIZE, case.bits, case.key_group, case.norm, boosted=case.boosted, static=static
        )
        value_bits = case.bits if case.value_bits is None else case.value_bits
        values = ValueFormat(HEADS, DIM, PAGE_SIZE, value_bits, case.value_group, static=static)
        self.case, self.format = case, LayerFormat(keys, values)
        pages = (case.tokens - case.residual) // PAGE_SIZE if not case.span else case.tokens // PAGE_SIZE
        count = case.batch * pages
        self.keys = empty_keys(count, keys, DTYPE, torch.device("cuda"))
        self.values = empty_values(count, values, DTYPE, torch.device("cuda"))
        for tensors in (self.keys, self.values):
            for name, tensor in tensors.tensors():
                self._fill(name, tensor)
        key_pool = self.keys.codes if case.bits == 16 else self.keys.record
        value_pool = self.values.codes if value_bits == 16 else self.values.record
        self.bytes = count * (key_pool[0].nbytes + value_pool[0].nbytes) + case.batch * case.residual * 4 * HEADS * DIM
        order = torch.randperm(count, device="cuda")
        last = torch.zeros(1, dtype=torch.int64, device="cuda")
        tables = [torch.cat([order * (pool[0].nbytes // 16), last]) for pool in (key_pool, value_pool)]
        # As the runtime divides work: for the residual window that there will be when the next page is complete.
        residual = -(-case.residual // PAGE_SIZE) * PAGE_SIZE
        sequences = [
            SequencePlan((Segment(row * pages, (row + 1) * pages, pages * PAGE_SIZE),), residual)
            for row in range(case.batch)
        ]
        self.span = SpanFormat(case.bits, value_bits, tau1=case.tau, tau2=case.tau * 2) if case.span else None
        programs = programs_for(torch.device("cuda"), self.format, self.span, GROUP, 1)
        plan = plan_work(sequences, programs).to(torch.device("cuda"))
        self.scales = torch.rand(4, HEADS, DIM, dtype=torch.float16, device="cuda") + 0.5
        shared = None
        if case.span:
            bases = (key_pool, key_pool, value_pool, value_pool)
            offsets = [(s.data_ptr() - b.data_ptr()) // 16 for s, b in zip(self.scales, bases, strict=True)]
            shared = torch.tensor([offsets], device="cuda")
        self.tables = PageTables(key_pool, value_pool, *tables, plan, shared)
        self.buffer = torch.randn(2, case.batch, HEADS, PAGE_SIZE, DIM, dtype=DTYPE, device="cuda")
        rows = torch.zeros(case.batch, 8, dtype=torch.int64)
        for row in range(case.batch):
            for side in range(2):
                rows[row, 2 * side] = (side * case.batch + row) * HEADS * PAGE_SIZE * DIM // 8
                rows[row, 2 * side + 1] = PAGE_SIZE * DIM // 8
            rows[row, 7] = case.residual
        self.windows = ResidualWindows(self.buffer, rows.cuda())
        self.queries = torch.randn(case.batch, HEADS * GROUP, 1, DIM, dtype=DTYPE, device="cuda")

    @staticmethod
    def _fill(name: str, tensor: torch.Tensor) -> None:
        if name == "channels":
            tensor.copy_(torch.arange(tensor.shape[-1], dtype=torch.uint8, device="cuda").expand(tensor.shape))
        elif tensor.dtype == torch.int16:
            tensor.copy_(torch.randint(-(1 << 15), 1 << 15, tensor.shape, dtype=torch.int16, device="cuda"))
        elif name in ("scale", "norm"):
            tensor.copy_(torch.rand(tensor.shape, dtype=tensor.dtype, device="cuda") + 0.5)
        else:
            tensor.copy_(torch.randn(tensor.shape, dtype=tensor.dtype, device="cuda"))

    def step(self) -> torch.Tensor:
        """One decode step of the layer."""
        return decode_attention(
            self.queries,
            self.tables,
            self.windows,
            self.format,
            DIM**-0.5,
            span=self.span,
        )


def flash_times(batch: int, tokens: int) -> dict[str, float]:
    """Seconds of one decode step by each of torch's attention backends over bf16 keys and values."""
    nbytes = 4 * batch * HEADS * tokens * DIM
    sets = [
        [torch.randn(batch, HEADS, tokens, DIM, dtype=DTYPE, device="cuda") for _ in range(2)]
        for _ in range(buffers_beyond_cache(nbytes, most=16))
    ]
    queries = torch.randn(batch, HEADS * GROUP, 1, DIM, dtype=DTYPE, device="cuda")
    times = {}
    for name, backend in BACKENDS.items():

        def launch(keys: torch.Tensor, values: torch.Tensor) -> Callable[[], torch.Tensor]:
            return lambda: torch.nn.functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)

        try:
            with sdpa_kernel(backend):
                times[name] = graph_time([launch(*kv) for kv in sets])
        except RuntimeError as error:
            # A backend without a kernel for grouped queries says so; every other failure is one of the benchmark.
            if "No available kernel" not in str(error):
                raise
    return times


def check(device: torch.device) -> list[dict]:
    """The fused kernel over random stored tokens against float64 attention over what they dequantize to."""
    # Random cases are shared with the tests, whose folder benchmarks/gpu.py puts on the path.
    from decode_cases import Case as Stored
    from decode_cases import compare

    results = []
    for dtype, tolerance in ((torch.float32, 4e-3), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
        for case in (
            Stored(norm="joint", pages=(9, 0, 2), residual=(100, 33, 0)),
            Stored(norm="joint", key_group=32, value_group=32),
            Stored(key_bits=1, value_bits=1),
            Stored(key_bits=4, value_bits=4, key_group=16, value_group=16, norm="per_head"),
            Stored(key_bits=8, value_bits=8, key_group=32, value_group=32),
            Stored(key_bits=3, value_bits=2, norm="joint"),
            Stored(key_bits=2, value_bits=3, key_group=32, value_group=32),
            Stored(key_bits=3, value_bits=3, key_dim=80, value_dim=48, value_group=24),
            Stored(key_bits=16, value_bits=16),
            Stored(key_bits=16, value_bits=2),
            Stored(boosted=16, half_quantized=1, half_quantized_pages=(1, 0, 2)),
            Stored(boosted=32, fixed_channels=True),
            Stored(static=True, key_bits=4, value_bits=8),
            Stored(key_dim=80, value_dim=80, key_group=64, value_group=16),
            Stored(key_dim=256, value_dim=256, value_group=128),
            Stored(half_quantized=2, half_quantized_pages=(1, 0, 2)),
            Stored(queries=9, masked=True, group=2, softcap=5.0, sink_logits=True),
            Stored(group=1),
            Stored(group=16),
        ):
            case = replace(case, dtype=dtype)
            error, _ = compare(case, device)
            results.append(
                {
                    "kernel": "decode",
                    "case": f"{case} {dtype}",
                    "error": error,
                    "tolerance": tolerance,
                    "passed": error < tolerance,
                }
            )
    return results


def measure(device: torch.device) -> list[dict]:
    """Every case against the fastest of torch's backends in this run."""
    bandwidth = copy_bandwidth()
    peers: dict[tuple[int, int], dict[str, float]] = {}
    rows = []
    for case in CASES:
        shape = (case.batch, case.tokens)
        if shape not in peers:
            peers[shape] = flash_times(*shape)
        first = Layer(case)
        layers = [first] + [Layer(case) for _ in range(buffers_beyond_cache(first.bytes, most=24) - 1)]
        seconds = graph_time([layer.step for layer in layers])
        fastest = min(peers[shape], key=peers[shape].get)
        rows.append(
            {
                "operation": "decode attention",
                "case": case.name,
                "ours_us": seconds * 1e6,
                "peer": fastest,
                "peer_us": peers[shape][fastest] * 1e6,
                "peers_us": {name: t * 1e6 for name, t in peers[shape].items()},
                "ratio": peers[shape][fastest] / seconds,
                "bar": case.bar,
                "bytes": first.bytes,
                "of_copy_bandwidth": first.bytes / seconds / bandwidth,
            }
        )
        print(
            f"{case.name:36s} {seconds * 1e6:8.1f} us  {fastest} {peers[shape][fastest] * 1e6:8.1f} us  "
            f"ratio {rows[-1]['ratio']:.2f}  {rows[-1]['of_copy_bandwidth']:.0%} of copy bandwidth",
            flush=True,
        )
        del first, layers
        gc.collect()
        torch.cuda.empty_cache()
    return rows
