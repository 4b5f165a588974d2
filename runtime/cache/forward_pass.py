"""One forward pass: its tokens (positions, padding, mask, modality), where they go, what is compressed after it.

A token's position is its index in the padded input, which masks and sliding windows refer to.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from kvconvert.errors import CacheError
from kvconvert.kernels.attention import Choice
from kvconvert.runtime.cache.sequence import SealEviction, SealSpan, Sequence

# (batch, head, query positions, key positions) -> bool, broadcast over all four; as transformers' mask functions.
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

Tables = TypeVar("Tables")

# Entries of a mask, queries times keys, that are evaluated at once.
BLOCK = 1 << 24


def is_pure(function: MaskFunction | None) -> bool:
    """Whether a mask depends on positions alone, rather than on tensors that a function holds."""
    if isinstance(function, partial):
        contents: list[Any] = [function.func, *function.args, *function.keywords.values()]
    elif function is None or isinstance(function, BuiltinFunctionType):
        return True
    elif isinstance(function, FunctionType):
        contents = [cell.cell_contents for cell in function.__closure__ or ()] + list(function.__defaults__ or ())
    else:
        return False
    while contents:
        part = contents.pop()
        if isinstance(part, torch.Tensor):
            return False
        if isinstance(part, (list, tuple)):
            contents += part
        elif callable(part) and not is_pure(part):
            return False
    return True


class PassTokens:
    """The tokens of one forward pass: which positions they have, which are padding, which keys each query attends to.

    Args:
        query_positions: int64 [T].
        padding_mask: [B, positions so far], nonzero where a token is real; None when nothing is padding.
        mask_function: which keys a query attends to; None is causal attention, to all positions up to its own.

    Attributes:
        query_positions: as given.
        real: bool [B, positions so far], or None when nothing is padding.
        is_causal: whether attention is causal.
    """

    def __init__(
        self,
        query_positions: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
        mask_function: MaskFunction | None = None,
    ):
        self.query_positions = query_positions
        self.mask_function = mask_function
        self.is_causal = mask_function is None
        self.real = None if padding_mask is None or bool(padding_mask.all()) else padding_mask.bool()
        self._length = None if padding_mask is None else padding_mask.shape[1]
        self._checked: torch.Tensor | bool | None = False  # the past that was compared already; layers share one
        self._host: list[list[bool]] | None = None
        self._windows: dict[tuple[int, tuple], bool] = {}

    def check_past(self, past: torch.Tensor | None, length: int, where: str) -> None:
        """Compare this pass's mask with that of the first `length` positions, which are stored.

        Raises:
            CacheError: the mask has another length, or differs for stored positions.
        """
        if self._length is not None and self._length != length + len(self.query_positions):
            raise CacheError(
                f"The attention mask has {self._length} columns and {where} of the cache needs "
                f"{length + len(self.query_positions)}: pass one mask over all tokens so far and the new ones."
            )
        if past is self._checked:
            return
        known = 0 if past is None else min(length, past.shape[1])
        if self.real is None:
            same = past is None or bool(past[:, :known].all())
        else:
            same = bool(self.real[:, known:length].all())
            same = same and (not known or torch.equal(self.real[:, :known], past[:, :known].to(self.real.device)))
        if not same:
            raise CacheError(
                f"The attention mask differs for positions that {where} of the cache has already stored; pass the same "
                "mask for old tokens, or start a new cache."
            )
        self._checked = past

    def same_padding(self, other: PassTokens) -> bool:
        """Whether the same tokens are real in another description of the same pass."""
        if self.real is None or other.real is None:
            return self.real is other.real
        return torch.equal(self.real, other.real.to(self.real.device))

    def runs(self, row: int, start: int, count: int) -> list[tuple[int, int]]:
        """The real positions among start..start+count-1 as (first position, how many)."""
        if self.real is None:
            return [(start, count)] if count else []
        if self._host is None:
            self._host = self.real[:, start : start + count].tolist()
        runs: list[tuple[int, int]] = []
        for offset, real in enumerate(self._host[row]):
            if not real:
                continue
            if runs and sum(runs[-1]) == start + offset:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((start + offset, 1))
        return runs

    def visible(self, row: int, query_positions: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """bool [H or 1, T, n]: which of the tokens at `positions` [n] or [H, n] each query attends to."""
        device = query_positions.device
        queries, keys = query_positions[None, :, None], torch.atleast_2d(positions.to(device)).unsqueeze(1)
        if self.mask_function is None:
            seen = keys <= queries
        else:
            batch, head = torch.tensor(row, device=device), torch.tensor(0, device=device)
            seen = self.mask_function(batch, head, queries, keys)
        return seen.expand(keys.shape[0], len(query_positions), keys.shape[2])

    def is_window(self, window: int, stored: tuple, positions: Callable[[], list[torch.Tensor]]) -> bool:
        """Whether each query attends to the `window` positions up to its own, as far as stored tokens go.

        Args:
            window: tokens that a query attends to, its own included.
            stored: identifies what is stored; layers that store the same tokens share one evaluation of the mask.
            positions: gives int64 [n] of each row's stored tokens.
        """
        key = (window, stored)
        if key not in self._windows:
            self._windows[key] = self._shows_window(window, positions())
        return self._windows[key]

    def _shows_window(self, window: int, positions: list[torch.Tensor]) -> bool:
        differs = torch.zeros((), dtype=torch.bool, device=self.query_positions.device)
        for row, part in enumerate(positions):
            if not len(part):
                continue
            part = part.to(differs.device)
            for queries in self.query_positions.split(max(1, BLOCK // len(part))):
                own = queries.unsqueeze(1)
                expected = (part <= own) & (part > own - window)
                differs |= (self.visible(row, queries, part)[0] != expected).any()
        return not bool(differs)


class LayerTokens(PassTokens):
    """The tokens of a pass whose queries attend to what their row's own first token decides.

    Args:
        chunk: the pass.
        store: the layer, which knows the sequences once the pass's tokens are committed.
        choice: of an indexer for these queries, counted from each row's first position; None without one.
        in_chunks: whether the mask is one of chunks, which are counted from there, too.
    """

    def __init__(self, chunk: PassTokens, store: Any, choice: Choice | None, in_chunks: bool):
        self.__dict__.update(chunk.__dict__)
        self.store, self.choice, self.in_chunks, self.is_causal = store, choice, in_chunks, False

    def visible(self, row: int, query_positions: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `PassTokens`; H is the number of KV heads where an indexer chose tokens for each."""
        first = 0 if self.store.group.real is not None else self.store.sequences[row].first
        queries, tokens = query_positions - first, positions.to(query_positions.device) - first
        if self.in_chunks:  # the batch of a packed pass has one row
            seen = super().visible(0, queries, tokens)
        else:
            seen = super().visible(row, query_positions, positions)
        if self.choice is None:
            return seen
        return seen & self.choice.of_row(row, query_positions - self.query_positions[0], tokens.flatten())


