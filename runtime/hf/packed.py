"""One forward pass over the new tokens of several caches, one after another in a batch of one row.

Whatever treats each token by itself (norms, Linears, rotary positions) runs once for all of them. Attention goes to
each cache's own tokens. Where kernels run, it is planned for all layers before the first one
(`runtime/cache/prompt_pass.py` for prompts, `runtime/cache/steps.py` for decoding rows), and a layer launches the same
few kernels whatever the number of caches; caches that this does not serve (`unplanned`) store, attend and compress
their tokens layer by layer, as if they were alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from kvconvert.errors import CacheError
from kvconvert.kernels.attention import Choice, Scoring
from kvconvert.kernels.convolution import SideBySide
from kvconvert.kernels.pages import LayerFormat
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.runtime.cache.attend import attend, store_and_attend
from kvconvert.runtime.cache.forward_pass import PassTokens, layer_tokens
from kvconvert.runtime.cache.prompt_pass import PlannedChunk, PromptPass, TableCapacity, unplanned
from kvconvert.runtime.cache.steps import PlannedStep, can_plan_steps
from kvconvert.runtime.cache.store import LayerStore
from kvconvert.runtime.hf.captured_passes import PromptPlaces
from kvconvert.runtime.hf.handles import KeyHandle, LatentHandle, MaskHandle
from kvconvert.runtime.hf.layer import PagedLayer, StateLayer


@dataclass(eq=False)
class Segment:
    """The tokens of one cache in a packed pass.

    Attributes:
        cache: where they are stored, a `KVCache`.
        rows: of the cache; each has equally many of the tokens, one row after the other.
        tokens: which of the pass they are.
        padded: a batch whose padding the pass leaves out, so that rows differ in tokens; else None.
        error: what the cache failed with, after which the rest of the pass passes it over; None while it has not.
        chunk: a prompt's part in what was planned for all layers; None where it was not.
    """

    cache: Any
    rows: int
    tokens: slice
    padded: PaddedBatch | None = None
    error: Exception | None = None
    chunk: PlannedChunk | None = None

    @property
    def length(self) -> int:
        """New positions of each row."""
        return self.padded.length if self.padded else (self.tokens.stop - self.tokens.start) // self.rows

    def split(self, states: Tensor) -> Tensor:
        """The segment's part of [1, heads, N, channels]: [rows, heads, length, channels], zeros where padding is."""
        own = states[0, :, self.tokens]
        if self.padded:
            spread = own.new_zeros(own.shape[0], self.rows * self.length, own.shape[2])
            spread[:, self.padded.places] = own
            own = spread
        return own.unflatten(1, (self.rows, self.length)).transpose(0, 1)

    def put(self, attended: Tensor, output: Tensor) -> None:
        """Write what is attended to, [rows, heads, length, channels], to the pass's [N, heads, channels]."""
        here = output[self.tokens]
        if self.padded:
            here.copy_(attended.transpose(1, 2).flatten(0, 1)[self.padded.places])
        else:
            here.unflatten(0, (self.rows, self.length)).copy_(attended.transpose(1, 2))


@dataclass(frozen=True)
class PaddedBatch:
    """Which of a batch's new positions are tokens.

    Attributes:
        chunk: the tokens of the forward pass, whose mask has padding.
        places: int64 [N] of the tokens, one row's after the other's, among all positions of the batch; on the device,
            and on the host.
    """

    chunk: PassTokens
    places: Tensor
    places_on_host: Tensor

    @property
    def length(self) -> int:
        """New positions of each row."""
        return len(self.chunk.query_positions)


