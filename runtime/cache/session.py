"""A sequence in a file: pages as they are, full-precision tokens, and a description that says what they belong to.

The file is safetensors: `layers.{i}.keys` and `.values` [H, n, channels] are the tokens in layer i's buffers,
`layers.{i}.key_pages` and `.value_pages` its pages, `layers.{i}.states.{name}` its states if it has any, and
`description` is JSON as uint8: the fingerprint of model, schemes and KV plan, the length, what each group of layers
stores, the SHA-256 of every tensor, and one of the description.

A snapshot is a sequence as it is at one moment, so that another cache, now or in another process, can go on from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError

from kvconvert.errors import CacheError, KvconvertError, printable
from kvconvert.io.json_text import parse_json
from kvconvert.io.regular import open_tensors
from kvconvert.io.tensorfile import replace_tensors
from kvconvert.io.tensorheader import read_header
from kvconvert.kernels.pages import PAGE_SIZE, pages_of
from kvconvert.kernels.states import is_packed
from kvconvert.kernels.states.reference import unpack_reference
from kvconvert.runtime.cache.pool import PageNumbers, TokenBuffer
from kvconvert.runtime.cache.sequence import Sequence, Side, TokenPositions
from kvconvert.runtime.cache.store import Group, LayerRow, LayerStore

FORMAT = 1
DESCRIPTION = "description"
_SEAL = "0" * 64
# What no number of a key, a value, or a state comes near, and whose products are still numbers in float32.
_MOST = 2.0**32
_STATE = re.compile(r"layers\.(\d{1,6})\.states\.(.+)", re.ASCII)


States = Mapping[int, Mapping[str, torch.Tensor]]
_Count = Annotated[int, Field(ge=0, lt=2**40)]


class _Part(BaseModel, extra="forbid", strict=True):
    """A part of a description: every field of its type, and none else."""


class _Side(_Part):
    buffered: _Count
    pages: _Count


class _Group(_Part):
    layers: list[_Count]
    sink_tokens: _Count
    dropped: _Count
    keys: _Side
    values: _Side


class _Description(_Part):
    format: _Count
    fingerprint: str
    length: _Count
    groups: list[_Group]
    tensors: dict[str, str]
    seal: str


def save(file: Path, groups: Sequence_[Group], fingerprint: str, states: States) -> None:
    """Write the only sequence of a cache, or replace the file that is there; `states` are those of its layers.

    Raises:
        CacheError: there is no such sequence, it is padded, whole prompts are compressed, or the file cannot be
            written, as in place of a device.
    """
    if os.path.exists(file) and not os.path.isfile(file):  # which take any name, however long
        raise CacheError(f"{file} is no file, so no session replaces it; choose another place.")
    snapshot = Snapshot.take(groups)
    tensors: dict[str, torch.Tensor] = {}
    described = []
    for group, sequence, tokens in zip(groups, snapshot.sequences, snapshot.tokens, strict=True):
        sides = {}
        for name, side in (("keys", sequence.keys), ("values", sequence.values)):
            sides[name] = {"buffered": side.buffered, "pages": len(side.pages)}
        about = {"sink_tokens": sequence.sink_tokens, "dropped": sequence.dropped}
        described.append({"layers": group.indices, **about, **sides})
        for store, (keys, values) in zip(group.stores, tokens, strict=True):
            tensors |= {f"layers.{store.index}.keys": keys, f"layers.{store.index}.values": values}
            for name, storage, side in _sides(store, sequence):
                if side.pages:
                    tensors[name] = storage.read(side.pages).buffer
    for index, own in states.items():
        tensors |= {f"layers.{index}.states.{name}": tensor for name, tensor in own.items()}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    fields = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "length": snapshot.length,
        "groups": described,
        "tensors": {name: _sha256(tensor) for name, tensor in sorted(tensors.items())},
    }
    tensors[DESCRIPTION] = torch.frombuffer(bytearray(_sealed(fields)), dtype=torch.uint8)
    try:
        replace_tensors(file, tensors)
    except OSError as error:
        raise CacheError(
            f"The session {file} cannot be written ({error.strerror}); make room, or choose another place."
        ) from error


def load(
    file: Path,
    groups: Sequence_[Group],
    fingerprint: str,
    device: torch.device,
    dtype: torch.dtype | None,
    with_states: Collection[int],
) -> States:
    """Let an empty cache go on from a file, and return the states of its layers.

    Args:
        file: that `save` wrote.
        groups: of the cache.
        fingerprint: of model, schemes and KV plan; the file's has to be the same.
        device: for tokens and pages.
        dtype: that tokens have to have, or None for any.
        with_states: numbers of the layers that keep states.

    Raises:
        CacheError: the file is none of this kind, was changed, or is of another model, plan or dtype; or the cache has
            no room for its pages.
    """
    told, tensors = _read(file)
    if told.fingerprint != fingerprint:
        raise _refusal(
            file, "it was saved with another model, KV scheme or KV plan; load it with the one it was saved of"
        )
    states: dict[int, dict[str, torch.Tensor]] = {}
    for name in [*tensors]:
        if (state := _STATE.fullmatch(name)) is not None:
            if tensors[name].shape[:1] != (1,):
                raise _refusal(file, f"{printable(name)[:80]} is no state of one sequence")
            states.setdefault(int(state[1]), {})[state[2]] = tensors.pop(name).to(device)
    layers = [described.layers for described in told.groups], sorted(states)
    if layers != ([group.indices for group in groups], sorted(with_states)):
        raise _refusal(file, "its layers are not those of this cache")
    length, sequences, tokens = told.length, [], []
    for group, described in zip(groups, told.groups, strict=True):
        _check_tensors(file, group, described, length, tensors)
        found = []
        for store in group.stores:
            pair = tuple(tensors[f"layers.{store.index}.{side}"].to(device) for side in ("keys", "values"))
            if dtype is not None and pair[0].dtype != dtype:
                raise _refusal(file, f"its tokens are {pair[0].dtype} and the model computes in {dtype}")
            store.allocate(*(part[None] for part in pair))
            found.append(pair)
        sides = []
        for name, numbers in (("keys", group.key_numbers), ("values", group.value_numbers)):
            side = getattr(described, name)
            sides.append(Side(side.buffered, numbers.reserve(side.pages)))
        positions = TokenPositions().append(0, length)
        about = {"sink_tokens": described.sink_tokens, "dropped": described.dropped}
        sequences.append(Sequence(*sides, positions=positions, **about))
        tokens.append(tuple(found))
        for store in group.stores:
            for name, storage, side in _sides(store, sequences[-1]):
                at = 0
                for run in storage.runs(side.pages):
                    pages = tensors[name][at : at + len(run)]
                    if (pages.shape, pages.dtype) != (run.shape, run.dtype):
                        raise _refusal(file, f"{name} is of other pages than this cache has")
                    run.copy_(pages)
                    if not pages_of(run, storage.format).is_sound():
                        raise _refusal(file, f"{name} holds numbers that no page can hold")
                    at += len(run)
    stores = tuple(tuple(group.stores) for group in groups)
    Snapshot(length, tuple(sequences), stores, tuple(tokens)).put(groups)
    for group, sequence in zip(groups, sequences, strict=True):
        # The sequence has its own references now.
        group.release((sequence,))
    return states


def _check_tensors(
    file: Path, group: Group, described: _Group, length: int, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Refuse (CacheError) tokens and pages of other counts than a sequence of this length has, before room is made."""
    sinks = described.sink_tokens
    whole = sinks <= min(length, group.scheme.sink_tokens) and (not described.dropped or bool(group.sliding_window))
    for name in ("keys", "values"):
        side = getattr(described, name)
        paged = described.dropped + side.pages
        whole = whole and side.buffered == length - PAGE_SIZE * paged + (sinks if paged else 0) >= sinks
        for layer in group.indices:
            kept, pages = tensors.get(f"layers.{layer}.{name}"), tensors.get(f"layers.{layer}.{name[:-1]}_pages")
            whole = whole and kept is not None and kept.dim() == 3 and kept.shape[1] == side.buffered
            whole = whole and 0 not in kept.shape[::2]
            keys = tensors[f"layers.{layer}.keys"] if whole else None
            whole = whole and kept.is_floating_point() and (len(kept), kept.dtype) == (len(keys), keys.dtype)
            whole = whole and (0 if pages is None or not pages.dim() else len(pages)) == side.pages
    if not whole:
        raise _refusal(file, f"what it holds of {group.name} is no sequence of {length:,} tokens")


