"""What a group of layers plans, around every page boundary: each token is somewhere once, where a short model has it.

A layer is stood in for by lists of positions: it does what the plans say and knows nothing else.
"""

import itertools

import pytest
import torch

from kvconvert.errors import CacheError
from kvconvert.methods import KVScheme
from kvconvert.runtime.cache.forward_pass import Chunk
from kvconvert.runtime.cache.groups import LayerGroup
from kvconvert.runtime.cache.prompts import SealSpan
from kvconvert.runtime.cache.sequence import Sequence

P = 128
LONGEST = 3 * P + 2


def pages(**fields) -> KVScheme:
    return KVScheme(rotate_keys="none", rotate_values="none", token_norm="none", **fields)


# Scheme and sliding window.
PAGED = {
    "equal windows": (pages(), None),
    "recent tokens": (pages(key_recent_tokens=20, value_recent_tokens=20), None),
    "keys stay longer": (pages(key_recent_tokens=140, sink_tokens=3), None),
    "values stay longer": (pages(value_recent_tokens=129, sink_tokens=5), None),
    "sink tokens": (pages(sink_tokens=32), None),
    "16 bits": (pages(key_bits=16, value_bits=16, sink_tokens=4), None),
    "window of a page": (pages(sink_tokens=4), 128),
    "window shorter than recent tokens": (pages(key_recent_tokens=200, value_recent_tokens=60), 90),
    "window longer than a page": (pages(value_recent_tokens=128, sink_tokens=1), 131),
}
WHOLE = {
    "spans": KVScheme.preset("calibquant-1bit"),
    "eviction": KVScheme.preset("minikv"),
    "eviction and sink tokens": KVScheme.preset("minikv").__class__.from_dict(
        KVScheme.preset("minikv").to_dict() | {"sink_tokens": 3, "heavy_ratio": 0.7, "recent_ratio": 0.2}
    ),
}


class Layer:
    """Positions in place of keys and values."""

    def __init__(self, group, rows):
        self.group, self.sequences = group, (Sequence(),) * rows
        self.buffers = [([], []) for _ in range(rows)]
        self.written = ({}, {})  # pages of each side by number
        self.spans, self.evicted = [[] for _ in range(rows)], [[] for _ in range(rows)]
        group.add(self, 0)
        group.sequences = self.sequences

    def append(self, latest):
        for row, runs, *firsts in latest.destinations:
            positions = [latest.start + first + i for first, count in runs for i in range(count)]
            for buffer, first in zip(self.buffers[row], firsts, strict=True):
                assert len(buffer) == first
                buffer += positions
        self.sequences = latest.appended

    def execute(self, plan):
        for seal in plan.seals:
            (self._seal_span if isinstance(seal, SealSpan) else self._evict)(seal)
        for row, side, start, stop, used in plan.discards:
            assert len(self.buffers[row][side]) == used
            del self.buffers[row][side][start:stop]
        for side, pending in enumerate((plan.keys, plan.values)):
            in_use = {n for s in self.sequences for n in (s.keys, s.values)[side].pages}
            for row, start, numbers, used in pending:
                buffer = self.buffers[row][side]
                assert len(buffer) == used
                assert not in_use & set(numbers)
                in_use |= set(numbers)
                for number in numbers:
                    self.written[side][number] = buffer[start : start + P]
                    assert len(self.written[side][number]) == P
                    del buffer[start : start + P]
        self.sequences = plan.after

    def _seal_span(self, seal):
        moved = []
        for buffer in self.buffers[seal.row]:
            assert len(buffer) == seal.used
            moved.append([position for part in seal.parts for position in buffer[slice(*part)]])
            for start, stop in reversed(seal.parts):
                del buffer[start:stop]
        assert moved[0] == moved[1]
        self.spans[seal.row].append(moved[0])

    def _evict(self, seal):
        if seal.keeps_all:
            return
        for buffer in self.buffers[seal.row]:
            assert len(buffer) == seal.tokens
            gone = slice(seal.sink_tokens + seal.heavy_hitters, seal.tokens - seal.recent)
            self.evicted[seal.row] = buffer[gone]
            del buffer[gone]


