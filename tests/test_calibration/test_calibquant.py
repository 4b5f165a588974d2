"""The tau search against float64 loops over single queries, and the choice of one pair for all layers."""

from dataclasses import replace

import pytest
import torch
from sample_layers import layer_work, random_sample, run_passes

from kvconvert.calibration.attention_sample import AttentionSampler, causal
from kvconvert.calibration.calibquant import SPAN_CLIP_RATIO_GRID, CalibQuantPass, choose_taus, search_taus, span_of
from kvconvert.kernels.quantizer import dequantize, quantize
from kvconvert.kernels.spans import SpanFormat, shift_extremes
from kvconvert.methods.calibquant import CalibQuant

GRID = (0.0, 1.0, 2.0, 3.0)


def by_single_queries(sample, bits, tau1, tau2, key_clip_ratio, value_clip_ratio, sinks, span_tokens=0):
    """(mean squared error of the weights, relative error of the output), query by query in float64."""
    span = span_of(sample.num_tokens, sinks)
    n = span.stop - span.start
    error = output_error = size = 0.0
    count = 0
    for s in range(len(sample.queries)):
        for i in range(sample.queries.shape[1]):
            h = i * sample.keys.shape[1] // sample.queries.shape[1]
            keys, values = sample.keys[s, h].double(), sample.values[s, h].double()
            read_k, read_v = keys.clone(), values.clone()
            for start in range(span.start, span.stop, span_tokens or n):
                part = slice(start, min(start + (span_tokens or n), span.stop))
                m = part.stop - part.start
                read_k[part] = dequantize(*quantize(keys[part], bits, m, 0, key_clip_ratio), m, 0).double()
                read_v[part] = dequantize(*quantize(values[part], bits, m, 0, value_clip_ratio), m, 0).double()
            for t in range(span.stop, sample.num_tokens):
                q = sample.queries[s, i, t].double() * sample.scaling
                exact = (keys[: t + 1] @ q).softmax(0)
                scores = read_k[: t + 1] @ q
                x = scores[span]
                gamma, delta = x.min(), x.max()
                if delta == gamma:
                    scores[span] = x - tau1
                else:
                    slope = max(0.0, float((delta - gamma + tau1 - tau2) / (delta - gamma)))
                    scores[span] = slope * (x - gamma) + gamma - tau1
                weights = scores.softmax(0)
                error += float((weights - exact).square().sum())
                count += t + 1
                output_error += float((weights @ read_v[: t + 1] - exact @ values[: t + 1]).square().sum())
                size += float((exact @ values[: t + 1]).square().sum())
    return error / count, output_error / size


def peaked_sample(tokens=24, dim=16):
    """Scores wide enough for tau to matter."""
    sample = random_sample(sequences=2, tokens=tokens, dim=dim)
    return replace(sample, scaling=1.0)


@pytest.mark.each_value
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("bits", [1, 2])
def test_the_table_is_that_of_single_queries(bits, sinks):
    sample = peaked_sample()
    tables = search_taus(sample, SpanFormat(bits, bits), GRID, GRID[:2], (0.6,), (0.8,), sinks)
    assert tables.error.shape == (4, 2)
    for i, tau1 in enumerate(GRID):
        for j, tau2 in enumerate(GRID[:2]):
            error, output_error = by_single_queries(sample, bits, tau1, tau2, 0.6, 0.8, sinks)
            assert float(tables.error[i, j]) == pytest.approx(error, rel=1e-3)
            assert float(tables.output_error[i, j]) == pytest.approx(output_error, rel=1e-3)


def test_shorter_spans_are_searched_as_they_are_stored():
    sample = peaked_sample()
    tables = search_taus(sample, SpanFormat(2, 2, span_tokens=5), (0.0,), (1.0,), (0.6,), (0.8,), 3)
    error, output_error = by_single_queries(sample, 2, 0.0, 1.0, 0.6, 0.8, 3, span_tokens=5)
    assert float(tables.error) == pytest.approx(error, rel=1e-3)
    assert float(tables.output_error) == pytest.approx(output_error, rel=1e-3)


def test_every_pair_gets_its_best_key_range_and_values_theirs():
    sample = peaked_sample(tokens=300)
    ranges = (1.0, 0.6, 0.3)
    tables = search_taus(sample, SpanFormat(1, 1), GRID, GRID, ranges, ranges)
    for r, key_clip_ratio in enumerate(ranges):
        alone = search_taus(sample, SpanFormat(1, 1), GRID, GRID, (key_clip_ratio,), (tables.value_clip_ratio,))
        torch.testing.assert_close(tables.clip_ratio_error[r], alone.error)
        chosen = tables.key_clip_ratio == key_clip_ratio
        torch.testing.assert_close(tables.output_error[chosen], alone.output_error[chosen])
    assert torch.equal(tables.error, tables.clip_ratio_error.amin(0))
    outputs = {
        r: search_taus(sample, SpanFormat(8, 1), (0.0,), (0.0,), (1.0,), (r,)).output_error.item() for r in ranges
    }
    assert tables.value_clip_ratio == min(outputs, key=outputs.get)


