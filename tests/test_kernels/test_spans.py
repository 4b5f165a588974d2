"""Spans: per-channel quantization of a whole prompt, post-scaled products, and shifted scores."""

import pytest
import torch

from kvconvert.errors import NumericError
from kvconvert.kernels.spans import (
    SpanFormat,
    clamped_rows,
    quantize_span,
    shift_extremes,
    span_keys,
    span_scores,
    span_values,
    weighted_span_values,
)


def by_hand(x: torch.Tensor, bits: int, shrink: float) -> torch.Tensor:
    """Channel by channel, in float64: [H, n, D]."""
    out = torch.empty_like(x, dtype=torch.float64)
    for head in range(x.shape[0]):
        for channel in range(x.shape[2]):
            values = x[head, :, channel].double()
            middle = (values.max() + values.min()) / 2
            low = middle + (values.min() - middle) * shrink
            scale = float(((values.max() - values.min()) * shrink / (2**bits - 1)).half())
            low = float(low.half())
            codes = torch.zeros_like(values) if scale == 0 else ((values - low) / scale).round().clamp(0, 2**bits - 1)
            out[head, :, channel] = codes * scale + low
    return out


@pytest.mark.each_value
@pytest.mark.parametrize("tokens", [1, 2, 17, 127, 128, 129, 300])
@pytest.mark.parametrize(("key_bits", "value_bits"), [(1, 2), (2, 1), (3, 3), (4, 8), (8, 4)])
def test_spans_come_back_as_the_formula_says(tokens, key_bits, value_bits):
    torch.manual_seed(tokens)
    keys, values = torch.randn(2, tokens, 48), torch.randn(2, tokens, 80)
    format = SpanFormat(key_bits, value_bits, 0.9, 0.7)
    span = quantize_span(keys, values, format)
    # float32 against float64: a value on the edge between two codes may fall either way
    assert ((span_keys(span, format) - by_hand(keys, key_bits, 0.9)).abs() < 2e-3).float().mean() > 0.995
    assert ((span_values(span, format) - by_hand(values, value_bits, 0.7)).abs() < 2e-3).float().mean() > 0.995


@pytest.mark.parametrize("tokens", [1, 37, 256, 300, 513])
def test_post_scaled_products_equal_products_of_dequantized_tensors(tokens):
    torch.manual_seed(0)
    format = SpanFormat(2, 1)
    span = quantize_span(torch.randn(3, tokens, 64), torch.randn(3, tokens, 32), format)
    # Weights with a sum of about 1/2, like attention's: sums of hundreds are rounded by more than the tolerance.
    queries, weights = torch.randn(3, 5, 64), torch.rand(3, 5, tokens) / tokens
    expected = queries.double() @ span_keys(span, format).double().transpose(1, 2)
    torch.testing.assert_close(span_scores(queries, span, format).double(), expected, rtol=1e-4, atol=1e-4)
    expected = weights.double() @ span_values(span, format).double()
    got = weighted_span_values(weights, span, format, tile_blocks=2)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=2e-6)


def test_a_constant_channel_is_exact_and_one_token_is_all_constant():
    keys = torch.randn(1, 40, 16)
    keys[..., 5] = 0.75
    format = SpanFormat(1, 1)
    assert torch.equal(span_keys(quantize_span(keys, keys, format), format)[..., 5], keys[..., 5])
    one = keys[:, :1]
    assert torch.equal(span_keys(quantize_span(one, one, format), format), one.half().float())


def test_what_float16_cannot_hold_is_an_error():
    keys = torch.randn(1, 4, 16)
    keys[0, 2, 3] = float("nan")
    with pytest.raises(NumericError):
        quantize_span(keys, keys, SpanFormat(2, 2))


def shifted(scores, tau1, tau2):
    return shift_extremes(torch.tensor(scores, dtype=torch.float64), tau1, tau2).tolist()


def test_extremes_move_by_tau_and_the_rest_in_proportion():
    assert shifted([0.0, 4.0, 10.0], 1.0, 3.0) == pytest.approx([-1.0, 2.2, 7.0])
    assert shifted([-2.0, 0.0, 2.0], 0.0, 1.0) == pytest.approx([-2.0, -0.5, 1.0])
    assert shifted([5.0, 1.0], 0.0, 0.0) == pytest.approx([5.0, 1.0])
    # a smaller shift above than below spreads the scores
    assert shifted([0.0, 1.0, 2.0], 1.0, 0.0) == pytest.approx([-1.0, 0.5, 2.0])


def test_equal_scores_move_down_by_tau1():
    assert shifted([3.0, 3.0, 3.0], 1.0, 2.0) == [2.0, 2.0, 2.0]
    assert shifted([3.0], 0.5, 2.0) == [2.5]


@pytest.mark.parametrize("tau2", [2.0, 3.5])
def test_a_slope_that_would_turn_negative_stops_at_zero_and_is_counted(tau2):
    scores = torch.tensor([[0.0, 1.0, 2.0], [0.0, 2.0, 9.0], [1.0, 1.0, 1.0]])
    got = shift_extremes(scores, 0.0, tau2)
    assert got[0].tolist() == [0.0, 0.0, 0.0]
    assert got[1].tolist() == sorted(got[1].tolist())
    assert got[1, 2] == pytest.approx(9.0 - tau2)
    assert clamped_rows(scores, 0.0, tau2).tolist() == [True, False, False]