def _sides(store: LayerStore, sequence: Sequence) -> Iterator[tuple[str, Any, Side]]:
    """The name of a layer's pages, their storage, and which they are, for keys and for values."""
    yield f"layers.{store.index}.key_pages", store.key_pages, sequence.keys
    yield f"layers.{store.index}.value_pages", store.value_pages, sequence.values


def _read(file: Path) -> tuple[_Description, dict[str, torch.Tensor]]:
    """The description and the tensors of a file, after comparing their hashes and shapes with what it says."""
    try:
        infos = read_header(file)
        if DESCRIPTION not in infos:
            raise _refusal(file, "it holds no session, but other tensors")
        with open_tensors(file) as opened:
            tensors = {name: opened.get_tensor(name) for name in infos}
    except CacheError:
        raise
    except OSError as error:
        raise _refusal(file, f"it cannot be read ({error.strerror})") from error
    except (KvconvertError, SafetensorError) as error:
        raise _refusal(file, "it is no session that `save` wrote, or not all of one") from error
    text = bytes(tensors.pop(DESCRIPTION).reshape(-1).view(torch.uint8).numpy())
    try:
        fields = parse_json(text)
        whole = _sealed(fields) == text
    except (ValueError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise _refusal(file, "its description was changed since it was saved")
    if fields.get("format") != FORMAT:
        raise _refusal(file, f"its format is {fields.get('format')!r:.40}, and this kvconvert reads {FORMAT}")
    try:
        told = _Description.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = printable(".".join(map(str, first["loc"])))[:80]
        raise _refusal(file, f"{field} of its description is wrong ({first['msg']})") from error
    changed = {name for name in {*tensors, *told.tensors} if _changed(name, tensors, told.tensors)}
    if changed:
        raise _refusal(file, f"{printable(min(changed))} is not what was saved")
    for name, tensor in tensors.items():
        _check_numbers(file, name, tensor)
    return told, tensors


def _check_numbers(file: Path, name: str, tensor: torch.Tensor) -> None:
    """Refuse (CacheError) floating-point numbers that no model makes; packed states are looked at unpacked."""
    numbers = unpack_reference(tensor) if _STATE.fullmatch(name) and is_packed(tensor) else tensor
    numbers = numbers if numbers.element_size() > 1 else numbers.float()  # float8 has no smallest number
    if numbers.is_floating_point() and numbers.numel() and not all(abs(x.item()) <= _MOST for x in numbers.aminmax()):
        raise _refusal(file, f"{printable(name)[:80]} holds NaN, infinity, or numbers beyond {_MOST:g}")


def _changed(name: str, tensors: dict[str, torch.Tensor], hashes: dict[str, str]) -> bool:
    return name not in tensors or hashes.get(name) != _sha256(tensors[name])


def _sha256(tensor: torch.Tensor) -> str:
    """Of a tensor's dtype, shape and bytes."""
    found = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _sealed(fields: dict[str, Any]) -> bytes:
    """Fields as JSON with the SHA-256 of that JSON, in which the hash itself is zeros."""
    text = json.dumps(fields | {"seal": _SEAL}, sort_keys=True)
    return json.dumps(fields | {"seal": hashlib.sha256(text.encode()).hexdigest()}, sort_keys=True).encode()


def _refusal(file: Path, reason: str) -> CacheError:
    return CacheError(f"The session {file} cannot be loaded: {reason}.")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One sequence without padding, in all layers of a cache, between two forward passes.

    It holds copies of full-precision tokens and the numbers of pages, to which whoever keeps it has to have references.

    Attributes:
        length: tokens read so far.
        sequences: of each group.
        stores: the layers that it was taken of, group by group; of the caches that it is put into they say dtype,
            device and formats.
        tokens: of each layer, keys [H, n, D] and values [H, m, E] in its buffers. Nothing may change them.
        states: of each layer with states, or keys of an indexer, by its number: its `copies`.
    """

    length: int
    sequences: tuple[Sequence, ...]
    stores: tuple[tuple[LayerStore, ...], ...]
    tokens: tuple[tuple[tuple[torch.Tensor, torch.Tensor], ...], ...]
    states: Mapping[int, Mapping[str, torch.Tensor]] = field(default_factory=dict)

    def state_pages(self, earlier: Snapshot | None) -> int:
        """Pages, each of all layers, that have as many bytes as the states that an earlier snapshot does not hold."""
        known = {id(t) for tensors in (earlier.states.values() if earlier else ()) for t in tensors.values()}
        size = sum(t.nbytes for tensors in self.states.values() for t in tensors.values() if id(t) not in known)
        sides = (side for stores in self.stores for store in stores for side in (store.key_pages, store.value_pages))
        return -(-size // sum(side.page_bytes for side in sides))

    @classmethod
    def take(
        cls,
        groups: Sequence_[Group],
        earlier: Snapshot | None = None,
        states: Mapping[int, Mapping[str, torch.Tensor]] | None = None,
    ) -> Snapshot:
        """The only sequence of a cache whose latest pass is over.

        Args:
            groups: of the cache.
            earlier: of the same sequence; where nothing but sink tokens is in the buffers, they are not copied again.
            states: copies of all states; None for layers without.

        Raises:
            CacheError: there is no such sequence, or it cannot be gone on with elsewhere.
        """
        for group in groups:
            if reason := not_taken(group):
                raise CacheError(f"The sequence in {group.name} of the cache cannot be kept: {reason}.")
        sequences, tokens = tuple(group.sequences[0] for group in groups), []
        for number, (group, sequence) in enumerate(zip(groups, sequences, strict=True)):
            before = None if earlier is None else (earlier.sequences[number], earlier.tokens[number])
            tokens.append(tuple(_copied(group, sequence, layer, before) for layer in range(len(group.stores))))
        stores = tuple(tuple(group.stores) for group in groups)
        return cls(groups[0].logical, sequences, stores, tuple(tokens), states or {})

    def put(self, groups: Sequence_[Group]) -> None:
        """Let an empty cache of the same layers, with pages in the same storage, hold the sequence.

        Its pages get a reference each. The copies of tokens are the cache's buffers until it stores the next token,
        which moves them.
        """
        for group, sequence, stores, tokens in zip(groups, self.sequences, self.stores, self.tokens, strict=True):
            group.key_numbers.retain(sequence.keys.pages)
            group.value_numbers.retain(sequence.values.pages)
            group.sequences = (sequence,)
            group.logical = group.attended = self.length
            group.touch()
            for store, source, (keys, values) in zip(group.stores, stores, tokens, strict=True):
                if source is not store:
                    store.adopt(source, 1)
                store.sequences = group.sequences
                store.rows = [LayerRow(TokenBuffer(keys), TokenBuffer(values))]

    def pages_beyond(self, earlier: Snapshot | None) -> Iterator[tuple[PageNumbers, list[int]]]:
        """Pages of each side of each group that an earlier snapshot of the same prompt has not."""
        before = earlier.sequences if earlier is not None else (Sequence(),) * len(self.sequences)
        for sequence, known, stores in zip(self.sequences, before, self.stores, strict=True):
            group = stores[0].group
            for numbers, now, then in (
                (group.key_numbers, sequence.keys.pages, set(known.keys.pages)),
                (group.value_numbers, sequence.values.pages, set(known.values.pages)),
            ):
                yield numbers, [number for number in now if number not in then]


def _copied(
    group: Group, sequence: Sequence, layer: int, before: tuple[Sequence, tuple[tuple[torch.Tensor, ...], ...]] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in a layer's buffers, or an earlier copy of them where they are sink tokens alone."""
    row, found = group.stores[layer].rows[0], []
    for place, (buffer, side) in enumerate(((row.keys, sequence.keys), (row.values, sequence.values))):
        if before is not None:
            known = (before[0].keys, before[0].values)[place]
            if side.buffered == known.buffered == sequence.sink_tokens:
                found.append(before[1][layer][place])
                continue
        found.append(buffer.tokens(0, side.buffered).clone())
    return found[0], found[1]


def not_taken(group: Group) -> str | None:
    """Why a group's sequence cannot be kept, as the end of a sentence, or None."""
    if not group.policy.is_plain:
        return "its scheme compresses whole prompts (spans, eviction), which no other prompt begins with"
    if len(group.sequences) != 1:
        return f"there are {len(group.sequences):,} sequences, and one can be kept"
    sequence = group.sequences[0]
    if group.real is not None:
        return "it has padding"
    if group.error is not None:
        return "tokens were lost"
    if group.record_past or sequence.open_from is not None:
        return "pages that are complete are not written yet"
    return None
