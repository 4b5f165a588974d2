"""Chunks of several prompts in one pass on a GPU: planned once for all layers, few launches in each.

Everything that the prompts have stored comes to lie in a workspace, their new tokens behind it (`kernels/ragged`). From
there pages that are complete are quantized into their blocks, and the tokens that stay in full precision are copied,
of as many layers at once as the workspace has room for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.blocks import BlockGeometry, copy_tokens
from kvconvert.kernels.device import upload
from kvconvert.kernels.pages import PAGE_SIZE, PageAddresses, quantize_listed, tables_of
from kvconvert.kernels.ragged import RaggedTables, TokensInBlocks, append, attend, fill_workspace
from kvconvert.kernels.ragged.tables import (
    PackedSequences,
    flattened,
    listed_pages,
    ranges,
    unflattened,
)
from kvconvert.vllm.blocks import BlockLayout, LayerBlocks
from kvconvert.vllm.step import Request, StepPlan

# Room for the keys and values of the prompts of a pass in one layer: 131,072 tokens of 8 KV heads of 128 channels.
WORKSPACE_BYTES = 512 << 20
# Layers that have their own part of it at most.
MOST_LAYERS = 32
BOTH_SIDES = 3
# Tables of `RaggedTables` that are the same in all layers.
PLANNED = "tokens", "key_places", "value_places", "center_pages", "centers", "tiles"


# Writes the causal attention of several sequences side by side, each sequence's queries being of its last tokens:
# queries [N, Hq, D], keys [W, H, D], values [W, H, E] (channels side by side); where the queries and keys of each end,
# int32 [S + 1] on the device from 0 on; the most queries and keys of a sequence; the factor of the dot products; and
# the output [N, Hq, E].
Flash = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, Tensor], None]


class Workspace:
    """Memory of any dtype that prompts use one after another, and what the newest of them still have to store from it.

    That is finished before the memory is used anew, and before the next pass is planned.
    """

    def __init__(self, memory: torch.Tensor):
        self.memory = memory
        self._user: PackedPrompts | None = None

    def take(self, user: PackedPrompts) -> None:
        """Let `user` have it, who may have had it before."""
        if self._user is not user:
            self.finish()
            self._user = user

    def finish(self) -> None:
        """Store what is still to be stored."""
        if self._user is not None:
            self._user.finish()
            self._user = None


class Packing:
    """What prompts are packed with, made once.

    Args:
        like: a layer's blocks; all layers have its heads and dtype, and `kernels/ragged` serves all.
        flash: attends instead of our kernel, if given.
        workspace: for keys and values.

    Attributes:
        tokens: that the workspace has room for, those of all layers that use it at a time together.
    """

    def __init__(self, like: LayerBlocks, flash: Flash | None, workspace: Workspace):
        f, memory, self.workspace = like.format, workspace.memory, workspace
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
        packing: of whose workspace each layer fills a part, until there is no room for another.
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
        # What a layer takes of the workspace, in whole pages, so that every part begins at a multiple of 16 bytes.
        self._room = -(-int(totals.sum()) // PAGE_SIZE) * PAGE_SIZE
        self._at_once = min(MOST_LAYERS, packing.tokens // self._room)
        self._waiting: list[LayerBlocks] = []
        self._continues = requests[-1].continues
        self._write(plan)
        self._of_geometry: dict[BlockGeometry, list[torch.Tensor]] = {}

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
        # A sequence's part of a layer's part of the workspace is its buffer.
        begins = np.arange(self._at_once)[:, None] * self._room + packed.begins
        whole = np.array([0, capacity * dim, heads * capacity * dim, capacity * value_dim])
        lines = packed.lines(capacity, dim) | {
            "buffers": whole + np.multiply.outer(begins, [dim, 0, value_dim, 0]),
            "tokens": packed.new_tokens(int(self.lengths.sum()), self.stored, self.stored),
            "places": np.column_stack([np.concatenate(places), np.concatenate([full[0], side, *full[1:]])]),
            "settled_keys": self._listed_pages(settled, dim),
            "settled_values": self._listed_pages(settled, value_dim),
            "ends": np.cumsum([[0, *self.lengths], [0, *totals]], 1),
        }
        flat = upload(flattened(lines), plan.device)
        self._on_device = unflattened(flat, {name: line.shape for name, line in lines.items()})
        self._places = self._on_device["places"].split([len(sinks[0]) + len(owner), len(new_sinks[0]) + len(kept[0])])
        self._ends = self._on_device["ends"].int().unbind()
        self._most, self._all = (int(self.lengths.max()), int(totals.max())), int(totals.sum())
        self._settled_positions = settled[1] * PAGE_SIZE

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
        packing, waiting = self.packing, self._waiting
        packing.workspace.take(self)
        if len(waiting) == self._at_once:
            self.finish()
        device, f, records = self._on_device, blocks.format, self._records(blocks)
        shared, begin = blocks.static_scales, len(waiting) * self._room
        scales = (None, None) if shared is None else (shared[0, :2], shared[0, 2:])
        workspace = packing.keys[:, begin:], packing.values[:, begin:]
        tables = RaggedTables(
            base=packing.memory,
            buffers=device["buffers"][len(waiting)],
            key_pages=PageAddresses(f.keys, blocks.words, records[0], scales[0], f.key_tensors.boosted),
            value_pages=PageAddresses(f.values, blocks.words, records[1], scales[1]),
            copies=TokensInBlocks(blocks.tokens, records[4], self._places[0]),
            capacity=packing.tokens,
            **{name: device[name] for name in PLANNED},
        )
        turned = append(*(x.transpose(0, 1) for x in (queries, keys, values)), tables, f, f.rotations)
        if packing.flash is None or scoring.softcap or scoring.sink_logits is not None:
            attend(turned, tables, f, scoring, workspace=workspace, output=output)
        else:
            fill_workspace(tables, f, *workspace)
            # Behind them is what was never written.
            written = (side[:, : self._all].transpose(0, 1) for side in workspace)
            packing.flash(turned.transpose(0, 1), *written, *self._ends, *self._most, scoring.scaling, output)
        waiting.append(blocks)
        if self._continues:
            # What comes next of the sequence reads what these tokens complete.
            self.finish()

    def finish(self) -> None:
        """Store what the layers that have attended leave in the workspace."""
        groups: dict[Hashable, list[int]] = {}
        for number, blocks in enumerate(self._waiting):
            own = None if blocks.format.shares_launches else number
            groups.setdefault((blocks.format.kind, blocks.geometry, own), []).append(number)
        for numbers in groups.values():
            self._store([self._waiting[number] for number in numbers], np.array(numbers) * self._room)
        self._waiting.clear()

    def _store(self, layers: list[LayerBlocks], begins: np.ndarray) -> None:
        """Store tokens and pages of layers that are alike, given where their parts of the workspace begin."""
        first, records, packing = layers[0], self._records(layers[0]), self.packing
        apart = [[(blocks.words.data_ptr() - first.words.data_ptr()) // 16 for blocks in layers]]
        apart += [[(blocks.tokens.data_ptr() - first.tokens.data_ptr()) // 16 for blocks in layers]]
        offsets = upload(np.stack([begins, *apart]), self.block_table.device)
        begin, words_apart, tokens_apart = offsets[:, :, None]
        places = self._places[1].repeat(len(layers), 1, 1)
        places[:, :, 0] += begin
        every = (records[5] + tokens_apart).flatten()
        workspace = packing.keys, packing.values
        copy_tokens(every, places.flatten(0, 1), first.tokens, *workspace, to_blocks=True)
        if not len(self._settled_positions):
            return
        for f, tokens, where in zip((first.format.keys, first.format.values), workspace, records[2:4], strict=True):
            words = first.words if f.bits < 16 else first.words.view(first.dtype)
            table = self._on_device["settled_keys" if f.is_key else "settled_values"].repeat(len(layers), 1, 1)
            table[:, :, 0] += begin * f.head_dim
            table[:, :, 2] = (where + words_apart) * (16 // words.itemsize)
            tensors = [blocks.format.side(f.is_key)[1] for blocks in layers]
            more = tables_of(tensors, self._settled_positions, tokens.device)
            quantize_listed(tokens, table.flatten(0, 1), words, f, first.flag, tensors=tensors[0], **more)

    def _records(self, blocks: LayerBlocks) -> list[torch.Tensor]:
        """Offsets in units of 16 bytes from a layer's blocks: pages of keys and of values before the pass, those that
        it completes, full-precision tokens before it, and those after it.
        """
        known = self._of_geometry.get(blocks.geometry)
        if known is None:
            g, tokens = blocks.geometry, [[self._in_blocks(blocks.layout, *some) for some in t] for t in self._tokens]
            listed = [*self._found, *(np.concatenate(part, 1) for part in tokens)]
            # What a kernel is given begins at a multiple of 16 bytes, on which it is specialized.
            sizes = [part.shape[1] + part.shape[1] % 2 for part in listed]
            found = np.zeros((3, sum(sizes)), np.int64)
            for part, end, size in zip(listed, itertools.accumulate(sizes), sizes, strict=True):
                found[:, end - size : end - size + part.shape[1]] = part
            # A rehearsed length may need more entries than there are.
            found[1] = np.minimum(found[1], self.block_table.shape[1] - 1)
            rows, entries, slots = upload(found, self.block_table.device)
            every = torch.add(self.block_table[rows, entries].long() * g.block_units, slots, alpha=g.token_units)
            parts = every.split(sizes)
            # Values lie behind keys.
            parts[1].add_(g.key_units)
            parts[3].add_(g.key_units)
            known = [part[: line.shape[1]] for part, line in zip(parts, listed, strict=True)]
            self._of_geometry[g] = known
        return known
