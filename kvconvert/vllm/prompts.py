"""Chunks of several prompts in one pass on a GPU: planned once for all layers, few launches in each.

Everything that the prompts have stored comes to lie in a workspace, their new tokens behind it (`kernels/ragged`). From
there pages that are complete are quantized into their blocks, and the tokens that stay in full precision are copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.blocks import BlockGeometry, copy_tokens
from kvconvert.kernels.device import upload
from kvconvert.kernels.pages import PAGE_SIZE, PageAddresses, PageFormat, quantize_listed
from kvconvert.kernels.ragged import RaggedTables, TokensInBlocks, append, attend, fill_workspace
from kvconvert.kernels.ragged.tables import (
    PackedSequences,
    flattened,
    listed_centers,
    listed_pages,
    ranges,
    unflattened,
)
from kvconvert.vllm.blocks import BlockLayout, LayerBlocks
from kvconvert.vllm.step import Request, StepPlan

# Room for the keys and values of the prompts of a pass in one layer: 131,072 tokens of 8 KV heads of 128 channels.
WORKSPACE_BYTES = 512 << 20
BOTH_SIDES = 3
# Tables of `RaggedTables` that are the same in all layers.
PLANNED = "buffers", "tokens", "key_places", "value_places", "center_pages", "centers", "tiles"


# Writes the causal attention of several sequences side by side, each sequence's queries being of its last tokens:
# queries [N, Hq, D], keys [W, H, D], values [W, H, E] (channels side by side); where the queries and keys of each end,
# int32 [S + 1] on the device from 0 on; the most queries and keys of a sequence; the factor of the dot products; and
# the output [N, Hq, E].
Flash = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, Tensor], None]


class Packing:
    """What prompts are packed with, made once.

    Args:
        like: a layer's blocks; all layers have its heads and dtype, and `kernels/ragged` serves all.
        flash: attends instead of our kernel, if given.
        memory: for the keys and values of one layer, any dtype.

    Attributes:
        tokens: that the workspace has room for.
    """

    def __init__(self, like: LayerBlocks, flash: Flash | None, memory: torch.Tensor):
        f = like.format
        self.flash, self.sides = flash, ((f.keys.heads, f.keys.head_dim), (f.values.heads, f.values.head_dim))
        # Whole pages, so that no size of a pass gives kernels a number of another kind.
        self.tokens = memory.nbytes // like.layout.token_bytes // PAGE_SIZE * PAGE_SIZE
        sizes = [heads * self.tokens * dim for heads, dim in self.sides]
        self.memory = memory.view(like.dtype)[: sum(sizes)]
        parts = zip(self.memory.split(sizes), self.sides, strict=True)
        self.keys, self.values = (part.view(heads, self.tokens, dim) for part, (heads, dim) in parts)


def divide_prompts(plan: StepPlan, packing: Packing | None) -> list[tuple[slice, PackedPrompts | Request]]:
    """A pass's prompts, packed where kernels run; those for which the workspace has no room one by one.

    Args:
        plan: of the pass.
        packing: None where `kernels/ragged` does not serve all layers.

    Returns:
        of each part its tokens in the pass.
    """
    parts: list[list[Request]] = []
    most = room = 0 if packing is None else packing.tokens
    for request in plan.prompts:
        if not parts or request.tokens > room or parts[-1][-1].continues:
            parts.append([])
            room = most
        parts[-1].append(request)
        room -= request.tokens
    found: list[tuple[slice, PackedPrompts | Request]] = []
    for part in parts:
        tokens = slice(part[0].first, part[-1].first + part[-1].length)
        fits = packing is not None and sum(request.tokens for request in part) <= most
        found.append((tokens, PackedPrompts(plan, part, packing) if fits else part[0]))
    return found


class PackedPrompts:
    """Consecutive prompts of a pass.

    Args:
        plan: of the pass.
        requests: which of its prompts.
        packing: whose workspace each layer fills anew.
    """

    def __init__(self, plan: StepPlan, requests: Sequence[Request], packing: Packing):
        self.layout, self.packing = plan.layout, packing
        names = "row", "stored", "length", "drafted", "recent"
        fields = (np.array([getattr(request, name) for request in requests]) for name in names)
        self.rows, self.stored, self.lengths, self._drafted, recent = fields
        self._settles = np.array([request.settled for request in requests]).T
        totals = self.stored + self.lengths
        keys, values = plan.layout.quantized_pages(self.stored, recent)
        firsts, begins = np.cumsum(self.lengths) - self.lengths, np.cumsum(totals) - totals
        zeros = np.zeros_like(totals)
        self.packed = PackedSequences(firsts, self.lengths, totals, begins, keys, values, zeros)
        self.block_table = plan.block_table
        self._write(plan)
        self._of_geometry: dict[BlockGeometry, list[torch.Tensor]] = {}
        self._listed: dict[tuple[BlockGeometry, bool, int], torch.Tensor] = {}

    def _write(self, plan: StepPlan) -> None:
        """Upload what does not depend on the layer."""
        layout, packed, capacity = self.layout, self.packed, self.packing.tokens
        (heads, dim), (_, value_dim) = self.packing.sides
        totals, keys, values, zeros = packed.totals, packed.keys, packed.values, packed.positions
        any_page = np.maximum(keys, values) > 0
        # Of keys and of values: pages before the pass, full-precision tokens before it, and what comes to be stored.
        history = [ranges(zeros, count) for count in (keys, values)]
        sinks = ranges(zeros, np.where(any_page, layout.sink_tokens, 0))
        owner, position = ranges(np.minimum(keys, values) * PAGE_SIZE, self.stored)
        side = (position >= keys[owner] * PAGE_SIZE) + 2 * (position >= values[owner] * PAGE_SIZE)
        settled = ranges(*self._settles)
        new_sinks = ranges(zeros, np.where(self._settles[0], 0, np.minimum(layout.sink_tokens, totals)))
        recent_from = np.minimum(*layout.quantized_pages(totals - 1, np.ones_like(totals)))
        kept_from = np.where(self._drafted, 0, recent_from * PAGE_SIZE)
        kept = ranges(np.maximum(kept_from, self.stored), totals)

        # Of both the tokens in blocks before the pass and those after it: sink tokens first.
        self._found = [self._pages(*pages) for pages in (*history, settled, settled)]
        self._tokens = ((*sinks, True), (owner, position, False)), ((*new_sinks, True), (*kept, False))
        full = [np.full(len(part[0]), BOTH_SIDES) for part in (sinks, new_sinks, kept)]
        places = [packed.begins[who] + where for who, where, _ in itertools.chain(*self._tokens)]
        # A sequence's part of the workspace is its buffer.
        whole = np.array([0, capacity * dim, heads * capacity * dim, capacity * value_dim])
        lines = packed.lines(capacity, dim) | {
            "buffers": whole + np.outer(packed.begins, [dim, 0, value_dim, 0]),
            "tokens": packed.new_tokens(int(self.lengths.sum()), self.stored, self.stored),
            "places": np.column_stack([np.concatenate(places), np.concatenate([full[0], side, *full[1:]])]),
            "settled_keys": self._listed_pages(settled, dim),
            "settled_values": self._listed_pages(settled, value_dim),
            "settled_centers": listed_centers(settled[1] * PAGE_SIZE),
            "ends": np.cumsum(np.pad([self.lengths, totals], ((0, 0), (1, 0))), 1),
        }
        flat = upload(flattened(lines), plan.device)
        self._on_device = unflattened(flat, {name: line.shape for name, line in lines.items()})
        self._ends = self._on_device["ends"].int().unbind()
        self._most, self._all = (int(self.lengths.max()), int(totals.max())), int(totals.sum())

    def _listed_pages(self, pages: tuple[np.ndarray, np.ndarray], dim: int) -> np.ndarray:
        hidden = np.where(pages[1], 0, self.layout.sink_tokens)
        return listed_pages(self.packed.places(*pages), self.packing.tokens, dim, hidden)

    def _pages(self, owner: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Of pages their rows of the block table, entries there, and 0: [3, n]."""
        return np.stack([self.rows[owner], self.layout.first_page + number, np.zeros_like(number)])

    def _in_blocks(self, layout: BlockLayout, owner: np.ndarray, position: np.ndarray, sinks: bool) -> np.ndarray:
        """Of full-precision tokens rows, entries, and slots within blocks of a layout: [3, n]."""
        places = (layout.sinks if sinks else layout.places)(torch.from_numpy(position))
        return np.stack([self.rows[owner], *(part.numpy() for part in places)])

    def attend(
        self,
        blocks: LayerBlocks,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scoring: Scoring,
        output: torch.Tensor,
    ) -> None:
        """Store a layer's new tokens, with what they complete, and attend.

        Args:
            blocks: of the layer.
            queries: [N, Hq, D]; keys: [N, H, D]; values: [N, H, E], of the prompts alone, as the model gives them.
            scoring: the layer's scoring.
            output: [N, Hq, E], for attention in the coordinates in which values are stored.
        """
        device, f, records = self._on_device, blocks.format, self._records(blocks)
        shared = blocks.static_scales
        scales = (None, None) if shared is None else (shared[0, :2], shared[0, 2:])
        places = device["places"].split([len(records[4]), len(records[5])])
        packing = self.packing
        tables = RaggedTables(
            base=packing.memory,
            key_pages=PageAddresses(f.keys, blocks.words, records[0], scales[0], f.key_tensors.boosted),
            value_pages=PageAddresses(f.values, blocks.words, records[1], scales[1]),
            copies=TokensInBlocks(blocks.tokens, records[4], places[0]),
            capacity=packing.tokens,
            **{name: device[name] for name in PLANNED},
        )
        turned = append(*(x.transpose(0, 1) for x in (queries, keys, values)), tables, f, f.rotations)
        workspace = packing.keys, packing.values
        if packing.flash is None or scoring.softcap or scoring.sink_logits is not None:
            attend(turned, tables, f, scoring, workspace=workspace, output=output)
        else:
            fill_workspace(tables, f, *workspace)
            # Behind them is what was never written.
            written = (side[:, : self._all].transpose(0, 1) for side in workspace)
            packing.flash(turned.transpose(0, 1), *written, *self._ends, *self._most, scoring.scaling, output)
        copy_tokens(records[5], places[1], blocks.tokens, *workspace, to_blocks=True)
        self._quantize(blocks, f.keys, packing.keys)
        self._quantize(blocks, f.values, packing.values)

    def _quantize(self, blocks: LayerBlocks, f: PageFormat, tokens: torch.Tensor) -> None:
        """Quantize one side of what the pass has completed, from the workspace, whose tokens may change."""
        words = blocks.words if f.bits < 16 else blocks.words.view(blocks.dtype)
        table = self._settled(blocks, f.is_key, words.itemsize)
        if len(table):
            centers = self._on_device["settled_centers"]
            tensors = blocks.format.side(f.is_key)[1]
            quantize_listed(tokens, table, words, f, blocks.flag, centers=centers, tensors=tensors)

    def _records(self, blocks: LayerBlocks) -> list[torch.Tensor]:
        """Offsets in units of 16 bytes from a layer's blocks: pages of keys and of values before the pass, those that
        it completes, full-precision tokens before it, and those after it.
        """
        known = self._of_geometry.get(blocks.geometry)
        if known is None:
            g, tokens = blocks.geometry, [[self._in_blocks(blocks.layout, *some) for some in t] for t in self._tokens]
            listed = [*self._found, *(np.concatenate(part, 1) for part in tokens)]
            # What a kernel is given begins at a multiple of 16 bytes, on which it is specialized.
            found = np.concatenate([np.pad(part, ((0, 0), (0, part.shape[1] % 2))) for part in listed], 1)
            # A rehearsed length may need more entries than there are.
            found[1] = np.minimum(found[1], self.block_table.shape[1] - 1)
            rows, entries, slots = upload(found, self.block_table.device)
            every = torch.add(self.block_table[rows, entries].long() * g.block_units, slots, alpha=g.token_units)
            parts = every.split([part.shape[1] + part.shape[1] % 2 for part in listed])
            # Values lie behind keys.
            parts[1].add_(g.key_units)
            parts[3].add_(g.key_units)
            known = [part[: line.shape[1]] for part, line in zip(parts, listed, strict=True)]
            self._of_geometry[g] = known
        return known

    def _settled(self, blocks: LayerBlocks, is_key: bool, itemsize: int) -> torch.Tensor:
        """The pages of one side that the pass completes, as `quantize_listed` takes them."""
        key = blocks.geometry, is_key, itemsize
        if key not in self._listed:
            table = self._on_device["settled_keys" if is_key else "settled_values"].clone()
            table[:, 2] = self._records(blocks)[2 if is_key else 3] * (16 // itemsize)
            self._listed[key] = table
        return self._listed[key]
