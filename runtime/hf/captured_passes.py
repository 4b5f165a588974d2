"""Passes over prompts and decoding rows as CUDA graphs, recorded for a few numbers of tokens, to which they are padded.

All that changes from pass to pass is in tables of fixed addresses and fixed rooms (`runtime/cache/prompt_pass.py`,
`runtime/cache/steps.py`), so that a pass costs the host its plan, an upload and a replay. Tokens beyond a pass's own
are computed and stored nowhere. A pass is recorded when it comes the second time, or at once within `preparing`. The
first recording of a kind, whatever its tokens, is used only if its replay gives the logits of the layers' own launches.

Prompts with states are read side by side, as in other passes (`runtime/hf/states.py`), but for a number of sequences
that never changes, and from tensors and tables of fixed addresses (`PromptPlaces`). The states of a pass's prompts are
copied to the first of as many places before it, and back after it. A place without a prompt has no tokens, and one more
place has the tokens that the pass is padded with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvconvert.kernels.convolution import CHUNK, SideBySide, chunks_of, ends_of, owners_of
from kvconvert.kernels.launches import skips_launches
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.models import CACHE
from kvconvert.runtime.cache.prompt_pass import ROOM_PAGES, TableCapacity, workspace_tokens
from kvconvert.runtime.cache.store import Group
from kvconvert.runtime.hf.layer import StateLayer

logger = logging.getLogger(__name__)

# Tokens of recorded passes, up to the Engine's default budget and 128 rows. From 768 on they are those with which the
# products of an 8B Llama take the least time on an H100 if lengths are log-uniform: 1.2% more than without padding in
# the mean, where steps of 512 take 4.7%, for some numbers of rows suit cuBLAS better than smaller ones.
SIZES = (
    *(64, 128, 192, 256, 320, 384, 512, 768, 1024, 1280, 1536, 1728, 2048),
    *(2304, 2816, 3328, 3840, 4224, 4864, 5184, 5696, 6080, 7040, 7808, 8320),
)
MOST_TOKENS = 2 * SIZES[-1]  # of a recorded pass
# How far logits of a replay may differ: kernels are the same, but libraries may choose others within a graph.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Recording:
    """A recorded pass, of prompts or of a decoding step.

    Attributes:
        graph: of its launches.
        inputs: what it reads, and every replay overwrites.
        output: what it writes, which the next replay of any recording overwrites.
        formats: of the caches' layers, whose tensors its launches read.
    """

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Any
    formats: list[Any]

    @classmethod
    def of(
        cls, captured: Any, launch: Callable[..., Any], inputs: Sequence[Tensor], formats: list[Any], mode: str
    ) -> Recording:
        """Record a pass.

        Args:
            captured: the model's `CapturedSteps`, whose memory all recordings share.
            launch: gives the output for tensors like `inputs`; it is called once.
            inputs: what it reads.
            formats: see above.
            mode: `capture_error_mode` of `torch.cuda.graph`.

        Raises:
            RuntimeError: it cannot be recorded; torch.OutOfMemoryError for want of memory.
        """
        graph, static = torch.cuda.CUDAGraph(), tuple(part.clone() for part in inputs)
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=captured.pool, capture_error_mode=mode):
                output = launch(*static)
        except RuntimeError:
            torch.cuda.synchronize()
            raise
        captured.pool = captured.pool or graph.pool()
        return cls(graph, static, output, formats)

    def replay(self, *inputs: Tensor) -> Any:
        """The output for other inputs."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.output


