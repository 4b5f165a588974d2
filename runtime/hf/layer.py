"""One attention layer of the cache, behind transformers' cache-layer protocol.

`update()` only parks new keys and values; the attention function commits them once it knows which tokens are padding
(`runtime/hf/attention.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from kvconvert.errors import CacheError
from kvconvert.kernels.states import can_pack, is_packed, pack, packed_like, unpack
from kvconvert.runtime.cache.compress import begin_forward, crop
from kvconvert.runtime.cache.indexer import IndexerKeys
from kvconvert.runtime.cache.store import LayerStore
from kvconvert.runtime.hf.handles import KeyHandle, LatentHandle


class PagedLayer(CacheLayerMixin):
    """A `LayerStore` as a cache layer of transformers.

    What concerns sequences rather than one layer's tensors (crops, the order of rows) is done for a whole group of
    layers: transformers asks every layer, and the group's first one does it.

    Args:
        store: what the layer stores.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, store: LayerStore):
        super().__init__()
        self.store = store
        self.sliding_window = store.group.sliding_window
        self.is_sliding = self.sliding_window is not None

    def reset(self) -> None:
        """Drop everything stored; the next update starts a new cache."""
        if self._leads:
            self.store.group.reset()
        self.store.reset()
        self.is_initialized = False

    @property
    def _leads(self) -> bool:
        """Whether this is its group's first layer."""
        return self.store.group.stores[0] is self.store

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Learn shape, dtype and device from the first keys [B, H, T, D] and values [B, H, T, E]."""
        self.store.allocate(key_states, value_states)
        self.adopt()

    def adopt(self) -> None:
        """Say of shape, dtype and device what the store has learned."""
        self.dtype, self.device, self.is_initialized = self.store.dtype, self.store.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Park new keys [B, H, T, D] and values [B, H, T, E]; the attention function finds the store in the key handle.

        Raises:
            CacheError: the model passes further arguments, calls update twice without attention in between, or the
                batch size changed.
        """
        store = self.store
        kwargs.pop("kwargs", None)  # transformers 5.24 hands on those of its attention functions, for paged caches
        if args or kwargs:
            raise CacheError(
                f"Layer {store.index} passes {[*kwargs] or args} to the cache, which kvconvert does not support."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if store.pending is not None:
            raise CacheError(
                f"Layer {store.index} received keys twice without attention in between; is the model's attention "
                'implementation "kvconvert"? Call model.set_attn_implementation("kvconvert").'
            )
        begin_forward(store)
        store.park(key_states, value_states)
        return KeyHandle.wrap(key_states, store), value_states

    def get_seq_length(self) -> int:
        """Positions so far, padding included."""
        return self.store.logical

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks cover all positions so far, whatever the layer still stores."""
        return self.store.logical + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def activate_past_recording(self) -> None:
        """Keep the newest tokens uncompressed until `crop` says which of them stay (assisted decoding)."""
        self.store.group.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens; `tokens_to_remove` is zero or negative, as transformers passes it.

        Raises:
            CacheError: the tokens are compressed already, or have left a sliding window that would need them again.
        """
        if self._leads:
            crop(self.store.group, tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the sequences of `beam_idx`, in its order; pages are shared, full-precision tokens copied."""
        if self._leads and self.is_initialized:
            heads = self.store.heads_apart
            self.store.group.reorder([row * heads + head for row in beam_idx.tolist() for head in range(heads)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        self.reorder_cache(torch.arange(len(self.store.rows) // self.store.heads_apart).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some sequences."""
        self.reorder_cache(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def offload(self) -> None:
        """Refused: pages are small because they are quantized, and offloading them is not available."""
        raise CacheError("Offloading a kvconvert cache is not available; create it without offloading.")

    prefetch = offload


class HeadwiseLayer(PagedLayer):
    """`PagedLayer` whose KV heads are rows of their own, because each keeps tokens of its own choice and number."""

    is_croppable = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Park new keys [B, H, T, D] and values [B, H, T, E]; those of a repetition are only handed on."""
        if self.store.group.repetition is None:
            super().update(*(part.flatten(0, 1).unsqueeze(1) for part in (key_states, value_states)), *args, **kwargs)
        return KeyHandle.wrap(key_states, self.store), value_states

    def take_heads(self, other: LayerStore) -> None:
        """Hold the prompts that another store of the layer has read, see `LayerStore.take_heads`."""
        if not self.is_initialized:
            rows = len(other.rows)
            empty = (part.expand(rows, -1, -1, -1).flatten(0, 1).unsqueeze(1) for part in other.empty_tokens)
            self.lazy_initialization(*empty)
        self.store.take_heads(other)

    def activate_past_recording(self) -> None:
        """Refused: drafts are taken back, and what a head keeps is decided once."""
        raise CacheError(
            f'Assisted decoding is not possible with selection = "{self.store.scheme.selection}"; generate without an '
            "assistant model or prompt lookup."
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, as `activate_past_recording`."""
        self.activate_past_recording()


class LatentLayer(PagedLayer):
    """`PagedLayer` of latent attention (MLA), which gives latents in the place of keys, and RoPE parts as values."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Park new latents [B, 1, T, R] and RoPE parts [B, 1, T, r]; the model expands what comes back.

        Raises:
            CacheError: see `PagedLayer.update`.
        """
        latents, rope = super().update(key_states, value_states, *args, **kwargs)
        return LatentHandle.wrap(latents.as_subclass(torch.Tensor), self.store), rope


class IndexedLayer(PagedLayer):
    """`PagedLayer` of sparse attention, with the keys by which an indexer chooses tokens.

    Attributes:
        index: these keys.
        rows: those that the indexer reads now, with masks of these keys (`runtime/hf/sequence_modules.py`); None
            elsewhere.
    """

    def __init__(self, store: LayerStore):
        super().__init__(store)
        self.index = IndexerKeys(8 if store.scheme.quantizes else 16)
        self.rows: list[int] | None = None
        store.is_indexed = True

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Store the new keys [b, T, D] of the rows that are read, and return all of theirs, see `IndexerKeys.append`.

        Raises:
            CacheError: the model is not one of a bundle.
        """
        if self.rows is None:
            raise CacheError(
                f"The indexer of layer {self.store.index} takes masks that this cache does not have; use the model of "
                "a bundle with a KV plan, which gives it others."
            )
        return self.index.append(keys, self.rows, len(self.store.group.sequences))

    def update_index(self, keys: Tensor) -> Tensor:
        """The same for keys [b, 1, T, D]."""
        return self.update_indexer(keys[:, 0])[:, None]

    def reset(self) -> None:
        """Drop everything stored."""
        super().reset()
        self.index.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens."""
        super().crop(tokens_to_remove)
        self.index.remove(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the sequences of `beam_idx`, in its order."""
        super().reorder_cache(beam_idx)
        if self.index.counts:
            self.index.reorder(beam_idx.tolist())

    # As those of `StateLayer`.

    def copies(self, earlier: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The indexer's keys of the only sequence, see `IndexerKeys.copies`."""
        return self.index.copies(earlier)

    def go_on(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from these."""
        self.index.hold(tensors)

    def resize(self, rows: int) -> None:
        """Have as many rows, the first of which are those there were."""
        self.index.resize(rows)

    def join(self, row: int, other: IndexedLayer, rows: int) -> list[tuple[Tensor, Tensor]]:
        """Let a row of `rows` have the keys of the only sequence in another cache's layer; nothing is left to copy."""
        self.index.take(row, other.index, rows)
        return []

    def move(self, moves: Mapping[int, int]) -> list[tuple[Tensor, Tensor]]:
        """Let sequences have free rows; nothing is left to copy."""
        self.index.move(moves)
        return []


class IndexedLatentLayer(IndexedLayer, LatentLayer):
    """`LatentLayer` of sparse attention."""


class RecurrentStates(dict[int, Any]):
    """Recurrent states by their numbers; those that are stored in 12 bits are unpacked wherever they are read."""

    def __init__(self, states: Mapping[int, Any], bits: int):
        super().__init__(states)
        self.bits = bits

    def __getitem__(self, number: int) -> Tensor | None:
        stored = super().__getitem__(number)
        return unpack(stored) if is_packed(stored) else stored

    def __setitem__(self, number: int, states: Tensor | None) -> None:
        if states is not None and not is_packed(states) and self.bits < 16 and can_pack(states):
            packed = packed_like(states)
            pack(states, packed)
            states = packed
        super().__setitem__(number, states)

    def write(self, number: int, states: Tensor) -> None:
        """Overwrite what is stored, where it is."""
        stored = self.get(number)
        pack(states, stored) if is_packed(stored) else stored.copy_(states)


def read_each(stored: Sequence[RecurrentStates], number: int) -> Tensor | None:
    """The states of as many sequences, each stored by itself, [S, ...]; zeros of one that has none, None if all have.

    Packed ones are unpacked together, for a launch takes longer than a state.
    """
    states = [own.get(number) for own in stored]
    known = next((state for state in states if state is not None), None)
    if known is None:
        return None
    together = known
    if len(states) > 1:
        together = torch.cat([torch.zeros_like(known) if state is None else state for state in states])
    return unpack(together) if is_packed(known) else together


def write_each(stored: Sequence[RecurrentStates], number: int, states: Tensor) -> None:
    """Overwrite the stored states of as many sequences with [S, ...]."""
    places = [own.get(number) for own in stored]
    if len(places) == 1:
        stored[0].write(number, states)
        return
    if is_packed(places[0]):
        together = packed_like(states)
        pack(states, together)
        states = together
    torch._foreach_copy_(places, list(states.split(1)))


class StateLayer(LinearAttentionLayer):
    """transformers' layer of states (linear attention, state-space models, short convolutions), for sequences that join
    and leave a batch.

    Args:
        number_of_states: states of each kind that the layer's module keeps.
        state_bits: width of recurrent states, 12 (`kernels/states`) or 16 for the module's own dtype.
    """

    def __init__(self, number_of_states: int = 1, state_bits: int = 16):
        super().__init__(number_of_states=number_of_states)
        self.recurrent_states: RecurrentStates = RecurrentStates(self.recurrent_states, state_bits)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Store the states after the newest tokens, [B, ...]; returns them."""
        if not self.is_recurrent_states_initialized[state_idx]:
            self.lazy_initialization(recurrent_states=recurrent_states, state_idx=state_idx)
        self.recurrent_states.write(state_idx, recurrent_states)
        return recurrent_states

    def tensors(self) -> dict[str, Tensor]:
        """All states as they are stored, [B, ...] each, by the names "conv.0", "recurrent.0", and so on."""
        found = {}
        for kind, states in (("conv", self.conv_states), ("recurrent", self.recurrent_states)):
            found |= {f"{kind}.{number}": state for number, state in states.items() if state is not None}
        return found

    def reset(self) -> None:
        """Forget the states."""
        for kind in ("conv", "recurrent"):
            getattr(self, f"{kind}_states").update(dict.fromkeys(range(self.number_of_states)))
            setattr(self, f"is_{kind}_states_initialized", dict.fromkeys(range(self.number_of_states), False))
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), False)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the sequences of `beam_idx`, in its order."""
        self.hold({name: tensor.index_select(0, beam_idx.to(tensor.device)) for name, tensor in self.tensors().items()})

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Let these be the states, which passes change in place."""
        for name, tensor in tensors.items():
            kind, number = name.split(".")
            if int(number) not in getattr(self, f"{kind}_states"):
                raise KeyError(f"a layer has no state {name}")
            getattr(self, f"{kind}_states")[int(number)] = tensor
            getattr(self, f"is_{kind}_states_initialized")[int(number)] = True
            self.has_previous_state[int(number)] = True
            if kind == "conv":
                self.conv_kernel_size[int(number)] = tensor.shape[-1]
                self.dtype, self.device = self.dtype or tensor.dtype, self.device or tensor.device

    def go_on(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from these, which are not changed."""
        self.hold({name: tensor.clone() for name, tensor in tensors.items()})

    def copies(self, earlier: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """A copy of `tensors`; nothing of what was copied `earlier` still holds."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def put(self, copies: Mapping[str, Tensor]) -> None:
        """Write copies to where the states are."""
        for name, tensor in self.tensors().items():
            tensor.copy_(copies[name])

    def resize(self, rows: int) -> None:
        """Have as many rows, the first of which are those there were."""

        def resized(tensor: Tensor) -> Tensor:
            more = rows - len(tensor)
            if more <= 0:
                return tensor[:rows]
            size = rows * math.prod(tensor.shape[1:])
            # Where rows were left out before, they are still behind the others.
            if tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() >= size * tensor.element_size():
                return tensor.as_strided((rows, *tensor.shape[1:]), tensor.stride())
            return torch.cat([tensor, tensor[:1].expand(more, *tensor.shape[1:])])

        self.hold({name: resized(tensor) for name, tensor in self.tensors().items()})

    def join(self, row: int, other: StateLayer, rows: int) -> list[tuple[Tensor, Tensor]]:
        """Let a row of `rows` have the states of the only sequence in another cache's layer.

        Returns:
            where the states of this row are to be copied to, and from where: those of all layers at once.
        """
        if not self.tensors():
            self.hold({name: tensor.new_zeros(rows, *tensor.shape[1:]) for name, tensor in other.tensors().items()})
        own = self.tensors()
        return [(own[name][row], state[0]) for name, state in other.tensors().items()]

    def move(self, moves: Mapping[int, int]) -> list[tuple[Tensor, Tensor]]:
        """Where the states of sequences that get free rows are to be copied to, and from where."""
        return [(states[new], states[old]) for states in self.tensors().values() for old, new in moves.items()]


class HybridLayer(StateLayer, PagedLayer):
    """`PagedLayer` with the convolution and recurrent states of transformers' linear-attention layers.

    Falcon-H1 and Zamba run attention and Mamba on the same input and use one cache layer for both.

    Args:
        store: what the layer stores of keys and values.
        number_of_states, state_bits: see `StateLayer`.
    """

    is_compileable = False

    def __init__(self, store: LayerStore, number_of_states: int = 1, state_bits: int = 16):
        StateLayer.__init__(self, number_of_states, state_bits)
        PagedLayer.__init__(self, store)

    def lazy_initialization(self, *args: torch.Tensor, **kwargs: Any) -> None:
        """transformers passes keys and values by position, states by name."""
        (PagedLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def activate_past_recording(self) -> None:
        """Keep the newest tokens uncompressed, and states as transformers needs them for a crop."""
        LinearAttentionLayer.activate_past_recording(self)
        PagedLayer.activate_past_recording(self)

    def reset(self) -> None:
        """Drop everything stored."""
        StateLayer.reset(self)
        PagedLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the sequences of `beam_idx`, in its order."""
        StateLayer.reorder_cache(self, beam_idx)
        PagedLayer.reorder_cache(self, beam_idx)

    @property
    def is_croppable(self) -> bool:
        """Recurrent states cannot be restored."""
        return LinearAttentionLayer.is_croppable.fget(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens, where the states allow it."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        PagedLayer.crop(self, tokens_to_remove)

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def offload(self) -> None:
        """Refused, as for every layer with pages."""
        PagedLayer.offload(self)

    prefetch = offload
