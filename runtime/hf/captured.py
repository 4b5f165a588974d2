"""Decoding steps as CUDA graphs: a model's passes over a token of each row are recorded once and replayed.

A step is planned on the host for whole groups of layers (`runtime/cache/steps.py`), which writes the few numbers that
change into tables of fixed addresses; then one graph launches everything that the model's forward pass would. Graphs
are recorded by batch size and by how much work they have room for, and serve every cache of the model.

The first recording of a batch is used only after a test: at other positions than those it was made at, it has to give
what the layers give one by one. A model whose forward pass depends on numbers that the host counts fails it and runs
eagerly.

`prepare_steps` records before the first token is due: kernels are compiled, and graphs made, over a pretended cache. A
recording depends on how many sequences there are and on how much work there is room for, not on what is stored. So a
short prompt is read into a cache of its own, whose sequences then claim to be long: their page tables name the same
page again and again. That takes the memory of one page per sequence and no time at any length. Lengths whose work has
the same room as that of others are passed over before anything is written for them.

States of linear attention lie where recordings know them, in slots that one cache at a time has (`StateSlots`). As a
pass changes them, they are put back before a step runs once more to be recorded or tested.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Sequence_
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm
from transformers.cache_utils import DummyLayer
from transformers.utils import ModelOutput

from kvconvert.kernels.launches import skips_launches
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import KVScheme
from kvconvert.models import CACHE
from kvconvert.models.configuration import context_length
from kvconvert.runtime.cache.groups import FREE
from kvconvert.runtime.cache.sequence import Sequence, Side
from kvconvert.runtime.cache.steps import PlannedStep, TableRegistry, can_plan_steps, entries_needed
from kvconvert.runtime.cache.store import Group
from kvconvert.runtime.hf.cache import KVCache
from kvconvert.runtime.hf.captured_passes import CapturedPasses, Recording, alike, states_of
from kvconvert.runtime.hf.layer import HeadwiseLayer, HybridLayer, IndexedLayer, PagedLayer, StateLayer

logger = logging.getLogger(__name__)

# By how much positions are moved for the test of a recording (back, if there are as many).
SHIFT = 13
# Arguments that change nothing about the last token's logits.
HARMLESS = frozenset({"return_dict", "use_cache", "logits_to_keep", "cache_position"})


class StateSlots:
    """Where recorded steps read and write the states of linear attention: tensors that one cache at a time has.

    A batch has the first rows of the smallest slots with room for it, so that batches of an Engine share theirs.
    """

    def __init__(self) -> None:
        self._slots: dict[Hashable, list[dict[str, torch.Tensor]]] = {}
        self._owners: dict[Hashable, weakref.ref[KVCache]] = {}

    def lend(self, cache: KVCache, rows: int) -> Hashable:
        """Let the states of a cache of as many rows lie in slots; which they are, None without states."""
        layers = list(cache.state_layers().values())
        if not layers:
            return None
        device = next(iter(layers[0].tensors().values())).device
        room = min((n for n, where in self._slots if where == device and n >= rows), default=None)
        if room is None:
            room = rows
            self._slots[room, device] = [layer.copies() for layer in layers]
        key = (room, device)
        owner = self._owners.get(key, lambda: None)()
        for number, (layer, slots) in enumerate(zip(layers, self._slots[key], strict=True)):
            tensors = layer.tensors()
            if all(t.data_ptr() == slots[name].data_ptr() for name, t in tensors.items()):
                continue
            if owner is not None and owner is not cache:
                before = list(owner.state_layers().values())[number]
                if any(t.data_ptr() == slots[name].data_ptr() for name, t in before.tensors().items()):
                    before.hold(before.copies())
            own = {name: slots[name][:rows] for name in tensors}
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
            layer.hold(own)
        self._owners[key] = weakref.ref(cache)
        return key


class CapturedSteps:
    """Records and replays the decoding steps of one model.

    Args:
        forward: the model's own forward pass, without our replacement.
        name: of the model's class, for messages.

    Attributes:
        registry: of the tables that all of the model's caches use.
        reason: why the model's steps run eagerly although its caches could be planned, or None.
        replayed: steps replayed so far; recorded: graphs made.
        prepared: batches whose steps were recorded beforehand, see `prepare_steps`.
        has_kernels: whether all kernels that the model may launch are on its GPU.
        passes: recordings of passes over prompts and decoding rows.
        pool: the memory of all recordings, once there is one.
    """

    def __init__(self, forward: Callable[..., ModelOutput], name: str):
        self.forward, self.name = forward, name
        self.registry = TableRegistry()
        self.reason: str | None = None
        self.replayed = self.recorded = 0
        self.prepared: set[Hashable] = set()
        self.has_kernels = False
        self.passes = CapturedPasses(self)
        self.states = StateSlots()
        # Of batches, the first recording of which was tested.
        self._tested: set[Hashable] = set()
        self._recordings: dict[Hashable, Recording] = {}
        self.pool: Any = None
        self._logits = torch.empty(0, 0)  # [N, V], written by the replay of any recording
        # While steps are prepared, and whether they get the most room for their work.
        self._prepares = self._most_room = False
        self._trusts_masks = False
        self._told: set[str] = set()

    def __deepcopy__(self, memo: dict) -> CapturedSteps:
        # Recordings know the addresses of their own model's weights.
        return CapturedSteps(copy.deepcopy(self.forward, memo), self.name)

    @contextmanager
    def trusting_masks(self) -> Iterator[None]:
        """Within the context attention masks are not read: those of `generate` never mask a new token."""
        before, self._trusts_masks = self._trusts_masks, True
        try:
            yield
        finally:
            self._trusts_masks = before

    def serves(self, arguments: dict[str, Any]) -> bool:
        """Whether a forward pass with these arguments is a step that can be planned and recorded."""
        cache, ids = arguments.get(CACHE), arguments.get("input_ids")
        if self.reason is not None or not isinstance(cache, KVCache) or not isinstance(ids, torch.Tensor):
            return False
        if not (ids.is_cuda or skips_launches()) or ids.dim() != 2 or not cache.replays:
            return False
        if ids.shape[1] != 1:
            return False
        if (
            torch.is_grad_enabled()
            or (ids.is_cuda and torch.cuda.is_current_stream_capturing())
            or not cache.groups[0].rows
        ):
            return False
        if cache.groups[0].reading_prompt:
            return False
        reason = self._unsupported(cache, arguments)
        if reason is not None:
            if reason not in self._told:
                self._told.add(reason)
                logger.warning("Steps of %s run without CUDA graphs: %s.", self.name, reason)
            return False
        mask = arguments.get("attention_mask")
        if mask is None or self._trusts_masks:
            return True
        # In a user's own loop: masked new tokens, and masks that have to be refused, are left to the eager path.
        whole = isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] == cache.get_seq_length() + 1
        return whole and bool((mask[:, -1:] != 0).all())

    def _unsupported(self, cache: KVCache, arguments: dict[str, Any]) -> str | None:
        """Why a decoding step cannot be planned; None if it can."""
        if cache.groups[0].registry is not self.registry:
            return "the cache was not made by the model's new_kv_cache()"
        if not _records(cache):
            return "some layers are transformers' own, or an indexer chooses their tokens"
        if not can_plan_steps(cache.groups):
            return "the kernels do not serve its layers, or these lie on several devices"
        return other_arguments(arguments)

    def step(self, arguments: dict[str, Any]) -> ModelOutput:
        """A forward pass that `serves` accepts; errors are those of `PlannedStep`."""
        cache, ids = arguments[CACHE], arguments["input_ids"]
        positions = arguments.get("position_ids")
        if positions is None:
            positions = cache.get_seq_length() + torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        planned = PlannedStep(cache.groups, max_capacity=self._most_room)
        try:
            if skips_launches():
                output = self._launch(planned, cache, ids, positions)
                planned.finish()
                return output
            with torch.cuda.device(ids.device):
                batch = ids.shape, positions.shape, ids.device, self.states.lend(cache, len(ids))
                recording = self._recorded(planned, batch)
                if recording is None:
                    output = self._record(planned, cache, ids, positions, batch)
                elif self._prepares:
                    planned.abandon()
                    return recording.output
                else:
                    self.replayed += 1
                    output = recording.replay(ids, positions)
                result = _copied(output, cache)
        except BaseException:
            planned.abandon()
            raise
        planned.finish()
        return result

    def _recorded(self, planned: PlannedStep, batch: tuple[Hashable, ...]) -> Recording | None:
        """What was recorded for a step; if nothing was, for steps with any work, and this one gets as much room."""
        found = self._recordings.get((*batch, planned.key()))
        if found is None and not (planned.max_capacity or self._prepares):
            planned.max_capacity = True
            found = self._recordings.get((*batch, planned.key()))
            planned.max_capacity = found is not None
        return found

    def _record(
        self,
        planned: PlannedStep,
        cache: KVCache,
        ids: torch.Tensor,
        positions: torch.Tensor,
        batch: tuple[Hashable, ...],
    ) -> ModelOutput:
        """Run a step layer by layer, and record it for the next time."""
        counts = [tables.clamped_rows.clone() for tables in planned.tables]
        put_back = states_of(cache.state_layers().values())
        if not (self.has_kernels and batch in self._tested and all(tables.asked for tables in planned.tables)):
            # This also compiles kernels, and tells the tables how work is to be divided.
            seen = self._launch(planned, cache, ids, positions).logits
            if (self._logits.device, self._logits.dtype) != (seen.device, seen.dtype):
                self._logits = seen.new_empty(0, seen.shape[-1])
        key = (*batch, planned.key())
        try:
            room = self.room_for_logits(ids)

            def launch(*static: torch.Tensor) -> ModelOutput:
                recorded = self._launch(planned, cache, *static)
                # Their own memory is the next recording's, which keeps no cache alive.
                recorded.logits, recorded[CACHE] = room.copy_(recorded.logits), None
                return recorded

            recording = Recording.of(self, launch, (ids, positions), [], "global")
            moved = planned, cache, recording, ids, positions
            if batch not in self._tested and not self._holds_elsewhere(*moved, put_back):
                self.reason = "its forward pass depends on positions that are counted on the host"
        except RuntimeError as error:
            self.reason = str(error).strip().split("\n")[0].rstrip(".")
            torch.cuda.synchronize()
        if self.reason is not None:
            logger.warning("Steps of %s run without CUDA graphs: %s.", self.name, self.reason)
        else:
            self._recordings[key], self.recorded = recording, self.recorded + 1
            self._tested.add(batch)
        for tables, count in zip(planned.tables, counts, strict=True):
            tables.clamped_rows.copy_(count)
        put_back()
        if self.reason is None:
            return recording.replay(ids, positions)
        return self._launch(planned, cache, ids, positions)

    def room_for_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Where recordings leave the logits of tokens of any shape, [*ids.shape, V], until another one is replayed."""
        if len(self._logits) < ids.numel():
            self._logits = self._logits.new_empty(ids.numel(), self._logits.shape[1])
        return self._logits[: ids.numel()].view(*ids.shape, -1)

    def _launch(self, planned: PlannedStep, cache: KVCache, ids: torch.Tensor, positions: torch.Tensor) -> ModelOutput:
        """The model's forward pass over a planned step."""
        with planned.launches():
            return self.forward(input_ids=ids, position_ids=positions, use_cache=True, **{CACHE: cache})

    def _holds_elsewhere(
        self,
        planned: PlannedStep,
        cache: KVCache,
        recording: Recording,
        ids: torch.Tensor,
        positions: torch.Tensor,
        put_back: Callable[[], None],
    ) -> bool:
        """Whether a recording gives at other positions what the layers give there; both overwrite the new tokens' keys
        and values, and states, which a step has to write again.
        """

        def move(by: int) -> None:
            for group, tables in zip(planned.groups, planned.tables, strict=True):
                group.logical += by
                tables.step[2] += by

        by = -min(SHIFT, int(positions.min())) or 1
        move(by)
        try:
            put_back()
            expected = self._launch(planned, cache, ids, positions + by).logits.clone()
            put_back()
            return alike(recording.replay(ids, positions + by).logits, expected)
        finally:
            move(-by)