class Cache:
    """A group with one layer; rows are padded on their left."""

    def __init__(self, scheme, window=None, padding=(0,), rooms=None):
        self.group, self.padding = LayerGroup(scheme, window, False), padding
        for numbers, room in zip((self.group.key_numbers, self.group.value_numbers), rooms or (), strict=False):
            numbers.limit(room)
        self.layer = Layer(self.group, len(padding))

    def seal(self):
        if any(sequence.open_from is not None for sequence in self.group.sequences):
            self.layer.execute(self.group.compress(seal=True))

    def feed(self, tokens):
        """A forward pass, as layers go through it."""
        group = self.group
        if group.is_decoding(tokens):
            self.seal()
        latest = group.begin(tokens)
        columns = torch.arange(group.logical)
        mask = torch.stack([columns >= padding for padding in self.padding])
        group.append(latest, Chunk(columns[latest.start :], mask))
        self.layer.append(latest)
        group.attended = group.logical
        self.layer.execute(group.compress(seal=False))

    def check(self, expect=None):
        """Every token is somewhere, once, in order; `expect` gives (dropped, key pages, value pages) of a length."""
        group, layer = self.group, self.layer
        assert layer.sequences == group.sequences
        for side, numbers in enumerate((group.key_numbers, group.value_numbers)):
            of_rows = [(s.keys, s.values)[side].pages for s in group.sequences]
            in_use = list(itertools.chain(*of_rows))
            assert len(set(in_use)) == len(in_use) == numbers.used
        for row, (sequence, padding) in enumerate(zip(group.sequences, self.padding, strict=True)):
            everything = list(range(padding, group.logical))
            gone = {*layer.evicted[row], *itertools.chain(*layer.spans[row])}
            left = [position for position in everything if position not in gone]
            counted = [(expect or (lambda n: None))(len(everything))]
            for side, part in enumerate((sequence.keys, sequence.values)):
                buffer = layer.buffers[row][side]
                stored = buffer[: sequence.sink_tokens]
                stored += left[len(stored) :][: P * sequence.dropped]
                stored += [position for number in part.pages for position in layer.written[side][number]]
                stored += buffer[sequence.sink_tokens :]
                assert stored == left
                assert part.buffered == len(buffer)
                counted.append(len(part.pages))
            assert counted[0] in (None, (sequence.dropped, *counted[1:]))
            assert len(sequence) == len(left)
            assert [len(span) for span in layer.spans[row]] == [span.tokens for span in sequence.spans]
            for span, stored in zip(layer.spans[row], sequence.spans, strict=True):
                assert stored.positions.slice(0, len(span)).tolist() == span
            assert sequence.positions.slice(0, len(sequence.positions)).tolist() == left[sequence.kept :]
            assert sequence.stored(P) == len(everything) - len(layer.evicted[row]) - sequence.dropped * P
            assert sequence.residual(P) + sequence.pages * P == sequence.stored(P) - sum(map(len, layer.spans[row]))


