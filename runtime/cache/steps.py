"""Decoding steps that are planned for whole groups before any layer runs, as captured steps need them, and the tables
that the kernels of a pass follow: those of all the group's layers, or one layer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kvconvert.cache.plan_tensors import token_scorer
from kvconvert.kernels import ragged
from kvconvert.kernels.device import runs_triton
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.kernels.select import TokenScorer
from kvconvert.runtime.cache.compress import compress, end_planned, read_flags, seal
from kvconvert.runtime.cache.forward_pass import ForwardPass, PassTokens
from kvconvert.runtime.cache.group_tables import FEWEST_ENTRIES, GroupTables
from kvconvert.runtime.cache.pool import UNIT
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.cache.store import Group, LayerStore


class TableRegistry:
    """Tables by what they are for, so that all caches of a model share them and captured steps serve every cache; those
    of one pass have their own.

    Attributes:
        least_entries: pages and span blocks of a row that new tables have room for, by the number of rows.
    """

    def __init__(self) -> None:
        self.least_entries: dict[int, int] = {}
        self._tables: dict[Hashable, GroupTables] = {}
        self._known: dict[Hashable, Any] = {}

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def base(self, device: torch.device) -> torch.Tensor:
        """A small tensor that never moves, int16 and aligned to 16 bytes, from which addresses on a device count."""
        return self._once(device, lambda: torch.zeros(UNIT, dtype=torch.int16, device=device))

    def kept(self, key: Hashable, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers on a device at the address where those of this key were before."""
        like = partial(torch.empty_like, numbers, memory_format=torch.contiguous_format)
        return self._once(("kept", key), like).copy_(numbers)

    def boosted(self, store: LayerStore) -> torch.Tensor | None:
        """int32 [H, n], a layer's boosted channels where its scheme fixes them; else None."""
        boosted = store.format.key_tensors.boosted
        return None if boosted is None else self._once(("boosted", store.index, store.device), boosted.int)

    def scorer(self, store: LayerStore) -> TokenScorer:
        """The network that predicts scores of a layer, see `token_scorer` for errors."""
        make = partial(token_scorer, store.format, store.heads_apart, store.plan, store.device)
        return self._once(("scorer", store.index, store.device), make)

    def ragged_unsupported(self, store: LayerStore) -> str | None:
        """Why `kernels/ragged` does not serve a layer; None if it does."""
        about = store.format, store.dtype, store.device
        return self._once(("ragged", store.index, *about[1:]), lambda: ragged.unsupported(*about))

    def tables_of(self, group: Group) -> list[GroupTables]:
        """The tables whose contents are a group's."""
        return [tables for tables in self._tables.values() if tables.belongs_to(group)]

    def __deepcopy__(self, memo: dict) -> TableRegistry:
        return self

    def tables(self, group: Group, entries: int) -> GroupTables:
        """Tables for a group's layers and rows, with room for so many pages and span blocks of a row."""
        known, rows = group.tables, len(group.sequences)
        if known is not None and (known.place, known.rows) == (group.place, rows) and known.entries >= entries:
            return known
        room = FEWEST_ENTRIES
        if not group.sliding_window:
            entries = max(entries, self.least_entries.get(rows, 0))
        while room < entries:
            room *= 2
        stores = group.stores
        formats = tuple((s.index, s.dtype, s.device, s.format.kind, s.format.span) for s in stores)
        key = (formats, rows, room, group.place)
        if key not in self._tables:
            self._tables[key] = GroupTables(stores, rows, room, group.place)
        group.tables = self._tables[key]
        return group.tables

    def step_tables(self, store: LayerStore) -> GroupTables | None:
        """The tables of a planned step, or of another pass of single tokens, written once for all layers; None where
        kernels do not follow them.
        """
        group, latest = store.group, store.forward_pass
        if latest.length > 1:
            return None
        if latest.step_tables is None and latest.all_allocated and follows_tables(store) and runs_steps(group):
            latest.step_tables = self.prepare_step(group, latest)
            latest.step_tables.spread_step()
        return latest.step_tables

    def prepare_step(self, group: Group, latest: ForwardPass) -> GroupTables:
        """Make room for a step's token in all layers, and write where it goes and what is stored."""
        tables = self.tables(group, entries_needed(group.sequences))
        known = tables.belongs_to(group) and group.changed is not None
        for destination in latest.destinations:
            row, after = destination.row, latest.appended[destination.row]
            needed = (after.keys.buffered, after.values.buffered)
            if (
                known
                and row not in group.changed
                and all(n <= c for n, c in zip(needed, tables.capacity[row], strict=True))
            ):
                continue
            moved = [store.reserve(row, after) for store in group.stores]
            if any(moved):
                group.touch(row)
        tables.serve(group)
        tables.write_step(group, latest)
        return tables

    def chunk_tables(self, store: LayerStore) -> tuple[GroupTables, int]:
        """Tables of pages and spans for a pass of many tokens, and the layer's line in them."""
        group, latest = store.group, store.forward_pass
        if latest.chunk_tables is None and latest.all_allocated:
            latest.chunk_tables = self.tables(group, entries_needed(latest.appended))
            latest.chunk_tables.serve(group)
        if latest.chunk_tables is not None:
            return latest.chunk_tables, group.stores.index(store)
        # A first prompt. When its last layer is there, the layers before have been compressed already, so that no table
        # describes them all.
        tables = GroupTables([store], len(store.sequences), max(FEWEST_ENTRIES, entries_needed(store.sequences)))
        tables.write(group, [store], store.sequences, list(range(len(store.sequences))))
        return tables, 0

    def clamped_rows(self, store: LayerStore) -> int:
        """What was counted for a layer so far (`LayerStore.clamped_rows`), in its own counter and in tables."""
        line = store.group.stores.index(store)
        return int(store.clamped_rows) + sum(int(t.clamped_rows[line]) for t in self.tables_of(store.group))


