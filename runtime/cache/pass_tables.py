"""Which tables the kernels of a forward pass follow: those of all the group's layers, or one layer's own."""

from __future__ import annotations

from kvconvert.kernels.device import runs_triton
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.runtime.cache.forward_pass import Chunk, is_pure
from kvconvert.runtime.cache.groups import ForwardPass
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.cache.store import LayerStore
from kvconvert.runtime.cache.tables import FEWEST_ENTRIES, Group, GroupTables


def step_tables(store: LayerStore) -> GroupTables | None:
    """The tables of a pass of single tokens, written once for all layers; None where kernels do not follow them."""
    group, latest = store.group, store.forward_pass
    if latest.length != 1:
        return None
    if "step" not in latest.shared:
        tables = latest.shared.get("prepared")
        if tables is None and runs_steps(group):
            tables = prepare_step(group, latest)
        if tables is not None:
            tables.spread_step()
        latest.shared["step"] = tables
    return latest.shared["step"]


def runs_steps(group: Group) -> bool:
    """Whether kernels can follow tables of all the group's layers."""
    devices = {store.device for store in group.stores if store.is_allocated}
    return (
        all(store.is_allocated for store in group.stores)
        and len(devices) == 1
        and runs_triton(next(iter(devices)))
        and all(store.appends_in_one_launch for store in group.stores)
        and group.page_size == PAGE_SIZE
    )


def prepare_step(group: Group, latest: ForwardPass) -> GroupTables:
    """Make room for a pass of single tokens in all layers, and write where these go and what is stored."""
    tables = group.registry.tables(group, entries_needed(group.sequences))
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


def chunk_tables(store: LayerStore) -> tuple[GroupTables, int]:
    """Tables of pages and spans for a pass of many tokens, and the layer's line in them."""
    group, latest = store.group, store.forward_pass
    if "chunk" not in latest.shared:
        latest.shared["chunk"] = None
        if all(other.is_allocated for other in group.stores):
            latest.shared["chunk"] = group.registry.tables(group, entries_needed(latest.appended))
            latest.shared["chunk"].serve(group)
    if latest.shared["chunk"] is not None:
        return latest.shared["chunk"], group.stores.index(store)
    # A first prompt. When its last layer is there, the layers before have been compressed already, so that no table
    # describes them all.
    tables = GroupTables([store], len(store.sequences), max(FEWEST_ENTRIES, entries_needed(store.sequences)))
    tables.write(group, [store], store.sequences, list(range(len(store.sequences))))
    return tables, 0


def can_mask_on_device(group: Group, chunk: Chunk) -> bool:
    """Whether `GroupTables.step_mask` serves a step."""
    if chunk.is_causal:
        return True
    evicted = any(sequence.kept for sequence in group.sequences)
    return bool(group.sliding_window) and not evicted and is_pure(chunk.mask_function)


def entries_needed(sequences: tuple[Sequence, ...]) -> int:
    """Pages, span blocks, and as many again as residual tokens fill, of the longest row."""
    blocks = (sum(-(-span.tokens // PAGE_SIZE) for span in s.spans) for s in sequences)
    return max(n + s.pages + -(-s.residual(PAGE_SIZE) // PAGE_SIZE) for n, s in zip(blocks, sequences, strict=True))


def clamped_rows(store: LayerStore) -> int:
    """What was counted for a layer so far (`LayerStore.clamped_rows`), in its own counter and in tables."""
    group = store.group
    tables = group.registry.tables_of(group)
    return int(store.clamped_rows) + sum(int(t.clamped_rows[group.stores.index(store)]) for t in tables)
