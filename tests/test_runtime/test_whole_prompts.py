"""Schemes that treat a whole prompt: spans (CalibQuant), eviction (MiniKV), and windows that differ for K and V
(Kitty).
"""

import copy

import pytest
import torch
from quantized_oracle import fake_quantize
from tiny.models import GREEDY, random_ids, tiny_model
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from kvconvert import KVCache, KVScheme
from kvconvert.errors import CacheError

SPAN = KVScheme(key_granularity="span", value_granularity="span", key_bits=2, value_bits=2)
EVICT = KVScheme(key_bits=16, value_bits=16, heavy_ratio=0.25, recent_ratio=0.25)
MINIKV = KVScheme.preset("minikv")


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama", "kvconvert", num_hidden_layers=2, gain=3.0)


# --- an independent model of both


class CompressedLayer(DynamicLayer):
    """Full precision; when a single token arrives, `compress` replaces what was stored, once per prompt."""

    def __init__(self, compress):
        super().__init__()
        self.compress, self.done = compress, 0

    def update(self, key_states, value_states, *args, **kwargs):
        if self.is_initialized and key_states.shape[2] == 1 and self.done == 0:
            self.done = self.keys.shape[2]
            self.keys, self.values = self.compress(self.keys, self.values)
        return super().update(key_states, value_states, *args, **kwargs)


def oracle(model, compress) -> DynamicCache:
    cache = DynamicCache()
    cache.layer_class_to_replicate = None
    cache.layers = [CompressedLayer(compress) for _ in range(model.config.num_hidden_layers)]
    return cache


def per_channel(bits):
    def compress(keys, values):
        def image(x):
            n = x.shape[2]
            return fake_quantize(x.transpose(2, 3), bits, n).transpose(2, 3)

        return image(keys), image(values)

    return compress


def with_eager(model, run, cache):
    model.set_attn_implementation("eager")
    try:
        return run(cache)
    finally:
        model.set_attn_implementation("kvconvert")


# --- spans


@pytest.mark.each_value
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 2, 150])
def test_spans_are_the_prompt_quantized_per_channel(llama, bits, length):
    ids = random_ids(1, length)
    run = lambda cache: llama.generate(ids, max_new_tokens=8, past_key_values=cache, **GREEDY)  # noqa: E731
    expected = with_eager(llama, run, oracle(llama, per_channel(bits)))
    scheme = KVScheme(key_granularity="span", value_granularity="span", key_bits=bits, value_bits=bits)
    cache = KVCache(llama.config, scheme)
    assert run(cache).tolist() == expected.tolist()
    sequence = cache.layers[1].store.sequences[0]
    assert [span.tokens for span in sequence.spans] == [length]
    assert sequence.keys.buffered == 7  # generated tokens stay in full precision


@pytest.mark.parametrize(("length", "spans"), [(300, [128, 128, 40]), (132, [128]), (133, [128, 1]), (3, [])])
def test_shorter_spans_are_the_prompt_after_its_sink_tokens_piece_by_piece(llama, length, spans):
    def compress(keys, values):
        def image(x):
            pieces = [piece.transpose(2, 3) for piece in x[:, :, 4:].split(128, dim=2) if piece.shape[2]]
            pieces = [fake_quantize(piece, 2, piece.shape[3]).transpose(2, 3) for piece in pieces]
            return torch.cat([x[:, :, :4], *pieces], 2)

        return image(keys), image(values)

    run = lambda cache: llama.generate(random_ids(1, length), max_new_tokens=8, past_key_values=cache, **GREEDY)  # noqa: E731
    expected = with_eager(llama, run, oracle(llama, compress))
    cache = KVCache(llama.config, KVScheme.from_dict(SPAN.to_dict() | {"sink_tokens": 4, "span_tokens": 128}))
    assert run(cache).tolist() == expected.tolist()
    sequence = cache.layers[1].store.sequences[0]
    assert [span.tokens for span in sequence.spans] == spans
    assert [span.positions.position(0) for span in sequence.spans] == [4 + 128 * i for i in range(len(spans))]


def test_sealing_by_hand_is_the_same_as_the_first_step(llama):
    ids = random_ids(1, 40)
    sealed, waiting = KVCache(llama.config, SPAN), KVCache(llama.config, SPAN)
    for cache in (sealed, waiting):
        llama(ids, past_key_values=cache)
    sealed.seal()
    assert sealed.stats().bytes_used < waiting.stats().bytes_used
    step = random_ids(1, 1, seed=2)
    assert torch.equal(llama(step, past_key_values=sealed).logits, llama(step, past_key_values=waiting).logits)
    assert sealed.stats() == waiting.stats()


