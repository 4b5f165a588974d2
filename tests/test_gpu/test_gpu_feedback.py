"""The kernel that rounds keys with error feedback stores the codes of the reference, and touches nothing else.

A sum of another order may decide between two codes, and then later ones of that token differ: of one token in fifty.
Records hold noise beforehand.
"""

import pytest
import torch
from page_writes import store_pages

from kvconvert.calibration.keys import feedback_matrices
from kvconvert.kernels.pages import ChannelScales, PageFormat, PageTensors, SideTensors, new_pages, quantize_pages
from kvconvert.kernels.pages.reference import page_codes
from kvconvert.kernels.spans import SpanFormat, quantize_span, quantize_span_reference, span_keys


def key_format(bits=2, dim=16, page=32, group=16, **more) -> PageFormat:
    return PageFormat.keys(2, dim, page, bits, group, **more)


def feedback(dim: int, device, seed: int = 0) -> torch.Tensor:
    few = torch.randn(2, dim, max(1, dim // 4), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return feedback_matrices(few @ few.transpose(1, 2))[0].half().to(device)


def random_keys(pages: int, f: PageFormat, device, dtype=torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(f.head_dim)
    x = torch.randn(pages, f.heads, f.page_size, f.head_dim) * (1 + torch.rand(f.head_dim))
    return x.to(device, dtype)


def noise(count: int, f: PageFormat, device) -> PageTensors:
    pages = new_pages(count, f, torch.bfloat16, device)
    pages.buffer.random_(-(2**15), 2**15 - 1)
    return pages


def on_cpu(pages: PageTensors) -> PageTensors:
    return PageTensors(format=pages.format, **{name: tensor.cpu() for name, tensor in pages.tensors()})


def assert_same(found: PageTensors, expected: PageTensors, f: PageFormat, fixed=None) -> None:
    found = on_cpu(found)
    for name, tensor in expected.tensors():
        if name not in ("codes", "high") and f.token_norm == "none":
            assert torch.equal(getattr(found, name), tensor), name
    different = (page_codes(found, fixed) != page_codes(expected, fixed)).any(2)
    assert different.float().mean() <= 0.02


FORMATS = {
    "joint norm": key_format(token_norm="joint", clip_ratio=0.85),
    "1 bit, fixed channels": key_format(1, dim=16, boosted=3, fixed_channels=True),
    "3 bits": key_format(3, dim=48),
    "scales of 8 bits": key_format(2, dim=16, clip_ratio=0.85, scale_bits=8),
    "two programs of a page": key_format(dim=16, page=64, group=64),
    "norms of heads": key_format(4, dim=40, token_norm="per_head"),
    "8 bits": key_format(8, dim=16),
    "boosted": key_format(dim=48, boosted=5),
    "1 bit, boosted": key_format(1, dim=40, page=128, group=128, boosted=7),
    "4 bits, boosted": key_format(4, dim=16, boosted=2),
    "static": key_format(4, dim=24, page=128, group=128, static=True),
    "3 bits, joint norm": key_format(3, dim=24, token_norm="joint"),
    "3 bits, norms of heads": key_format(3, dim=40, page=128, group=128, token_norm="per_head"),
    "3 bits, static": key_format(3, dim=16, page=128, group=128, static=True),
    "3 bits, 64 channels": key_format(3, dim=64),
    "3 bits, 96 channels": key_format(3, dim=96),
    "3 bits, 128 channels": key_format(3, dim=128, page=16),
    "small pages": key_format(dim=16, page=16),
    "128 channels": key_format(dim=128, group=32),
    "256 channels": key_format(dim=256, group=32),
}
DEFAULT = 4
FULL = list(FORMATS)[DEFAULT:]


@pytest.mark.parametrize("name", [*list(FORMATS)[:DEFAULT], *(pytest.param(n, marks=pytest.mark.full) for n in FULL)])
def test_pages_hold_the_codes_of_the_reference(device, name):
    f = FORMATS[name]
    keys, matrices = random_keys(1, f, device), feedback(f.head_dim, device)
    fixed = torch.tensor([[0, 3, 11], [2, 5, 15]]) if f.fixed_channels else None
    static = None
    if f.static:
        static = ChannelScales(*(torch.full((2, f.head_dim), v, device=device).half() for v in (0.4, -3.0)))
    pages = noise(1, f, device)
    store_pages(list(keys), [pages], None if fixed is None else fixed.to(device), static, [matrices])
    on_host = None if static is None else ChannelScales(*(part.cpu() for part in static))
    assert_same(pages, quantize_pages(keys.cpu(), f, SideTensors(fixed, on_host, matrices.cpu())), f, fixed)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_dtype_of_keys(device, dtype):
    f = key_format()
    keys, pages = random_keys(2, f, device, dtype), noise(2, f, device)
    store_pages(list(keys), [pages], feedback=[feedback(16, device)])
    assert_same(pages, quantize_pages(keys.cpu(), f, SideTensors(feedback=feedback(16, "cpu"))), f)


def test_pages_of_several_layers_have_matrices_of_their_own(device):
    f = key_format()
    keys, pages = random_keys(2, f, device), noise(2, f, device)
    matrices = [feedback(16, device, seed) for seed in (1, 2)]
    store_pages(list(keys), [pages], feedback=matrices)
    for i, matrix in enumerate(matrices):
        expected = quantize_pages(keys[i : i + 1].cpu(), f, SideTensors(feedback=matrix.cpu()))
        assert_same(pages.select(slice(i, i + 1)), expected, f)


@pytest.mark.full
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_spans_hold_the_codes_of_the_reference(device, bits):
    f = SpanFormat(bits, bits)
    keys, values = (torch.randn(2, 131, 16).bfloat16().to(device) for _ in range(2))
    found = quantize_span(keys, values, f, feedback(16, device))
    expected = quantize_span_reference(keys.cpu(), values.cpu(), f, feedback(16, "cpu"))
    assert torch.equal(found.values.codes.cpu(), expected.values.codes)
    apart = (found.keys.codes.cpu() != expected.keys.codes).float().mean()
    assert apart <= 0.02  # padding beyond the last token included
    assert span_keys(expected, f).shape == (2, 131, 16)
