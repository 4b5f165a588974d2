"""The quantized cache against an independent model of it (quantized_oracle.py) on transformers' own cache and eager
attention.
"""

import pytest
import torch
from quantized_oracle import oracle_cache
from tiny.models import GREEDY, random_ids, tiny_model

from kvconvert import KVCache, KVScheme

OSCAR = KVScheme(rotate_keys="hadamard", rotate_values="online", token_norm="joint")


def compare(model, run, bits: int, oscar: bool, group: int = 32, pad: list[int] | None = None, batch: int = 1) -> None:
    scheme = OSCAR if oscar else KVScheme()
    scheme = KVScheme(
        **scheme.to_dict() | {"key_bits": bits, "value_bits": bits, "key_group_size": group, "value_group_size": group}
    )
    model.set_attn_implementation("eager")
    expected = run(oracle_cache(model, bits, group, oscar, pad, batch))
    model.set_attn_implementation("kvconvert")
    assert run(KVCache(model.config, scheme)).tolist() == expected.tolist()


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama", num_hidden_layers=2, gain=3.0)


@pytest.mark.parametrize("length", [127, 128, 129, 255, 256, 257])
def test_generation_is_right_across_page_boundaries(llama, length):
    ids = random_ids(1, length)
    compare(llama, lambda c: llama.generate(ids, max_new_tokens=6, past_key_values=c, **GREEDY), bits=2, oscar=True)


@pytest.mark.quick("1-True", "2-False")
@pytest.mark.parametrize(
    ("bits", "oscar", "group"),
    [(1, True, 128), (2, False, 16), (3, True, 32), (8, False, 64), pytest.param(4, True, 32, marks=pytest.mark.full)],
)
def test_every_width_and_group_matches(llama, bits, oscar, group):
    ids = random_ids(1, 375)
    run = lambda c: llama.generate(ids, max_new_tokens=15, past_key_values=c, **GREEDY)  # noqa: E731
    compare(llama, run, bits, oscar, group)


@pytest.mark.parametrize("model_type", ["qwen3", "mistral"])
def test_other_architectures_match(model_type):
    model = tiny_model(
        model_type, num_hidden_layers=2, gain=3.0, **({"sliding_window": None} if model_type == "mistral" else {})
    )
    ids = random_ids(1, 260)
    compare(model, lambda c: model.generate(ids, max_new_tokens=6, past_key_values=c, **GREEDY), bits=2, oscar=True)


@pytest.mark.parametrize("bits", [pytest.param(2, marks=pytest.mark.full), 3])
def test_beams_equal_beams_of_the_oracle(llama, bits):
    ids = random_ids(1, 250)
    run = lambda c: llama.generate(ids, max_new_tokens=12, num_beams=3, past_key_values=c, **GREEDY)  # noqa: E731
    # generate() repeats the prompt for each beam before the first forward pass
    compare(llama, run, bits=bits, oscar=True, batch=3)


def test_a_left_padded_batch_equals_each_sequence_alone(llama):
    llama.set_attn_implementation("kvconvert")
    lengths = [300, 261, 130, 7]
    rows = [random_ids(1, n, seed=n)[0] for n in lengths]
    ids = torch.stack([torch.cat([torch.zeros(300 - len(row), dtype=torch.long), row]) for row in rows])
    mask = torch.stack([torch.cat([torch.zeros(300 - n), torch.ones(n)]) for n in lengths]).long()
    together = llama.generate(
        ids, attention_mask=mask, max_new_tokens=20, past_key_values=KVCache(llama.config, OSCAR), **GREEDY
    )
    for row, answer in zip(rows, together, strict=True):
        alone = llama.generate(row[None], max_new_tokens=20, past_key_values=KVCache(llama.config, OSCAR), **GREEDY)
        assert alone[0, -20:].tolist() == answer[-20:].tolist()


def test_a_second_turn_equals_one_long_prompt_read_in_the_same_pieces(llama):
    llama.set_attn_implementation("kvconvert")
    prompt, more = random_ids(1, 256), random_ids(1, 30, seed=2)
    cache = KVCache(llama.config, OSCAR)
    first = llama.generate(prompt, max_new_tokens=40, past_key_values=cache, **GREEDY)
    everything = torch.cat([first, more], 1)
    second = llama.generate(everything, max_new_tokens=12, past_key_values=cache, **GREEDY)
    # The generated tokens and the second turn lie within one page, so reading them at once or one by one meets the
    # same pages.
    whole = llama.generate(
        everything, max_new_tokens=12, prefill_chunk_size=256, past_key_values=KVCache(llama.config, OSCAR), **GREEDY
    )
    assert second.tolist() == whole.tolist()


def test_prompt_lookup_flushes_what_was_accepted_and_crops_what_was_not(llama):
    llama.set_attn_implementation("kvconvert")
    ids = random_ids(1, 40).repeat(1, 6)
    cache = KVCache(llama.config, OSCAR)
    out = llama.generate(ids, max_new_tokens=60, prompt_lookup_num_tokens=6, past_key_values=cache, **GREEDY)
    stored = out.shape[1] - 1
    assert cache.get_seq_length() == stored
    stats = cache.stats()
    assert (stats.tokens, stats.pages) == (stored, 2 * (stored // 128))


@pytest.mark.parametrize("sampling", [{"do_sample": True, "top_k": 20}, {"do_sample": True, "num_beams": 2}])
def test_sampling_with_several_return_sequences_shares_pages(llama, sampling):
    llama.set_attn_implementation("kvconvert")
    cache = KVCache(llama.config, OSCAR)
    torch.manual_seed(0)
    out = llama.generate(
        random_ids(1, 150),
        max_new_tokens=8,
        num_return_sequences=2,
        past_key_values=cache,
        eos_token_id=None,
        pad_token_id=0,
        **sampling,
    )
    assert out.shape == (2, 158)
    assert len(cache.layers[0].store.sequences) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_generate_and_store_their_own_dtype(llama, dtype):
    import copy

    model = copy.deepcopy(llama).to(dtype)
    model.set_attn_implementation("kvconvert")
    cache = KVCache(model.config, "oscar")
    out = model.generate(random_ids(2, 140), max_new_tokens=4, past_key_values=cache, **GREEDY)
    assert out.shape == (2, 144)
    assert cache.layers[0].store.rows[0].keys.tensor.dtype == dtype
    # the same tokens in float32 give nearly the same next-token distribution
    llama.set_attn_implementation("kvconvert")
    reference = llama(out[:, :-1], past_key_values=KVCache(llama.config, "oscar")).logits.softmax(-1)
    got = model(out[:, :-1], past_key_values=KVCache(model.config, "oscar")).logits.float().softmax(-1)
    assert (got - reference).abs().mean() < 5e-3
