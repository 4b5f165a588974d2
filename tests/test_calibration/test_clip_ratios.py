"""The range search against a loop over single queries, and its optimum where theory puts it."""

import math
import re
from dataclasses import replace

import pytest
import torch
from sample_layers import cache_format, layer_work, random_sample, run_passes

from kvconvert.calibration import scales
from kvconvert.calibration.attention_sample import AttentionSample, AttentionSampler, causal
from kvconvert.calibration.protocol import CalibrationPass
from kvconvert.calibration.scales import (
    CLIP_RATIO_GRID,
    ClipRatioPass,
    key_clip_ratio_errors,
    pages_read,
    reads_quantized,
    stored_tokens,
    value_clip_ratio_errors,
)
from kvconvert.kernels.pages import PageFormat, SideTensors
from kvconvert.kernels.quantizer import dequantize, quantize
from kvconvert.kernels.rotate import Rotations, hadamard_matrix


def simulated_flushes(tokens, sinks, recent, page=128):
    """For each token, the first query that finds it quantized, by playing the cache's life token by token.

    Sink tokens are never found quantized.
    """
    first_reader = [math.inf] * tokens
    flushed = 0
    for t in range(tokens):  # token t is appended and attends; then complete pages are flushed
        while t + 1 - flushed * page - recent >= page:
            for j in range(max(sinks, flushed * page), (flushed + 1) * page):
                first_reader[j] = t + 1
            flushed += 1
    return torch.tensor(first_reader)


@pytest.mark.parametrize("sinks", [0, 5, 32])
@pytest.mark.parametrize("recent", [0, 1, 128])
@pytest.mark.parametrize("tokens", [1, 128, 129, 300, 420])
def test_queries_read_pages_quantized_exactly_once_the_cache_has_flushed_them(tokens, sinks, recent):
    first_reader = simulated_flushes(tokens, sinks, recent)
    expected = torch.arange(tokens)[:, None] >= first_reader[None]
    found = reads_quantized(slice(0, tokens), tokens, sinks, recent, 128, torch.device("cpu"))
    assert torch.equal(found, expected)
    assert pages_read(tokens, recent, 128) == -(-int(expected[-1].sum()) // 128)


def test_tokens_are_stored_as_page_by_page_and_head_by_head_quantization_gives():
    sample = random_sample(tokens=300)
    cache = replace(cache_format(dim=16), sink_tokens=20, key_window=10)
    keys = stored_tokens(sample.keys[:1], cache, "key", [0.7])[0, 0]
    expected = sample.keys[0].clone()
    # The groups of the first page but its first one, whose 20 sink tokens the next token stands for, and the second's.
    for start in range(0, 256, 32):
        part = expected[:, start : start + 32].clone()
        hidden = 0 if start else 20
        part[:, :hidden] = part[:, hidden : hidden + 1]
        read = dequantize(*quantize(part, 2, 32, 1, 0.7), 32, 1)
        expected[:, start + hidden : start + 32] = read[:, hidden:]
    # 300 tokens: the second page ends at 256, and a query from 266 on reads it.
    torch.testing.assert_close(keys, expected, rtol=0, atol=1e-5)
    values = stored_tokens(sample.values[:1], cache, "value", [0.7])[0, 0]
    expected = sample.values[0].clone()
    expected[:, 20:256] = dequantize(*quantize(expected[:, 20:256], 2, 16, 2, 0.7), 16, 2)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("numbers", [1, 2**20], ids=["one by one", "at once"])
@pytest.mark.parametrize("changes", [{}, {"token_norm": "joint"}, {"boosted": 4}], ids=["plain", "norms", "boosted"])
def test_sequences_and_clip_ratios_together_are_each_alone(monkeypatch, changes, numbers):
    """Also with sink tokens, which only the first page of each sequence has, and with error feedback."""
    monkeypatch.setattr(scales, "STORED_NUMBERS", numbers)
    sample = random_sample(sequences=3, tokens=300)
    cache = replace(cache_format(dim=16), sink_tokens=20)
    feedback = torch.eye(16) + torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).triu(1) / 4
    keys = replace(cache.keys, **changes)
    tensors = SideTensors(feedback=feedback.half())
    cache = replace(cache, keys=keys, key_tensors=tensors)
    for side, tokens in (("key", sample.keys), ("value", sample.values)):
        together = stored_tokens(tokens, cache, side, (1.0, 0.7))
        for number, ratio in enumerate((1.0, 0.7)):
            for n in range(3):
                alone = stored_tokens(tokens[n : n + 1], cache, side, [ratio])[0, 0]
                torch.testing.assert_close(together[number, n], alone, rtol=0, atol=1e-6)
                assert torch.equal(alone[:, :20], tokens[n, :, :20])
        assert not torch.equal(*together)


