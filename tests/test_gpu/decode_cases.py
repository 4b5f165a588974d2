"""Random stored tokens for the decode kernel, and the float64 attention that it has to agree with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvconvert.kernels.attention import Scoring, attention_reference
from kvconvert.kernels.decode import PageTables, ResidualWindows, Visibility
from kvconvert.kernels.decode.plan import Segment, SequencePlan, plan_work
from kvconvert.kernels.decode.triton.launch import decode_attention
from kvconvert.kernels.pages import (
    PAGE_SIZE,
    ChannelScales,
    KeyCenter,
    LayerFormat,
    PageFormat,
    SideTensors,
    dequantize_pages,
    new_pages,
    page_centers,
    quantize_pages,
)
from kvconvert.kernels.pages.center import rope_matrix


@dataclass(frozen=True)
class Case:
    """One layer, and the pages, half-quantized pages and residual tokens of each sequence.

    `hides`: sink tokens take the places of the first page's first tokens, as in a sequence's first page.

    `center` is the length of what key pages leave out, 0 where they hold whole keys; `position` of the first page's
    first token in the first sequence.
    """

    heads: int = 2
    group: int = 4
    key_dim: int = 128
    value_dim: int = 128
    key_bits: int = 2
    value_bits: int = 2
    key_group: int = 128
    value_group: int = 128
    norm: str = "none"
    boosted: int = 0
    fixed_channels: bool = False
    static: bool = False
    dtype: torch.dtype = torch.float32
    pages: tuple[int, ...] = (2, 0, 1)
    residual: tuple[int, ...] = (40, 17, 0)
    half_quantized: int = 0
    half_quantized_pages: tuple[int, ...] = (0, 0, 0)
    sink_tokens: int = 4
    queries: int = 1
    masked: bool = False
    softcap: float | None = None
    sink_logits: bool = False
    programs: int = 3
    scaling: float = 0.11
    hides: bool = False
    center: float = 0.0
    position: int = 4
    scale_bits: int = 16

    def __str__(self) -> str:
        default = Case()
        return ",".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k)).replace("torch.", "")


class Stored:
    """Pages, half_quantized-quantized pages and residual windows of a case, with what they dequantize to."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0):
        self.case, self.device = case, device
        generator = torch.Generator().manual_seed(seed)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        c = case
        keys = PageFormat.keys(
            c.heads, c.key_dim, PAGE_SIZE, c.key_bits, PAGE_SIZE if c.static else c.key_group, c.norm,
            boosted=c.boosted, fixed_channels=c.fixed_channels, static=c.static and c.key_bits < 16,
            scale_bits=c.scale_bits,
        )  # fmt: skip
        values = PageFormat.values(
            c.heads, c.value_dim, PAGE_SIZE, c.value_bits, c.value_dim if c.static else c.value_group,
            static=c.static and c.value_bits < 16, scale_bits=c.scale_bits,
        )  # fmt: skip
        channels = None
        if c.boosted and c.fixed_channels:
            channels = torch.stack(
                [torch.randperm(c.key_dim, generator=generator)[: c.boosted].sort().values for _ in range(c.heads)]
            )
        scales = [None, None]
        if c.static:
            for side, dim in enumerate((c.key_dim, c.value_dim)):
                scales[side] = ChannelScales(
                    (random(c.heads, dim).abs() * 0.1 + 0.3).half(), (random(c.heads, dim) * 0.2 - 2).half()
                )
        center = random_center(c, generator) if c.center else None
        key_tensors = SideTensors(channels, scales[0], center=center)
        windows = {"key_window": c.half_quantized // 2, "value_window": c.half_quantized % 2}
        self.format = LayerFormat(
            keys, values, key_tensors, SideTensors(static=scales[1]), sink_tokens=int(c.hides), **windows
        )
        key_rows = []
        offset = random(1, c.heads, 1, c.key_dim) * 2  # keys have channels far from zero, as in real models
        self.sequences = []
        self.hidden: list[int] = []
        key_pages, value_pages = [], []
        self.rows = torch.zeros(len(c.pages), 8, dtype=torch.int64)
        plans, self.buffers = [], []
        for row, (pages, half_quantized, residual) in enumerate(
            zip(c.pages, c.half_quantized_pages, c.residual, strict=True)
        ):
            k = (random(pages + half_quantized, c.heads, PAGE_SIZE, c.key_dim) + offset).to(c.dtype)
            v = random(pages + half_quantized, c.heads, PAGE_SIZE, c.value_dim).to(c.dtype)
            sink_tokens = min(c.sink_tokens, residual)
            tk, tv = (
                (random(c.heads, residual, c.key_dim) + offset[0]).to(c.dtype),
                random(c.heads, residual, c.value_dim).to(c.dtype),
            )
            key_count = pages + (half_quantized if c.half_quantized == 1 else 0)
            value_count = pages + (half_quantized if c.half_quantized == 2 else 0)
            plans.append((pages, half_quantized, residual, len(key_pages)))
            qk, qv = quantize_pages(k, *self.format.side(True)), quantize_pages(v, *self.format.side(False))
            dk = dequantize_pages(qk, self.format.key_tensors)
            dv = dequantize_pages(qv, self.format.value_tensors)
            dk[key_count:], dv[value_count:] = k[key_count:].float(), v[value_count:].float()
            first = c.position + 1000 * row
            key_rows.append([len(key_pages), key_count, first])
            if center is not None and key_count:
                dk[:key_count] += page_centers(first + PAGE_SIZE * torch.arange(key_count), PAGE_SIZE, center)
            # Both tables have an entry for every half-quantized page; the side in full precision has no page.
            key_pages += [qk.select(slice(i, i + 1)) if i < key_count else None for i in range(pages + half_quantized)]
            value_pages += [
                qv.select(slice(i, i + 1)) if i < value_count else None for i in range(pages + half_quantized)
            ]
            buffers = []
            for side, (paged, tokens, full) in enumerate(((key_count, tk, k), (value_count, tv, v))):
                rest = full[paged:].transpose(0, 1).reshape(c.heads, -1, full.shape[-1])
                if c.hides and not paged:
                    rest = rest[:, sink_tokens:]
                joined = torch.cat([tokens[:, :sink_tokens], rest, tokens[:, sink_tokens:]], 1)
                capacity = joined.shape[1] + 3 * row + 1
                buffer = torch.full((c.heads, capacity, full.shape[-1]), float("nan"), dtype=c.dtype)
                buffer[:, : joined.shape[1]] = joined
                buffers.append(buffer.to(device))
                self.rows[row, 5 + side] = rest.shape[1]
            self.buffers.append(buffers)
            self.rows[row, 4], self.rows[row, 7] = sink_tokens, residual
            flat = [x.transpose(0, 1).reshape(c.heads, -1, x.shape[-1]) for x in (dk, dv)]
            self.hidden.append(sink_tokens if c.hides and len(dk) else 0)
            self.sequences.append((torch.cat([flat[0], tk.float()], 1), torch.cat([flat[1], tv.float()], 1)))
        self.key_rows = torch.tensor(key_rows, device=device)
        self.base = torch.zeros(8, dtype=c.dtype, device=device)
        for row, buffers in enumerate(self.buffers):
            for side, buffer in enumerate(buffers):
                self.rows[row, 2 * side] = (buffer.data_ptr() - self.base.data_ptr()) // (8 * buffer.element_size())
                self.rows[row, 2 * side + 1] = buffer.stride(0) // 8
        self.key_pool, self.keys = self._pool(key_pages, keys)
        self.value_pool, self.values = self._pool(value_pages, values)
        sequences = []
        for (pages, half_quantized, residual, first), hidden in zip(plans, self.hidden, strict=True):
            segments = (Segment(first, first + pages, pages * PAGE_SIZE, hidden=hidden),) if pages else ()
            tokens = pages * PAGE_SIZE
            sequences.append(
                SequencePlan(
                    segments,
                    residual,
                    half_quantized,
                    first + pages,
                    tokens,
                    tokens + half_quantized * PAGE_SIZE,
                    0 if pages else hidden,
                )
            )
        self.plan = plan_work(sequences, c.programs)

    def _pool(self, pages, f):
        """Pages in a shuffled order, so that the tables matter."""
        count = len(pages)
        room = new_pages(count + 1, f, self.case.dtype, self.device)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
        for page, place in zip(pages, order, strict=True):
            if page is None:
                continue
            for name, tensor in page.tensors():
                getattr(room, name)[place] = tensor[0].to(self.device)
        record = room.codes if f.bits == 16 else room.record
        step = record.stride(0) * record.element_size()
        assert step % 16 == 0
        return record, torch.tensor([place * step // 16 for place in order] + [0], device=self.device)

    def tables(self) -> PageTables:
        shared = None
        f = self.format
        if self.case.static:
            scales = []
            for base, tensors in ((self.key_pool, f.key_tensors), (self.value_pool, f.value_tensors)):
                for tensor in tensors.static:
                    own = tensor.to(self.device).contiguous()
                    self.buffers.append([own])
                    scales.append((own.data_ptr() - base.data_ptr()) // 16)
            shared = torch.tensor([scales], device=self.device)
        boosted = None if f.key_tensors.boosted is None else f.key_tensors.boosted.to(self.device, torch.int32)
        plan = self.plan.to(self.device)
        found = PageTables(self.key_pool, self.value_pool, self.keys, self.values, plan, shared, boosted)
        if f.key_tensors.center is None:
            return found
        parts = [part.to(self.device) for part in (f.key_tensors.center.matrix, f.key_tensors.center.frequencies)]
        return replace(found, center=KeyCenter(*parts), key_rows=self.key_rows)


def random_center(case: Case, generator: torch.Generator) -> KeyCenter:
    """A random constant part with RoPE's usual frequencies, in pairs of channels that are half a head apart."""
    half = torch.arange(case.key_dim // 2)
    mean = torch.randn(case.heads, case.key_dim, generator=generator)
    mean *= case.center / mean.norm(dim=1, keepdim=True)
    frequencies = 10_000.0 ** (-half / len(half))
    matrix = rope_matrix(mean, frequencies, torch.stack([half, half + len(half)], 1))
    return KeyCenter(matrix.half(), frequencies)


def compare(case: Case, device: torch.device, seed: int = 0) -> tuple[float, torch.Tensor]:
    """Largest error of a case relative to the outputs' RMS, and the output."""
    stored = Stored(case, device, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    batch, query_heads = len(case.pages), case.heads * case.group
    queries = torch.randn(batch, query_heads, case.queries, case.key_dim, generator=generator).to(case.dtype)
    sink_logits = torch.randn(query_heads, generator=generator) if case.sink_logits else None
    visibility, visible = None, None
    if case.masked:
        most = max(k.shape[1] for k, _ in stored.sequences)
        visible = torch.rand(batch, case.queries, most + 5, generator=generator) > 0.3
        mask = visible.to(device, torch.uint8).contiguous()
        visibility = Visibility(mask, mask.stride(0), 0, mask.stride(1))
    scoring = Scoring(case.scaling, case.softcap, None if sink_logits is None else sink_logits.to(device))
    windows = ResidualWindows(stored.base, stored.rows.to(device))
    out = decode_attention(queries.to(device), stored.tables(), windows, stored.format, scoring, visibility=visibility)
    worst = 0.0
    for row, (keys, values) in enumerate(stored.sequences):
        seen = torch.ones(case.queries, keys.shape[1], dtype=torch.bool)
        if visible is not None:
            seen = visible[row, :, : keys.shape[1]].clone()
        seen[:, : stored.hidden[row]] = False
        want = attention_reference(queries[row], keys, values, seen, case.scaling, case.softcap, sink_logits).output
        got = out[row].double().cpu()
        assert got.isfinite().all()
        if keys.shape[1]:
            worst = max(worst, float((got - want).abs().max() / want.square().mean().sqrt().clamp(min=1e-9)))
        else:
            assert not got.any()
    return worst, out