def other_arguments(arguments: dict[str, Any]) -> str | None:
    """What a forward pass is given that no recording and no packed pass takes; None if there is nothing."""
    known = {CACHE, "input_ids", "attention_mask", "position_ids"} | HARMLESS
    others = [n for n, value in arguments.items() if n not in known and value is not None and value is not False]
    if others:
        return f"the model was given {', '.join(sorted(others))}"
    if arguments.get("use_cache") is False or arguments.get("return_dict") is False:
        return "use_cache or return_dict is False"
    return None


def is_plain(cache: KVCache) -> bool:
    """Whether all layers keep keys and values and no other states, and all heads of a layer the same tokens."""
    layers, other = cache.paged_layers(), (HeadwiseLayer, HybridLayer, IndexedLayer)
    return len(layers) == len(cache.layers) and not any(isinstance(layer, other) for layer in layers)


def _records(cache: KVCache) -> bool:
    """Whether what all layers keep lies where recordings of steps find it."""

    def found(layer: Any) -> bool:
        if isinstance(layer, StateLayer) and (layer.record_past or not layer.tensors()):
            return False
        return isinstance(layer, (PagedLayer, StateLayer, DummyLayer)) and not isinstance(layer, IndexedLayer)

    return all(map(found, cache.layers))


def _copied(output: ModelOutput, cache: KVCache) -> ModelOutput:
    """An output with copies of its tensors, which later replays do not overwrite, and the cache that was used."""
    parts = {name: part.clone() if isinstance(part, torch.Tensor) else part for name, part in output.items()}
    return type(output)(**parts | {CACHE: cache})