@pytest.mark.parametrize("scores", [1, 4 * 128 * 290 * 4, 2**30])
def test_errors_do_not_depend_on_what_is_computed_at_once(monkeypatch, scores):
    sample = random_sample(sequences=3, tokens=290, dim=8)
    visible = causal(290).expand(3, -1, -1).clone()
    visible[1, 200:, 30:60] = False
    sample = replace(sample, visible=visible, sink_logits=torch.tensor([0.5, -1.0, 2.0, 0.0]))
    cache = replace(cache_format(), sink_tokens=4)
    for measure in (key_clip_ratio_errors, value_clip_ratio_errors):
        expected = measure(sample, cache, (1.0, 0.8, 0.6))
        with monkeypatch.context() as patch:
            patch.setattr(scales, "SCORES", scores)
            found = measure(sample, cache, (1.0, 0.8, 0.6))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        assert len(set(expected.tolist())) == 3


def by_single_queries(sample, cache, r, side, step):
    """Relative error of the output in float64, one query and head at a time, of every `step`-th of the readers."""
    error = size = 0.0
    recent = cache.window(side == "key")
    tokens, heads = sample.num_tokens, sample.keys.shape[1]
    for n in range(len(sample.queries)):
        keys, values = sample.keys[n].double(), sample.values[n].double()
        read = stored_tokens(getattr(sample, f"{side}s")[n : n + 1], cache, side, [r])[0, 0].double()
        read_k, read_v = (read, values) if side == "key" else (keys, read)
        first_reader = simulated_flushes(tokens, cache.sink_tokens, recent)
        for t in range(128 + recent, tokens, step):
            quantized = first_reader[: t + 1] <= t
            if not quantized.any():
                continue
            pair = []
            for k, v in ((keys, values), (read_k, read_v)):
                outputs = []
                for i, q in enumerate(sample.queries[n, :, t].double()):
                    h = i * heads // sample.queries.shape[1]
                    mixed_k = torch.where(quantized[:, None], k[h, : t + 1], keys[h, : t + 1])
                    mixed_v = torch.where(quantized[:, None], v[h, : t + 1], values[h, : t + 1])
                    outputs.append((mixed_k @ q * sample.scaling).softmax(0) @ mixed_v)
                pair.append(torch.cat(outputs))
            difference = pair[1] - pair[0]
            if sample.output_weight is not None:
                weight = sample.output_weight.double()
                difference, pair[0] = weight @ difference, weight @ pair[0]
            error, size = error + float(difference.square().sum()), size + float(pair[0].square().sum())
    return error / size


@pytest.mark.quick("True-3", "False-1")
@pytest.mark.parametrize(("weight", "step"), [(False, 1), (True, 1), (True, 3)])
def test_errors_are_those_of_single_queries_that_read_flushed_pages(monkeypatch, weight, step):
    monkeypatch.setattr(scales, "QUERIES", 290 // step)
    sample = random_sample(sequences=2, tokens=290, dim=8)
    if weight:
        sample = replace(sample, output_weight=torch.randn(5, 32, generator=torch.Generator().manual_seed(1)))
    cache = replace(cache_format(), sink_tokens=4, key_window=3, value_window=20)
    for side, measure in (("key", key_clip_ratio_errors), ("value", value_clip_ratio_errors)):
        found = measure(sample, cache, (1.0, 0.6))
        expected = [by_single_queries(sample, cache, r, side, step) for r in (1.0, 0.6)]
        assert found.tolist() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("bits", "theory"), [(1, 1.6 / 5.3), (2, 3.0 / 5.3)])