def layer_tokens(chunk: PassTokens, store: Any, choice: Choice | None) -> PassTokens:
    """The pass for one layer: `chunk` itself if its mask alone decides which tokens each query attends to."""
    if choice is not None:
        first = min((sequence.first for sequence in store.sequences), default=0)
        if choice.is_all_of(store.logical - first):
            choice = None
    in_chunks = store.in_chunks and chunk.real is None and store.group.real is None
    return chunk if choice is None and not in_chunks else LayerTokens(chunk, store, choice, in_chunks)


@dataclass(frozen=True)
class ModalityMask:
    """The tokens of one modality in one forward pass.

    Attributes:
        chosen: bool [B, T], T the tokens of the pass, padding included. Read only where a prompt needs it, so that a
            single-token step on a GPU does not wait for the device.
    """

    chosen: torch.Tensor

    @cached_property
    def runs(self) -> list[list[tuple[int, int]]]:
        """Per row, (first, how many) of consecutive tokens, ascending."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.chosen]
        edges = torch.nn.functional.pad(self.chosen.to("cpu", torch.int8), (1, 1)).diff(dim=1)
        begins, ends = ((edges == sign).nonzero().tolist() for sign in (1, -1))
        for (row, first), (_, end) in zip(begins, ends, strict=True):
            found[row].append((first, end - first))
        return found

    def of_row(self, row: int, rows: int, length: int, layer: int) -> list[tuple[int, int]]:
        """Runs of one of `rows` rows, in a pass with `length` new tokens in layer number `layer`.

        Raises:
            CacheError: the mask is of another shape.
        """
        if tuple(self.chosen.shape) != (rows, length):
            raise CacheError(
                f"The modality mask of layer {layer} of the cache has shape {list(self.chosen.shape)}, but {rows:,} "
                f"sequences of {length:,} tokens arrived; the mask describes the input whose keys and values the cache "
                "receives, one placeholder token for each."
            )
        return self.runs[row]


class Destination(NamedTuple):
    """Where one row's new tokens go.

    Attributes:
        row: the row of the batch.
        runs: (first, how many) of the row's real tokens among the new ones, without padding.
        first_key, first_value: index of the first one in each buffer; the runs are written there one after another.
    """

    row: int
    runs: list[tuple[int, int]]
    first_key: int
    first_value: int


class PendingPages(NamedTuple):
    """Complete pages in one row's buffer of one side.

    Attributes:
        row: the row of the batch.
        start: index of their first token.
        hidden: how many of the first tokens are sink tokens, which stay in the buffer and which no scale takes part in.
        numbers: under which they will be stored.
        used: tokens in the buffer before the pages leave it.
        position: of their first token among all of the sequence's, see `Sequence.page_position`.
    """

    row: int
    start: int
    hidden: int
    numbers: tuple[int, ...]
    used: int
    position: int


class Discard(NamedTuple):
    """Tokens that left the sliding window before they were quantized: start..stop-1 of a row's buffers of `used` ones;
    `side` is 0 for keys and 1 for values.
    """

    row: int
    side: int
    start: int
    stop: int
    used: int


@dataclass(frozen=True)
class Compression:
    """What layers do at the end of a forward pass, in this order.

    Attributes:
        seals: prompts that are compressed as a whole.
        discards: tokens to be dropped.
        keys, values: pages to be quantized.
        after: the sequences then.
    """

    seals: tuple[SealSpan | SealEviction, ...]
    discards: tuple[Discard, ...]
    keys: tuple[PendingPages, ...]
    values: tuple[PendingPages, ...]
    after: tuple[Sequence, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be done."""
        return not (self.seals or self.discards or self.keys or self.values)