# Lengths at which steps are recorded grow by this factor; room for work doubles, and not at the same lengths for all.
FACTOR = 1.5
# Seconds after which there is a bar.
DELAY = 1.0


@torch.no_grad()
def prepare_steps(
    model: Any,
    tokens: Sequence_[int],
    longest: int,
    growing: int | None = None,
    *,
    most_room: bool = False,
    batch: ShortBatch | None = None,
) -> int:
    """Record the decoding steps of a batch that begins with so many tokens and ends with the longest at `longest`.

    Steps of caches that compress prompts as a whole are recorded for short prompts alone, and layers of transformers'
    own not at all.

    Args:
        model: of a bundle (`runtime/hf/generation.py`), on a GPU.
        tokens: of each row's prompt, 0 for a row that is free; rows without a complete page (`tokens_with_pages`) get
            no longer.
        longest: tokens of the longest row in the end.
        growing: how many rows, the first ones, get longer; None for all.
        most_room: record with room for any work. Such a recording serves, less fast, all steps of the batch that none
            was made for.
        batch: that has been read already, if `ShortBatch.takes_any_length` takes such rows; None for one of its own.

    Returns:
        how many graphs were recorded.
    """
    captured, begin = model.captured, max(tokens)
    # Recordings hold at every position, and a learned embedding of positions has none beyond its last.
    last = (context_length(model.config) or longest + 1) - 1
    before = captured.recorded
    lengths = [begin]
    while lengths[-1] < longest:
        lengths.append(min(longest, int(lengths[-1] * FACTOR) + 1))
    with tqdm(total=len(lengths) + 1, desc="Preparing decoding steps", delay=DELAY, leave=False, disable=None) as bar:
        batch = batch or ShortBatch.read(model, tokens)
        if batch is None:
            return 0
        bar.update()
        some = torch.zeros(len(tokens), 1, dtype=torch.int64, device=model.device)
        for length in lengths:
            grown = [n + (length - begin) * (growing is None or row < growing) for row, n in enumerate(tokens)]
            batch.set_lengths(grown, length)
            if not captured.serves({CACHE: batch.cache, "input_ids": some}):
                break
            if batch.work(most_room) not in batch.recorded:
                try:
                    captured._prepares, captured._most_room = True, most_room
                    model(input_ids=some, position_ids=some + min(length, last), **{CACHE: batch.cache})
                finally:
                    captured._prepares = captured._most_room = False
                batch.set_lengths(grown, length)
                batch.recorded.update({batch.work(most_room)} - {None})
            bar.update()
    return captured.recorded - before