def test_a_later_prompt_opens_a_span_of_its_own(llama):
    cache = KVCache(llama.config, SPAN)
    first = llama.generate(random_ids(1, 60), max_new_tokens=5, past_key_values=cache, **GREEDY)
    more = torch.cat([first, random_ids(1, 30, seed=3)], 1)
    llama.generate(more, max_new_tokens=3, past_key_values=cache, **GREEDY)
    sequence = cache.layers[0].store.sequences[0]
    # the first turn's last token was not in the cache yet and arrives with the second prompt
    assert [span.tokens for span in sequence.spans] == [60, 31]
    assert [span.positions.slice(0, 1).tolist() for span in sequence.spans] == [[0], [64]]
    assert sequence.positions.slice(0, 6).tolist() == [60, 61, 62, 63, 95, 96]
    assert cache.stats().tokens == cache.get_seq_length() == 97


def test_sink_tokens_stay_out_of_spans_and_a_short_prompt_is_all_sink_tokens(llama):
    scheme = KVScheme(key_granularity="span", value_granularity="span", sink_tokens=8)
    for length, tokens in ((20, [12]), (5, [])):
        cache = KVCache(llama.config, scheme)
        llama(random_ids(1, length), past_key_values=cache)
        cache.seal()
        assert [span.tokens for span in cache.layers[0].store.sequences[0].spans] == tokens


def test_a_span_cannot_be_cropped(llama):
    cache = KVCache(llama.config, SPAN)
    llama(random_ids(1, 20), past_key_values=cache)
    cache.seal()
    with pytest.raises(CacheError, match="cannot give back"):
        cache.crop(-1)


def test_rows_whose_scores_the_shift_makes_equal_are_counted(llama):
    for tau2, counted in ((0.0, 0), (1e3, 3 * 2 * 4)):
        scheme = KVScheme(key_granularity="span", value_granularity="span", tau2=tau2)
        cache = KVCache(llama.config, scheme)
        llama.generate(random_ids(1, 20), max_new_tokens=4, past_key_values=cache, **GREEDY)
        # three steps, two layers, four query heads
        assert cache.stats().clamped_rows == counted


def test_one_bit_spans_cost_one_bit_and_scales_per_channel(llama):
    cache = KVCache(llama.config, KVScheme(key_granularity="span", value_granularity="span", key_bits=1, value_bits=1))
    llama(random_ids(1, 640), past_key_values=cache)
    cache.seal()
    assert cache.layers[0].store.bytes_used() == 2 * 2 * 16 * (640 // 8 + 4)


@pytest.mark.quick("scheme0", "scheme2")
@pytest.mark.parametrize("scheme", [SPAN, MINIKV, KVScheme.preset("calibquant-1bit"), KVScheme.preset("kitty")])
def test_a_left_padded_batch_equals_each_sequence_alone(llama, scheme):
    lengths = [300, 170, 40]
    rows = [random_ids(1, n, seed=n)[0] for n in lengths]
    ids = torch.stack([torch.cat([torch.zeros(300 - len(row), dtype=torch.long), row]) for row in rows])
    mask = torch.stack([torch.cat([torch.zeros(300 - n), torch.ones(n)]) for n in lengths]).long()

    def run(tokens, **arguments):
        cache = KVCache(llama.config, scheme)
        return llama.generate(tokens, max_new_tokens=12, past_key_values=cache, **arguments, **GREEDY)

    together = run(ids, attention_mask=mask)
    for row, answer in zip(rows, together, strict=True):
        assert run(row[None])[0, -12:].tolist() == answer[-12:].tolist()


# --- eviction


KEPT: dict[int, torch.Tensor] = {}  # layer index to bool [query heads, prompt]: what decoding may see of the prompt


def masked_eager(module, query, key, value, attention_mask, scaling, **kwargs):
    repeats = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeats, 1).transpose(2, 3) * scaling
    scores = scores + attention_mask[..., : key.shape[2]]
    kept = KEPT.get(module.layer_idx)
    if kept is not None and query.shape[2] == 1:
        scores[0, :, :, : kept.shape[1]].masked_fill_(~kept[:, None], float("-inf"))
    return (scores.softmax(-1) @ value.repeat_interleave(repeats, 1)).transpose(1, 2).contiguous(), None