def follows_tables(store: LayerStore) -> bool:
    """Whether kernels can follow tables of a layer that is allocated."""
    served = runs_triton(store.device) and store.appends_in_one_launch
    return served and not (store.is_latent and store.latents_unsupported)


def runs_steps(group: Group) -> bool:
    """Whether kernels can follow tables of all the group's layers."""
    return all(store.is_allocated and follows_tables(store) for store in group.stores) and (
        len({store.device for store in group.stores}) == 1
    )


def entries_needed(sequences: tuple[Sequence, ...]) -> int:
    """Pages, span blocks, and as many again as residual tokens fill, of the longest row."""
    blocks = (sum(-(-span.tokens // PAGE_SIZE) for span in s.spans) for s in sequences)
    return max(n + s.pages + -(-s.residual // PAGE_SIZE) for n, s in zip(blocks, sequences, strict=True))


# All new tokens are real, and layers bring their own mask functions.
_STEP = PassTokens(torch.zeros(1, dtype=torch.int64))


class PlannedStep:
    """A pass of one new token in every occupied row of a cache.

    Planning stores nothing yet: `launches()` is the context in which a model runs its layers, which then launch
    kernels over the tables and do no bookkeeping. It may be entered any number of times, or replaced by the replay of a
    recording; every run writes the same numbers to the same places. `finish()` ends the pass.

    Args:
        groups: of all the cache's layers; `runs_steps` accepts each.
        max_capacity: whether the division of its work gets the most room, see `GroupTables`; may be changed before it
            runs.

    Attributes:
        continues: whether it is like the step before it, so that nothing is planned: every occupied row has got one
            token more, and room for it.
        tables: of each group.

    Raises:
        CacheError: what is stored has become unusable, or an open prompt cannot be sealed for want of pages.
        NumericError: an open prompt holds numbers that cannot be stored.
    """

    def __init__(self, groups: list[Group], max_capacity: bool = False):
        self.groups, self.max_capacity = groups, max_capacity
        self._before: list[tuple[tuple[Sequence, ...], ForwardPass | None, int]] = []
        self.continues = all(_continues(group) for group in groups)
        if self.continues:
            self.tables = [group.tables for group in groups]
            for group, tables in zip(groups, self.tables, strict=True):
                group.logical += 1
                group.unapplied_tokens += 1
                tables.advance()
            return
        for group in groups:
            read_flags(group, wait=False)
            seal(group)
            if group.keep_for_sharing and group.forward_pass is not None:
                compress(group, seal=False)
        self.tables: list[GroupTables] = []
        try:
            for group in groups:
                before = (group.sequences, group.forward_pass, group.passes)
                latest = group.begin(1)
                self._before.append(before)
                group.append(latest, _STEP, check=False)
                self.tables.append(group.registry.prepare_step(group, latest))
        except BaseException:
            # Groups that have advanced would be ahead of the others.
            self.abandon()
            raise

    def key(self) -> Hashable:
        """What a recording of the pass's kernels depends on: the tables, and how much work they have room for."""
        with self._room_for_work():
            return tuple(
                (id(tables), tables.work_key(group, self.continues))
                for group, tables in zip(self.groups, self.tables, strict=True)
            )

    @contextmanager
    def _room_for_work(self) -> Iterator[None]:
        for tables in self.tables:
            tables.max_capacity = self.max_capacity
        try:
            yield
        finally:
            for tables in self.tables:
                tables.max_capacity = False

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Within the context layers launch kernels and do nothing else."""
        stores = [store for group in self.groups for store in group.stores]
        passes = [store.forward_pass for store in stores]
        try:
            for group, tables in zip(self.groups, self.tables, strict=True):
                tables.spread_step()
                appended = group.sequences
                group.rehearsal = ForwardPass(group.logical - 1, 1, _STEP, appended=appended, step_tables=tables)
            with self._room_for_work():
                yield
        finally:
            for group in self.groups:
                group.rehearsal = None
            for store, forward_pass in zip(stores, passes, strict=True):
                store.forward_pass, store.pending = forward_pass, None

    def abandon(self) -> None:
        """Undo the plan of a pass whose kernels did not run: its tokens were never stored."""
        begun = self.groups if self.continues else self.groups[: len(self._before)]
        for index, group in enumerate(begun):
            group.logical -= 1
            if self.continues:
                # Sequences may have been asked for since, and know of the token then.
                group.drop_newest()
            else:
                sequences, group.forward_pass, group.passes = self._before[index]
                group.sequences = sequences
                for store in group.stores:
                    store.sequences = sequences
            group.touch()

    def finish(self) -> None:
        """Count the tokens as stored and compress what is complete.

        Raises:
            CacheError: the pages have a fixed capacity and no room left.
            NumericError: a page holds numbers that cannot be stored.
        """
        if self.continues:
            for group in self.groups:
                group.attended = group.logical
            return
        for group in self.groups:
            end_planned(group)


def _continues(group: Group) -> bool:
    """Whether a step is like the group's step before it."""
    tables = group.tables
    return (
        tables is not None
        and tables.steps_left > 0
        and tables.belongs_to(group)
        and not group.changed
        and group.changed is not None
        and group.error is None
        and not group.keep_for_sharing
    )


def can_plan_steps(groups: list[Group]) -> bool:
    """Whether kernels can follow the tables of all groups, whose tokens no indexer chooses."""
    indexed = any(store.is_indexed for group in groups for store in group.stores)
    return bool(groups) and not indexed and all(group.rows and runs_steps(group) for group in groups)
