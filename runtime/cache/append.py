"""Storing the new tokens of a forward pass in full precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvconvert.errors import CacheError
from kvconvert.kernels.rotate import hadamard_transform, rotate_and_append, unsupported_append
from kvconvert.runtime.cache.compress import seal
from kvconvert.runtime.cache.forward_pass import Chunk, ModalityMask
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.cache.store import LayerStore


@dataclass(frozen=True)
class Destination:
    """Where one row's new tokens go: room already counted as stored, which has to be written before it is read.

    Attributes:
        row: the batch row.
        runs: (first, how many) of the row's real tokens among the new ones, without padding.
        keys, values: buffers [H, capacity, D] and [H, capacity, E].
        first_key, first_value: index of the first free token in each; the runs are written there, one after another.
    """

    row: int
    runs: list[tuple[int, int]]
    keys: torch.Tensor
    values: torch.Tensor
    first_key: int
    first_value: int

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the row's tokens from all new keys [B, H, T, D] and values [B, H, T, E], already rotated."""
        for buffer, at, tokens in ((self.keys, self.first_key, keys), (self.values, self.first_value, values)):
            for first, count in self.runs:
                buffer[:, at : at + count] = tokens[self.row, :, first : first + count].detach()
                at += count


def make_room(
    store: LayerStore, chunk: Chunk, start: int, count: int, decoding: bool, modality_mask: ModalityMask | None = None
) -> list[Destination]:
    """Room for the real tokens among positions start..start+count-1, of all rows that have any.

    Lengths, positions and sink tokens are updated as if the tokens were written, which is left to the caller: one copy
    per row, or one launch for all. `modality_mask` tells which of the tokens are of the scheme's modality.

    Raises:
        CacheError: the scheme compresses one modality and the mask is missing or has another shape.
    """
    destinations = []
    for row, sequence in enumerate(store.sequences):
        runs = chunk.runs(row, start, count)
        if not runs:
            continue
        _open_prompt(store, sequence, decoding)
        if sequence.open_from is not None and store.scheme.modality != "all":
            sequence.modality_runs += _modality_runs(store, modality_mask, row, start, count)
        first_key, first_value = sequence.extend(sum(n for _, n in runs), store.scheme.sink_tokens)
        for first, n in runs:
            sequence.positions.append(first, n)
        own = [(first - start, n) for first, n in runs]
        keys, values = sequence.keys.buffer, sequence.values.buffer
        destinations.append(Destination(row, own, keys, values, first_key, first_value))
    return destinations


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
    modality_mask, store.modality_mask = store.modality_mask, None
    n = keys.shape[2]
    start = store.logical - n
    chunk.check_past(store.real, start, f"layer {store.index}")
    store.real = chunk.real
    # A single token means that the prompt is complete; so do the drafts of assisted decoding.
    decoding = n == 1 or store.record_past
    if decoding:
        seal(store)
    destinations = make_room(store, chunk, start, n, decoding, modality_mask)
    whole = all(destination.runs == [(0, n)] for destination in destinations)
    if queries is not None and whole and unsupported_append(store.dtype, queries, keys, values) is None:
        return _append_in_one_launch(store, destinations, queries, keys, values)
    if store.rotations.keys:
        keys = hadamard_transform(keys)
    if store.rotations.values:
        values = hadamard_transform(values)
    for destination in destinations:
        destination.write(keys, values)
    return None


def _append_in_one_launch(
    store: LayerStore,
    destinations: list[Destination],
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Rotate and store the tokens of all rows, and rotate the queries."""
    table, base = store.block_tables.append_table(store.sequences), store.block_tables.residual_base
    first = [-1] * len(store.sequences)
    for destination in destinations:
        first[destination.row] = destination.first_key
    first_tokens = torch.tensor(first, dtype=torch.int64).to(store.device, non_blocking=True)
    return rotate_and_append(queries, keys, values, base, table, first_tokens, store.rotations)


def _open_prompt(store: LayerStore, sequence: Sequence, decoding: bool) -> None:
    """Record where a prompt begins that will be compressed as a whole: the first one, or with spans every one."""
    first = sequence.untouched and not sequence.keys.buffered
    if sequence.open_from is None and (
        (first and (store.scheme.is_span or store.scheme.evicts)) or (store.scheme.is_span and not decoding)
    ):
        sequence.open_from = sequence.keys.buffered


def _modality_runs(
    store: LayerStore, modality_mask: ModalityMask | None, row: int, start: int, count: int
) -> list[tuple[int, int]]:
    """(position, how many) of a row's new tokens whose modality the scheme compresses."""
    if modality_mask is None:
        raise CacheError(
            f'Layer {store.index} of the cache compresses modality = "{store.scheme.modality}" and has no modality '
            "mask for these tokens: call the model with input_ids (inputs_embeds alone are not enough) after "
            "kvconvert.runtime.watch_inputs(model), or call KVCache.set_modality_mask before the forward pass."
        )
    return [(start + first, n) for first, n in modality_mask.of_row(row, len(store.sequences), count, store.index)]