@dataclass
class UnreadFlags:
    """What kernels could not store or choose, as they say it, and nobody has looked at.

    Attributes:
        flags: [n], on their way to the host.
        copied: when they are there; None where they are.
        raises: for each flag, the function that raises the error that its value stands for, if any.
    """

    flags: torch.Tensor
    copied: torch.cuda.Event | None
    raises: list[Callable[[Any], None]]

    @classmethod
    def of(cls, flags: torch.Tensor, raises: list[Callable[[Any], None]]) -> UnreadFlags:
        """Begin to copy flags to the host."""
        if not flags.is_cuda:
            return cls(flags, None, raises)
        copied = torch.cuda.Event()
        on_host = flags.to("cpu", non_blocking=True)
        copied.record(torch.cuda.current_stream(flags.device))
        return cls(on_host, copied, raises)

    def arrived(self, wait: bool) -> bool:
        """Whether they can be read; with `wait`, once they can."""
        if self.copied is not None:
            if not (wait or self.copied.query()):
                return False
            self.copied.synchronize()
            self.copied = None
        return True

    def __deepcopy__(self, memo: dict) -> UnreadFlags:
        self.arrived(wait=True)
        return UnreadFlags(self.flags.clone(), None, deepcopy(self.raises, memo))


@dataclass(eq=False)
class ForwardPass(Generic[Tables]):
    """One forward pass of a group's layers, and what they share in it.

    Attributes:
        start: the first new position; length: how many there are.
        chunk: of the first layer that committed its tokens, None before.
        destinations: where new tokens go; appended: the sequences with them.
        compression: what is done at the end; None until a layer gets there.
        ended: layers whose attention is over.
        all_allocated: whether every layer knew the shape of its tokens when the pass began, so that tables can describe
            all layers.
        step_tables: those that kernels of a planned step or another pass of single tokens follow, once a layer has
            asked for them.
        chunk_tables: those of pages and spans that kernels of other passes follow, once a layer has asked for them.
        page_parts: how paths without kernels divide the pages, for which sequences, pages of a part, and rows, once a
            layer has asked for it.
        step_mask: which stored tokens the queries of such a pass attend to (`GroupTables.step_mask`), once a
            layer has asked for it.
    """

    start: int
    length: int
    chunk: PassTokens | None = None
    destinations: tuple[Destination, ...] = ()
    appended: tuple[Sequence, ...] = ()
    compression: Compression | None = None
    ended: int = 0
    all_allocated: bool = False
    step_tables: Tables | None = None
    chunk_tables: Tables | None = None
    page_parts: tuple[tuple[Sequence, ...], int, list[int], list[Any]] | None = None
    step_mask: torch.Tensor | None = None