class PackedLayer(CacheLayerMixin):
    """One layer of a `PackedCache`.

    Args:
        cache: of all layers.
        index: the layer's number in the model.

    Attributes:
        length: what attention modules are told of it, see `runtime/hf/sequence_modules.py`; 0 for others.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: PackedCache, index: int):
        super().__init__()
        self.cache, self.index = cache, index
        self.length: int | Tensor = 0
        self.layers: list[PagedLayer] = [segment.cache.layers[index] for segment in cache.segments]
        self.is_sliding = self.layers[0].is_sliding
        self.is_initialized, self.pending = True, None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Park new keys [1, H, N, D] and values [1, H, N, E], each cache's own.

        Raises:
            Exception: what the last cache failed with, if none is left.
        """
        self.pending = key_states, value_states
        for segment, layer in zip(self.cache.segments, self.layers, strict=True):
            if segment.error is None and segment.chunk is None:
                try:
                    layer.update(segment.split(key_states), segment.split(value_states), *args, **kwargs)
                except Exception as error:
                    self.cache.fail(segment, error)
        if self.layers[0].store.is_latent:
            return LatentHandle.wrap(key_states, self), value_states
        return KeyHandle.wrap(key_states, self), value_states

    def attend(
        self,
        queries: Tensor,
        mask: MaskHandle,
        scoring: Scoring,
        *,
        value_dim: int,
        over_latents: Callable[[LayerStore, Segment, PassTokens], Tensor] | None = None,
        choice: Choice | None = None,
    ) -> Tensor:
        """Attention of queries [1, Hq, N, D], each over what its own cache stores: [1, N, Hq, E].

        Later layers may attend to the same tokens again, once these are stored.

        Args:
            queries: of all tokens of the pass.
            mask, scoring: see `attention_function`.
            value_dim: E.
            over_latents: attention [rows, T, Hq, E] of one cache's tokens in a layer of latents; None for others.
            choice: of an indexer, for all tokens of the pass.

        Raises:
            Exception: what the last cache failed with, if none is left.
        """
        pending, self.pending = self.pending, None
        _refuse_padding(mask)
        rotated, output = queries, None
        prompts, store = self.cache.prompts, self.layers[0].store
        if prompts is not None:
            keys, values = pending
            rotated = prompts.append(self._planned_store(), queries[0], keys[0], values[0])[None]
            if shows_window(mask.arguments["mask_function"], store.group.sliding_window):
                output = prompts.attend(self._planned_store(), rotated[0], scoring)
            else:
                self.cache.key = None
        fused = output is not None
        if output is None:
            output = queries.new_empty(*queries.shape[2:0:-1], value_dim)
        for segment, layer in zip(self.cache.segments, self.layers, strict=True):
            if segment.chunk is not None and fused:
                continue
            if segment.error is None:
                try:
                    chunk = _chunk(mask, segment, layer.store.forward_pass.start, queries.device)
                    chunk = layer_tokens(chunk, layer.store, choice and choice.part(segment.tokens, segment.rows))
                    if over_latents is not None:
                        own = over_latents(layer.store, segment, chunk).transpose(1, 2)
                    elif segment.chunk is not None:
                        own = attend(layer.store, segment.split(rotated), chunk, scoring, True, False)
                    else:
                        own = store_and_attend(layer.store, segment.split(queries), chunk, scoring, False)
                    segment.put(own, output)
                    continue
                except Exception as error:
                    self.cache.fail(segment, error)
            output[segment.tokens].zero_()
        unrotate = store.format.rotations.values and over_latents is None
        return hadamard_transform(output[None], inverse=True) if unrotate else output[None]

    def _planned_store(self) -> Any:
        """The layer of one of the caches whose prompts were planned."""
        pairs = zip(self.cache.segments, self.layers, strict=True)
        return next(layer.store for segment, layer in pairs if segment.chunk is not None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Left to the caches' own layers."""

    def get_seq_length(self) -> int | Tensor:
        """0: positions are given to the model, and each cache knows its own; `length` for those who ask besides."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The new tokens alone."""
        return query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class PackedStates:
    """A layer of a `PackedCache` without pages: states are read cache by cache (`runtime/hf/states.py`), or there is
    nothing to read.
    """

    is_compileable = is_croppable = is_sliding = supports_early_init = False


class PackedCache(Cache):
    """Several caches of one model in one forward pass, whose input is a batch of one row.

    A cache that fails does not keep the others from going on: its error is kept, and its tokens' outputs are
    meaningless. What the model raises outside of the caches concerns all of them.

    Args:
        parts: each `KVCache` and its number of new tokens, in the order in which the model's input has them; of a cache
            with several sequences one's after the other's, equally many of each.
        rows: whether the first part is the decoding rows that prompts will join.
        padded: of the only part, if its rows have padding; `parts` counts its tokens without.

    Attributes:
        segments: of the pass.
        prompts: those that were planned for all layers; None if none was.
        key: what a recording of the pass's kernels depends on; None where it cannot be replayed, which may show only
            when the model has run.
        placed: the states of prompts in a pass that can be replayed; None in others, and without states.
        placeholders: see `KVCache`.
    """

    def __init__(self, parts: Sequence[tuple[Any, int]], *, rows: bool = False, padded: PaddedBatch | None = None):
        self.segments: list[Segment] = []
        begin = 0
        for cache, count in parts:
            self.segments.append(Segment(cache, max(1, cache.groups[0].rows), slice(begin, begin + count), padded))
            begin += count
        for place, segment in enumerate(self.segments):
            for group in segment.cache.groups:
                group.place = place
                group.tokens_beside = begin - (segment.tokens.stop - segment.tokens.start)
        first = self.segments[0].cache
        self.placeholders, self.prompts = first.placeholders, None
        self._tokens, self._rows = begin, self.segments[0] if rows else None
        self._sequences: dict[tuple[int, ...], SideBySide] = {}
        self._step: PlannedStep | None = None
        self.key: Hashable | None = None
        self.placed: PromptPlaces | None = None
        kinds = [
            PackedLayer(self, i) if isinstance(x, PagedLayer) else PackedStates() for i, x in enumerate(first.layers)
        ]
        super().__init__(layers=kinds)

    @contextmanager
    def planned(self, capacity: TableCapacity | None = None, places: PromptPlaces | None = None) -> Iterator[None]:
        """Within the context the model's forward pass runs, in that of `launches`, planned for all layers as far as
        possible.

        Args:
            capacity: what the tables of a pass that is recorded have room for; None for a pass that is not.
            places: for the states of prompts in a pass that is recorded; None without states.

        Raises:
            Exception: what the last cache failed with, if none is left.
        """
        self._plan(capacity)
        try:
            if self.key is not None and places is not None:
                self._place(places, capacity)
            yield
            if self.placed is not None:
                self.placed.take()
        except BaseException as error:
            if self._step is not None:
                self._step.abandon()
            for group in (group for s in self.segments if s.chunk is not None for group in s.cache.groups):
                group.error = group.error or error
            raise
        finish: list[tuple[Segment, Callable[[], None]]] = []
        if self._step is not None:
            finish.append((self._rows, self._step.finish))
        finish += [(s, partial(PromptPass.finish, s.chunk)) for s in self.segments if s.chunk is not None]
        self.prompts = None
        for segment, end in finish:
            try:
                end()
            except Exception as error:
                self.fail(segment, error)

    def launches(self) -> AbstractContextManager[None]:
        """The context of each run of the model within `planned`."""
        if self.placed is not None:
            self.placed.begin_run()
        return nullcontext() if self._step is None else self._step.launches()

    def _place(self, places: PromptPlaces, capacity: TableCapacity) -> None:
        prompts = [segment for segment in self.segments if segment is not self._rows]
        rows, lengths = self.segments[0].tokens.stop, [segment.length for segment in prompts]
        places.put([segment.cache for segment in prompts], lengths, rows, capacity)
        self.placed = places

    def state_layers(self) -> list[StateLayer]:
        """Where states lie that a pass which can be replayed changes: those of decoding rows, and of `placed`."""
        if self.placed is None:
            return []
        return [*self._rows.cache.state_layers().values(), *self.placed.layers.values()]

    def formats(self) -> list[LayerFormat]:
        """How the caches' pages are read, of all layers."""
        return [layer.store.format for segment in self.segments for layer in segment.cache.paged_layers()]

    def are_stored(self, tokens: Tensor) -> Tensor:
        """Which of these tokens of the pass [n] are a sequence's, bool [n]; those of free rows are read for nothing."""
        stored = torch.ones(self._tokens, dtype=torch.bool)
        if self._rows is not None:
            stored[self._rows.tokens] = torch.tensor([s.occupied for s in self._rows.cache.groups[0].sequences])
        return stored.to(tokens.device)[tokens]

    @contextmanager
    def counted_once(self) -> Iterator[None]:
        """Within the context launches run again that ran before, and nothing is counted."""
        tables = [] if self._step is None else self._step.tables
        counts = [part.clamped_rows.clone() for part in tables]
        yield
        for part, count in zip(tables, counts, strict=True):
            part.clamped_rows.copy_(count)

    def _plan(self, capacity: TableCapacity | None) -> None:
        prompts = None
        for segment in self.segments:
            try:
                if segment is self._rows:
                    if can_plan_steps(segment.cache.groups):
                        self._step = PlannedStep(segment.cache.groups, max_capacity=capacity is not None)
                    continue
                if not segment.cache.allocate_beside():
                    continue
                groups, count = segment.cache.groups, segment.tokens.stop - segment.tokens.start
                if unplanned(groups, segment.length) is not None:
                    continue
                prompts = prompts or PromptPass(groups, self._tokens)
                if prompts.has_room(groups, count):
                    chunk = segment.padded and segment.padded.chunk
                    segment.chunk = prompts.add(groups, segment.tokens.start, segment.length, chunk)
            except Exception as error:
                self.fail(segment, error)
        if prompts is not None and prompts.chunks:
            complete = all(s.error is None and (s.chunk or (s is self._rows and self._step)) for s in self.segments)
            self.prompts, fits = prompts, prompts.write(capacity if complete else None)
            if fits:
                self.key = capacity, None if self._step is None else self._step.key()

    def sequences(self, lengths: list[int], device: torch.device) -> SideBySide:
        """Where sequences of these lengths lie side by side, one object for all layers."""
        return self._sequences.setdefault(tuple(lengths), SideBySide(lengths, device))

    def fail(self, segment: Segment, error: Exception) -> None:
        """Go on without a segment, unless it is the last one."""
        segment.error = error
        if all(segment.error is not None for segment in self.segments):
            raise error

    def set_modality_mask(self, tokens: Tensor | None, modality: str) -> None:
        """`KVCache.set_modality_mask` of each cache, from that of all new tokens, bool [1, N]."""
        for segment in self.segments:
            own = None if tokens is None else tokens[0, segment.tokens].unflatten(0, (segment.rows, segment.length))
            segment.cache.set_modality_mask(own, modality)


def _refuse_padding(mask: MaskHandle) -> None:
    """Read the attention mask of a pass, if it has one, once."""
    padding = mask.arguments["attention_mask"]
    if padding is not None and "no padding" not in mask.cached:
        if not bool(padding.all()):
            raise CacheError("A packed pass has no padding, and the attention mask has zeros; pass none.")
        mask.cached["no padding"] = True


def shows_window(function: Callable, window: int | None) -> bool:
    """Whether a mask function of transformers is causal, within a sliding window if there is one, and nothing else."""
    expected = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    return _alike(function, expected)


def _alike(one: Any, other: Any) -> bool:
    """Whether two functions have the same code over the same values."""
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    if isinstance(one, FunctionType):
        contents = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other)]
        return one.__code__ is other.__code__ and one.__defaults__ == other.__defaults__ and _alike(*contents)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return one is other or one == other


def _chunk(mask: MaskHandle, segment: Segment, start: int, device: torch.device) -> PassTokens:
    """A segment's new tokens, from position `start` on; one object for all layers that share the mask."""
    key = (segment, str(device))
    if key not in mask.cached:
        function = mask.arguments["mask_function"]
        positions, real = torch.arange(start, start + segment.length, device=device), None
        if segment.padded:
            real = segment.padded.chunk.real
        mask.cached[key] = PassTokens(positions, real, None if function is causal_mask_function else function)
    return mask.cached[key]
