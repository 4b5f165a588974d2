"""Which tables the kernels of a forward pass follow: those of all the group's layers, or one layer's own."""

from __future__ import annotations

from collections.abc import Hashable

from kvconvert.kernels.device import runs_triton
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.runtime.cache.forward_pass import ForwardPass
from kvconvert.runtime.cache.group_tables import FEWEST_ENTRIES, GroupTables
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.cache.store import Group, LayerStore


class TableRegistry:
    """Tables by what they are for, so that all caches of a model share them and captured steps serve every cache."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, GroupTables] = {}

    def tables_of(self, group: Group) -> list[GroupTables]:
        """The tables whose contents are a group's."""
        return [tables for tables in self._tables.values() if tables.belongs_to(group)]

    def __deepcopy__(self, memo: dict) -> TableRegistry:
        return self

    def tables(self, group: Group, entries: int) -> GroupTables:
        """Tables for a group's layers and rows, with room for so many pages and span blocks of a row."""
        known = group.tables
        if known is not None and known.rows == len(group.sequences) and known.entries >= entries:
            return known
        room = FEWEST_ENTRIES
        while room < entries:
            room *= 2
        stores = group.stores
        formats = tuple(
            (s.index, s.dtype, s.device, s.format.keys, s.format.values, s.span_format, s.format.key_center is None)
            for s in stores
        )
        key = (formats, len(group.sequences), room)
        if key not in self._tables:
            self._tables[key] = GroupTables(stores, len(group.sequences), room)
        group.tables = self._tables[key]
        return group.tables

    def step_tables(self, store: LayerStore) -> GroupTables | None:
        """The tables of a pass of single tokens, written once for all layers; None where kernels do not follow them."""
        group, latest = store.group, store.forward_pass
        if latest.length != 1:
            return None
        if latest.step_tables is None and latest.all_allocated and follows_tables(store) and runs_steps(group):
            latest.step_tables = self.prepare_step(group, latest)
            latest.step_tables.spread_step()
        return latest.step_tables

    def prepare_step(self, group: Group, latest: ForwardPass) -> GroupTables:
        """Make room for a pass of single tokens in all layers, and write where these go and what is stored."""
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
    return store.page_size == PAGE_SIZE and runs_triton(store.device) and store.appends_in_one_launch


def runs_steps(group: Group) -> bool:
    """Whether kernels can follow tables of all the group's layers."""
    return all(store.is_allocated and follows_tables(store) for store in group.stores) and (
        len({store.device for store in group.stores}) == 1
    )


def entries_needed(sequences: tuple[Sequence, ...]) -> int:
    """Pages, span blocks, and as many again as residual tokens fill, of the longest row."""
    blocks = (sum(-(-span.tokens // PAGE_SIZE) for span in s.spans) for s in sequences)
    return max(n + s.pages + -(-s.residual(PAGE_SIZE) // PAGE_SIZE) for n, s in zip(blocks, sequences, strict=True))
