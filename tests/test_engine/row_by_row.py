"""The rows of an Engine's cache, each a cache of its own: what one pass over the batch has to be equal to."""

import weakref
from types import SimpleNamespace

import torch

from kvconvert.runtime import KVCache

BYTES = 2**14  # that a page counts for


class RowByRow:
    """A bundle's model whose decoding passes read one row after another, each through its own cache."""

    def __init__(self, model):
        self.model = model
        self.config, self.generation_config, self.device = model.config, model.generation_config, model.device

    def new_kv_cache(self, *, kv_memory=None):
        return Rows(self.model, None if kv_memory is None else kv_memory // BYTES)

    def forward(self, input_ids, position_ids, past_key_values, **options):
        if not isinstance(past_key_values, Rows):
            return self.model(
                input_ids=input_ids, position_ids=position_ids, past_key_values=past_key_values, **options
            )
        logits = torch.zeros(len(past_key_values.rows), 1, self.config.get_text_config().vocab_size)
        for row, cache in enumerate(past_key_values.rows):
            if cache is not None:
                ids, positions = input_ids[row : row + 1], position_ids[row : row + 1]
                logits[row] = self.model(
                    input_ids=ids, position_ids=positions, past_key_values=cache, **options
                ).logits[0]
        return SimpleNamespace(logits=logits)

    __call__ = forward


class Rows:
    """A cache or None for each row."""

    def __init__(self, model, pages):
        self.model, self.schemes, self.rows = model, model.kv_schemes, []
        self.pages, self.caches = pages, weakref.WeakSet()

    def open_rows(self, count):
        self.rows = [None] * count

    def beside(self):
        cache = self.model.new_kv_cache()
        self.caches.add(cache)
        return cache

    def join(self, row, cache):
        assert self.rows[row] is None
        assert isinstance(cache, KVCache)
        self.rows[row] = cache

    def leave(self, row):
        self.rows[row].reset()
        self.rows[row] = None

    def free_pages(self):
        if self.pages is None:
            return None
        free = self.pages - sum(-(-cache.get_seq_length() // 128) for cache in self.caches)
        assert free >= 0, "out of pages"
        return free
