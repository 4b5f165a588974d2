"""Kernels are compiled before the first pass, side by side instead of one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread

import torch

from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.device import compiles
from kvconvert.kernels.launches import begin_to_compile, make_ready, record_specializations
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.vllm.attention import LayerStep, quantize_pending
from kvconvert.vllm.blocks import BlockLayout, LayerBlocks, alike
from kvconvert.vllm.prompts import Packing, divide_prompts
from kvconvert.vllm.step import DecodeTables, plan_step


def rehearse(
    layers: Sequence[LayerBlocks],
    heads: Sequence[tuple[int, Scoring]],
    tables: DecodeTables,
    packing: Packing | None,
) -> None:
    """Launch what passes launch: single tokens, prompts after others and without, and pages of both.

    Nothing but what kernels would write is computed, and only block 0, which vLLM leaves to no request, may change.

    Args:
        layers: of the cache.
        heads: query heads of each, and what becomes of its dot products.
        tables: of decoding steps, written anew before each of these.
        packing: of prompts, if they are packed.
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