AttentionInterface.register("masked_eager_for_tests", masked_eager)
AttentionMaskInterface.register("masked_eager_for_tests", eager_mask)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_evicted_decoding_equals_attention_masked_to_the_same_tokens(model_type):
    window = {"sliding_window": 90} if model_type == "mistral" else {}
    # peaked attention, lest the oldest tokens receive most in every layer
    model = tiny_model(
        model_type, "kvconvert", num_hidden_layers=2, gain=8.0 if model_type == "llama" else 3.0, **window
    )
    ids = random_ids(1, 160)
    cache = KVCache(model.config, EVICT)
    got = model.generate(ids, max_new_tokens=10, past_key_values=cache, **GREEDY)
    KEPT.clear()
    for index, store in enumerate(cache.stores()):
        kept = store.rows[0].kept
        assert kept.shape == (2, 80)
        mask = torch.zeros(2, 160, dtype=torch.bool).scatter(1, kept.long(), True)
        KEPT[index] = mask.repeat_interleave(2, 0)
    assert not torch.equal(KEPT[0], KEPT[1])
    model.set_attn_implementation("masked_eager_for_tests")
    expected = model.generate(ids, max_new_tokens=10, past_key_values=DynamicCache(), **GREEDY)
    KEPT.clear()
    assert got.tolist() == expected.tolist()


def test_kept_tokens_are_those_that_received_most_attention(llama):
    """The attention mass is computed here from eager weights over the whole prompt."""
    ids = random_ids(1, 64)
    cache = KVCache(llama.config, EVICT)
    llama(ids, past_key_values=cache)
    cache.seal()
    llama.set_attn_implementation("eager")
    weights = llama(ids, output_attentions=True).attentions
    llama.set_attn_implementation("kvconvert")
    for store, weight in zip(cache.stores(), weights, strict=True):
        attention_mass = weight[0].unflatten(0, (2, 2)).sum((1, 2))
        heavy_hitters = attention_mass[:, :48].topk(16, dim=-1).indices.sort(-1).values
        expected = torch.cat([heavy_hitters, torch.arange(48, 64).expand(2, 16)], 1)
        assert store.rows[0].kept.tolist() == expected.tolist()


def test_chunked_prefill_keeps_the_same_tokens(llama):
    ids = random_ids(1, 200)
    whole, pieces = KVCache(llama.config, MINIKV), KVCache(llama.config, MINIKV)
    llama.generate(ids, max_new_tokens=2, past_key_values=whole, **GREEDY)
    llama.generate(ids, max_new_tokens=2, past_key_values=pieces, prefill_chunk_size=64, **GREEDY)
    for one, other in zip(whole.stores(), pieces.stores(), strict=True):
        same = (one.rows[0].kept == other.rows[0].kept).float().mean()
        assert same > 0.99  # float32 sums in another order may swap two nearly equal tokens


@pytest.mark.parametrize(
    ("heavy", "recent", "kept"), [(0.0, 0.0, 0), (0.0, 0.5, 50), (1.0, 0.0, 100), (0.6, 0.6, 100), (0.1, 0.05, 15)]
)
def test_budgets_from_nothing_to_everything(llama, heavy, recent, kept):
    scheme = KVScheme(key_bits=16, value_bits=16, heavy_ratio=heavy, recent_ratio=recent)
    cache = KVCache(llama.config, scheme)
    out = llama.generate(random_ids(1, 100), max_new_tokens=4, past_key_values=cache, **GREEDY)
    assert out.shape == (1, 104)
    assert cache.stats().tokens == kept + 3


def test_fewer_prompt_tokens_than_sink_tokens_and_recent_ones(llama):
    scheme = KVScheme(heavy_ratio=0.1, recent_ratio=0.5, sink_tokens=16)
    cache = KVCache(llama.config, scheme)
    llama.generate(random_ids(1, 20), max_new_tokens=3, past_key_values=cache, **GREEDY)
    assert cache.stats().tokens == 22


def test_sink_tokens_survive_eviction(llama):
    cache = KVCache(llama.config, KVScheme(heavy_ratio=0.1, recent_ratio=0.1, sink_tokens=8))
    llama(random_ids(1, 200), past_key_values=cache)
    cache.seal()
    kept = cache.layers[0].store.rows[0].kept
    assert kept.shape == (2, 8 + 20 + 20)
    assert kept[:, :8].tolist() == [list(range(8))] * 2
    assert kept[:, -20:].tolist() == [list(range(180, 200))] * 2


def test_a_second_turn_after_eviction_keeps_its_prompt_and_generates(llama):
    cache = KVCache(llama.config, MINIKV)
    first = llama.generate(random_ids(1, 300), max_new_tokens=5, past_key_values=cache, **GREEDY)
    more = torch.cat([first, random_ids(1, 150, seed=4)], 1)
    second = llama.generate(more, max_new_tokens=5, past_key_values=copy.deepcopy(cache), **GREEDY)
    again = llama.generate(more, max_new_tokens=5, past_key_values=cache, **GREEDY)
    assert second.tolist() == again.tolist()
    # sink tokens, half of the first prompt, and everything since
    assert cache.stats().tokens == 4 + 150 + (again.shape[1] - 1 - 300)
    assert cache.stats().pages > 0


