"""Compression of full-precision tokens: whole prompts are sealed, complete pages quantized, old pages dropped."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from kvconvert.errors import CacheError, KvconvertError, NumericError
from kvconvert.kernels.device import runs_triton
from kvconvert.kernels.pages import (
    PAGE_SIZE,
    PageWrites,
    new_flag,
    quantize_at,
    quantize_by_reference,
    raise_if_flagged,
    unsupported,
)
from kvconvert.runtime.cache.eviction import evict
from kvconvert.runtime.cache.forward_pass import Compression, PendingPages, UnreadFlags
from kvconvert.runtime.cache.pool import UNIT, TokenBuffer, remove_tokens
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.cache.store import Group, LayerStore

# Layers and what is planned for each.
Works = list[tuple[LayerStore, Compression]]

# Tokens of a pass that may lie in full precision in all layers at once: 256 MiB in bfloat16 for 32 layers with 8 KV
# heads of 128 channels.
FEW_TOKENS = 2048


def begin_forward(store: LayerStore) -> None:
    """Compress what the previous forward pass left, if this layer begins another one."""
    group = store.group
    if group.rehearsal is not None:
        return
    if store.forward_pass is group.forward_pass:
        read_flags(group, wait=False)
    if group.keep_for_sharing and store.forward_pass is group.forward_pass is not None:
        compress(group, seal=False)


def end_forward(store: LayerStore) -> None:
    """Compress what is complete after the attention of committed tokens; later calls in the same pass do nothing.

    Many tokens are compressed layer by layer, so that no more than one layer's lie in full precision. What few tokens
    complete, and no whole prompt, is compressed once all layers of the group are there, in as few launches as for one.

    Raises:
        CacheError: the pages have a fixed capacity and no room left.
        NumericError: keys or values that cannot be stored; the group is unusable afterwards.
    """
    group, latest = store.group, store.forward_pass
    if store.ended is latest or group.rehearsal is latest:
        return
    store.ended = latest
    latest.ended += 1
    group.attended = latest.start + latest.length
    if latest.length > 1:
        # Tokens were stored layer by layer, in buffers that may have moved.
        group.touch()
    if group.keep_for_sharing:
        return
    single, plain = latest.length == 1 and not group.seal_at_once, group.policy.flushes and not group.policy.selects
    if single or (plain and latest.length * group.rows + group.tokens_beside <= FEW_TOKENS):
        if latest.ended == len(group.stores):
            seal_now, group.seal_at_once = group.seal_at_once, False
            compress(group, seal_now)
        return
    if latest.compression is None:
        seal_now, group.seal_at_once = group.seal_at_once, False
        latest.compression = group.plan_compression(seal_now)
    _execute([(store, latest.compression)])


def read_flags(group: Group, wait: bool = True) -> None:
    """Raise what kernels found that have quantized pages; without `wait`, those that have ended so far.

    A launch leaves what it could not store in a flag on the device. Read at once, the host would wait for every layer
    in turn; so the flag is copied to the host, and a later pass has a look at it.

    Raises:
        NumericError: keys or values could not be stored; the group cannot be used further.
    """
    while group.unread_flags:
        unread = group.unread_flags[0]
        if not unread.arrived(wait):
            return
        del group.unread_flags[0]
        try:
            raise_found([unread])
        except KvconvertError as error:
            group.error = error
            raise


def raise_found(flushes: Iterable[UnreadFlags]) -> None:
    """Raise what flushes could not store (NumericError); waits until it is known."""
    for unread in flushes:
        unread.arrived(wait=True)
        for value, raises in zip(unread.flags.tolist(), unread.raises, strict=True):
            raises(value)


def raise_pages(stores: list[LayerStore], value: int) -> None:
    """Raise what a launch has found in the pages of these layers, one for each page."""
    with _named_errors(stores, 1):
        raise_if_flagged(value, stores[0].format.keys.heads)


def seal(group: Group) -> None:
    """Compress the open prompts, which are complete: quantize them as spans, or evict.

    Page methods have none, but pages that were kept for later layers of the pass to read are due.
    """
    is_open = any(sequence.open_from is not None for sequence in group.sequences)
    if group.error is None and (is_open or group.keep_for_sharing):
        compress(group, seal=True)


def compress(group: Group, seal: bool) -> None:
    """Compress, in all layers of a group, what is complete between passes; errors are those of `end_forward`."""
    plan = group.plan_compression(seal)
    if not plan.is_empty:
        _execute([(store, plan) for store in group.stores])
    for store in group.stores:
        store.sequences = plan.after


def end_planned(group: Group, seal: bool = False) -> None:
    """End a pass that was planned for all layers of a group, as `end_forward` ends it layer by layer."""
    latest = group.forward_pass
    for store in group.stores:
        store.forward_pass = store.ended = latest
        store.passes, store.sequences = group.passes, latest.appended
    latest.ended = len(group.stores)
    group.attended = latest.start + latest.length
    if not group.keep_for_sharing:
        compress(group, seal)


def crop(group: Group, tokens_to_remove: int) -> None:
    """Remove the newest tokens; `tokens_to_remove` is zero or negative, as transformers passes it.

    Raises:
        CacheError: the tokens are compressed already, or have left a sliding window that would need them again.
    """
    if tokens_to_remove > 0:
        raise CacheError(
            f"crop({tokens_to_remove}) is not possible: pass the number of tokens to remove as a negative number."
        )
    if not group.sequences:
        return
    length = group.logical + tokens_to_remove
    for row, sequence in enumerate(group.sequences):
        _check_crop(group, row, sequence, length)
    cropped = tuple(sequence.crop(length) for sequence in group.sequences)
    for store in group.stores:
        for sequence, row in zip(cropped, store.rows, strict=True):
            row.keys.truncate(sequence.keys.buffered)
            row.values.truncate(sequence.values.buffered)
            if row.attention_mass is not None:
                row.attention_mass = row.attention_mass[:, : sequence.keys.buffered]
    group.sequences = cropped
    group.logical = group.attended = length
    if group.real is not None:
        group.real = group.real[:, :length]
    group.touch()
    # What was held back for this may be compressed now.
    recording, group.record_past = group.record_past, False
    compress(group, seal=False)
    group.record_past = recording


def _check_crop(group: Group, row: int, sequence: Sequence, length: int) -> None:
    removed = len(sequence) - sequence.before(length)
    free = 0 if sequence.untouched else sequence.sink_tokens
    loose = min(sequence.keys.buffered, sequence.values.buffered) - free
    in_span = any(span.positions.before(length) < span.tokens for span in sequence.spans)
    if removed > loose or in_span:
        raise CacheError(
            f"Sequence {row} cannot give back its newest {removed:,} tokens: {group.name} has already quantized "
            "some of them; call activate_past_recording() before the tokens are added, and crop at most a page at a "
            "time."
        )
    if removed and sequence.dropped and group.sliding_window:
        oldest = sequence.position(sequence.page_position(0))
        if oldest > length - group.sliding_window + 1:
            raise CacheError(
                f"Sequence {row} cannot give back its newest {removed:,} tokens: {group.name} has dropped tokens "
                "that its sliding window would need again; call activate_past_recording() before the tokens are added."
            )


def seal_together(groups: list[Group]) -> None:
    """Seal the open prompts of groups whose layers hold different numbers of tokens, in as few launches as for one."""
    is_open = [group for group in groups if any(sequence.open_from is not None for sequence in group.sequences)]
    works = [
        (store, plan)
        for group, plan in [(group, group.plan_compression(seal=True)) for group in is_open if group.error is None]
        for store in group.stores
    ]
    if works:
        _execute(works)


def _execute(works: Works) -> None:
    """Do what is planned in some layers."""
    try:
        evict([(store, plan.seals) for store, plan in works if store.group.policy.selects])
        for store, plan in works:
            if not store.group.policy.selects:
                for work in plan.seals:
                    with _named_errors([store], 0):
                        store.seal_span(work)
            for row, side, start, stop, used in plan.discards:
                store.buffer(row, side == 0).remove([(start, stop)], used)
        _flush([(store, plan) for store, plan in works if plan.keys or plan.values])
    except Exception as error:
        for store, _ in works:
            store.group.error = error
        raise
    for store, plan in works:
        store.sequences = plan.after


def _flush(works: Works) -> None:
    """Move complete pages of all rows to their storage: keys, then values."""
    launches = []
    for some in _launched_together(works):
        first = some[0][0]
        if first.flag is None:
            first.flag = new_flag(first.device)
        for is_key in (True, False):
            parts = [(store, plan.keys if is_key else plan.values) for store, plan in some]
            _quantize([(store, pending) for store, pending in parts if pending], is_key)
        if runs_triton(first.device):
            # The layer of each page, in the order of the tables.
            counts = [(store, plan.keys or plan.values) for store, plan in some]
            launches.append([store for store, pending in counts for part in pending for _ in part.numbers])
    for device in {pages[0].device for pages in launches}:
        here = [pages for pages in launches if pages[0].device == device]
        flags = torch.cat([pages[0].flag for pages in here])
        unread = UnreadFlags.of(flags, [partial(raise_pages, pages) for pages in here])
        works[0][0].group.unread_flags.append(unread)
    removed = []
    for store, plan in works:
        for pending, is_key in ((plan.keys, True), (plan.values, False)):
            for part in pending:
                store.flushes += len(part.numbers)
                stop = part.start + len(part.numbers) * PAGE_SIZE
                removed.append((store.buffer(part.row, is_key), part.start + part.hidden, stop, part.used))
    remove_tokens(removed)


def _quantize(parts: list[tuple[LayerStore, tuple[PendingPages, ...]]], is_key: bool) -> None:
    """Write pages of one side of some layers, in one launch where kernels run."""
    if not parts:
        return
    stores, (first, pending) = [store for store, _ in parts], parts[0]
    alike = all(own is pending for _, own in parts)
    f, tensors = first.format.side(is_key)
    sample = _tokens(first.buffer(pending[0].row, is_key), pending[0])
    plain = f if is_key and tensors.feedback is None and tensors.center is None else None
    reason = unsupported(sample, plain_keys=plain)
    if reason is not None:
        for store, own in parts:
            if runs_triton(store.device):
                store.fall_back("page quantization", reason)
            storage = store.key_pages if is_key else store.value_pages
            for part in own:
                tokens, side = _tokens(store.buffer(part.row, is_key), part), store.format.side(is_key)[1]
                with _named_errors([store], 1):
                    rooms, about = storage.runs(part.numbers), ([part.position], [part.hidden])
                    quantize_by_reference([tokens], rooms, storage.format, side, *about)
        return
    if alike:
        writes = _page_writes(stores, pending, is_key, sample)
        sides = [store.format.side(is_key)[1] for store in stores]
    else:
        # KV heads that are stored apart have no tables (`KVzip.check`).
        writes = PageWrites.side_by_side([_page_writes([store], own, is_key, sample) for store, own in parts])
        sides = [tensors]
    storage = first.key_pages if is_key else first.value_pages
    quantize_at(writes, sample, storage.runs(pending[0].numbers)[0], f, first.flag, sides)


def _page_writes(
    stores: list[LayerStore], pending: tuple[PendingPages, ...], is_key: bool, sample: torch.Tensor
) -> PageWrites:
    """Where pages of one side lie and go, the same of all layers; `sample` is some of the tokens."""
    storages = [store.key_pages if is_key else store.value_pages for store in stores]
    numbers = np.array([number for part in pending for number in part.numbers], dtype=np.int64)
    origin = stores[0].origin
    records = [storage.offsets(numbers, origin) * UNIT + origin.data_ptr() for storage in storages]
    # Of each page, the part that it is of, and which one of these.
    counts = [len(part.numbers) for part in pending]
    part_of = np.repeat(np.arange(len(pending)), counts)
    within = np.concatenate([np.arange(count) for count in counts])
    width = PAGE_SIZE * sample.shape[2] * sample.element_size()
    distance = np.array([part.start * width // PAGE_SIZE for part in pending])[part_of] + width * within
    buffers = [[store.buffer(part.row, is_key) for part in pending] for store in stores]
    starts = np.array([[buffer.address for buffer in line] for line in buffers])[:, part_of] + distance
    strides = np.array([[buffer.head_stride for buffer in line] for line in buffers])[:, part_of]
    positions = np.array([part.position for part in pending])[part_of] + PAGE_SIZE * within
    hidden = np.where(within, 0, np.array([part.hidden for part in pending])[part_of])
    return PageWrites(starts, strides, np.stack(records), positions, hidden)


def _tokens(buffer: TokenBuffer, part: PendingPages) -> torch.Tensor:
    return buffer.tokens(part.start, part.start + len(part.numbers) * PAGE_SIZE)


def _launched_together(works: Works) -> list[Works]:
    """Layers whose pages one launch of the kernels can write."""
    groups: dict[Hashable, Works] = {}
    for store, plan in works:
        together = runs_triton(store.device) and store.format.shares_launches
        key = (store.format.kind, store.dtype, store.device) if together else store.index
        groups.setdefault(key, []).append((store, plan))
    return list(groups.values())


@contextmanager
def _named_errors(stores: list[LayerStore], position: int) -> Iterator[None]:
    """Add layer and head to a numeric error.

    Args:
        stores: the layer of each quantized page, or of all.
        position: the head's place in the quantized tensor's shape; the page's is before it.
    """
    try:
        yield
    except NumericError as error:
        index, layer, head = getattr(error, "index", None), str(stores[0].index), ""
        if index is not None and len(index) > position:
            head = f", KV head {index[position]}"
            if len(stores) > 1:
                layer = str(stores[min(index[0], len(stores) - 1)].index)
        elif len(others := {store.index for store in stores}) > 1:
            layer += f" or one of {len(others) - 1} more"
        raise NumericError(f"Layer {layer}{head}: the cache cannot store these keys or values: {error}") from error
