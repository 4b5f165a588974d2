"""Figures of fidelity are computed through the cache from the same tokens, as if they were decoded one by one."""

import math

import pytest
import torch
from tiny.checkpoints import REFERENCE, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert import KVCache, KVScheme
from kvconvert.data.sources import EVALUATION
from kvconvert.data.text import load_token_samples
from kvconvert.errors import NumericError
from kvconvert.fidelity.evaluate import text_figures
from kvconvert.fidelity.scoring import Decoder, batches, compare, generate_greedily

UNQUANTIZED = KVScheme(key_bits=16, value_bits=16)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REFERENCE)


def with_cache(model, scheme) -> Decoder:
    model.set_attn_implementation("kvconvert")
    return Decoder(model, lambda: KVCache(model.config, scheme))


def random_ids(segments: int, length: int) -> torch.Tensor:
    return torch.randint(4096, (segments, length), generator=torch.Generator().manual_seed(1))


def test_figures_equal_a_plain_computation_when_nothing_is_quantized():
    source, other = tiny_model("llama", 0, max_position_embeddings=512), tiny_model("llama", 1)
    ids = random_ids(3, 400)
    result = compare(Decoder.plain(source), {"other": with_cache(other, UNQUANTIZED)}, ids, batch=2)["other"]
    other.set_attn_implementation("sdpa")
    with torch.no_grad():
        p, q = (model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1) for model in (source, other))
    scored = slice(128, 399)
    kl = (p.exp() * (p - q)).sum(-1)[:, scored]
    targets = ids[:, 129:, None]
    assert result.kl.shape == (3, 271)
    # float32 logits of a model whose weights are drawn with deviation 0.1: a few 1e-6 apart.
    torch.testing.assert_close(result.kl, kl, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(result.source_nll, -p[:, scored].gather(-1, targets)[..., 0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(result.other_nll, -q[:, scored].gather(-1, targets)[..., 0], atol=2e-5, rtol=1e-5)
    agrees = p[:, scored].argmax(-1) == q[:, scored].argmax(-1)
    assert (result.agrees == agrees).double().mean() > 0.99, "ties within rounding may fall either way"
    figures = text_figures(result, seed=0)
    assert figures["perplexity"].source == pytest.approx(float(result.source_nll.mean().exp()))
    assert figures["perplexity"].increase == pytest.approx(
        float((result.other_nll.mean() - result.source_nll.mean()).exp()) - 1
    )
    assert figures["kl"].mean == pytest.approx(float(kl.mean()), rel=1e-4)
    share_above = float((kl > figures["kl"].p99).double().mean())
    assert 0.005 < share_above < 0.015


def test_chunks_score_what_token_by_token_decoding_scores():
    model = tiny_model("llama", max_position_embeddings=512)
    decoder = with_cache(model, KVScheme.preset("oscar-paper").with_online_rotation())
    ids = random_ids(1, 270)
    plain = Decoder.plain(tiny_model("llama", max_position_embeddings=512))
    chunked = compare(plain, {"low-bit": decoder}, ids)["low-bit"]
    single = compare(plain, {"low-bit": decoder}, ids, chunk=1)["low-bit"]
    assert float(chunked.kl.mean()) > 1e-4, "two-bit pages must be seen"
    # The same pages, attended to in another order of float32 sums.
    torch.testing.assert_close(chunked.other_nll, single.other_nll, atol=1e-4, rtol=1e-4)
    assert chunked.residual_share == single.residual_share


def test_the_residual_share_counts_what_scored_queries_attend_to():
    decoder = with_cache(tiny_model("llama", max_position_embeddings=512), KVScheme())
    result = compare(decoder, {"kivi": decoder}, random_ids(2, 385))["kivi"]
    # Two whole chunks of queries 1 ... 128 tokens into their page, after one and after two quantized pages.
    own = 128 * 129 // 2
    assert result.residual_share == pytest.approx(2 * own / (2 * own + 128 * 128 + 128 * 256))
    plain = Decoder.plain(tiny_model("llama", max_position_embeddings=512))
    assert compare(plain, {"plain": plain}, random_ids(1, 200))["plain"].residual_share == 1


def test_nan_is_refused_instead_of_averaged():
    model = tiny_model("llama")
    model.model.norm.weight.data[0] = math.nan
    with pytest.raises(NumericError, match="broken answers with NaN"):
        compare(Decoder.plain(tiny_model("llama")), {"broken": Decoder.plain(model)}, random_ids(1, 100), prefill=32)


@pytest.mark.full
def test_oscar_keeps_more_than_kivi_on_the_reference_model(tokenizer):
    ids = load_token_samples(EVALUATION, tokenizer, 2, 512, 0).ids
    source = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32).eval()
    kivi, oscar = KVScheme.preset("kivi"), KVScheme.preset("oscar").with_online_rotation()
    found = compare(Decoder.plain(source), {"kivi": with_cache(model, kivi), "oscar": with_cache(model, oscar)}, ids)
    assert 0 < float(found["oscar"].kl.mean()) < 0.8 * float(found["kivi"].kl.mean())


def test_greedy_generation_reads_the_cue_after_the_context_was_quantized():
    model = tiny_model("llama", max_position_embeddings=512)
    ids = random_ids(2, 268)
    plain = generate_greedily(Decoder.plain(model), ids[:, :256], ids[:, 256:], 6)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)[:, 268:]
    assert torch.equal(plain, expected)
    pages = []

    class Watched(KVCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            pages.append((key_states.shape[2], self.stats().pages))
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    model.set_attn_implementation("kvconvert")
    generate_greedily(Decoder(model, lambda: Watched(model.config, "kivi")), ids[:, :256], ids[:, 256:], 2)
    assert pages[0] == (256, 0)
    cue = next(stored for new, stored in pages if new == 12)
    assert cue == 8, "two pages of keys and of values of each of two sequences, before the first layer reads the cue"


def test_batches_hold_prompts_of_equal_shape_and_every_prompt_once():
    prompts = [([0] * n, [0] * m) for n, m in [(4, 2), (5, 2), (4, 2), (4, 3), (4, 2)]]
    found = list(batches(prompts, size=2))
    assert sorted(i for batch in found for i in batch) == [0, 1, 2, 3, 4]
    assert all(len({tuple(map(len, prompts[i])) for i in batch}) == 1 and len(batch) <= 2 for batch in found)