@dataclass(frozen=True, eq=False)
class ShortBatch:
    """A cache whose rows hold short prompts and claim to be of any lengths.

    Attributes:
        cache: of all rows.
        tokens: that were read of each row.
        before: each group with its sequences and positions after that.
        recorded: what steps were recorded for, see `work`.
    """

    cache: KVCache
    tokens: Sequence_[int]
    before: list[tuple[Group, tuple[Sequence, ...], int]]
    recorded: set[Hashable]

    @classmethod
    def read(cls, model: Any, tokens: Sequence_[int]) -> ShortBatch | None:
        """Read prompts of these lengths, but of at most a page beyond all windows; None where they are read twice."""
        cache = model.new_kv_cache()
        return None if cache.reconstructs else cls(cache, tokens, _read_short_prompt(model, cache, tokens), set())

    @property
    def takes_any_length(self) -> bool:
        """Whether rows with pages may be given lengths without any: where no prompt is compressed as a whole."""
        return all(group.policy.flushes and not group.policy.selects for group, *_ in self.before)

    def set_lengths(self, tokens: list[int], longest: int) -> None:
        """Give rows as many pages as these numbers of tokens fill, or none, at position `longest`, for a dummy run."""
        for group, sequences, logical in self.before:
            _set_dummy_lengths(group, sequences, logical, self._stored(group, tokens), longest)

    def _stored(self, group: Group, tokens: list[int]) -> list[int]:
        """The tokens stored in each of a group's rows; KV heads with rows of their own keep parts of prompts."""
        if not group.scheme.heads_apart:
            return tokens
        held = []
        for count, prompt in zip(tokens, self.tokens, strict=True):
            kept, _ = group.policy.budgets.of(prompt, group.policy.layer)
            held += [own + count - prompt if count else 0 for own in kept]
        return held

    def work(self, most_room: bool) -> Hashable:
        """What the recording of the next step depends on; None as long as no step has asked how its work is divided."""
        found: list[Hashable] = []
        for group, *_ in self.before:
            run = [(group.logical, 1)]
            after = tuple(s.extend(run, group.scheme.sink_tokens) if s.occupied else s for s in group.sequences)
            tables = group.registry.tables(group, entries_needed(after))
            found.append((id(tables), tables.rooms(group, after)))
        return None if None in (rooms for _, rooms in found) else (tuple(found), most_room)


