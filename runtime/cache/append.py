"""Storing the new tokens of a forward pass in full precision."""

from __future__ import annotations

import torch

from kvconvert.errors import CacheError
from kvconvert.kernels.rotate import hadamard_transform, rotate_and_append, unsupported_append
from kvconvert.runtime.cache.compress import seal
from kvconvert.runtime.cache.forward_pass import Chunk, ForwardPass
from kvconvert.runtime.cache.store import LayerStore


def commit(store: LayerStore, chunk: Chunk, queries: torch.Tensor | None = None) -> torch.Tensor | None:
    """Store the parked tokens that are not padding; later calls in the same forward pass do nothing.

    Args:
        store: where tokens are parked.
        chunk: of the forward pass.
        queries: [B, Hq, T, D] of the same pass, to be rotated along with the keys where one kernel does both.

    Returns:
        The rotated queries if they were, for `attend(..., rotated=True)`; else None.

    Raises:
        CacheError: the attention mask differs for stored positions, or the scheme compresses one modality and no mask
            tells which tokens of a prompt are of it.
    """
    if store.pending is None:
        return None
    (keys, values), store.pending = store.pending, None
    group, latest = store.group, store.forward_pass
    if latest.chunk is None and group.is_decoding(latest.length) and not group.reading_prompt:
        seal(group)
    group.append(latest, chunk)
    n, in_one_launch = latest.length, False
    if queries is not None and unsupported_append(store.dtype, queries, keys, values) is None:
        in_one_launch = all(destination.runs == [(0, n)] for destination in latest.destinations)
    tables = group.registry.step_tables(store) if in_one_launch else None
    if tables is not None:
        store.sequences = latest.appended
        table, base = tables.appends[group.stores.index(store)], tables.base.view(store.dtype)
        return rotate_and_append(queries, keys, values, base, table, tables.step[0], store.rotations)
    if group.rehearsal is not None:
        raise CacheError(f"Layer {store.index} was given keys and values that no kernel stores in a planned step.")
    for destination in latest.destinations:
        if store.reserve(destination.row, latest.appended[destination.row]):
            group.touch(destination.row)
    store.sequences = latest.appended
    if in_one_launch:
        table, first_tokens = _append_table(store, latest)
        return rotate_and_append(queries, keys, values, store.origin, table, first_tokens, store.rotations)
    if store.rotations.keys:
        keys = hadamard_transform(keys)
    if store.rotations.values:
        values = hadamard_transform(values)
    for row, runs, *starts in latest.destinations:
        tensors = store.rows[row]
        for buffer, at, tokens in zip((tensors.keys, tensors.values), starts, (keys, values), strict=True):
            for first, count in runs:
                buffer.tensor[:, at : at + count] = tokens[row, :, first : first + count].detach()
                at += count
    return None


def _append_table(store: LayerStore, latest: ForwardPass) -> tuple[torch.Tensor, torch.Tensor]:
    """Where one layer's new tokens go: the table of `GroupTables.appends`, and the first token's index of each row."""
    first, lines, origin, size = [-1] * len(store.rows), [], store.origin.data_ptr(), store.dtype.itemsize
    for row, start, shift in ((d.row, d.first_key, d.first_value - d.first_key) for d in latest.destinations):
        first[row] = start
        keys, values = store.rows[row].keys, store.rows[row].values
        at_values = (values.address - origin) // size + shift * values.tensor.shape[2]
        lines.append(((keys.address - origin) // size, keys.head_stride, at_values, values.head_stride))
    table = torch.zeros(len(first), 4, dtype=torch.int64)
    if lines:
        table[[row for row, start in enumerate(first) if start >= 0]] = torch.tensor(lines, dtype=torch.int64)
    return table.to(store.device, non_blocking=True), torch.tensor(first).to(store.device, non_blocking=True)