def test_tau_lowers_the_error_of_the_weights_at_one_bit():
    """The paper's figure 2: one-bit keys overstate extreme scores, and lowering the top mends it."""
    sample = random_sample(tokens=256)  # scores divided by sqrt(d), as models have them
    tables = search_taus(sample, SpanFormat(1, 1), GRID, GRID, (1.0,), (1.0,))
    row, column = choose_taus([tables.error], [tables.output_error])
    assert GRID[column] > 0
    assert float(tables.error[row, column]) < 0.5 * float(tables.error[0, 0])


@pytest.mark.parametrize(("tokens", "sinks"), [(2, 0), (2, 5), (3, 1)])
def test_a_span_of_one_token_and_constant_channels_are_exact_to_rounding(tokens, sinks):
    sample = peaked_sample(tokens=tokens)
    span = span_of(tokens, sinks)
    assert span.stop - span.start == 1
    tables = search_taus(sample, SpanFormat(1, 1), (0.0,), (0.0,), (1.0,), (1.0,), sinks)
    assert float(tables.error) < 1e-6
    constant = replace(sample, keys=torch.ones_like(sample.keys), values=torch.ones_like(sample.values))
    tables = search_taus(constant, SpanFormat(1, 1), GRID, GRID, (1.0, 0.5), (1.0, 0.5), sinks)
    assert float(tables.error[0, 0]) == 0
    assert float(tables.key_clip_ratio[0, 0]) == tables.value_clip_ratio == 1.0


def test_a_clamped_slope_is_measured_like_any_other():
    """delta - gamma < tau2 - tau1: all span scores become equal."""
    sample = replace(peaked_sample(), scaling=1e-3)
    tables = search_taus(sample, SpanFormat(2, 2), (0.0,), (3.0,), (1.0,), (1.0,))
    error, output_error = by_single_queries(sample, 2, 0.0, 3.0, 1.0, 1.0, 0)
    assert float(tables.error) == pytest.approx(error, rel=1e-3)
    assert float(tables.output_error) == pytest.approx(output_error, rel=1e-3)


def test_hidden_tokens_count_neither_in_weights_nor_in_the_mean():
    sample = peaked_sample(tokens=16)
    window = causal(16) & (torch.arange(16)[:, None] - torch.arange(16)[None] < 4)
    far = search_taus(replace(sample, visible=window), SpanFormat(1, 1), GRID, GRID, (1.0,), (1.0,))
    assert far.error.isfinite().all()
    # Queries that see nothing of the span are exact whatever tau is.
    alone = causal(16) & (torch.arange(16)[None] >= 8)
    nothing = search_taus(replace(sample, visible=alone), SpanFormat(1, 1), GRID, GRID, (1.0,), (1.0,))
    assert nothing.error.abs().max() == 0


def test_one_pair_serves_all_layers_and_ties_go_to_the_output_then_to_smaller_taus():
    first = torch.tensor([[5.0, 1.0], [3.0, 9.0]])
    second = torch.tensor([[5.0, 9.0], [3.0, 1.0]])
    zero = torch.zeros(2, 2)
    assert choose_taus([first], [zero]) == (0, 1)
    assert choose_taus([first, second], [zero, zero]) == (1, 0)
    tied = torch.tensor([[2.0, 1.0], [1.0, 1.0]])
    assert choose_taus([tied], [torch.tensor([[0.0, 3.0], [2.0, 2.0]])]) == (1, 0)
    assert choose_taus([tied], [zero]) == (0, 1)


def span_work(length, bits=2):
    work, _ = layer_work(samples=2, length=length)
    work.cache = replace(work.cache, span=SpanFormat(bits, bits, 0.9, 0.8))
    return work


def test_the_pass_keeps_the_whole_table_and_leaves_tau_and_key_range_open():
    work = span_work(24)
    sampler = AttentionSampler(2)
    result = run_passes([sampler, CalibQuantPass(sampler, GRID)], work)
    tables = search_taus(sampler.sample, work.cache.span, GRID, GRID, SPAN_CLIP_RATIO_GRID, SPAN_CLIP_RATIO_GRID)
    assert result.scheme == {"value_clip_ratio": tables.value_clip_ratio}
    assert result.plan["tau_grid"].tolist() == list(GRID)
    for name in ("error", "output_error", "key_clip_ratio"):
        torch.testing.assert_close(result.plan[f"tau_{name}"], getattr(tables, name).float())
    torch.testing.assert_close(result.plan["tau_clip_ratio_error"], tables.clip_ratio_error.float())
    assert result.plan.keys() == {*CalibQuant.plan_tensors}


