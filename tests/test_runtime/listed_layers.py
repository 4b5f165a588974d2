"""A group's only layer, stood in for by lists of positions: it does what plans say and knows nothing else."""

import itertools
from types import SimpleNamespace

import torch

from kvconvert.runtime.cache.forward_pass import PassTokens
from kvconvert.runtime.cache.groups import LayerGroup
from kvconvert.runtime.cache.sequence import SealSpan, Sequence

P = 128


class Buffer(list):
    """Positions in place of keys or values."""

    def truncate(self, tokens):
        del self[tokens:]


class Layer:
    """Positions in place of keys and values."""

    is_allocated = True

    def __init__(self, group, rows):
        self.group, self.sequences = group, (Sequence(),) * rows
        self.buffers = [(Buffer(), Buffer()) for _ in range(rows)]
        self.written = ({}, {})  # pages of each side by number
        self.spans, self.evicted = [[] for _ in range(rows)], [[] for _ in range(rows)]
        group.add(self, 0)
        group.sequences = self.sequences

    @property
    def rows(self):
        return [SimpleNamespace(keys=keys, values=values, attention_mass=None) for keys, values in self.buffers]

    def reorder(self, rows):
        self.buffers = [tuple(map(Buffer, self.buffers[row])) for row in rows]

    def empty_row(self):
        return None

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
            for row, start, hidden, numbers, used, position in pending:
                buffer = self.buffers[row][side]
                after = plan.after[row]
                assert after.evicted or buffer[start] == after.position(position)
                assert len(buffer) == used
                assert not in_use & set(numbers)
                in_use |= set(numbers)
                tokens = buffer[start : start + P * len(numbers)]
                del buffer[start + hidden : start + P * len(numbers)]
                assert position or hidden == after.sink_tokens
                for number in numbers:
                    self.written[side][number] = tokens[:P]
                    assert len(self.written[side][number]) == P
                    del tokens[:P]
        self.sequences = plan.after

    def _seal_span(self, seal):
        moved = []
        for buffer in self.buffers[seal.row]:
            assert len(buffer) == seal.used
            moved.append([position for part in seal.parts for position in buffer[slice(*part)]])
            for start, stop in reversed(seal.parts):
                del buffer[start:stop]
        assert moved[0] == moved[1]
        for length in seal.lengths:
            self.spans[seal.row].append(moved[0][:length])
            del moved[0][:length]
        assert not moved[0]

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
            self.layer.execute(self.group.plan_compression(seal=True))

    def feed(self, tokens):
        """A forward pass, as layers go through it."""
        group = self.group
        if group.is_decoding(tokens):
            self.seal()
        latest = group.begin(tokens)
        columns = torch.arange(group.logical)
        mask = torch.stack([columns >= padding for padding in self.padding])
        group.append(latest, PassTokens(columns[latest.start :], mask))
        self.layer.append(latest)
        group.attended = group.logical
        self.layer.execute(group.plan_compression(seal=False))

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
                sinks, outside = sequence.sink_tokens, sequence.dropped + len(part.pages)
                assert buffer[:sinks] == left[:sinks]
                stored = left[: P * sequence.dropped]
                stored += [position for number in part.pages for position in layer.written[side][number]]
                stored += buffer[sinks if outside else 0 :]
                assert stored == left
                assert part.buffered == len(buffer)
                counted.append(len(part.pages))
            assert counted[0] in (None, (sequence.dropped, *counted[1:])), (len(everything), counted, sequence)
            assert len(sequence) == len(left)
            assert [len(span) for span in layer.spans[row]] == [span.tokens for span in sequence.spans]
            for span, stored in zip(layer.spans[row], sequence.spans, strict=True):
                assert stored.positions.slice(0, len(span)).tolist() == span
            assert sequence.positions.slice(0, len(sequence.positions)).tolist() == left[sequence.kept :]
            outside = max(0, sequence.dropped * P - sequence.sink_tokens)
            assert sequence.stored == len(everything) - len(layer.evicted[row]) - outside
            twice = sequence.hidden(0) if sequence.pages else 0
            here = sequence.stored - sum(map(len, layer.spans[row])) + twice
            assert sequence.residual + sequence.pages * P == here


def expectation(scheme, window):
    """Dropped pages, key pages and value pages of a sequence by its length, whatever the way to it."""

    def expect(n):
        dropped = max(0, (n - window + 1) // P) if window else 0
        recent = scheme.key_recent_tokens, scheme.value_recent_tokens
        return dropped, *(max(0, max(0, (n - tokens) // P) - dropped) for tokens in recent)

    return expect