def test_for_normal_keys_the_optimum_is_where_theory_puts_it(bits, theory):
    """The best uniform grid of 2^b levels spans 1.596 sigma at 1 bit and 2.988 at 2; 128 values span about 5.3.

    Attention is flat, so that its output's error is proportional to the keys' squared error. Tolerance: two steps of
    the grid, for the optimum is flat and the extremes of 128 values vary.
    """
    generator = torch.Generator().manual_seed(0)
    keys, values, queries = torch.randn(3, 2, 2, 1024, 32, generator=generator)
    sample = AttentionSample(queries * 0.05, keys, values, 1.0, causal(1024))
    errors = key_clip_ratio_errors(sample, cache_format(dim=32, bits=bits, group=128), CLIP_RATIO_GRID)
    assert CLIP_RATIO_GRID[int(errors.argmin())] == pytest.approx(theory, abs=0.1)


def test_a_channel_of_two_values_wants_its_whole_range():
    sample = random_sample(tokens=300)
    sample = replace(sample, keys=sample.keys.sign(), values=sample.values.sign())
    cache = cache_format(dim=16, bits=1)
    for measure in (key_clip_ratio_errors, value_clip_ratio_errors):
        errors = measure(sample, cache, CLIP_RATIO_GRID)
        assert int(errors.argmin()) == 0
        assert float(errors[0]) < 1e-6


def test_ties_go_to_the_larger_factor_and_no_read_page_means_no_error():
    sample = random_sample(tokens=128)
    cache = cache_format(dim=16)
    assert key_clip_ratio_errors(sample, cache, CLIP_RATIO_GRID).tolist() == [0.0] * len(CLIP_RATIO_GRID)
    constant = replace(random_sample(tokens=300), keys=torch.ones(2, 2, 300, 16), values=torch.ones(2, 2, 300, 16))
    for measure in (key_clip_ratio_errors, value_clip_ratio_errors):
        assert int(measure(constant, cache, CLIP_RATIO_GRID).argmin()) == 0


def work_with_pages(length, **changes):
    work, _ = layer_work(samples=2, length=length)
    work.cache = replace(cache_format(bits=2, group=128), **changes)
    return work


def test_the_pass_chooses_both_ranges_and_says_what_they_save():
    work = work_with_pages(300)
    sampler = AttentionSampler(1)
    result = run_passes([sampler, ClipRatioPass(sampler)], work)
    assert sampler.sample.queries.shape == (1, 4, 300, 8)
    for side, measure in (("key", key_clip_ratio_errors), ("value", value_clip_ratio_errors)):
        before = cache_format(bits=2, group=128)
        errors = measure(sampler.sample, before, CLIP_RATIO_GRID)
        chosen = CLIP_RATIO_GRID[int(errors.argmin())]
        assert result.scheme[f"{side}_clip_ratio"] == chosen
        assert result.plan[f"{side}_clip_ratio_error"].tolist() == pytest.approx(errors.tolist())
        saved = result.statistics[f"{side}_output_error"]
        assert saved["full_range"] == pytest.approx(float(errors[0]), rel=1e-5)
        assert saved["chosen"] == pytest.approx(float(errors.min()), rel=1e-5)
    assert result.plan["clip_ratio_grid"].tolist() == pytest.approx(CLIP_RATIO_GRID)
    assert result.scheme["key_clip_ratio"] < 1
    assert (work.cache.keys.clip_ratio, work.cache.values.clip_ratio) == (
        result.scheme["key_clip_ratio"],
        result.scheme["value_clip_ratio"],
    )


