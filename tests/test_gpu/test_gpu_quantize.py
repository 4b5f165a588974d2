"""The page kernels store what the reference stores: the same scales, zero_points and channels, and codes computed from them.

Codes are compared exactly except where a number lies within a thousandth of a code of the border between two codes:
there one rounding of float32 may decide. Records are filled with noise beforehand, so that what is not written shows.
"""

from dataclasses import replace

import pytest
import torch

from kvconvert.errors import NumericError, UsageError
from kvconvert.kernels.device import fallbacks
from kvconvert.kernels.pages import (
    ChannelScales,
    KeyFormat,
    KeyPages,
    ValueFormat,
    empty_keys,
    empty_values,
    key_codes,
    quantize_keys,
    quantize_values,
    value_codes,
)
from kvconvert.kernels.pages.triton import launch as gpu
from kvconvert.kernels.quantizer import GroupRangeError
from kvconvert.kernels.spans import SpanFormat, quantize_span, quantize_span_reference

CPU = torch.device("cpu")


def key_format(bits=2, heads=2, dim=64, group=32, page=128, **more) -> KeyFormat:
    return KeyFormat(heads, dim, page, bits, group, **more)


def value_format(bits=2, heads=2, dim=64, group=32, page=128, **more) -> ValueFormat:
    return ValueFormat(heads, dim, page, bits, group, **more)


def random_tokens(pages: int, f, device, dtype=torch.bfloat16) -> torch.Tensor:
    """[N, H, P, channels] with outlying channels and tokens, and one constant page and head."""
    torch.manual_seed(f.head_dim + f.bits)
    x = torch.randn(pages, f.heads, f.page_size, f.head_dim) * (1 + 3 * torch.rand(f.head_dim))
    x = x * (0.5 + torch.rand(f.page_size, 1)) + torch.rand(f.head_dim)
    x[-1, -1] = 0.375
    return x.to(device, dtype)


def cpu(static: ChannelScales | None) -> ChannelScales | None:
    return static and ChannelScales(*(part.cpu() for part in static))


def poison(buffer: torch.Tensor) -> None:
    if buffer.dtype == torch.int16:
        buffer.random_(-(2**15), 2**15 - 1)
    else:
        buffer.fill_(torch.nan)


def quantized_keys(keys, f, monkeypatch, channels=None, static=None, rotate=False) -> KeyPages:
    def noisy(*arguments):
        pages = empty_keys(*arguments)
        poison(pages.buffer)
        return pages

    monkeypatch.setattr(gpu, "empty_keys", noisy)
    return gpu.quantize_keys(keys, f, channels, static, rotate)