def tokens_with_pages(schemes: Sequence_[KVScheme]) -> int:
    """Of a prompt that fills a page in every layer."""
    return max(scheme.exact_tokens + PAGE_SIZE for scheme in schemes) + 1


@torch.no_grad()
def _read_short_prompt(model: Any, cache: Any, tokens: Sequence_[int]) -> list[tuple[Group, tuple[Sequence, ...], int]]:
    """Read a prompt of at most a page beyond all windows; each group with its sequences and positions afterwards."""
    most = tokens_with_pages([group.scheme for group in cache.groups])
    counts = [max(1, min(n, most)) for n in tokens]
    width = max(counts)
    first = torch.tensor([width - n for n in counts], device=model.device)
    mask = (torch.arange(width, device=model.device) >= first[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache.expect_whole_prompt()
    model(input_ids=torch.zeros_like(mask), attention_mask=mask, position_ids=positions, **{CACHE: cache})
    return [(group, group.sequences, group.logical) for group in cache.groups]


def _set_dummy_lengths(
    group: Group, before: tuple[Sequence, ...], logical: int, tokens: list[int], longest: int
) -> None:
    """Let sequences, which stood like this at position `logical`, claim to have as many pages as so many tokens fill.

    Their residual windows stay as they are, so that they may claim to have up to a page of tokens more.
    """
    size, scheme = PAGE_SIZE, group.scheme
    exact = scheme.exact_tokens
    group.logical = group.attended = longest + size
    found = []
    for row, (sequence, count) in enumerate(zip(before, tokens, strict=True)):
        if not count:
            found.append(FREE)
            continue
        if count < len(sequence):
            # All of them in the buffers.
            short = Sequence().extend([(group.logical - count, count)], scheme.sink_tokens)
            found.append(group.without_outsiders(row, short, [], []))
            continue
        more = 0
        # Shares of a prompt are not known here, but where each KV head's are.
        grows = group.policy.flushes and (scheme.heads_apart or not group.policy.selects)
        if grows and sequence.keys.pages and sequence.values.pages:
            fewest = min(len(sequence.keys.pages), len(sequence.values.pages))
            more = max(0, (count - exact) // size - fewest)
        sides = [Side(s.buffered, s.pages + s.pages[-1:] * more) for s in (sequence.keys, sequence.values)]
        end = group.logical - more * size
        moved = sequence.shift(end - logical)
        positions = moved.positions.append(end, more * size)
        pretended = replace(moved, keys=sides[0], values=sides[1], positions=positions)
        # Only what a sliding window leaves.
        found.append(group.without_outsiders(row, pretended, [], []))
    group.unapplied_tokens = 0
    group.sequences = tuple(found)
    for store in group.stores:
        store.sequences = group.sequences
    group.touch()
