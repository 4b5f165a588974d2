"""The span kernels store what the reference stores: equal scales and offsets, and codes computed from them."""

import pytest
import torch

from kvconvert.kernels.device import fallbacks
from kvconvert.kernels.quantizer import GroupRangeError
from kvconvert.kernels.spans import SpanFormat, quantize_span, quantize_span_reference, unsupported


@pytest.mark.quick("63", "129")
@pytest.mark.parametrize(
    ("tokens", "bits"),
    [
        (1, (2, 2)),
        (63, (1, 2)),
        (129, (2, 1)),
        (40, (3, 3)),
        *(pytest.param(n, bits, marks=pytest.mark.full) for n, bits in ((300, (8, 4)), (257, (3, 1)))),
    ],
)
def test_spans_are_those_of_the_reference(device, tokens, bits):
    torch.manual_seed(tokens)
    f = SpanFormat(*bits, key_clip_ratio=0.6, value_clip_ratio=1.0)
    heads = 2 if tokens < 100 else 1
    keys = torch.randn(heads, tokens + 3, 32, device=device, dtype=torch.bfloat16)[:, 1 : tokens + 1]
    values = torch.randn(heads, tokens, 48, device=device, dtype=torch.bfloat16)
    found, expected = quantize_span(keys, values, f), quantize_span_reference(keys.cpu(), values.cpu(), f)
    assert found.tokens == tokens
    for mine, wanted in ((found.keys, expected.keys), (found.values, expected.values)):
        assert torch.equal(mine.scale.cpu(), wanted.scale)
        assert torch.equal(mine.offset.cpu(), wanted.offset)
        assert (mine.codes.cpu() != wanted.codes).float().mean() < 1e-3


def test_spans_the_kernels_cannot_take_are_quantized_all_the_same(device):
    x = torch.randn(2, 10, 16, device=device, dtype=torch.float64)
    assert "float64" in unsupported(x, x)
    before = sum(fallbacks.values())
    found, expected = quantize_span(x, x, SpanFormat(2, 2)), quantize_span_reference(x.cpu(), x.cpu(), SpanFormat(2, 2))
    assert torch.equal(found.keys.codes.cpu(), expected.keys.codes)
    assert sum(fallbacks.values()) == before + 1


def test_bad_spans_are_named(device):
    x = torch.randn(2, 20, 16, device=device)
    bad = x.clone()
    bad[1, 17, 5] = torch.inf
    for keys, values in ((bad, x), (x, bad)):
        with pytest.raises(GroupRangeError) as raised:
            quantize_span(keys, values, SpanFormat(2, 2))
        assert raised.value.index == (1,)