def test_with_tau_given_only_ranges_are_searched_and_the_other_way_round():
    work = span_work(24)
    sampler = AttentionSampler(2)
    given = run_passes([sampler, CalibQuantPass(sampler, None, (0.0, 2.0))], work)
    tables = search_taus(sampler.sample, work.cache.span, (0.0,), (2.0,), SPAN_CLIP_RATIO_GRID, SPAN_CLIP_RATIO_GRID)
    assert given.scheme == {
        "key_clip_ratio": float(tables.key_clip_ratio[0, 0]),
        "value_clip_ratio": tables.value_clip_ratio,
    }
    assert "tau_grid" not in given.plan
    sampler = AttentionSampler(2)
    fixed = run_passes([sampler, CalibQuantPass(sampler, GRID, (0.0, 0.0), False, False)], span_work(24))
    assert fixed.scheme == {}
    assert torch.allclose(fixed.plan["tau_key_clip_ratio"], torch.tensor(0.9))
    assert "tau_clip_ratio_grid" not in fixed.plan


def test_one_token_sequences_are_said_to_be_too_short():
    sampler = AttentionSampler(2)
    result = run_passes([sampler, CalibQuantPass(sampler, GRID)], span_work(1))
    assert "one token" in result.notes[0]
    assert result.plan == result.scheme == {}


# --- visual tokens only


def test_a_visual_span_is_searched_on_its_own_tokens_and_decoded_by_text():
    sample = peaked_sample(tokens=40)
    visual = torch.zeros(2, 40, dtype=torch.bool)
    visual[0, [3, 4, 5, 9, 10, 17, 22]] = visual[1, [0, 1, 12, 13, 14, 15, 39]] = True
    arguments = (SpanFormat(1, 1), GRID, GRID, (1.0, 0.6), (1.0, 0.6))
    found = search_taus(replace(sample, visual=visual), *arguments)
    error = torch.zeros(4, 4, dtype=torch.float64)
    count = 0
    for s in range(2):
        span = visual[s, :20].nonzero().flatten()
        for i in range(4):
            keys = sample.keys[s, i // 2].double()
            read = keys.clone()
            read[span] = dequantize(*quantize(keys[span], 1, len(span), 0, 0.6), len(span), 0).double()
            for t in (~visual[s, 20:]).nonzero().flatten() + 20:
                q = sample.queries[s, i, t].double() * sample.scaling
                exact = (keys[: t + 1] @ q).softmax(0)
                count += int(t) + 1
                for a, tau1 in enumerate(GRID):
                    for b, tau2 in enumerate(GRID):
                        scores = read[: t + 1] @ q
                        scores[span] = shift_extremes(scores[span], tau1, tau2)
                        error[a, b] += float((scores.softmax(0) - exact).square().sum())
    torch.testing.assert_close(found.clip_ratio_error[1], error / count, rtol=1e-3, atol=0)


def visual_work(visual, modality="visual"):
    work = span_work(24)
    work.cache = replace(work.cache, span=replace(work.cache.span, modality=modality))
    work.visual = visual
    return work


def test_the_pass_searches_visual_tokens_where_the_scheme_says_so():
    visual = torch.zeros(2, 24, dtype=torch.bool)
    visual[1, 2:9] = True
    sampler = AttentionSampler(2)
    result = run_passes([sampler, CalibQuantPass(sampler, GRID)], visual_work(visual))
    assert sampler.sample.visual.tolist() == visual[1:].tolist()  # sequences without images say nothing
    everything = AttentionSampler(2)
    all_tokens = run_passes([everything, CalibQuantPass(everything, GRID)], visual_work(visual, "all"))
    assert result.plan.keys() == all_tokens.plan.keys() == {*CalibQuant.plan_tensors}
    assert not torch.equal(result.plan["tau_error"], all_tokens.plan["tau_error"])
    plain = AttentionSampler(2)
    assert torch.equal(
        all_tokens.plan["tau_error"], run_passes([plain, CalibQuantPass(plain, GRID)], span_work(24)).plan["tau_error"]
    )


@pytest.mark.parametrize(
    ("modality", "columns"), [("visual", None), ("visual", []), ("visual", [23]), ("audio", None), ("audio", [2, 3])]
)
def test_without_visual_tokens_nothing_is_searched_and_the_record_says_so(modality, columns):
    visual = None
    if columns is not None:
        visual = torch.zeros(2, 24, dtype=torch.bool)
        visual[:, columns] = True
    sampler = AttentionSampler(2)
    result = run_passes([sampler, CalibQuantPass(sampler, GRID)], visual_work(visual, modality))
    assert result.plan == result.scheme == {}
    assert f"no {modality} tokens" in result.notes[0]
    assert "the scheme's own" in result.notes[0]