def near_a_border(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
    position = (x.double() - zero_point.double()) / scale.double()
    return ((position - position.floor() - 0.5).abs() < 1e-3) | (scale == 0)


def assert_same_keys(found: KeyPages, keys: torch.Tensor, f: KeyFormat, channels=None, static=None) -> None:
    """Everything but norms exactly; these to one unit in the last place, and the rest by the norms found.

    A norm's reciprocal is the GPU's own to a unit of float32, which one group in thousands rounds to the next fp16:
    even among few groups there may be one.
    """
    keys = keys.cpu()
    expected = quantize_keys(keys, f, channels, static)
    fields = {name: tensor.cpu() for name, tensor in found.tensors()}
    if f.token_norm != "none":
        norm = fields["norm"]
        assert (norm.view(torch.int16) - expected.norm.view(torch.int16)).abs().max() <= 1
        inverse = torch.where(norm > 0, norm.float().reciprocal(), 0.0)
        keys = keys.float() * inverse.unsqueeze(3)
        expected = quantize_keys(keys, replace(f, token_norm="none"), channels, static)
    rounded = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    for name in ("scale", "zero_point", "channels"):
        if getattr(expected, name) is None:
            continue
        if f.token_norm == "none" or name == "channels":
            assert torch.equal(fields[name], getattr(expected, name)), name
        else:
            apart = (fields[name].view(torch.int16).int() - getattr(expected, name).view(torch.int16).int()).abs()
            assert apart.max() <= 1, name
            assert (apart > 0).sum() <= 1 + apart.numel() // 1000, name
            rounded = rounded | (apart > 0)
    found = KeyPages(format=f, **fields)
    different = key_codes(found, f, channels) != key_codes(expected, f, channels)
    if rounded.any():
        different &= ~rounded.repeat_interleave(f.group_size, 3)
    if different.any():
        scale, zero_point = (static or expected)[:2] if static else (expected.scale, expected.zero_point)
        grid = [
            part[None, :, :, None] if static else part.repeat_interleave(f.group_size, 3)
            for part in (scale, zero_point)
        ]
        assert not (different & ~near_a_border(keys.transpose(2, 3), *grid)).any()
        assert different.float().mean() < 1e-3


FORMATS = [
    key_format(2),
    key_format(2, token_norm="joint"),
    key_format(2, dim=48, group=128, token_norm="joint", token_norm_measure="mean_abs", clip_ratio=0.7),
    key_format(4, group=16, token_norm="per_head", clip_ratio=0.85),
    key_format(8, dim=80, group=32),
    key_format(8, group=128),
    key_format(1, group=64, clip_ratio=0.5),
    key_format(1, dim=80, heads=3, group=128, token_norm="per_head", token_norm_measure="mean_abs"),
    key_format(2, group=128, boosted=8),
    key_format(2, dim=96, group=32, boosted=24, token_norm="joint"),
    key_format(1, dim=48, group=64, boosted=5),
    key_format(4, heads=1, page=32, group=16, boosted=3),
    key_format(16),
    key_format(16, dim=80, heads=1),
]


@pytest.mark.parametrize("f", FORMATS, ids=str)
def test_keys_are_stored_as_by_the_reference(device, monkeypatch, f):
    keys = random_tokens(2, f, device)
    found = quantized_keys(keys, f, monkeypatch)
    if f.bits == 16:
        assert torch.equal(found.codes, keys)
    else:
        assert_same_keys(found, keys, f)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", ["none", "joint", "per_head"])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [8, 48, 64, 80, 96, 128, 256])
def test_every_key_format(device, monkeypatch, dim, bits, group, norm, dtype):
    f = key_format(bits, dim=dim, group=group, token_norm=norm, clip_ratio=0.8)
    keys = random_tokens(2, f, device, dtype)
    assert_same_keys(quantized_keys(keys, f, monkeypatch), keys, f)
    f = replace(f, boosted=dim // 4 + 1)
    if bits < 8:
        assert_same_keys(quantized_keys(keys, f, monkeypatch), keys, f)


@pytest.mark.parametrize("bits", [1, 2])
def test_calibrated_channels_are_boosted(device, monkeypatch, bits):
    f = key_format(bits, group=128, boosted=3, boost_select="calibrated")
    channels = torch.tensor([[0, 31, 63], [5, 6, 40]])
    keys = random_tokens(2, f, device, torch.float16)
    found = quantized_keys(keys, f, monkeypatch, channels.to(device))
    assert_same_keys(found, keys, f, channels)


def test_ties_boost_the_lower_channel(device, monkeypatch):
    f = key_format(2, heads=1, group=128, boosted=4)
    keys = torch.ones(1, 1, 128, 64, device=device)
    keys[..., 9] = 2
    assert quantized_keys(keys, f, monkeypatch).channels.flatten().tolist() == [0, 1, 2, 9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tokens_are_rotated_on_the_way(device, monkeypatch, dtype):
    """As if rotated and rounded before: the same but for the last place of what is rounded."""
    from kvconvert.kernels.rotate.triton.launch import rotate

    f = key_format(2, token_norm="joint", group=128, boosted=8, dim=48)
    keys = random_tokens(1, f, device, dtype)
    found = quantized_keys(keys, f, monkeypatch, rotate=True)
    plain = quantized_keys(rotate(keys), f, monkeypatch)
    assert torch.equal(found.channels, plain.channels)
    torch.testing.assert_close(found.scale, plain.scale, rtol=2e-3, atol=1e-4)
    assert (key_codes(found, f) != key_codes(plain, f)).float().mean() < 1e-3


VALUE_FORMATS = [
    value_format(2),
    value_format(2, dim=128, group=128, clip_ratio=0.7),
    value_format(2, dim=80, group=16),
    value_format(1, dim=96, group=48),
    value_format(1, group=64, clip_ratio=0.5),
    value_format(4, group=16),
    value_format(8, dim=48, heads=3, group=16),
    value_format(8, group=16, page=32),
    value_format(16, dim=80),
]


def assert_same_values(found, values, f, static=None) -> None:
    expected = quantize_values(values.cpu(), f, static)
    codes, wanted = value_codes(replace(found, codes=found.codes.cpu()), f), value_codes(expected, f)
    if not f.static:
        assert torch.equal(found.scale.cpu(), expected.scale)
        assert torch.equal(found.zero_point.cpu(), expected.zero_point)
        grid = [part.repeat_interleave(f.group_size, 3) for part in (expected.scale, expected.zero_point)]
    else:
        grid = [part[None, :, None] for part in static]
    assert not ((codes != wanted) & ~near_a_border(values.cpu(), *grid)).any()


@pytest.mark.parametrize("f", VALUE_FORMATS, ids=str)
def test_values_are_stored_as_by_the_reference(device, monkeypatch, f):
    values = random_tokens(2, f, device)
    found = noisy_values(values, f, monkeypatch)
    if f.bits == 16:
        assert torch.equal(found.codes, values)
    else:
        assert_same_values(found, values, f)


def noisy_values(values, f, monkeypatch, static=None):
    def noisy(*arguments):
        pages = empty_values(*arguments)
        poison(pages.buffer)
        return pages

    monkeypatch.setattr(gpu, "empty_values", noisy)
    return gpu.quantize_values(values, f, static)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [8, 48, 64, 80, 96, 128, 256])
def test_every_value_format(device, monkeypatch, dim, bits, dtype):
    for group in {g for g in (8, 16, 32, 64, 128, dim // 2, dim) if dim % g == 0}:
        f = value_format(bits, dim=dim, group=group, clip_ratio=0.8)
        values = random_tokens(2, f, device, dtype)
        assert_same_values(noisy_values(values, f, monkeypatch), values, f)


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_static_pages(device, monkeypatch, bits):
    f, g = key_format(bits, group=128, static=True), value_format(bits, group=64, static=True)
    scale, zero_point = (
        torch.rand(2, 64, device=device).half() * 4 / 2**bits,
        -2 * torch.rand(2, 64, device=device).half(),
    )
    scale[0, 3] = 0
    static = ChannelScales(scale, zero_point)
    x = torch.randn(2, 2, 128, 64, device=device)
    assert_same_keys(quantized_keys(x, f, monkeypatch, static=static), x, f, static=cpu(static))
    assert_same_values(noisy_values(x, g, monkeypatch, static), x, g, cpu(static))


def test_pages_of_sequences_with_their_own_buffers(device):
    """One launch: pages out of buffers of different capacity into records in a pool, all in the table's order."""
    f, g = key_format(2, token_norm="joint"), value_format(2)
    buffers = [torch.randn(2, n, 64, device=device, dtype=torch.bfloat16) for n in (300, 145, 128)]
    places = [(0, 130), (1, 17), (0, 2), (2, 0)]
    tokens = [buffers[b][:, start : start + 128] for b, start in places]
    slots = [4, 0, 2, 1]
    for layout, empty, launch in (
        (f, empty_keys, gpu.quantize_key_pages),
        (g, empty_values, gpu.quantize_value_pages),
    ):
        pool = empty(5, layout, torch.bfloat16, device).buffer
        poison(pool)
        before = pool.clone()
        flag = gpu.new_flag(pool.device)
        table = gpu.page_table(tokens, buffers[2], [pool[slot] for slot in slots], pool)
        launch(buffers[2], 64, table, layout, pool, flag)
        gpu.raise_if_flagged(flag, 2)
        for slot, page in zip(slots, tokens, strict=True):
            if layout is f:
                assert_same_keys(gpu_pages(pool[slot : slot + 1], f), page[None], f)
            else:
                assert_same_values(gpu_pages(pool[slot : slot + 1], g), page[None], g)
        assert torch.equal(pool[3], before[3])


def gpu_pages(records, f):
    from kvconvert.kernels.pages import pages_of

    return pages_of(records, f)


@pytest.mark.parametrize(("tokens", "bits"), [(1, (2, 2)), (63, (1, 2)), (129, (2, 1)), (300, (8, 4))])
def test_spans_are_those_of_the_reference(device, tokens, bits):
    torch.manual_seed(tokens)
    f = SpanFormat(*bits, key_clip_ratio=0.6, value_clip_ratio=1.0)
    keys = torch.randn(2, tokens + 3, 64, device=device, dtype=torch.bfloat16)[:, 1 : tokens + 1]
    values = torch.randn(2, tokens, 80, device=device, dtype=torch.bfloat16)
    found, expected = quantize_span(keys, values, f), quantize_span_reference(keys.cpu(), values.cpu(), f)
    for name in ("key_scale", "key_zero_point", "value_scale", "value_zero_point"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    assert found.tokens == tokens
    for name in ("key_codes", "value_codes"):
        different = getattr(found, name).cpu() != getattr(expected, name)
        assert different.float().mean() < 1e-3, name


@pytest.mark.parametrize(
    ("poisoned", "norm"),
    [(torch.nan, "none"), (torch.inf, "none"), (3e38, "none"), (torch.nan, "joint"), (3e38, "per_head")],
)
def test_bad_keys_are_named(device, poisoned, norm):
    f = key_format(2, token_norm=norm)
    keys = torch.randn(3, 2, 128, 64, device=device)
    keys[1, 1, 7, 9] = keys[2, 0, 100, 1] = poisoned
    with pytest.raises(NumericError) as raised:
        gpu.quantize_keys(keys, f)
    if norm == "none":
        assert isinstance(raised.value, GroupRangeError)
        assert raised.value.index == (1, 1)


@pytest.mark.parametrize("static", [False, True])
def test_bad_values_are_named_once(device, static):
    f = value_format(2, group=64, static=static)
    scales = ChannelScales(*torch.ones(2, 2, 64, device=device, dtype=torch.float16)) if static else None
    values = torch.randn(3, 2, 128, 64, device=device)
    values[1, 1, 127, 63] = torch.nan
    flag = gpu.new_flag(values.device)
    records = empty_values(3, f, values.dtype, values.device).buffer
    table = gpu.page_table(list(values), values, list(records), records)
    gpu.quantize_value_pages(values, 64, table, f, records, flag, scales)
    with pytest.raises(GroupRangeError) as raised:
        gpu.raise_if_flagged(flag, 2)
    assert raised.value.index == (1, 1)
    gpu.raise_if_flagged(flag, 2)


def test_spans_the_kernels_cannot_take_are_quantized_all_the_same(device):
    x = torch.randn(2, 10, 16, device=device, dtype=torch.float64)
    before = sum(fallbacks.values())
    found, expected = quantize_span(x, x, SpanFormat(2, 2)), quantize_span_reference(x.cpu(), x.cpu(), SpanFormat(2, 2))
    assert torch.equal(found.key_codes.cpu(), expected.key_codes)
    assert sum(fallbacks.values()) == before + 1


def test_bad_spans_are_named(device):
    x = torch.randn(3, 90, 64, device=device)
    bad = x.clone()
    bad[2, 70, 5] = torch.inf
    for keys, values in ((bad, x), (x, bad)):
        with pytest.raises(GroupRangeError) as raised:
            gpu.quantize_span(keys, values, SpanFormat(2, 2))
        assert raised.value.index == (2,)


def test_why_not_says_what_the_kernels_do_not_take(device):
    x = torch.zeros(1, 2, 128, 64, device=device)
    assert gpu.why_not(x, key_format()) is None
    assert "float64" in gpu.why_not(x.double(), key_format())
    assert "head sizes" in gpu.why_not(x[..., :20], key_format())
    assert "pages" in gpu.why_not(x, key_format(page=96))
    assert "16 bytes" in gpu.why_not(x[..., 2:58], key_format())
    with pytest.raises(UsageError, match="16 bytes"):
        gpu.page_table([x[0, :, :, 2:]], x, [x], x)
