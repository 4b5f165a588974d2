"""A language model and a paged cache on the host, with the interface that an Engine uses and checks of its own.

The next token's logits are a hash of all tokens before it, so that a sequence that lost, repeated or mixed up a token
goes on differently.
"""

from types import SimpleNamespace

import torch

VOCABULARY = 97
END = 0
PAGE = 128
PRIME = 2_147_483_629


class FakePool:
    """Counts pages, and raises when there are no more."""

    def __init__(self, pages):
        self.pages, self.used = pages, 0

    def take(self, count):
        self.used += count
        assert self.used >= 0
        assert self.pages is None or self.used <= self.pages, "the pool is out of pages"


class FakeCache:
    """The sequences of some rows; None is a free row."""

    def __init__(self, pool):
        self.pool, self.rows, self.sealed, self.open = pool, [], False, False
        self.schemes = ()

    def open_rows(self, count):
        self.rows, self.open = [None] * count, True

    def beside(self):
        assert self.open
        cache = FakeCache(self.pool)
        cache.rows = [[]]
        return cache

    def append(self, row, tokens):
        sequence = self.rows[row]
        before = pages_of(sequence)
        sequence += tokens
        self.pool.take(pages_of(sequence) - before)

    def begin_prompt(self):
        self.sealed = False

    def seal(self):
        assert not self.sealed
        self.sealed = True

    def reset(self):
        self.pool.take(-sum(map(pages_of, self.rows)))
        self.rows = [[]]

    def join(self, row, prompt):
        assert prompt.sealed
        assert self.rows[row] is None
        (self.rows[row],) = prompt.rows
        prompt.rows = [[]]

    def leave(self, row):
        self.pool.take(-pages_of(self.rows[row]))
        self.rows[row] = None

    def free_pages(self):
        return None if self.pool.pages is None else self.pool.pages - self.pool.used


class FakeModel:
    """`kv_memory` is a number of pages here."""

    def __init__(self, max_positions=4096):
        self.config = SimpleNamespace(
            vocab_size=VOCABULARY,
            max_position_embeddings=max_positions,
            model_type="fake",
            get_text_config=self._config,
        )
        self.generation_config = SimpleNamespace(eos_token_id=END)
        self.device = torch.device("cpu")
        self.batches = []  # occupied rows of each decoding pass
        self.chunks = []
        self.before_pass = lambda: None

    def _config(self, decoder):
        return self.config

    def new_kv_cache(self, *, kv_memory=None):
        self.pool = FakePool(kv_memory)
        return FakeCache(self.pool)

    def forward(self, input_ids, position_ids, past_key_values, use_cache, return_dict, logits_to_keep=0):
        self.before_pass()
        cache = past_key_values
        assert input_ids.shape == position_ids.shape
        assert input_ids.shape[0] == len(cache.rows)
        logits = torch.zeros(len(cache.rows), 1, VOCABULARY)
        occupied = [row for row, sequence in enumerate(cache.rows) if sequence is not None]
        for row in occupied:
            start = len(cache.rows[row])
            assert position_ids[row].tolist() == list(range(start, start + input_ids.shape[1]))
            cache.append(row, input_ids[row].tolist())
            logits[row, 0] = next_logits(cache.rows[row])
        if cache.open:
            self.batches.append(occupied)
        else:
            self.chunks.append(input_ids.shape[1])
        return SimpleNamespace(logits=logits)

    __call__ = forward


def pages_of(sequence):
    return -(-len(sequence) // PAGE)


def next_logits(sequence):
    """Logits of the token after a sequence, float32 [V]."""
    state = len(sequence)
    for token in sequence:
        state = (state * 1_000_003 + token + 1) % PRIME
    places = torch.arange(1, VOCABULARY + 1)
    return ((places * state) % PRIME * 48_271 % PRIME) / PRIME * 4
