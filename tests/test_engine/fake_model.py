"""A language model and a paged cache on the host, with the interface that an Engine uses and checks of its own.

The next token's logits are a hash of all tokens before it, so that a sequence that lost, repeated or mixed up a token
goes on differently.
"""

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from transformers import GenerationConfig

from kvconvert.models import CACHE

VOCABULARY = 97
END = 0
PAGE = 128
PRIME = 2_147_483_629


class FakePool:
    """Counts who refers to which page, and raises when there are no more."""

    def __init__(self, pages):
        self.pages, self.references, self.made = pages, Counter(), 0

    @property
    def used(self):
        return len(self.references)

    def take(self):
        self.made += 1
        self.retain([self.made])
        assert self.pages is None or self.used <= self.pages, "the pool is out of pages"
        return self.made

    def retain(self, pages):
        self.references.update(pages)

    def release(self, pages):
        for page in pages:
            assert self.references[page] > 0
            self.references[page] -= 1
            if not self.references[page]:
                del self.references[page]


class FakeSequence(list):
    """Tokens, and the pages that they take."""

    def __init__(self, tokens=(), pages=()):
        super().__init__(tokens)
        self.pages = list(pages)


@dataclass(frozen=True, eq=False)
class FakeSnapshot:
    """A sequence at the end of a page."""

    pool: FakePool
    tokens: tuple
    pages: tuple

    def state_pages(self, earlier):
        return 0

    @property
    def length(self):
        return len(self.tokens)

    def pages_beyond(self, earlier):
        known = () if earlier is None else earlier.pages
        assert self.pages[: len(known)] == known
        yield self.pool, list(self.pages[len(known) :])


class FakeCache:
    """The sequences of some rows; None is a free row."""

    def __init__(self, pool):
        self.pool, self.rows, self.sealed, self.open = pool, [], False, False
        self.schemes, self.fingerprint, self.groups, self.heads_apart = (), "fake", (), False

    def open_rows(self, count):
        self.rows, self.open = [None] * count, True

    def resize_rows(self, count):
        assert all(row is None for row in self.rows[count:])
        self.rows = [*self.rows[:count], *[None] * (count - len(self.rows))]

    def state_layers(self):
        return {}

    def beside(self):
        assert self.open
        cache = FakeCache(self.pool)
        cache.rows = [FakeSequence()]
        return cache

    def packed(self, prompts, *, rows):
        return FakePacked([*([(self, len(self.rows))] if rows else []), *prompts])

    def append(self, row, tokens):
        sequence = self.rows[row]
        sequence.extend(tokens)
        while len(sequence.pages) * PAGE < len(sequence):
            sequence.pages.append(self.pool.take())

    def snapshot(self, earlier=None):
        (sequence,) = self.rows
        assert not len(sequence) % PAGE
        return FakeSnapshot(self.pool, tuple(sequence), tuple(sequence.pages))

    def restore(self, snapshot):
        assert self.rows == [[]]
        assert all(self.pool.references[page] for page in snapshot.pages)
        self.rows = [FakeSequence(snapshot.tokens, snapshot.pages)]
        self.pool.retain(snapshot.pages)

    def unread_flags(self, wait=False):
        return []

    def take_unread_flags(self):
        return []

    def begin_prompt(self):
        self.sealed = False

    def seal(self):
        assert not self.sealed
        self.sealed = True

    def reset(self):
        for sequence in self.rows:
            self.pool.release(sequence.pages)
        self.rows = [FakeSequence()]

    def join(self, row, prompt):
        assert prompt.sealed
        assert self.rows[row] is None
        (self.rows[row],) = prompt.rows
        prompt.rows = [FakeSequence()]

    def move_rows(self, moves):
        for old, new in moves.items():
            assert self.rows[new] is None
            self.rows[old], self.rows[new] = None, self.rows[old]

    def leave(self, row):
        self.pool.release(self.rows[row].pages)
        self.rows[row] = None

    def free_pages(self):
        return None if self.pool.pages is None else self.pool.pages - self.pool.used


class FakePacked:
    """Caches whose new tokens come one after another, and how many each."""

    def __init__(self, parts):
        self.parts = parts
        self.segments = [SimpleNamespace(error=None) for _ in parts]

    key = None

    def planned(self, capacity, places):
        return nullcontext()

    def launches(self):
        return nullcontext()


class FakeModel:
    """`kv_memory` is a number of pages here."""

    def __init__(self, max_positions=4096):
        self.config = SimpleNamespace(
            vocab_size=VOCABULARY,
            max_position_embeddings=max_positions,
            model_type="fake",
            get_text_config=self._config,
        )
        self.generation_config = GenerationConfig(eos_token_id=END)
        self.device = torch.device("cpu")
        passes = SimpleNamespace(capacity=lambda *of: None, places=None)
        self.captured = SimpleNamespace(passes=passes)
        self.batches = []  # occupied rows of each decoding pass
        self.chunks = []
        self.before_pass = lambda: None
        self.before_segment = lambda number, tokens: None

    def _config(self, decoder):
        return self.config

    def modules(self):
        return []

    def new_kv_cache(self, *, kv_memory=None):
        self.pool = FakePool(kv_memory)
        return FakeCache(self.pool)

    def forward(self, input_ids, position_ids, use_cache, return_dict, logits_to_keep=0, **given):
        past_key_values = given[CACHE]
        self.before_pass()
        assert input_ids.shape == position_ids.shape
        if not isinstance(past_key_values, FakePacked):
            return SimpleNamespace(logits=self._read(past_key_values, input_ids, position_ids))
        assert input_ids.shape == (1, sum(count for _, count in past_key_values.parts))
        logits, begin = [], 0
        for number, (cache, count) in enumerate(past_key_values.parts):
            part = slice(begin, begin + count)
            ids, positions = (x[0, part].view(len(cache.rows), -1) for x in (input_ids, position_ids))
            try:
                self.before_segment(number, count)
                logits.append(self._read(cache, ids, positions).repeat(1, ids.shape[1], 1).flatten(0, 1))
            except MemoryError as error:
                past_key_values.segments[number].error = error
                logits.append(torch.zeros(count, VOCABULARY))
            begin += count
        return SimpleNamespace(logits=torch.cat(logits)[None, logits_to_keep])

    def _read(self, cache, ids, positions):
        """Logits [rows, 1, V] of the tokens after those of each row."""
        assert ids.shape[0] == len(cache.rows)
        logits = torch.zeros(len(cache.rows), 1, VOCABULARY)
        occupied = [row for row, sequence in enumerate(cache.rows) if sequence is not None]
        for row in occupied:
            start = len(cache.rows[row])
            assert positions[row].tolist() == list(range(start, start + ids.shape[1]))
            cache.append(row, ids[row].tolist())
            logits[row, 0] = next_logits(cache.rows[row])
        if cache.open:
            self.batches.append(occupied)
        else:
            self.chunks.append(ids.shape[1])
        return logits

    __call__ = forward


def next_logits(sequence):
    """Logits of the token after a sequence, float32 [V]."""
    state = len(sequence)
    for token in sequence:
        state = (state * 1_000_003 + token + 1) % PRIME
    places = torch.arange(1, VOCABULARY + 1)
    return ((places * state) % PRIME * 48_271 % PRIME) / PRIME * 4
