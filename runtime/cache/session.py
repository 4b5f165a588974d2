"""A sequence in a file: pages as they are, full-precision tokens, and a description that says what they belong to.

The file is safetensors: `layers.{i}.keys` and `.values` [H, n, channels] are the tokens in layer i's buffers,
`layers.{i}.key_pages` and `.value_pages` its pages, `layers.{i}.states.{name}` its states if it has any, and
`description` is JSON as uint8: the fingerprint of model, schemes and KV plan, the length, what each group of layers
stores, the SHA-256 of every tensor, and one of the description.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Sequence_
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kvconvert.errors import CacheError, KvconvertError, printable
from kvconvert.io.tensorfile import replace_tensors
from kvconvert.io.tensorheader import read_header
from kvconvert.runtime.cache.sequence import Sequence, Side, TokenPositions
from kvconvert.runtime.cache.snapshot import Snapshot
from kvconvert.runtime.cache.store import Group, LayerStore

FORMAT = 1
DESCRIPTION = "description"
_SEAL = "0" * 64


States = Mapping[int, Mapping[str, torch.Tensor]]


def save(file: Path, groups: Sequence_[Group], fingerprint: str, states: States) -> None:
    """Write the only sequence of a cache, or replace the file that is there; `states` are those of its layers.

    Raises:
        CacheError: there is no such sequence, it is padded, whole prompts are compressed, or the file cannot be
            written.
    """
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
    fields, tensors = _read(file)
    if fields["fingerprint"] != fingerprint:
        raise _refusal(
            file, "it was saved with another model, KV scheme or KV plan; load it with the one it was saved of"
        )
    states: dict[int, dict[str, torch.Tensor]] = {}
    for name in [name for name in tensors if ".states." in name]:
        layer, kind = name.removeprefix("layers.").split(".states.")
        states.setdefault(int(layer), {})[kind] = tensors.pop(name).to(device)
    layers = [described["layers"] for described in fields["groups"]], sorted(states)
    if layers != ([group.indices for group in groups], sorted(with_states)):
        raise _refusal(file, "its layers are not those of this cache")
    length, sequences, tokens = fields["length"], [], []
    for group, described in zip(groups, fields["groups"], strict=True):
        found = []
        for store in group.stores:
            pair = tuple(tensors[f"layers.{store.index}.{side}"].to(device) for side in ("keys", "values"))
            if dtype is not None and pair[0].dtype != dtype:
                raise _refusal(file, f"its tokens are {pair[0].dtype} and the model computes in {dtype}")
            store.allocate(*(part[None] for part in pair))
            found.append(pair)
        sides = []
        for name, numbers in (("keys", group.key_numbers), ("values", group.value_numbers)):
            sides.append(Side(described[name]["buffered"], numbers.reserve(described[name]["pages"])))
        positions = TokenPositions().append(0, length)
        about = {"sink_tokens": described["sink_tokens"], "dropped": described["dropped"]}
        sequences.append(Sequence(*sides, positions=positions, **about))
        tokens.append(tuple(found))
        for store in group.stores:
            for name, storage, side in _sides(store, sequences[-1]):
                at = 0
                for view in storage.views(side.pages):
                    view.buffer.copy_(tensors[name][at : at + len(view)])
                    at += len(view)
    stores = tuple(tuple(group.stores) for group in groups)
    Snapshot(length, tuple(sequences), stores, tuple(tokens)).put(groups)
    for group, sequence in zip(groups, sequences, strict=True):
        # The sequence has its own references now.
        group.release((sequence,))
    return states


def _sides(store: LayerStore, sequence: Sequence) -> Iterator[tuple[str, Any, Side]]:
    """The name of a layer's pages, their storage, and which they are, for keys and for values."""
    yield f"layers.{store.index}.key_pages", store.key_pages, sequence.keys
    yield f"layers.{store.index}.value_pages", store.value_pages, sequence.values


def _read(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The description and the tensors of a file, after comparing their hashes and shapes with what it says."""
    try:
        infos = read_header(file)
    except OSError as error:
        raise _refusal(file, f"it cannot be read ({error.strerror})") from error
    except KvconvertError as error:
        raise _refusal(file, "it is no session that `save` wrote, or not all of one") from error
    if DESCRIPTION not in infos:
        raise _refusal(file, "it holds no session, but other tensors")
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in infos}
    text = bytes(tensors.pop(DESCRIPTION).reshape(-1).view(torch.uint8).numpy())
    try:
        fields = json.loads(text)
        whole = _sealed(fields) == text
    except (ValueError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise _refusal(file, "its description was changed since it was saved")
    if fields["format"] != FORMAT:
        raise _refusal(file, f"its format is {fields['format']}, and this kvconvert reads {FORMAT}")
    changed = {name for name in {*tensors, *fields["tensors"]} if _changed(name, tensors, fields["tensors"])}
    if changed:
        raise _refusal(file, f"{printable(min(changed))} is not what was saved")
    return fields, tensors


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
