"""Storing the new tokens of a forward pass in full precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvconvert.errors import CacheError
from kvconvert.kernels.rotate import hadamard_transform, rotate_and_append, unsupported_append
from kvconvert.runtime.cache.compress import seal
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.hf.handles import Chunk
from kvconvert.runtime.hf.modality import ModalityMask

if TYPE_CHECKING:
    from kvconvert.runtime.hf.layer import PagedLayer


@dataclass(frozen=True)
class Destination:
    """Where one row's new tokens go: room that is reserved and counted as stored, to be written before it is read.

    Attributes:
        row: the batch row.
        runs: (first, how many) of the row's real tokens among the new ones, padding left out.
        keys, values: buffers [H, capacity, D] and [H, capacity, E].
        first_key, first_value: the first free token in each; all runs follow one another from there.
    """

    row: int
    runs: list[tuple[int, int]]
    keys: torch.Tensor
    values: torch.Tensor
    first_key: int
    first_value: int

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the row's tokens out of all new keys [B, H, T, D] and values [B, H, T, E], as they are to be stored."""
        for buffer, at, tokens in ((self.keys, self.first_key, keys), (self.values, self.first_value, values)):
            for first, count in self.runs:
                buffer[:, at : at + count] = tokens[self.row, :, first : first + count].detach()
                at += count


def make_room(
    layer: PagedLayer, chunk: Chunk, start: int, count: int, decoding: bool, marks: ModalityMask | None = None
) -> list[Destination]:
    """Room for the real tokens among columns start..start+count-1, of all rows that have any.

    Lengths, columns and sink_tokens are those after the tokens are written, which is left to the caller: one copy per row, or
    one launch for all. `marks` say which of the tokens are of the scheme's modality.
    """
    destinations = []
    for row, sequence in enumerate(layer.sequences):
        runs = chunk.runs(row, start, count)
        if not runs:
            continue
        _open_prompt(layer, sequence, decoding)
        if sequence.open_from is not None and layer.scheme.modality != "all":
            sequence.marked += _marked(layer, marks, row, start, count)
        first_key, first_value = sequence.extend(sum(n for _, n in runs), layer.scheme.sink_tokens)
        for column, n in runs:
            sequence.columns.append(column, n)
        own = [(column - start, n) for column, n in runs]
        keys, values = sequence.keys.buffer, sequence.values.buffer
        destinations.append(Destination(row, own, keys, values, first_key, first_value))
    return destinations


def commit(layer: PagedLayer, chunk: Chunk, queries: torch.Tensor | None = None) -> torch.Tensor | None:
    """Store the parked tokens whose columns are real; later calls in the same forward pass do nothing.

    Args:
        layer: whose tokens are parked.
        chunk: of the forward pass.
        queries: [B, Hq, T, D] of the same pass, where they may be rotated along with the keys.

    Returns:
        the queries as `attend` wants them if they were, else None.

    Raises:
        CacheError: the mask changed its mind about columns that are already stored, or nobody said which tokens of a
            prompt are of the scheme's modality.
    """
    if layer.pending is None:
        return None
    (keys, values), layer.pending = layer.pending, None
    marks, layer.marks = layer.marks, None
    n = keys.shape[2]
    start = layer.logical - n
    chunk.check_past(layer.real, start, f"layer {layer.index}")
    layer.real = chunk.real
    # Decoding goes on, so the prompt is complete. The drafts of assisted decoding are decoding too.
    decoding = n == 1 or layer.record_past
    if decoding:
        seal(layer)
    destinations = make_room(layer, chunk, start, n, decoding, marks)
    whole = all(destination.runs == [(0, n)] for destination in destinations)
    if queries is not None and whole and unsupported_append(layer.dtype, queries, keys, values) is None:
        return _append_in_one_launch(layer, destinations, queries, keys, values)
    if layer.scheme.rotate_keys == "hadamard":
        keys = hadamard_transform(keys)
    if layer.scheme.rotate_values == "online":
        values = hadamard_transform(values)
    for destination in destinations:
        destination.write(keys, values)
    return None


def _append_in_one_launch(
    layer: PagedLayer,
    destinations: list[Destination],
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Rotate and store the tokens of all rows, and rotate the queries."""
    table, base = layer.places.append_table(), layer.places.dense_base
    first = [-1] * len(layer.sequences)
    for destination in destinations:
        first[destination.row] = destination.first_key
    first_tokens = torch.tensor(first, dtype=torch.int64).to(layer.device, non_blocking=True)
    rotations = (layer.scheme.rotate_keys == "hadamard", layer.scheme.rotate_values == "online")
    return rotate_and_append(queries, keys, values, base, table, first_tokens, *rotations)


def _open_prompt(layer: PagedLayer, sequence: Sequence, decoding: bool) -> None:
    """Remember where a prompt begins that will be compressed as a whole: the first one, or for spans any one."""
    first = sequence.untouched and not sequence.keys.dense
    if sequence.open_from is None and (
        (first and (layer.scheme.is_span or layer.scheme.evicts)) or (layer.scheme.is_span and not decoding)
    ):
        sequence.open_from = sequence.keys.dense


def _marked(layer: PagedLayer, marks: ModalityMask | None, row: int, start: int, count: int) -> list[tuple[int, int]]:
    """(column, how many) of a row's new tokens whose modality the scheme compresses."""
    if marks is None:
        raise CacheError(
            f'Layer {layer.index} of the cache compresses modality = "{layer.scheme.modality}" and was not told which '
            "tokens that are: give the model input_ids (inputs_embeds alone do not say) after "
            "kvconvert.runtime.watch_inputs(model), or call KVCache.mark before the forward pass."
        )
    return [(start + first, n) for first, n in marks.of_row(row, len(layer.sequences), count, layer.index)]
