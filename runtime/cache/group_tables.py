"""Where everything that a group of layers stores lies: the tables that kernels follow.

Addresses are offsets from a small tensor that never moves, because pages, spans and buffers are separate allocations.
Tables are tensors of fixed addresses, with room for more pages than there are, so that a captured step finds in them
what the host has planned since: a row's tables are written when its pages, spans or buffers change, that is about once
in a page's worth of steps, and a few numbers per row at every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import numpy as np
import torch

from kvconvert.errors import CacheError
from kvconvert.kernels.decode.plan import MOST_SLOTS, Segment, SequencePlan, WorkPlan, most_items, plan_work
from kvconvert.kernels.device import upload
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.kernels.pages.records import static_offsets
from kvconvert.kernels.spans import Span
from kvconvert.runtime.cache.forward_pass import ForwardPass, PassTokens
from kvconvert.runtime.cache.pool import UNIT
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.cache.store import Group, LayerStore, buffer_places

# Full-precision tokens by which a sequence grows at most before its work is divided again.
GROWTH = 128
# Entries of a row, and items of work, that tables have room for at least; both double.
FEWEST_ENTRIES = 16
FEWEST_ITEMS = 16
# Rows from which there are programs enough to merge the slots of one in a program of its own.
MANY_ROWS = 16


class GroupTables:
    """The tables of a group's layers, which are on one device.

    Args:
        stores: the layers.
        rows: the rows of the batch.
        entries: pages and span blocks that a row has room for.
        place: of the cache among those of a pass, which all need tables of their own.

    Attributes:
        base: int16, aligned to 16 bytes; what offsets count from, whatever the dtype they lead to.
        keys, values: int64 [L, B * entries + 2]: offsets of pages and span blocks in units of 16 bytes. A row's entries
            begin at its number times `entries`: first pages, those that are quantized on both sides before
            half-quantized ones (0 in the other side's table), then the blocks of its spans.
        described: int64 [L, B, 8]: address of the key buffer [H, capacity, D] from `base` and the distance from one key
            head to the next, the same two for values, all in units of 8 elements; sink tokens, key skip, value skip,
            residual tokens. Residual tokens are the sink tokens and those after the last page of either side; token i
            has index i in a buffer if it is a sink token, else i plus that side's skip (`Sequence.skip`).
        appends: int64 [L, B, 4]: address of the key buffer from `base`, distance from head to head, and the same for
            values, in elements. The values' address is shifted by as many tokens as they are more or fewer than the
            keys in their buffer, so that both sides' new tokens have the keys' index.
        step: int64 [3, B]: where a row's next token goes (-1 for nowhere), its residual tokens once all new ones are
            there, and the position of the first of these.
        shared: for each layer int64 [S, 4], where scale and offset of keys lie, float16 [H, D], and of values,
            float16 [H, E]: those of each span, or of the whole layer where scales are static; else None.
        positions: int64 [B, n], of a row's tokens in the order of pages, spans and residual tokens, those of the next
            steps included.
        plans: what each row has stored.
        steps_left: how many more single tokens may come before anything but `step` has to be written.
        max_capacity: whether work gets the most room at once, so that one recording serves all steps.
        asked: numbers of programs among which steps have divided their attention.
        capacity: tokens that a row's key and value buffers have room for, in every layer.
        boosted: for each layer int32 [H, n], boosted channels of a scheme that fixes them; else None.
        centers: of each layer's keys, None where pages hold whole keys.
        key_rows: int64 [B, 3], of each row's key pages the first entry, their number, and the position of the first
            one's first token; None without centers.
        clamped_rows: int64 [L], see `LayerStore`: what was counted for the present owner.
    """

    def __init__(self, stores: list[LayerStore], rows: int, entries: int, place: int = 0):
        self.rows, self.entries, self.place = rows, entries, place
        self.device, self._layers = stores[0].device, len(stores)
        device = {"dtype": torch.int64, "device": self.device}
        self.base = torch.zeros(UNIT, dtype=torch.int16, device=self.device)
        self.keys, self.values = (torch.zeros(self._layers, rows * entries + 2, **device) for _ in range(2))
        self.described = torch.zeros(self._layers, rows, 8, **device)
        self.appends = torch.zeros(self._layers, rows, 4, **device)
        self.step = torch.zeros(3, rows, **device)
        self.positions = torch.zeros(rows, entries * PAGE_SIZE + 2 * GROWTH, **device)
        self.clamped_rows = torch.zeros(self._layers, **device)
        # Caches of one model share tables and recordings of their kernels, which know the addresses of these.
        self.centers = [store.format.key_tensors.center for store in stores]
        self.key_rows = torch.zeros(rows, 3, **device) if any(self.centers) else None
        self.boosted = [store.group.registry.boosted(store) for store in stores]
        self.shared: list[torch.Tensor | None] = [None] * self._layers
        self._owner: weakref.ref[Group] | None = None
        self._written = -1
        self.plans = [SequencePlan((), 0)] * rows
        # Divisions of work, in tensors of fixed addresses with room for more of it.
        self._work: dict[tuple[int, bool], WorkPlan] = {}
        self._checked: tuple[Sequence, ...] | None = None
        self._room: dict[tuple[int, int], WorkPlan] = {}
        self.capacity = [(0, 0)] * rows
        self.asked: set[int] = set()
        self.max_capacity = False
        self.steps_left = 0
        self._increment = torch.zeros(3, rows, **device)

    def __deepcopy__(self, memo: dict) -> GroupTables:
        return self

    def belongs_to(self, group: Group) -> bool:
        """Whether the tables are a group's."""
        return self._owner is not None and self._owner() is group

    def serve(self, group: Group) -> None:
        """Let the tables describe a group, and write what has changed since they last did."""
        if not self.belongs_to(group):
            previous = None if self._owner is None else self._owner()
            self.steps_left = 0
            if previous is not None:
                for store, count in zip(previous.stores, self.clamped_rows.clone(), strict=True):
                    store.clamped_rows = store.clamped_rows + count
            self.clamped_rows.zero_()
            self._owner, group.changed = weakref.ref(group), None
        if group.changed is not None and not group.changed and self._written == group.version:
            return
        rows = range(self.rows) if group.changed is None else sorted(group.changed)
        self.write(group, group.stores, group.sequences, list(rows))
        group.changed, self._written = set(), group.version
        self._work = {}

    def write(self, group: Group, stores: list[LayerStore], sequences: tuple[Sequence, ...], rows: list[int]) -> None:
        """Write the tables of some rows, for all layers at once; `stores` are those that the tables were made for."""
        first_span = self._write_shared(sequences, stores)
        self._write_entries(stores, sequences, rows)
        if self.key_rows is not None:
            # Not last: a kernel that is launched early reads them before it waits for the one before it.
            self._write_key_rows(sequences)
        tables = np.zeros((self._layers, len(rows), 12), dtype=np.int64)
        for column, row in enumerate(rows):
            sequence = sequences[row]
            self.plans[row] = self._plan(group, row, sequence, first_span[row])
            self._write_positions(group, row, sequence)
            tables[:, column, 4:8] = sequence.residual_places
        shift = np.array([sequences[row].values.buffered - sequences[row].keys.buffered for row in rows])
        least = []
        for layer, store in enumerate(stores):
            lines = [store.rows[row] for row in rows]
            tables[layer, :, 8:] = buffer_places(lines, self.base, store.dtype)
            tables[layer, :, :4] = tables[layer, :, 8:] // 8
            tables[layer, :, 10] += shift * store.format.values.head_dim
            least.append([(line.keys.tensor.shape[1], line.values.tensor.shape[1]) for line in lines])
        for row, room in zip(rows, np.array(least).min(0).tolist(), strict=True):
            self.capacity[row] = tuple(room)
        for row in set(range(self.rows)).difference(rows):
            if sequences[row].spans:
                # Its scales follow those of the rows before it, which may have more or fewer spans now.
                self.plans[row] = self._plan(group, row, sequences[row], first_span[row])
        on_device = upload(tables, self.device)
        where = slice(None) if len(rows) == self.rows else upload(list(rows), self.device)
        self.described[:, where], self.appends[:, where] = on_device[..., :8], on_device[..., 8:]

    def _write_entries(self, stores: list[LayerStore], sequences: tuple[Sequence, ...], rows: list[int]) -> None:
        """Write the addresses of some rows' pages and span blocks, for all layers at once."""
        for table, is_key in ((self.keys, True), (self.values, False)):
            sides = [sequences[row].keys if is_key else sequences[row].values for row in rows]
            numbers = np.array([number for side in sides for number in side.pages], dtype=np.int64)
            places = [
                row * self.entries + i for row, side in zip(rows, sides, strict=True) for i in range(len(side.pages))
            ]
            if places:
                storages = [store.key_pages if is_key else store.value_pages for store in stores]
                offsets = np.stack([storage.offsets(numbers, self.base) for storage in storages])
                self._place(table, places, offsets)
            for row in rows:
                # Where the other side alone has a page, this one's entry leads nowhere.
                first, last = row * self.entries + len(sides[rows.index(row)].pages), row * self.entries
                missing = list(range(first, last + sequences[row].pages))
                if missing:
                    self._place(table, missing, np.zeros((self._layers, len(missing)), dtype=np.int64))
                if sequences[row].spans:
                    blocks = [self._blocks(store.rows[row].spans, is_key) for store in stores]
                    begin = last + sequences[row].pages
                    self._place(table, list(range(begin, begin + len(blocks[0]))), np.stack(blocks))

    def _write_key_rows(self, sequences: tuple[Sequence, ...]) -> None:
        """Write where all rows' key pages begin, how many there are, and at which position."""
        lines = [
            [row * self.entries, len(sequence.keys.pages), sequence.page_position(0)]
            for row, sequence in enumerate(sequences)
        ]
        self.key_rows.copy_(upload(lines, self.device))

    def _blocks(self, spans: list[Span], is_key: bool) -> np.ndarray:
        """Offsets of all blocks of one row's spans in one layer."""
        found = []
        for span in spans:
            codes = (span.keys if is_key else span.values).codes
            stride = codes.stride(0) * codes.element_size() // UNIT
            found.append(self._offset(codes) + stride * np.arange(len(codes), dtype=np.int64))
        return np.concatenate(found)

    def _place(self, table: torch.Tensor, places: list[int], offsets: np.ndarray) -> None:
        """Write [L, n] offsets to entries of all layers' lines."""
        table[:, upload(places, self.device)] = upload(offsets, self.device)

    def _offset(self, tensor: torch.Tensor) -> int:
        """Where a contiguous tensor begins, in units of 16 bytes from `base`."""
        distance = tensor.data_ptr() - self.base.data_ptr()
        if distance % UNIT or not tensor.is_contiguous():
            raise CacheError(
                f"Codes or scales of the cache do not begin at a multiple of {UNIT} bytes or are not contiguous, so "
                "that no kernel can read them; this is a bug in kvconvert."
            )
        return distance // UNIT

    def _write_shared(self, sequences: tuple[Sequence, ...], stores: list[LayerStore]) -> list[int]:
        """Write the scales that many pages share; where each row's spans begin among them."""
        first, total = [], 0
        for sequence in sequences:
            first.append(total)
            total += len(sequence.spans)
        for layer, store in enumerate(stores):
            static, lines = static_offsets(store.format, self.base), []
            if static is not None:
                lines = [static]
            elif total:
                spans = [span for row in store.rows for span in row.spans]
                lines = [[self._offset(p) for p in (*s.keys[1:], *s.values[1:])] for s in spans]
            if lines:
                table = self.shared[layer]
                if table is None or len(table) < len(lines):
                    room = max(len(lines), self.rows)
                    self.shared[layer] = table = torch.zeros(room, 4, dtype=torch.int64, device=self.device)
                table[: len(lines)] = upload(lines, self.device)
        return first

    def _plan(self, group: Group, row: int, sequence: Sequence, first_span: int) -> SequencePlan:
        """What a row has stored, for the division of work; `first_span` is the number of its first span in `shared`."""
        first = row * self.entries
        both = min(len(sequence.keys.pages), len(sequence.values.pages))
        hidden = sequence.hidden(0)
        segments = [Segment(first, first + both, both * PAGE_SIZE, hidden=hidden)] if both else []
        tokens, begin = sequence.pages * PAGE_SIZE, first + sequence.pages
        for number, span in enumerate(sequence.spans):
            end = begin + -(-span.tokens // PAGE_SIZE)
            segments.append(Segment(begin, end, span.tokens, first_span + number, tokens))
            tokens, begin = tokens + span.tokens, end
        half, residual = sequence.pages - both, self._reserved(group, sequence)
        hidden = hidden if half and not both else 0
        return SequencePlan(tuple(segments), residual, half, first + both, both * PAGE_SIZE, tokens, hidden)

    def _reserved(self, group: Group, sequence: Sequence) -> int:
        """Residual tokens once the next page is complete: work is divided for as many from the start."""
        tokens = sequence.residual
        if not group.policy.flushes:
            return tokens + GROWTH - 1
        recent = min(side.recent_tokens for side in group.scheme.sides)
        behind = max(sequence.buffer_index(s, len(s.pages)) for s in (sequence.keys, sequence.values))
        return tokens + (behind + recent - tokens) % GROWTH

    def _write_positions(self, group: Group, row: int, sequence: Sequence) -> None:
        """Positions in the order of kernels; where an eviction kept tokens they differ by layer and are not here."""
        if not group.sliding_window or sequence.kept:
            return
        positions = sequence.positions
        begin, end = (sequence.page_position(page) for page in (0, sequence.pages))
        parts = [positions.slice(begin, end)]
        parts += [span.positions.slice(0, span.tokens) for span in sequence.spans]
        parts += [positions.slice(0, sequence.sink_tokens)]
        parts += [positions.slice(max(end, sequence.sink_tokens), len(positions))]
        known = torch.cat(parts)[: self.positions.shape[1]]
        future = torch.arange(group.logical, group.logical + self.positions.shape[1] - len(known))
        self.positions[row] = upload(torch.cat([known, future]), self.device)

    def work(self, group: Group, sequences: tuple[Sequence, ...], programs: int) -> WorkPlan:
        """How one step's attention is divided among about `programs` programs.

        The same tensors as long as there is room in them; written anew when tables change, or when a row has many more
        residual tokens than were planned for.
        """
        plans = self.plans
        # Layers ask one after another.
        checked, self._checked = self._checked, sequences
        if checked is not sequences and any(
            s.residual > plan.residual for s, plan in zip(sequences, plans, strict=True)
        ):
            reserved = [self._reserved(group, sequence) for sequence in sequences]
            self.plans = plans = [p._replace(residual=tokens) for p, tokens in zip(plans, reserved, strict=True)]
            self._work = {}
        found = self._work.get((programs, self.max_capacity))
        if found is None:
            found = self._work[programs, self.max_capacity] = self._written_plan(plan_work(plans, programs), programs)
        return found

    def work_key(self, group: Group, continues: bool) -> Hashable:
        """Addresses that a recording of this step's kernels would know: of the divisions of work that steps have asked
        for so far, which are written for this one, and of shared scales.

        Args:
            group: whose tables these are.
            continues: nothing has been planned since the step before.
        """
        if not continues or any((programs, self.max_capacity) not in self._work for programs in self.asked):
            for programs in self.asked:
                self.work(group, group.sequences, programs)
        shared = tuple(0 if table is None else table.data_ptr() for table in self.shared)
        return (*((n, self._work[n, self.max_capacity].items.data_ptr()) for n in sorted(self.asked)), shared)

    def rooms(self, group: Group, sequences: tuple[Sequence, ...]) -> Hashable:
        """Of all that `work_key` says of a step after which the sequences are these, what differs between steps,
        without writing anything; None before a step has asked how its work is divided.
        """
        plans = [self._plan(group, row, sequence, 0) for row, sequence in enumerate(sequences)]
        return tuple(self._room_of(plan_work(plans, programs), programs) for programs in sorted(self.asked)) or None

    def _room_of(self, plan: WorkPlan, programs: int) -> tuple[int, int, int]:
        """Programs, and the items and slots that a plan gets room for."""
        room = FEWEST_ITEMS
        while room < max(len(plan.items), self.max_capacity * most_items(self.rows, programs)):
            room *= 2
        if self.max_capacity and self.rows >= MANY_ROWS:
            # The form for few slots serves any number, in more steps, and is the fastest for rows that have few.
            return programs, room, MOST_SLOTS[0]
        return programs, room, next(limit for limit in MOST_SLOTS[2 * self.max_capacity :] if plan.most_slots <= limit)

    def _written_plan(self, plan: WorkPlan, programs: int) -> WorkPlan:
        """A plan in tensors that stay; items beyond it do nothing."""
        key = _, room, most = self._room_of(plan, programs)
        if key not in self._room:
            empty = torch.zeros(room, plan.items.shape[1], dtype=torch.int32, device=self.device)
            ends = [torch.zeros(self.rows + 1, dtype=torch.int32, device=self.device) for _ in range(2)]
            # A row has at most two slots more than items.
            self._room[key] = WorkPlan(empty, *ends, room + 2 * self.rows, most)
        target, items = self._room[key], plan.items.new_zeros(room, plan.items.shape[1])
        items[: len(plan.items)] = plan.items
        for tensor, source in ((target.items, items), (target.item_rows, plan.item_rows)):
            tensor.copy_(upload(source, self.device))
        target.slot_rows.copy_(upload(plan.slot_rows, self.device))
        return target

    def write_step(self, group: Group, forward_pass: ForwardPass) -> None:
        """Write where the new tokens of a step go."""
        first = [-1] * self.rows
        for destination in forward_pass.destinations:
            first[destination.row] = destination.first_key
        residual = [sequence.residual for sequence in group.sequences]
        self.step.copy_(upload([first, residual, [forward_pass.start] * self.rows], self.device))
        self._increment[:2] = upload([int(index >= 0) for index in first], self.device)
        self._increment[2] = 1
        self.steps_left = self._count_steps(group)
        for row, sequence in enumerate(group.sequences):
            if sequence.occupied and first[row] < 0:
                # Its tokens do not follow one another any more.
                self.steps_left = 0
                group.touch(row)

    def _count_steps(self, group: Group) -> int:
        """Single tokens that fit before a page is complete or dropped, a buffer full, or work to be divided again."""
        scheme, left = group.scheme, []
        occupied = [row for row, sequence in enumerate(group.sequences) if sequence.occupied]
        for row in occupied:
            sequence, plan, room = group.sequences[row], self.plans[row], self.capacity[row]
            left.append(plan.residual - sequence.residual)
            for side, stored, capacity in zip((sequence.keys, sequence.values), scheme.sides, room, strict=True):
                left.append(capacity - side.buffered)
                if group.policy.flushes:
                    begin = sequence.buffer_index(side, len(side.pages))
                    left.append(begin + stored.recent_tokens + PAGE_SIZE - 1 - side.buffered)
            if group.sliding_window and len(sequence) // PAGE_SIZE > sequence.dropped:
                # The oldest page leaves the window.
                last = sequence.position(sequence.page_position(1) - 1)
                left.append(last + group.sliding_window - 1 - group.logical)
            if sequence.untouched and sequence.keys.buffered < scheme.sink_tokens:
                # The first tokens become sink tokens one by one.
                return 0
        plain = not group.record_past and all(s.open_from is None for s in group.sequences)
        return max(0, min(left, default=0)) if plain else 0

    def advance(self) -> None:
        """Write the numbers of the next step, one token further in every row that takes part."""
        self.step += self._increment
        self.steps_left -= 1

    def spread_step(self) -> None:
        """Copy how many residual tokens rows have to all layers' lines; on the device, so that captured steps do it."""
        self.described[:, :, 7] = self.step[1]

    def step_mask(self, chunk: PassTokens) -> torch.Tensor | None:
        """Which tokens a step's query attends to: uint8 [B, 1, 1, n]; None where each attends to all up to its own.

        For mask functions that `is_pure` accepts, and sequences from which nothing was evicted.
        """
        if chunk.is_causal:
            return None
        batch = torch.arange(self.rows, device=self.device).view(-1, 1, 1)
        head = torch.zeros((), dtype=torch.int64, device=self.device)
        seen = chunk.mask_function(batch, head, self.step[2].view(-1, 1, 1), self.positions.unsqueeze(1))
        return seen.expand(self.rows, 1, self.positions.shape[1]).to(torch.uint8).unsqueeze(1)