class CapturedPasses:
    """Records and replays one model's passes over prompts and rows.

    Args:
        captured: the model's `CapturedSteps`, whose memory these share.

    Attributes:
        reason: why passes run without graphs, or None.
        sizes: tokens of recorded passes: `SIZES`, and what `include` has added.
        longest: tokens of the longest pass that is recorded; fewer than the last of `sizes` once memory has run out.
        records_long: whether passes after more than `ROOM_PAGES` pages are recorded; not once memory has run out.
        replayed: passes replayed so far; recorded: graphs made.
        places: where recorded passes keep the states of their prompts; None if the model has no states or its passes
            cannot be recorded.
    """

    def __init__(self, captured: Any):
        self._captured = captured
        self.reason: str | None = None
        self.sizes = SIZES
        self.longest, self.records_long = SIZES[-1], True
        self.places: PromptPlaces | None = None
        self.replayed = self.recorded = 0
        self._seen: set[Hashable] = set()
        self._tested: set[Hashable] = set()
        self._prepares = False
        self._recordings: dict[Hashable, Recording] = {}

    def padded(self, tokens: int, device: torch.device) -> int | None:
        """To how many tokens a pass over so many is padded; None where it is not recorded.

        Steps of the model have to hold in recordings, which is tested at other positions (`runtime/hf/captured.py`).
        """
        if device.type != "cuda" or self.reason is not None or not self._captured.recorded or self._captured.reason:
            return None
        return next((size for size in self.sizes if tokens <= size <= self.longest), None)

    def capacity(
        self, tokens: int, stored: Sequence[int], groups: Sequence[Group], device: torch.device
    ) -> TableCapacity | None:
        """What the tables of a recorded pass have room for; None if the pass is not recorded.

        Args:
            tokens: tokens of the pass.
            stored: tokens that each sequence has stored before.
            groups: the layers of a sequence's cache.
            device: the tokens' device.
        """
        size = self.padded(tokens, device)
        if size is None:
            return None
        capacity = TableCapacity.of(size)
        if self.records_long and not capacity.takes(stored) and all(g.stores[0].is_allocated for g in groups):
            # After as much as the workspace holds.
            pages = (min(map(workspace_tokens, groups)) - capacity.workspace_tokens) // PAGE_SIZE + capacity.pages
            capacity = TableCapacity.of(size, max(pages, capacity.pages))
        return capacity if capacity.takes(stored) else None

    def include(self, tokens: int) -> None:
        """Also record passes of `tokens` tokens if they are longer than all others, as those of a large batch are."""
        if self.sizes[-1] < tokens <= MOST_TOKENS:
            if self.longest == self.sizes[-1]:
                self.longest = tokens
            self.sizes += (tokens,)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Within the context passes whose results nobody needs are recorded when they come the first time; all kernels
        are on the GPU already.
        """
        before, self._prepares = self._prepares, True
        try:
            yield
        finally:
            self._prepares = before

    def logits(self, cache: Any, read: Tensor, keep: Tensor) -> Tensor:
        """Logits [rows, V] of a planned pass.

        Args:
            cache: a `PackedCache` with a key, within `planned`.
            read: int64 [2, N], ids and positions.
            keep: int64 [rows], the tokens whose logits are wanted.
        """
        rooms, steps = cache.key
        states = None
        if cache.placed is not None:
            states = self._captured.states.lend(cache.segments[0].cache, cache.segments[0].rows)
        kind = steps, keep.shape, read.device, states
        key = rooms, *kind
        padded = torch.nn.functional.pad(read, (0, rooms.tokens - read.shape[1]))
        if skips_launches():
            return self._launch(cache, padded, keep)
        recording = self._recordings.get(key)
        if recording is not None:
            self.replayed += 1
            return recording.replay(padded, keep).clone()
        known = key in self._seen or (self._prepares and kind in self._tested)
        if known and self.reason is None and rooms.tokens <= self.longest:
            return self._record(key, kind, cache, padded, keep)
        # Kernels are compiled, and the tables are told how work is divided.
        logits = self._launch(cache, padded, keep)
        if cache.key is None:
            self.reason = "a mask is neither causal nor a sliding window"
        self._seen.add(key)
        return logits

    def _launch(self, cache: Any, read: Tensor, keep: Tensor) -> Tensor:
        options = {CACHE: cache, "use_cache": True, "logits_to_keep": keep}
        with cache.launches():
            return self._captured.forward(input_ids=read[:1], position_ids=read[1:], **options).logits[0]

    def _record(self, key: Hashable, kind: Hashable, cache: Any, read: Tensor, keep: Tensor) -> Tensor:
        expected, put_back = None, states_of(cache.state_layers())
        if kind not in self._tested:
            expected, stored = self._launch(cache, read, keep), cache.are_stored(keep)
            if not stored.any():  # nothing by which a replay could be judged
                return expected
        elif self._prepares and cache.placed is not None:
            # flash-linear-attention tries its kernels where their number of programs is another one.
            self._launch(cache, read, keep)
        try:
            recording = self._recording(cache, read, keep)
        except torch.OutOfMemoryError:
            if cache.key[0].pages > ROOM_PAGES:
                self.records_long, which = False, f"after more than {ROOM_PAGES * PAGE_SIZE}"
            else:
                self.longest = max((size for size in self.sizes if size < read.shape[1]), default=0)
                which = f"over more than {self.longest}"
            logger.warning(
                "Passes of %s %s tokens run without CUDA graphs: the GPU's memory is full.", self._captured.name, which
            )
        except RuntimeError as error:
            self._give_up(str(error).strip().split("\n")[0].rstrip("."))
        else:
            if expected is None:
                # What a prepared pass computes is of no use.
                logits = recording.output if self._prepares else recording.replay(read, keep).clone()
            else:
                put_back()
                with cache.counted_once():
                    logits = recording.replay(read, keep).clone()
                if not alike(logits[stored], expected[stored]):
                    self._give_up("a replay gives other logits")
                    return expected
                self._tested.add(kind)
            self._recordings[key], self.recorded = recording, self.recorded + 1
            return logits
        return self._launch(cache, read, keep) if expected is None else expected

    def _recording(self, cache: Any, read: Tensor, keep: Tensor) -> Recording:
        room = self._captured.room_for_logits(keep)

        def launch(*static: Tensor) -> Tensor:
            # Their own memory is the next recording's.
            return room.copy_(self._launch(cache, *static))

        # Other threads, which add requests, may go on meanwhile.
        return Recording.of(self._captured, launch, (read, keep), cache.formats(), "thread_local")

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        logger.warning("Passes over prompts of %s run without CUDA graphs: %s.", self._captured.name, reason)


def states_of(layers: Iterable[StateLayer]) -> Callable[[], None]:
    """What puts the present states of layers back."""
    kept = [(layer, layer.copies()) for layer in layers]

    def put_back() -> None:
        for layer, copies in kept:
            layer.put(copies)

    return put_back


def alike(logits: Tensor, expected: Tensor) -> bool:
    """Whether a replay's logits are those of the layers' own launches; tokens that a model rules out have -inf."""
    found, wanted = (part.float().nan_to_num(neginf=-1e4) for part in (logits, expected))
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30)) <= TOLERANCE


# Numbers by which a table is moved, so that kernels have aligned addresses.
_ALIGNED = 16


class _Places(SideBySide):
    """Sequences whose tables are given."""

    def __init__(self, lengths: Sequence[int], tables: Sequence[Tensor]):
        super().__init__(lengths, tables[0].device)
        self.ends, self.owners, self.chunks = tables


class PromptPlaces:
    """Places for the states of one pass's prompts, and tables of where their tokens are.

    Args:
        like: the cache of a prompt that has been read.
        most: what the largest pass has room for.

    Attributes:
        layers: the places of the present pass by the layers' numbers, each with the states [S, ...] of all.
        sequences: its tokens; other tensors in each run of the model, since flash-linear-attention keeps what it
            derives from one.
    """

    def __init__(self, like: Any, most: TableCapacity):
        count, self._like = most.sequences + 1, like.state_layers()
        self._states = {
            index: {name: tensor.new_zeros(count, *tensor.shape[1:]) for name, tensor in layer.tensors().items()}
            for index, layer in self._like.items()
        }
        device = next(tensor for states in self._states.values() for tensor in states.values()).device
        self._table = torch.zeros(sum(map(_room, _sizes(count, most.tokens))), dtype=torch.int32, device=device)
        self._layers: dict[int, dict[int, StateLayer]] = {}
        self.layers: dict[int, StateLayer] = {}
        self._caches: Sequence[Any] = ()
        self._lengths: np.ndarray = np.zeros(0, dtype=np.int32)

    def put(self, caches: Sequence[Any], lengths: Sequence[int], rows: int, capacity: TableCapacity) -> None:
        """Begin a pass: copy the states of its prompts here, and write the tables.

        Args:
            caches: the prompts' caches, at most `capacity.sequences`.
            lengths: the number of new tokens of each prompt.
            rows: the number of decoding rows, whose tokens come before the prompts'.
            capacity: the capacity of the pass.
        """
        count, tokens = capacity.sequences + 1, capacity.tokens - rows
        self._caches, self._lengths = caches, np.zeros(count, dtype=np.int32)
        self._lengths[: len(lengths)] = lengths
        self._lengths[-1] = tokens - sum(lengths)
        if count not in self._layers:
            self._layers[count] = {index: self._layer(index, count) for index in self._states}
        self.layers = self._layers[count]
        for place, cache in enumerate(caches):
            for here, there in _pairs(self.layers, cache, place):
                torch._foreach_copy_(here, there)
        fresh = [place for place, cache in enumerate(caches) if not _has_states(cache)]
        torch._foreach_zero_([t[place] for place in (*fresh, -1) for t in _tensors(self.layers)])
        sizes = _sizes(count, tokens)
        host = np.zeros(sum(map(_room, sizes)), dtype=np.int32)
        tables = ends_of(self._lengths), owners_of(self._lengths), chunks_of(self._lengths, sizes[-1] // 2)
        for own, table in zip(_divided(host, sizes), tables, strict=True):
            own[:] = table.ravel()
        pinned = torch.from_numpy(host)
        if self._table.is_cuda:
            pinned = pinned.pin_memory()
        self._table[: len(host)].copy_(pinned, non_blocking=True)
        self.begin_run()

    def begin_run(self) -> None:
        """Before each run of the model in the pass."""
        ends, owners, chunks = _divided(self._table, _sizes(len(self._lengths), int(self._lengths.sum())))
        self.sequences = _Places(self._lengths.tolist(), (ends, owners, chunks.view(-1, 2)))

    def take(self) -> None:
        """End the pass: copy the states after it to the prompts' caches."""
        for place, cache in enumerate(self._caches):
            if not _has_states(cache):
                for index, layer in cache.state_layers().items():
                    layer.hold({name: torch.empty_like(t[:1]) for name, t in self.layers[index].tensors().items()})
            for here, there in _pairs(self.layers, cache, place):
                torch._foreach_copy_(there, here)
        self._caches = ()

    def _layer(self, index: int, count: int) -> StateLayer:
        """The first places of a layer."""
        like = self._like[index]
        layer = StateLayer(like.number_of_states, like.recurrent_states.bits)
        layer.hold({name: tensor[:count] for name, tensor in self._states[index].items()})
        return layer


def _tensors(layers: dict[int, StateLayer]) -> list[Tensor]:
    return [tensor for layer in layers.values() for tensor in layer.tensors().values()]


def _has_states(cache: Any) -> bool:
    return all(layer.tensors() for layer in cache.state_layers().values())


def _pairs(layers: dict[int, StateLayer], cache: Any, place: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    """A place's states and those of a prompt's cache, those of a dtype together, which are copied at once."""
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for index, layer in cache.state_layers().items():
        places = layers[index].tensors()
        for name, tensor in layer.tensors().items():
            here, there = pairs.setdefault(tensor.dtype, ([], []))
            here.append(places[name][place])
            there.append(tensor[0])
    return list(pairs.values())


def _sizes(count: int, tokens: int) -> tuple[int, int, int]:
    """Numbers in the tables of where sequences end, of tokens' owners, and of chunks."""
    return count + 1, tokens, 2 * (tokens // CHUNK + count)


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _divided(table: Any, sizes: Sequence[int]) -> list[Any]:
    """The tables of these sizes in a line of numbers."""
    found, begin = [], 0
    for size in sizes:
        found.append(table[begin : begin + size])
        begin += _room(size)
    return found
