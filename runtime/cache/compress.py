"""Compression of full-precision tokens: whole prompts are sealed, complete pages quantized, old pages dropped."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
import torch

from kvconvert.errors import CacheError, KvconvertError, NumericError
from kvconvert.kernels.device import runs_triton
from kvconvert.kernels.pages import (
    PageWrites,
    add_centers,
    new_flag,
    quantize_at,
    quantize_by_reference,
    raise_if_flagged,
    unsupported,
)
from kvconvert.runtime.cache.buffer import TokenBuffer, remove_tokens
from kvconvert.runtime.cache.forward_pass import Compression, PendingPages, UnreadFlags
from kvconvert.runtime.cache.pool import UNIT
from kvconvert.runtime.cache.prompts import SealSpan
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.cache.store import Group, LayerStore

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
    _execute(group, [store], latest.compression)


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
        for value, (stores, pages) in zip(unread.flags.tolist(), unread.launches, strict=True):
            with _NamedErrors(stores, 1, pages):
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
        _execute(group, group.stores, plan)
    for store in group.stores:
        store.sequences = plan.after


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
            f"Sequence {row} cannot give back its newest {removed} tokens: {group.name} has already quantized "
            "some of them; call activate_past_recording() before the tokens are added, and crop at most a page at a "
            "time."
        )
    if removed and sequence.dropped and group.sliding_window:
        oldest = sequence.position(sequence.page_position(0, group.page_size))
        if oldest > length - group.sliding_window + 1:
            raise CacheError(
                f"Sequence {row} cannot give back its newest {removed} tokens: {group.name} has dropped tokens "
                "that its sliding window would need again; call activate_past_recording() before the tokens are added."
            )


def _execute(group: Group, stores: list[LayerStore], plan: Compression) -> None:
    """Do what is planned in some layers of a group."""
    try:
        for store in stores:
            for work in plan.seals:
                with _NamedErrors([store], 0):
                    store.seal_span(work) if isinstance(work, SealSpan) else store.evict(work)
            for row, side, start, stop, used in plan.discards:
                store.buffer(row, side == 0).remove([(start, stop)], used)
        _flush(group, stores, plan)
    except Exception as error:
        group.error = error
        raise
    for store in stores:
        store.sequences = plan.after


def _flush(group: Group, stores: list[LayerStore], plan: Compression) -> None:
    """Move complete pages of all rows to their storage: keys, then values."""
    if not (plan.keys or plan.values):
        return
    size, launches = stores[0].page_size, []
    for some in _launched_together(stores):
        first = some[0]
        if first.flag is None:
            first.flag = new_flag(first.device)
        for pending, is_key in ((plan.keys, True), (plan.values, False)):
            if not pending:
                continue
            _quantize(some, pending, is_key)
        if runs_triton(first.device):
            launches.append((some, sum(len(part.numbers) for part in plan.keys or plan.values)))
    for device in {some[0].device for some, _ in launches}:
        here = [launch for launch in launches if launch[0][0].device == device]
        flags, copied = torch.cat([some[0].flag for some, _ in here]), None
        if flags.is_cuda:
            flags, copied = flags.to("cpu", non_blocking=True), torch.cuda.Event()
            copied.record(torch.cuda.current_stream(device))
        group.unread_flags.append(UnreadFlags(flags, copied, here))
    removed = []
    for store in stores:
        for pending, is_key in ((plan.keys, True), (plan.values, False)):
            for part in pending:
                store.flushes += len(part.numbers)
                stop = part.start + len(part.numbers) * size
                removed.append((store.buffer(part.row, is_key), part.start + part.hidden, stop, part.used))
    remove_tokens(removed)


def _quantize(stores: list[LayerStore], pending: tuple[PendingPages, ...], is_key: bool) -> None:
    """Write the pages of one side of some layers that one launch serves."""
    first, size, f = stores[0], stores[0].page_size, stores[0].format
    channels, static = (f.boosted, f.static_keys) if is_key else (None, f.static_values)
    storages = [store.key_pages if is_key else store.value_pages for store in stores]
    sample = _tokens(first.buffer(pending[0].row, is_key), pending[0], size)
    plain = f.keys if is_key and f.key_feedback is None and f.key_center is None else None
    reason = unsupported(sample, size, plain)
    if reason is not None:
        for store, storage in zip(stores, storages, strict=True):
            tokens = [_tokens(store.buffer(part.row, is_key), part, size) for part in pending]
            pages = [view for part in pending for view in storage.views(part.numbers)]
            feedback, center = (store.format.key_feedback, store.format.key_center) if is_key else (None, None)
            if center is not None:
                for part, some in zip(pending, tokens, strict=True):
                    # Sink tokens stay in their buffers; the others leave them right after.
                    sinks = some[:, : part.hidden].clone()
                    add_centers(some, part.position, size, center, sign=-1)
                    some[:, : part.hidden] = sinks
            if runs_triton(store.device):
                store.fall_back("page quantization", reason)
            with _NamedErrors([store], 1):
                quantize_by_reference(tokens, pages, channels, static, feedback, [part.hidden for part in pending])
        return
    numbers = np.array([number for part in pending for number in part.numbers], dtype=np.int64)
    records = [storage.offsets(numbers, first.origin) * UNIT + first.origin.data_ptr() for storage in storages]
    width = size * sample.shape[2] * sample.element_size()
    # Of each page, from the buffer that it lies in: which one, and how far from its beginning.
    place = np.repeat(np.arange(len(pending)), [len(part.numbers) for part in pending])
    distance = np.concatenate([part.start * width // size + width * np.arange(len(part.numbers)) for part in pending])
    buffers = [[store.buffer(part.row, is_key) for part in pending] for store in stores]
    starts = np.array([[buffer.address for buffer in line] for line in buffers])[:, place] + distance
    strides = np.array([[buffer.head_stride for buffer in line] for line in buffers])[:, place]
    feedback = None
    if is_key and f.key_feedback is not None:
        feedback = np.repeat([store.format.key_feedback.data_ptr() for store in stores], len(numbers))
    center = f.key_center if is_key else None
    centers = None if center is None else _centers(stores, pending)
    hidden = np.zeros((len(stores), len(numbers)), dtype=np.int64)
    firsts = np.cumsum([0] + [len(part.numbers) for part in pending[:-1]])
    hidden[:, firsts] = [part.hidden for part in pending]
    writes = PageWrites(
        starts.flatten(), strides.flatten(), np.concatenate(records), feedback, centers, hidden.flatten()
    )
    quantize_at(writes, sample, storages[0].views(pending[0].numbers)[0], first.flag, channels, static, center)


def _centers(stores: list[LayerStore], pending: tuple[PendingPages, ...]) -> np.ndarray:
    """`PageWrites.centers`, layer after layer."""
    size, found = stores[0].page_size, []
    positions = np.concatenate([part.position + size * np.arange(len(part.numbers)) for part in pending])
    for store in stores:
        center = store.format.key_center
        addresses = np.full((len(positions), 2), [center.matrix.data_ptr(), center.frequencies.data_ptr()])
        found.append(np.column_stack([positions, addresses]))
    return np.concatenate(found).astype(np.int64)


def _tokens(buffer: TokenBuffer, part: PendingPages, size: int) -> torch.Tensor:
    return buffer.tokens(part.start, part.start + len(part.numbers) * size)


def _launched_together(stores: list[LayerStore]) -> list[list[LayerStore]]:
    """Layers whose pages one launch of the kernels can write: of one format, without tensors of their own.

    Matrices of error feedback and key centers are found by their addresses, and so may be each layer's own.
    """
    groups: dict[Hashable, list[LayerStore]] = {}
    for store in stores:
        f = store.format
        own = f.boosted is not None or f.static_keys is not None or f.static_values is not None
        alone = own or not runs_triton(store.device)
        absent = f.key_feedback is None, f.key_center is None
        key = store.index if alone else (f.keys, f.values, absent, store.dtype, store.device)
        groups.setdefault(key, []).append(store)
    return list(groups.values())


class _NamedErrors:
    """Adds layer and head to a numeric error.

    Args:
        stores: whose pages were quantized, one after another.
        position: the head's place in the quantized tensor's shape; the page's is before it.
        pages: of each store.
    """

    def __init__(self, stores: list[LayerStore], position: int, pages: int = 1):
        self.stores, self.position, self.pages = stores, position, pages

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, NumericError):
            index, layer, head = getattr(error, "index", None), str(self.stores[0].index), ""
            if index is not None and len(index) > self.position:
                head = f", KV head {index[self.position]}"
                if len(self.stores) > 1:
                    layer = str(self.stores[min(index[0] // self.pages, len(self.stores) - 1)].index)
            elif len(self.stores) > 1:
                layer += f" or one of {len(self.stores) - 1} more"
            raise NumericError(f"Layer {layer}{head}: the cache cannot store these keys or values: {error}") from error
