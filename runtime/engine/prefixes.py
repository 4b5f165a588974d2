"""Prompts that begin alike: the pages of one that was read are another's, by reference.

A prompt is read in chunks, whose tokens attend to each other in full precision and to everything before them as it is
stored. What a chunk stores therefore depends on where chunks begin, and chunks begin at multiples of `prompt_chunk`,
counted from the prompt's beginning, whoever else is in a pass. A prompt that goes on from the end of another's chunk
computes what it would have computed after reading that chunk itself: the same numbers, in passes of the same company.

Every chunk that was read whole is a `Prefix`, known by a hash of the request's salt and all tokens up to its end. It
holds references to the pages that were written in it, and copies of the full-precision tokens that a cache holds at
that point (sink tokens and residual windows) and of the states of linear attention. States are large, so they count as
the pages that their bytes would be.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvconvert.errors import NumericError
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.runtime.engine.model_steps import ModelSteps
from kvconvert.runtime.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from threading import Lock

    from kvconvert.runtime.cache.pool import PageNumbers
    from kvconvert.runtime.cache.session import Snapshot
    from kvconvert.runtime.engine.request import Request

# Pages kept where `kv_memory` sets no limit: prefixes of 131,072 tokens.
MOST_PAGES = 1024


def no_prefixes(steps: ModelSteps, chunk: int) -> str | None:
    """Why prompts cannot share what was stored of them, as the end of a sentence, or None."""
    if steps.whole_prompts:
        return "a layer's scheme compresses prompts as a whole (spans, eviction), so that no part of one is another's"
    if chunk % PAGE_SIZE:
        return f"`prompt_chunk` is {chunk} and has to be a multiple of a page's {PAGE_SIZE} tokens"
    return None


def chain(ids: Sequence[int], chunk: int, root: bytes) -> list[bytes]:
    """A hash of the first 1, 2, ... chunks of a prompt, of each whole one."""
    keys, key = [], root
    for begin in range(0, len(ids) - chunk + 1, chunk):
        key = hashlib.sha256(key + array("q", ids[begin : begin + chunk]).tobytes()).digest()
        keys.append(key)
    return keys


@dataclass(eq=False)
class Prefix:
    """The first chunks of a prompt.

    Attributes:
        key: their hash.
        chunks: how many.
        parent: the same without the last chunk.
        snapshot: of a cache that has read them.
        children: prefixes with one chunk more.
        users: requests that go on from it or from one that begins with it.
    """

    key: bytes
    chunks: int
    parent: Prefix | None
    snapshot: Snapshot
    children: int = 0
    users: int = 0


@dataclass(eq=False)
class Unconfirmed:
    """A chunk that was read.

    Attributes:
        snapshot: at its end.
        flags: launches that may still turn out to have met numbers that cannot be stored.
        pages: that were written in it, with a reference each.
    """

    snapshot: Snapshot
    flags: list[Any]
    pages: list[tuple[PageNumbers, list[int]]]


@dataclass(eq=False)
class Reading:
    """What is known of a request whose prompt is read, or was.

    Attributes:
        keys: of its whole chunks.
        prefix: the longest that the request holds, whose pages count as the store's and not as the request's.
        unconfirmed: further ones that it has read, in order.
        contributes: whether its chunks become prefixes.
    """

    keys: list[bytes]
    prefix: Prefix | None = None
    unconfirmed: list[Unconfirmed] = field(default_factory=list)
    contributes: bool = True


class Prefixes:
    """The prefixes that are stored, and which request uses which; by the thread that has the cache.

    Pages are counted once: a request's own are part of what was reserved for it, until they are a prefix's.

    Args:
        steps: the model's.
        scheduler: whose reservations are adjusted.
        lock: of the scheduler.
        chunk: tokens of a chunk, a multiple of a page's.

    Attributes:
        evicted: prefixes dropped so far to make room.
    """

    def __init__(self, steps: ModelSteps, scheduler: Scheduler, lock: Lock, chunk: int):
        self._steps, self._scheduler, self._lock, self._chunk = steps, scheduler, lock, chunk
        self._each = chunk // PAGE_SIZE
        self._root = hashlib.sha256(f"{steps.cache.fingerprint} {chunk}".encode()).digest()
        # The least recently used come first.
        self._stored: OrderedDict[bytes, Prefix] = OrderedDict()
        self._known: dict[Request, Reading] = {}
        # Chunks that are being read, by whom: others wait for their prefixes instead of reading them as well.
        self._coming: dict[bytes, Request] = {}
        self._state_pages = 0
        self.evicted = 0

    @property
    def pages(self) -> int:
        """Of all prefixes, states included."""
        return len(self._stored) * self._each + self._state_pages

    def resume(self, request: Request) -> bool:
        """Let a request go on from the longest prefix of its prompt; whether it may read its next chunk now.

        The last token is always read, for its logits.
        """
        known = self._reading(request)
        self._confirm(request, known)
        found = self._longest(request, known)
        if found is not None:
            self._go_on_from(request, known, found)
        number = request.prompt_read // self._chunk
        if number == len(known.keys) or not known.contributes:
            return True
        return self._coming.setdefault(known.keys[number], request) is request

    def claim(self, request: Request) -> None:
        """Let a request that waits for pages share those of the longest stored prefix of its prompt.

        Prefixes that no request uses yet are left out where others were promised their room.
        """
        known, scheduler = self._reading(request), self._scheduler
        prefix = self._longest(request, known)
        unused = []
        while prefix is not None and not prefix.users:
            unused.append(prefix)
            prefix = prefix.parent
        with self._lock:
            # Without a limit of pages nobody waits for them.
            room = (scheduler.pages or 0) - scheduler.pages_reserved - scheduler.pages_shared
            kept = unused[max(0, len(unused) - room // self._each) :]
            found = kept[0] if kept else prefix
            if found is not None and (known.prefix is None or found.chunks > known.prefix.chunks):
                self._hold(request, known, found)

    def _reading(self, request: Request) -> Reading:
        if request not in self._known:
            root = hashlib.sha256(self._root + request.prefix_salt).digest() if request.prefix_salt else self._root
            # What tokens of images stand for is not told by their ids.
            shared = request.prompt if request.inputs is None else ()
            self._known[request] = Reading(chain(shared, self._chunk, root), contributes=bool(shared))
        return self._known[request]

    def _longest(self, request: Request, known: Reading) -> Prefix | None:
        """The longest stored prefix beyond what the request has read, but for the last token."""
        found = None
        for key in known.keys[request.prompt_read // self._chunk : (len(request.prompt) - 1) // self._chunk]:
            prefix = self._stored.get(key)
            if prefix is None:
                break
            found = prefix
        return found

    def _go_on_from(self, request: Request, known: Reading, prefix: Prefix) -> None:
        if request.prompt_cache is not None:
            self._steps.discard(request.prompt_cache)
        request.prompt_cache = self._steps.new_prompt()
        request.prompt_cache.restore(prefix.snapshot)
        read = prefix.chunks * self._chunk
        request.cached_tokens += read - request.prompt_read
        request.prompt_read = read
        self._abandon(request, known)
        known.contributes = True
        with self._lock:
            self._hold(request, known, prefix)
        while prefix is not None:
            # The first ones last, for the others are of no use without them.
            self._stored.move_to_end(prefix.key)
            prefix = prefix.parent

    def _hold(self, request: Request, known: Reading, prefix: Prefix) -> None:
        """Let a request use a prefix that begins with the one it used; what it has of it is not reserved twice.

        With the lock held.
        """
        before, known.prefix = known.prefix, prefix
        taken = self._each * (prefix.chunks - (before.chunks if before else 0))
        while prefix is not before:
            self._scheduler.pages_shared += self._each * (prefix.users == 0)
            prefix.users += 1
            prefix = prefix.parent
        request.pages -= taken
        if request.row is not None:
            self._scheduler.pages_reserved -= taken

    def read(self, request: Request) -> None:
        """Keep what a request's cache holds, if a chunk has just ended; before the cache is joined or dropped."""
        known = self._known.get(request)
        if known is None or not known.contributes or request.prompt_read % self._chunk:
            return
        cache, earlier = request.prompt_cache, known.prefix.snapshot if known.prefix else None
        if known.unconfirmed:
            earlier = known.unconfirmed[-1].snapshot
        try:
            flags = cache.unread_flags()
        except NumericError:
            # Its next pass says so and ends it.
            self._abandon(request, known)
            return
        snapshot = cache.snapshot(earlier)
        pages = list(snapshot.pages_beyond(earlier))
        for numbers, written in pages:
            numbers.retain(written)
        known.unconfirmed.append(Unconfirmed(snapshot, flags, pages))

    def settle(self, request: Request) -> None:
        """Store what a request has read whose prompt is complete: before its cache is joined or dropped, or once it is
        known that it could be stored.
        """
        known = self._known.get(request)
        if known is not None and known.unconfirmed:
            if request.prompt_cache is not None:
                try:
                    request.prompt_cache.unread_flags(wait=True)
                except NumericError:
                    # Joining says so.
                    self._abandon(request, known)
            self._confirm(request, known)
        self._forget_coming(request)

    def _confirm(self, request: Request, known: Reading) -> None:
        """Store what a request has read, as far as it is known to be sound."""
        if not known.unconfirmed:
            return
        try:
            waiting = set(map(id, request.prompt_cache.unread_flags() if request.prompt_cache is not None else ()))
        except NumericError:
            self._abandon(request, known)
            return
        while known.unconfirmed and waiting.isdisjoint(map(id, known.unconfirmed[0].flags)):
            snapshot, parent = known.unconfirmed[0].snapshot, known.prefix
            key = known.keys[snapshot.length // self._chunk - 1]
            if key in self._stored:
                # Another request was first: these pages stay this one's own, and those that follow, too.
                self._abandon(request, known)
                return
            del known.unconfirmed[0]
            prefix = self._stored[key] = Prefix(key, snapshot.length // self._chunk, parent, snapshot)
            self._state_pages += snapshot.state_pages(parent and parent.snapshot)
            if parent is not None:
                parent.children += 1
            with self._lock:
                self._hold(request, known, prefix)
            self._coming.pop(key, None)

    def _abandon(self, request: Request, known: Reading) -> None:
        """Make no prefixes of what a request has read since the last one."""
        for chunk in known.unconfirmed:
            for numbers, written in chunk.pages:
                numbers.release(written)
        known.unconfirmed, known.contributes = [], False
        self._forget_coming(request)

    def _forget_coming(self, request: Request) -> None:
        for key in [key for key, reader in self._coming.items() if reader is request]:
            del self._coming[key]

    def leave(self, request: Request) -> None:
        """Forget a request that ends."""
        known = self._known.pop(request, None)
        if known is None:
            return
        self._abandon(request, known)
        prefix = known.prefix
        with self._lock:
            while prefix is not None:
                prefix.users -= 1
                self._scheduler.pages_shared -= self._each * (prefix.users == 0)
                prefix = prefix.parent

    def make_room(self) -> None:
        """Drop the least recently used prefixes until all that is reserved has room, and no more than that."""
        limit = MOST_PAGES if self._steps.pages is None else self._steps.pages - self._scheduler.pages_reserved
        while self.pages > limit:
            least = next((p for p in self._stored.values() if not p.users and not p.children), None)
            if least is None:
                return
            self._drop(least)
            self.evicted += 1

    def _drop(self, prefix: Prefix) -> None:
        del self._stored[prefix.key]
        parent = prefix.parent
        self._state_pages -= prefix.snapshot.state_pages(parent and parent.snapshot)
        if parent is not None:
            parent.children -= 1
        for numbers, pages in prefix.snapshot.pages_beyond(parent and parent.snapshot):
            numbers.release(pages)

    def clear(self) -> None:
        """Drop all prefixes that no request uses."""
        while True:
            unused = [p for p in self._stored.values() if not p.users and not p.children]
            if not unused:
                return
            for prefix in unused:
                self._drop(prefix)