def test_eviction_lowers_memory_and_the_prefills_peak(llama):
    ids = random_ids(1, 1000)
    everything, half = KVCache(llama.config, EVICT), KVCache(llama.config, EVICT)
    peak = []
    update = half.layers[1].update
    half.layers[1].update = lambda *given, **named: (
        peak.append(half.layers[0].store.bytes_allocated()),
        update(*given, **named),
    )[1]
    half.expect_whole_prompt()
    llama(ids, past_key_values=half)
    llama(ids, past_key_values=everything)
    full = everything.layers[0].store.bytes_used() - everything.layers[0].store.rows[0].attention_mass.nbytes
    assert full == 2 * 1000 * 2 * 16 * 4
    # When the second layer runs, the first has been reduced to half: 500 tokens in three pages and a residual window, a
    # fourth page's room, and four bytes of position per kept token and head.
    assert peak == [half.layers[0].store.bytes_allocated()]
    assert peak[0] < 0.66 * full


def test_pyramids_give_lower_layers_more_and_keep_the_total():
    model = tiny_model("llama", "kvconvert", num_hidden_layers=4)
    scheme = KVScheme(key_bits=16, value_bits=16, heavy_ratio=0.25, recent_ratio=0.25, allocation="pyramid")
    cache, uniform = KVCache(model.config, scheme), KVCache(model.config, EVICT)
    for each in (cache, uniform):
        model(random_ids(1, 400), past_key_values=each)
        each.seal()
    counts = [store.tokens() for store in cache.stores()]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == round(400 * (0.5 - 0.25 / 7)) + 100
    assert abs(sum(counts) - sum(store.tokens() for store in uniform.stores())) <= 4


# --- windows that differ for keys and values


def kitty_image(keys, values, group, boosted, paged_keys, paged_values, sinks):
    """Pages of one row of [1, H, n, D] as Kitty stores them, from the given numbers of pages on each side."""
    keys, values = keys.clone(), values.clone()
    for page in range(paged_keys):
        part = (slice(None), slice(None), slice(max(sinks, page * 128), (page + 1) * 128))
        k = keys[part].transpose(2, 3)
        order = k.abs().mean(3).sort(dim=-1, descending=True, stable=True).indices[..., :boosted]
        high = torch.zeros(k.shape[:3], dtype=torch.bool).scatter(2, order, True)[..., None]
        keys[part] = torch.where(high, *(fake_quantize(k, bits, min(group, k.shape[3])) for bits in (4, 2))).transpose(
            2, 3
        )
    for page in range(paged_values):
        part = (slice(None), slice(None), slice(max(sinks, page * 128), (page + 1) * 128))
        values[part] = fake_quantize(values[part], 2, min(group, values.shape[-1]))
    return keys, values


class KittyLayer(DynamicLayer):
    def __init__(self):
        super().__init__()
        self.exact = None

    def update(self, key_states, value_states, *args, **kwargs):
        if self.is_initialized:
            n = self.exact[0].shape[2]
            self.keys, self.values = kitty_image(*self.exact, 128, 2, max(0, n // 128), max(0, (n - 128) // 128), 32)
        new = super().update(key_states, value_states, *args, **kwargs)
        old = self.exact or (key_states[:, :, :0], value_states[:, :, :0])
        self.exact = (torch.cat([old[0], key_states], 2), torch.cat([old[1], value_states], 2))
        return new


@pytest.mark.parametrize("length", [127, 128, 129, 255, 256, 257, 384])
def test_kitty_matches_an_independent_model_of_it(llama, length):
    ids = random_ids(1, length)
    run = lambda cache: llama.generate(ids, max_new_tokens=5, past_key_values=cache, **GREEDY)  # noqa: E731
    reference = DynamicCache()
    reference.layer_class_to_replicate = None
    reference.layers = [KittyLayer() for _ in range(2)]
    expected = with_eager(llama, run, reference)
    cache = KVCache(llama.config, "kitty")
    assert run(cache).tolist() == expected.tolist()
    sequence, n = cache.layers[0].store.sequences[0], length + 4
    assert len(sequence.keys.pages) == max(0, n // 128)
    assert len(sequence.values.pages) == max(0, (n - 128) // 128)


def test_key_windows_may_be_the_longer_ones_too(llama):
    ids = random_ids(1, 400)
    scheme = KVScheme(key_bits=16, value_bits=16, key_recent_tokens=200, value_recent_tokens=10)
    expected = with_eager(
        llama, lambda c: llama.generate(ids, max_new_tokens=6, past_key_values=c, **GREEDY), DynamicCache()
    )
    cache = KVCache(llama.config, scheme)
    assert llama.generate(ids, max_new_tokens=6, past_key_values=cache, **GREEDY).tolist() == expected.tolist()
    sequence = cache.layers[0].store.sequences[0]
    assert (len(sequence.keys.pages), len(sequence.values.pages)) == (1, 3)