def expectation(scheme, window):
    """Dropped pages, key pages and value pages of a sequence by its length, whatever the way to it."""

    def expect(n):
        n -= scheme.sink_tokens
        dropped = max(0, (n + scheme.sink_tokens - window + 1 - scheme.sink_tokens) // P) if window else 0
        recent = scheme.key_recent_tokens, scheme.value_recent_tokens
        return dropped, *(max(0, max(0, (n - tokens) // P) - dropped) for tokens in recent)

    return expect


def boundaries(scheme, window):
    """Lengths around which pages are complete, or leave the window."""
    shifts = {0, scheme.sink_tokens}
    shifts |= {scheme.sink_tokens + recent for recent in (scheme.key_recent_tokens, scheme.value_recent_tokens)}
    shifts |= {window - 1 + scheme.sink_tokens} if window else set()
    around = {page * P + shift + by for page in (1, 2) for shift in shifts for by in (-2, -1, 0, 1, 2)}
    return sorted(length for length in around if length <= LONGEST)


@pytest.mark.parametrize("name", PAGED)
def test_pages_at_every_length_in_one_pass_and_token_by_token(name):
    scheme, window = PAGED[name]
    expect = expectation(scheme, window)
    walked = Cache(scheme, window)
    for length in range(LONGEST + 1):
        if length:
            walked.feed(1)
        walked.check(expect)
        whole = Cache(scheme, window)
        if length:
            whole.feed(length)
        whole.check(expect)


@pytest.mark.parametrize("name", PAGED)
def test_pages_after_every_pair_of_chunks_around_the_boundaries(name):
    scheme, window = PAGED[name]
    expect = expectation(scheme, window)
    for first, second in itertools.combinations(boundaries(scheme, window), 2):
        cache = Cache(scheme, window)
        for tokens in (first, second - first, LONGEST - second):
            if tokens:
                cache.feed(tokens)
                cache.check(expect)


@pytest.mark.parametrize("name", PAGED)
def test_rows_with_padding_are_planned_as_if_each_were_alone(name):
    scheme, window = PAGED[name]
    cache = Cache(scheme, window, padding=(0, 3, 130))
    for tokens in (120, *[1] * 20, 110, *[1] * 20, 125, 1):
        cache.feed(tokens)
        cache.check(expectation(scheme, window))


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("chunk", [None, 1, 100])
def test_whole_prompts_of_every_length_and_the_tokens_after_them(name, chunk):
    scheme = WHOLE[name]
    lengths = range(1, LONGEST) if chunk is None else [n for n in boundaries(scheme, None) if n > 1]
    for length in lengths:
        cache = Cache(scheme, padding=(0, length // 3))
        # A single token seals the prompt before it, but for a prompt's first one.
        for start in range(0, length, chunk or length):
            cache.feed(min(chunk or length, length - start))
            cache.check()
        cache.seal()
        cache.check()
        for row, padding in enumerate(cache.padding):
            if chunk == 1 or length % (chunk or P) == 1:
                continue
            n, sequence = length - padding, cache.group.sequences[row]
            sinks = min(n, scheme.sink_tokens)
            if scheme.is_span:
                assert [span.tokens for span in sequence.spans] == ([n - sinks] if n > sinks else [])
                assert sequence.keys.buffered == sinks
            else:
                assert len(sequence) == min(
                    n, sinks + round(scheme.heavy_ratio * n) + round(scheme.recent_ratio * n)
                )
        after = [len(sequence) for sequence in cache.group.sequences]
        for tokens in (1, 1, 1):
            cache.feed(tokens)
        cache.check()
        for sequence, before in zip(cache.group.sequences, after, strict=True):
            assert len(sequence) == before + 3
            if scheme.evicts:
                assert sequence.pages == max(0, (before + 3 - sequence.sink_tokens - scheme.key_recent_tokens) // P)


def test_each_further_prompt_becomes_a_span_of_its_own():
    cache = Cache(WHOLE["spans"])
    for tokens in (130, 1, 1, 60, 70, 1, 2, 1):
        cache.feed(tokens)
        cache.check()
    sinks = WHOLE["spans"].sink_tokens
    assert [len(span) for span in cache.layer.spans[0]] == [130 - sinks, 130, 2]


@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize("rooms", [(1, 9), (9, 1), (2, 2), (3, 9)])
def test_a_plan_that_finds_no_room_leaves_nothing_behind(name, rooms):
    scheme, window = PAGED[name]
    cache = Cache(scheme, window, padding=(0, 0, 7), rooms=rooms)
    group = cache.group
    numbers = group.key_numbers, group.value_numbers
    for tokens in (100, *[1] * 30, LONGEST):
        before = [pool.used for pool in numbers]
        try:
            cache.feed(tokens)
        except CacheError as error:
            message = str(error)
            break
        cache.check(expectation(scheme, window))
    else:
        assert window
        return
    assert "out of pages" in message
    assert [pool.used for pool in numbers] == before
    assert group.sequences == cache.layer.sequences == group.forward_pass.appended
    group.release(group.sequences)
    for pool, room in zip(numbers, rooms, strict=True):
        assert sorted(pool.reserve(room)) == list(range(room))


def test_a_reset_gives_all_pages_back_and_begins_anew():
    scheme, window = PAGED["keys stay longer"]
    cache = Cache(scheme, window, padding=(0, 7))
    cache.feed(LONGEST)
    shared = LayerGroup(scheme, window, False, (cache.group.key_numbers, cache.group.value_numbers))
    assert cache.group.key_numbers.used > 0
    shared.sequences, cache.group.sequences = cache.group.sequences, ()
    shared.reset()
    assert cache.group.key_numbers.used == cache.group.value_numbers.used == 0
    assert (shared.logical, shared.sequences, shared.real) == (0, (), None)
