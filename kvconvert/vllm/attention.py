"""Attention of one layer in one forward pass over blocks: attend, then store, then quantize what is complete.

Its kernels are compiled before the first pass, side by side instead of one after another (`prepare`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Thread

import torch

from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.chunked_prefill import PageReader, StoredPart, chunk_attention, stored_parts, unsupported
from kvconvert.kernels.chunked_prefill.parts import Workspace
from kvconvert.kernels.decode import decode_attention, divided_pages, paged_attention, pages_at_once
from kvconvert.kernels.decode.plan import PageTables, PageTile, ResidualTokens, ResidualWindows, SpanTokens
from kvconvert.kernels.device import compiles
from kvconvert.kernels.launches import begin_to_compile, make_ready, record_specializations
from kvconvert.kernels.pages import PAGE_SIZE, PageAddresses
from kvconvert.kernels.rotate import hadamard_transform, rotate_and_append, unsupported_append
from kvconvert.vllm.blocks import BlockLayout, LayerBatch, LayerBlocks, alike
from kvconvert.vllm.prompts import PackedPrompts, Packing, divide_prompts
from kvconvert.vllm.step import DecodeTables, Request, StepPlan, plan_step


def quantize_pending(layers: Iterable[LayerBatch], plan: StepPlan) -> None:
    """Quantize the pages that were complete when the pass before this one ended, in all layers.

    Sink tokens among theirs go where they stay; until then they lie with the others.
    """
    pages = plan.pending
    if pages is None:
        return
    for part in layers:
        tokens = plan.pending_tokens(part.layers[0].layout, pages)
        part.quantize_stored(pages.blocks, tokens.tokens, pages.firsts)
        if tokens.sinks is not None:
            part.copy(*tokens.sinks)


@dataclass(frozen=True)
class LayerStep:
    """One layer in one pass.

    Attributes:
        blocks: of the layer.
        plan: of the pass.
        scoring: the layer's scoring.
        prompts: of the pass, see `divide_prompts`.
        tables: of the requests with one new token, where kernels run.
    """

    blocks: LayerBlocks
    plan: StepPlan
    scoring: Scoring
    prompts: Sequence[tuple[slice, PackedPrompts | Request]]
    tables: DecodeTables | None = None

    def run(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, output: torch.Tensor) -> None:
        """Store the pass's tokens and write the attention of their queries.

        A prompt's chunk attends to itself in full precision and to what was stored before it as it is stored.

        Args:
            queries: [n, Hq, D]; keys: [n, H, D]; values: [n, H, E], after RoPE.
            output: [n, Hq, E].
        """
        count = self.plan.prompts[0].first if self.plan.prompts else len(queries)
        if count:
            self._decode(*(x[:count] for x in (queries, keys, values, output)))
        for part, prompts in self.prompts:
            own = [x[part] for x in (queries, keys, values)]
            if isinstance(prompts, PackedPrompts):
                prompts.attend(self.blocks, *own, self.scoring, output[part])
            else:
                attended = self._prompt(prompts, *(x.transpose(0, 1) for x in self._turned(*own)))
                output[part] = attended.transpose(0, 1)
        if self.blocks.format.rotations.values:
            output.copy_(hadamard_transform(output, inverse=True))

    def _turned(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rotations = self.blocks.format.rotations
        if rotations.keys:
            queries, keys = hadamard_transform(queries), hadamard_transform(keys)
        return queries, keys, hadamard_transform(values) if rotations.values else values

    def _prompt(
        self, request: Request, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attention [Hq, T, E] of a chunk, queries [Hq, T, D], keys [H, T, D] and values [H, T, E]."""
        plan = self.plan
        # The first token that is read in full precision on either side, sink tokens aside.
        begin = min(plan.quantized(request)) * PAGE_SIZE
        stored = self.blocks.read(*plan.places(self.blocks.layout, request, begin, request.stored))
        attended = self._attended(queries, self._history(request, *stored), keys, values)
        every = [torch.cat(side, 1) for side in zip(stored, (keys, values), strict=True)]
        sinks = min(self.blocks.layout.sink_tokens, request.tokens)
        first, end = request.settled
        if sinks and not first:
            self._write(plan.sinks(self.blocks.layout, request, 0, sinks), *(side[:, :sinks] for side in every))
        if first < end:
            firsts = [page * PAGE_SIZE for page in range(first, end)]
            for side, f in zip(every, (self.blocks.format.keys, self.blocks.format.values), strict=True):
                tokens = side[:, first * PAGE_SIZE - begin : end * PAGE_SIZE - begin]
                LayerBatch([self.blocks]).quantize(plan.pages(request, first, end), tokens[None].clone(), firsts, f)
        kept = max(min(self.blocks.layout.quantized(request.tokens - 1)) * PAGE_SIZE, request.stored)
        kept = request.stored if request.drafted else kept
        if kept < request.tokens:
            own = slice(kept - request.stored, None)
            self._write(plan.places(self.blocks.layout, request, kept, request.tokens), keys[:, own], values[:, own])
        return attended

    def _attended(
        self, queries: torch.Tensor, history: list[StoredPart], keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attention [Hq, T, E] of a chunk over what is stored before it and, causally, over itself."""
        format = self.blocks.format
        if unsupported(queries, format, keys.dtype, self.scoring) is None:
            return chunk_attention(queries, history, keys, values, self.scoring)

        def tokens() -> Iterator[ResidualTokens]:
            heads, dim, value_dim = keys.shape[0], keys.shape[2], values.shape[2]
            workspace = Workspace(keys.device, heads, dim, value_dim, torch.float32, None)
            for count in workspace.tiles(history):
                yield ResidualTokens(None, *(side[None, :, :count] for side in (workspace.keys, workspace.values)))
            length = queries.shape[1]
            causal = torch.ones(1, 1, length, length, dtype=torch.bool, device=keys.device).tril()
            yield ResidualTokens(None, keys[None], values[None], causal)

        return paged_attention(queries[None], (), tokens(), format, self.scoring)[0]

    def _write(self, places: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys [H, n, D] and values [H, n, E]."""
        self.blocks.write(*places, keys.transpose(0, 1), values.transpose(0, 1))

    def _history(self, request: Request, keys: torch.Tensor, values: torch.Tensor) -> list[StoredPart]:
        """What is stored before a chunk; keys [H, n, D] and values [H, n, E] are its full-precision tokens."""
        plan, blocks = self.plan, self.blocks
        counts, format = plan.quantized(request), blocks.format
        exact = [
            side[:, (count - min(counts)) * PAGE_SIZE :] for side, count in zip((keys, values), counts, strict=True)
        ]
        sinks = blocks.layout.sink_tokens if max(counts) else 0
        first = blocks.read(*plan.sinks(blocks.layout, request, 0, sinks)) if sinks else None

        def pages(begin: int, end: int) -> list[PageReader | PageAddresses]:
            return [blocks.source(plan.pages(request, begin, end), f) for f in (format.keys, format.values)]

        return stored_parts(counts, pages, exact, format.key_tensors.center, sinks=first)

    def _decode(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, output: torch.Tensor) -> None:
        """Store the tokens of the requests with one, and write their attention [B, Hq, E].

        Args:
            queries: [B, Hq, D]; keys: [B, H, D]; values: [B, H, E], as the model gives them.
            output: for attention in the coordinates in which values are stored.
        """
        plan, blocks, tables = self.plan, self.blocks, self.tables
        format, dtype = blocks.format, blocks.dtype
        if tables is not None:
            where, new = tables.targets(blocks, len(queries)), [x.unsqueeze(2) for x in (queries, keys, values)]
            if unsupported_append(dtype, *new, format.rotations) is not None:
                new = [x.contiguous() for x in new]
            queries = rotate_and_append(*new, blocks.tokens, *where, format.rotations).squeeze(2)
        else:
            queries, keys, values = self._turned(queries, keys, values)
            for number, request in enumerate(plan.decodes):
                token = keys[number].unsqueeze(1), values[number].unsqueeze(1)
                self._write(plan.places(blocks.layout, request, request.stored, request.tokens), *token)
        found = decode_attention(
            queries.unsqueeze(2),
            DecodeTokens(blocks, plan, tables, len(queries)),
            format,
            dtype,
            self.scoring,
            output=output.unsqueeze(2),
        )
        if tables is None:
            output.copy_(found.squeeze(2))


@dataclass(frozen=True)
class DecodeTokens:
    """What the requests with one new token have stored, that token included, for `decode_attention`."""

    blocks: LayerBlocks
    plan: StepPlan
    tables: DecodeTables | None
    rows: int

    def page_tables(self, programs: int) -> PageTables:
        """Where pages lie, with work for about `programs` programs."""
        return self.tables.page_tables(self.blocks, programs, self.rows)

    def residual_windows(self) -> ResidualWindows:
        """The full-precision tokens, gathered."""
        return self.tables.residual_windows(self.blocks, self.rows)

    def page_tiles(self, num_query_heads: int, num_queries: int) -> Iterator[PageTile]:
        """Pages of all rows: first those quantized on both sides, then those quantized on one."""
        plan, format = self.plan, self.blocks.format
        step = pages_at_once(num_query_heads, num_queries, format)
        quantized = [plan.quantized(request) for request in plan.decodes]
        for part in divided_pages([(number, *counts) for number, counts in enumerate(quantized)], step):
            number, page = part[0]
            yield self._tile(part, *(page < count for count in quantized[number]))

    def _tile(self, part: list[tuple[int, int]], key_pages: bool, value_pages: bool) -> PageTile:
        plan, format, device = self.plan, self.blocks.format, self.plan.device
        rows = [plan.decodes[number].row for number, _ in part]
        pages = torch.tensor([page for _, page in part], device=device)
        numbers = plan.block_table[torch.tensor(rows, device=device), self.blocks.layout.first_page + pages].long()
        sides = []
        for index, (is_page, f) in enumerate(((key_pages, format.keys), (value_pages, format.values))):
            if is_page:
                sides.append(self.blocks.pages(numbers, f))
            else:
                exact = [self._exact(*entry)[index] for entry in part]
                sides.append(torch.stack(exact))
        positions = pages * PAGE_SIZE if format.key_tensors.center is not None else None
        at = torch.tensor([number for number, _ in part], device=device)
        sinks = self.blocks.layout.sink_tokens
        hidden = [(i, sinks) for i, (_, page) in enumerate(part) if page == 0 and sinks]
        return PageTile(*sides, at, None, positions, hidden)

    def _exact(self, number: int, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        request = self.plan.decodes[number]
        return self.blocks.read(
            *self.plan.places(self.blocks.layout, request, page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
        )

    def residual_tokens(self) -> Iterator[ResidualTokens]:
        """The full-precision tokens of each row."""
        plan = self.plan
        for number, request in enumerate(plan.decodes):
            begin = max(plan.quantized(request)) * PAGE_SIZE
            sinks = self.blocks.layout.sink_tokens if begin else 0
            parts = [self.blocks.read(*plan.sinks(self.blocks.layout, request, 0, sinks))] if sinks else []
            parts.append(self.blocks.read(*plan.places(self.blocks.layout, request, begin, request.tokens)))
            keys, values = (torch.cat(side, 1)[None] for side in zip(*parts, strict=True))
            yield ResidualTokens(torch.tensor([number], device=plan.device), keys, values)

    def spans(self) -> Iterator[SpanTokens]:
        """None: bundles with spans are refused."""
        return iter(())

    def visibility(self, queries: slice) -> None:
        """Every query sees all of its sequence."""


def rehearse(
    layers: Sequence[LayerBlocks],
    heads: Sequence[tuple[int, Scoring]],
    tables: DecodeTables,
    packing: Packing | None,
) -> None:
    """Launch what passes launch: single tokens, prompts after others and without, and pages of both.

    Nothing but what kernels would write is computed, and only block 0, which vLLM leaves to no request, may change.

    Args:
        layers: the cache's layers.
        heads: query heads of each, and what becomes of its dot products.
        tables: the tables of decoding steps, written anew before each step.
        packing: how prompts are packed; None if they are not.
    """
    first = layers[0]
    layout, device, dtype = first.layout, first.words.device, first.dtype
    windows = layout.key_window, layout.value_window
    long = 2 * PAGE_SIZE + max(windows)
    block_table = torch.zeros(2, layout.blocks_for(4 * long), dtype=torch.int32, device=device)
    # Layers that are alike launch the same.
    kinds = {}
    for blocks, (count, scoring) in zip(layers, heads, strict=True):
        f, own = blocks.format, (count, scoring.softcap, scoring.sink_logits is None)
        kinds[f.kind, blocks.geometry, own] = blocks, count, scoring
    # Requests with a page to quantize, and one that is read as it is quantized on either side, as many at a time as
    # there are rows for.
    each = min(2, tables.rows)
    ends = [-(-window // PAGE_SIZE) * PAGE_SIZE for window in windows]
    stored = [PAGE_SIZE + end + 1 for end in (ends if each == 2 else sorted(set(ends)))]
    singles = [(list(range(each + 1)), stored[at : at + each], each) for at in range(0, len(stored), each)]
    if any(blocks.format.key_tensors.center is not None for blocks in layers):
        # What centers add to the scores is computed for a power of two of requests.
        singles += [(*singles[0][:2], 1 << power) for power in range(tables.rows.bit_length() + 1)]
    prompts = [0, long, 2 * long], [2 * long + PAGE_SIZE // 2, long], 2 * long
    for starts, lengths, count in (*singles, prompts):
        plan = plan_step(layout, starts, lengths, block_table)
        quantize_pending(alike(layers), plan)
        decodes = plan.decodes
        tables.write(block_table, [r.row for r in decodes], [r.tokens for r in decodes])
        parts = divide_prompts(plan, packing)
        for blocks, query_heads, scoring in kinds.values():
            f = blocks.format
            sizes = (query_heads, f.keys.head_dim), (f.keys.heads, f.keys.head_dim), (f.values.heads, f.values.head_dim)
            tokens = [torch.zeros(count, *size, dtype=dtype, device=device) for size in sizes]
            output = tokens[0].new_empty(count, query_heads, f.values.head_dim)
            LayerStep(blocks, plan, scoring, parts, tables).run(*tokens, output)
        if packing is not None:
            packing.workspace.finish()


def stand_ins(layouts: Sequence[BlockLayout], count: int, device: torch.device) -> list[torch.Tensor]:
    """Memory for `count` blocks of these layers, uint8 [count, bytes] each; side by side where slots are shared."""
    if not any(layout.is_shared for layout in layouts):
        return [torch.empty(count, layout.block_bytes, dtype=torch.uint8, device=device) for layout in layouts]
    sizes = [layout.block_bytes for layout in layouts]
    return list(torch.empty(count, sum(sizes), dtype=torch.uint8, device=device).split(sizes, 1))


# Blocks of a layer that stand in for the cache's: more than the requests of a rehearsal have pages.
STAND_INS = 64
# Compilations that `begin` has begun.
_begun: list[Thread] = []


def begin(device: torch.device, *rehearsals: Callable[[], None]) -> None:
    """Begin to compile what these launch, beside what vLLM does next; nothing is launched."""
    with record_specializations() as launches:
        for rehearsal in rehearsals:
            rehearsal()
    if compiles(device):
        _begun.append(begin_to_compile(launches, device))


def prepare(device: torch.device, *rehearsals: Callable[[], None]) -> None:
    """Compile what these launch, and bring it to the device; nothing is launched."""
    while _begun:
        _begun.pop().join()
    with record_specializations() as launches:
        for rehearsal in rehearsals:
            rehearsal()
    if compiles(device):
        make_ready(launches, device)
