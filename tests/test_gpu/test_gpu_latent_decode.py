"""The decode kernel over latents, against float64 attention over the same latents dequantized."""

from dataclasses import dataclass

import pytest
import torch

from kvconvert.kernels.decode import PageTables, ResidualWindows
from kvconvert.kernels.decode.plan import Segment, SequencePlan, plan_work
from kvconvert.kernels.latent import latent_decode, unsupported
from kvconvert.kernels.pages import PAGE_SIZE, LayerFormat, PageFormat, dequantize_pages, quantize_pages

SCALING = 0.09


@dataclass(frozen=True)
class Stored:
    """Sequences of one layer of latents, as the runtime lays them out: tables, a description, and float64 tokens."""

    tables: PageTables
    windows: ResidualWindows
    tokens: list[tuple[torch.Tensor, torch.Tensor]]
    keep: list[torch.Tensor]

    def page_tables(self, programs):
        return self.tables

    def residual_windows(self):
        return self.windows


def format_of(bits, rank, rope):
    return LayerFormat(
        PageFormat.keys(1, rank, PAGE_SIZE, bits, PAGE_SIZE, by_token=bits in (2, 4)),
        PageFormat.values(1, rope, PAGE_SIZE, 16 if bits == 16 else 8, rope),
    )


def stored_tokens(f, dtype, device, rows, programs, generator):
    """`rows`: of each sequence its pages, sink tokens (hidden in the first page) and tokens after the last page."""
    rank, rope = f.keys.head_dim, f.values.head_dim

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    count = sum(pages for pages, _, _ in rows)
    # A channel that is far from zero and one that is wide, as latents have.
    latents = random(count + 1, 1, PAGE_SIZE, rank)
    latents[..., 1] += 9
    latents[..., rank // 2] *= 5
    rope_parts = random(count + 1, 1, PAGE_SIZE, rope) * 2
    pages = quantize_pages(latents, f.keys), quantize_pages(rope_parts, f.values)
    exact = dequantize_pages(pages[0]).double(), dequantize_pages(pages[1]).double()
    # Pages lie in another order than they are read in.
    order = torch.randperm(count + 1, generator=generator)
    pools = [torch.empty_like(side.buffer).index_copy_(0, order, side.buffer).to(device) for side in pages]
    tables = [(order * (pool[0].nbytes // 16)).to(device) for pool in pools]
    described, plans, tokens, keep, first = torch.zeros(len(rows), 8, dtype=torch.int64), [], [], [], 0
    base = torch.zeros(8, dtype=dtype, device=device)
    for row, (pages, sinks, residual) in enumerate(rows):
        hidden = sinks if pages else 0
        window = random(1, sinks + residual, rank), random(1, sinks + residual, rope)
        parts = []
        for side, (own, dequantized) in enumerate(zip(window, exact, strict=True)):
            # What a buffer holds behind its tokens must not matter.
            buffer = torch.full((1, own.shape[1] + 5, own.shape[2]), float("nan"), dtype=dtype)
            buffer[:, : own.shape[1]] = own
            keep.append(buffer.to(device))
            described[row, 2 * side] = (keep[-1].data_ptr() - base.data_ptr()) // (8 * base.element_size())
            described[row, 2 * side + 1] = keep[-1].stride(0) // 8
            paged = dequantized[first : first + pages, 0].flatten(0, 1)[hidden:]
            parts.append(torch.cat([paged, own[0].double()]))
        described[row, 4], described[row, 7] = sinks, sinks + residual
        tokens.append(tuple(parts))
        segments = (Segment(first, first + pages, pages * PAGE_SIZE, hidden=hidden),) if pages else ()
        plans.append(SequencePlan(segments, sinks + residual))
        first += pages
    plan = plan_work(plans, programs).to(device)
    found = PageTables(*pools, *tables, plan)
    return Stored(found, ResidualWindows(base, described.to(device)), tokens, keep)


def expected_of(latent_queries, rope_queries, stored, scaling):
    found = []
    for row, (latents, rope) in enumerate(stored.tokens):
        scores = (latent_queries[row].double() @ latents.T + rope_queries[row].double() @ rope.T) * scaling
        found.append(scores.softmax(-1) @ latents)
    return torch.stack(found)


# Bits, heads, latent channels, RoPE channels, dtype, rows of (pages, sink tokens, tokens after), programs.
CASES = [
    (4, 16, 512, 64, torch.bfloat16, ((3, 4, 37),), 4),
    (2, 16, 512, 64, torch.bfloat16, ((3, 4, 37),), 2),
    (2, 5, 128, 16, torch.float16, ((2, 0, 1), (0, 0, 3), (5, 4, 130)), 4),
    (4, 5, 32, 16, torch.float16, ((1, 4, 0), (2, 4, 63)), 3),
    (4, 20, 96, 32, torch.float16, ((2, 1, 9),), 2),
    (4, 128, 256, 64, torch.bfloat16, ((2, 4, 20),), 2),
    (2, 3, 48, 8, torch.float16, ((2, 0, 31),), 1),
    (2, 70, 48, 24, torch.float16, ((1, 4, 3),), 1),
    (16, 17, 512, 64, torch.float16, ((1, 4, 5),), 1),
    (16, 4, 64, 128, torch.bfloat16, ((2, 0, 12), (1, 4, 0)), 2),
    (4, 16, 320, 40, torch.bfloat16, ((1, 4, 7),), 1),
]
SLOW_UNDER_THE_INTERPRETER = {5, 7}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.full if i in SLOW_UNDER_THE_INTERPRETER else ()) for i, c in enumerate(CASES)],
    ids=str,
)
def test_decoding_over_latents_is_that_of_float64(case, device):
    bits, heads, rank, rope, dtype, rows, programs = case
    generator = torch.Generator().manual_seed(0)
    f = format_of(bits, rank, rope)
    stored = stored_tokens(f, dtype, device, rows, programs, generator)
    queries = torch.randn(len(rows), heads, rank + rope, generator=generator).to(dtype)
    # Heads differ, and numbers of 8 bits of exponent may be such that fp16 would not hold them.
    large = 1.0 if dtype == torch.float16 else 2.0**20
    queries *= large * 4.0 ** -(torch.arange(heads) % 3.0).view(-1, 1).to(dtype)
    latent_queries, rope_queries = queries.to(device).split([rank, rope], -1)
    assert unsupported(f, dtype, device) is None
    found = latent_decode(latent_queries, rope_queries, stored, f, SCALING / large).cpu().double()
    expected = expected_of(*queries.split([rank, rope], -1), stored, SCALING / large)
    # fp16 holds weights and queries to 11 bits; bf16 weights of full-precision tokens have 8.
    most = {torch.float16: 4e-3, torch.bfloat16: 1e-2}[dtype]
    assert (found - expected).abs().max() < most * expected.abs().max()


@pytest.mark.parametrize(
    ("change", "reason"),
    [((3, 64, 16), "latents of 3 bits"), ((4, 520, 16), "latents of 520 channels"), ((4, 64, 12), "RoPE parts of 12")],
)
def test_what_the_kernel_does_not_serve_is_said(change, reason, device):
    f = format_of(*change)
    assert reason in unsupported(f, torch.float16, device)