@pytest.mark.parametrize(("keys", "values"), [(True, False), (False, True)])
def test_a_side_that_is_given_keeps_its_range(keys, values):
    work = work_with_pages(200)
    keys_given, values_given = replace(work.cache.keys, clip_ratio=0.9), replace(work.cache.values, clip_ratio=0.8)
    work.cache = replace(work.cache, keys=keys_given, values=values_given)
    sampler = AttentionSampler(1)
    result = run_passes([sampler, ClipRatioPass(sampler, keys, values)], work)
    assert set(result.scheme) == ({"key_clip_ratio"} if keys else {"value_clip_ratio"})
    assert (work.cache.keys.clip_ratio == 0.9, work.cache.values.clip_ratio == 0.8) == (
        not keys,
        not values,
    )


@pytest.mark.parametrize(
    ("length", "said"), [(128, "key_clip_ratio .129 .* value_clip_ratio .139"), (130, "value_clip_ratio .139")]
)
def test_sequences_too_short_for_a_page_are_said_and_leave_the_range(length, said):
    work = work_with_pages(length, value_window=10)
    sampler = AttentionSampler()
    result = run_passes([sampler, ClipRatioPass(sampler)], work)
    assert ("key_clip_ratio" in result.scheme) == (length > 128)
    assert "value_clip_ratio" not in result.scheme
    assert re.search(f"sequences of {length} tokens are too short to calibrate {said}", result.notes[0])


def test_the_sample_is_what_the_changed_layer_gives_the_cache():
    """Values scaled after observing (as AWQ does) are sampled scaled; evenly spaced sequences, rotated as asked."""

    class ScaleValues(CalibrationPass):
        name = "scale"

        def apply(self, work):
            work.layer.self_attn.v_proj.weight.mul_(3)

    work, seen = layer_work(samples=4, length=12)
    work.cache = replace(work.cache, rotations=Rotations(True, True))
    sampler = AttentionSampler(2)
    run_passes([ScaleValues(), sampler], work)
    h = hadamard_matrix(8, torch.float32)
    first, third = (torch.cat(seen[name])[[0, 2]] for name in ("keys", "values"))
    torch.testing.assert_close(sampler.sample.keys, first @ h, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sampler.sample.values, 3 * third @ h, rtol=1e-4, atol=1e-5)
    # What reaches the output is the same in either basis.
    outputs = third.transpose(1, 2).repeat_interleave(2, 2).flatten(2) * 3
    rotated = sampler.sample.values.transpose(1, 2).repeat_interleave(2, 2).flatten(2)
    expected = outputs @ work.layer.self_attn.o_proj.weight.T
    torch.testing.assert_close(rotated @ sampler.sample.output_weight.T, expected, rtol=1e-4, atol=1e-4)


def test_boosted_channels_and_norms_enter_the_search():
    sample = random_sample(tokens=300)
    cache = cache_format(dim=16)
    plain = key_clip_ratio_errors(sample, cache, (1.0,))
    keys = PageFormat.keys(2, 16, 128, 2, 32, boosted=16)
    boosted = key_clip_ratio_errors(sample, replace(cache, keys=keys), (1.0,))
    assert float(boosted) < 0.1 * float(plain)


def test_sequences_that_differ_in_their_masks_keep_their_own():
    """As the bidirectional images of Gemma 3 do."""
    work, seen = layer_work(samples=2, length=12)
    sampler = AttentionSampler(2)
    masks = [causal(12)[None, None].clone() for _ in range(2)]
    masks[0][..., 2:5, 2:5] = masks[1][..., 6:9, 6:9] = True
    embeddings = seen["model"].model.rotary_emb(seen["hidden"][:1], torch.arange(12)[None])
    with sampler.observe(work):
        for hidden, mask in zip(seen["hidden"].split(1), masks, strict=True):
            work.layer(hidden, position_embeddings=embeddings, attention_mask=mask)
    sampler.solve(work)
    assert torch.equal(sampler.sample.visible, torch.cat(masks)[:, 0])
    assert torch.equal(sampler.sample.visible_in(1), masks[1][0, 0])
