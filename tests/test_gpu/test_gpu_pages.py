"""The page kernels store what the reference stores: the same scales, offsets and channels, and codes from them.

Codes are compared exactly except where a number lies within a thousandth of a code of the border between two codes:
there one rounding of float32 may decide. Records are filled with noise beforehand, so that what is not written shows.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from page_writes import page_writes, store_pages

from kvconvert.errors import NumericError
from kvconvert.kernels.pages import (
    ChannelScales,
    PageFormat,
    PageTensors,
    SideTensors,
    new_flag,
    new_pages,
    quantize_at,
    quantize_pages,
    raise_if_flagged,
    unsupported,
)
from kvconvert.kernels.pages.reference import page_codes, shown_tokens
from kvconvert.kernels.quantizer import GroupRangeError


def key_format(bits=2, heads=2, dim=64, group=32, page=128, **more) -> PageFormat:
    return PageFormat.keys(heads, dim, page, bits, group, **more)


def value_format(bits=2, heads=2, dim=64, group=32, page=128, **more) -> PageFormat:
    return PageFormat.values(heads, dim, page, bits, group, **more)


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


def quantized(tokens: torch.Tensor, f, channels=None, static=None, **more) -> PageTensors:
    """Pages of tokens [N, H, P, channels], in records that held noise."""
    pages = new_pages(len(tokens), f, tokens.dtype, tokens.device)
    poison(pages.buffer)
    store_pages(list(tokens), [pages], channels, static, **more)
    return pages


def near_a_border(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    position = (x.double() - offset.double()) / scale.double()
    return ((position - position.floor() - 0.5).abs() < 1e-3) | (scale == 0)


def assert_same_keys(
    found: PageTensors, keys: torch.Tensor, f: PageFormat, channels=None, static=None, hidden: int = 0
) -> None:
    """Everything but norms exactly; these to one unit in the last place, and the rest by the norms found.

    A norm's reciprocal is the GPU's own to a unit of float32, which one group in thousands rounds to the next fp16:
    even among few groups there may be one.
    """
    keys = shown_tokens(keys.cpu(), hidden)
    tensors = SideTensors(channels, static)
    expected = quantize_pages(keys, f, tensors, hidden)
    fields = {name: tensor.cpu() for name, tensor in found.tensors()}
    if f.token_norm != "none":
        norm = fields["norm"]
        assert (norm.view(torch.int16) - expected.norm.view(torch.int16)).abs().max() <= 1
        inverse = torch.where(norm > 0, norm.float().reciprocal(), 0.0)
        keys = keys.float() * inverse.unsqueeze(3)
        expected = quantize_pages(keys, replace(f, token_norm="none"), tensors, hidden)
    rounded = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    for name in ("scale", "offset", "grid", "channels"):
        if getattr(expected, name) is None:
            continue
        if f.token_norm == "none" or name == "channels":
            assert torch.equal(fields[name], getattr(expected, name)), name
        else:
            apart = (fields[name].view(torch.int16).int() - getattr(expected, name).view(torch.int16).int()).abs()
            # A scale of 8 bits that is rounded the other way has another offset.
            assert name == "grid" or apart.max() <= 1, name
            assert (apart > 0).sum() <= 1 + apart.numel() // 1000, name
            rounded = rounded | (apart > 0)
    found = PageTensors(format=f, **fields)
    different = page_codes(found, channels) != page_codes(expected, channels)
    if rounded.any():
        different &= ~rounded.repeat_interleave(f.group_size, 3)
    if different.any():
        scale, offset = static or expected.group_scales
        grid = [
            part[None, :, :, None] if static else part.repeat_interleave(f.group_size, 3) for part in (scale, offset)
        ]
        assert not (different & ~near_a_border(keys.transpose(2, 3), *grid)).any()
        assert different.float().mean() < 1e-3


FORMATS = [
    key_format(2),
    key_format(2, token_norm="joint"),
    key_format(2, dim=48, group=128, token_norm="joint", token_norm_measure="mean_abs", clip_ratio=0.7),
    key_format(4, group=16, token_norm="per_head", clip_ratio=0.85),
    key_format(8, dim=80, group=32),
    key_format(1, group=64, clip_ratio=0.5),
    key_format(2, dim=96, heads=1, group=32, boosted=24, token_norm="joint"),
    key_format(1, dim=48, group=64, boosted=5),
    key_format(4, heads=1, page=32, group=16, boosted=3),
    key_format(3, dim=48, heads=1, group=16, clip_ratio=0.8),
    key_format(1, group=128, clip_ratio=0.5, scale_bits=8),
    key_format(2, dim=48, group=32, token_norm="joint", scale_bits=8),
    key_format(4, dim=80, heads=1, group=128, token_norm="per_head", scale_bits=8),
    key_format(1, dim=48, group=64, boosted=5, scale_bits=8),
    key_format(4, dim=512, heads=1, group=128, by_token=True, clip_ratio=0.9),
    key_format(16, dim=80, heads=1),
]
FORMATS += [
    pytest.param(f, marks=pytest.mark.full)
    for f in (
        key_format(8, group=128),
        key_format(1, dim=80, heads=3, group=128, token_norm="per_head", token_norm_measure="mean_abs"),
        key_format(2, group=128, boosted=8),
        key_format(3, dim=128, group=128, token_norm="joint"),
        key_format(3, dim=96, heads=3, group=64, token_norm="per_head"),
        key_format(3, group=64, scale_bits=8),
        key_format(2, group=128, boosted=8, scale_bits=8),
        key_format(2, dim=48, heads=1, group=128, by_token=True),
        key_format(2, dim=320, group=32, by_token=True, token_norm="joint"),
        key_format(16),
    )
]


@pytest.mark.parametrize("f", FORMATS, ids=str)
def test_keys_are_stored_as_by_the_reference(device, f):
    keys = random_tokens(1, f, device)
    found = quantized(keys, f)
    if f.bits == 16:
        assert torch.equal(found.codes, keys)
    else:
        assert_same_keys(found, keys, f)


@pytest.mark.full
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [8, 48, 64, 80, 96, 128, 256])
def test_every_key_format(device, dim, bits):
    dtypes = torch.float32, torch.float16, torch.bfloat16
    for group, norm, dtype in product((16, 32, 64, 128), ("none", "joint", "per_head"), dtypes):
        f = key_format(bits, dim=dim, group=group, token_norm=norm, clip_ratio=0.8)
        keys = random_tokens(2, f, device, dtype)
        assert_same_keys(quantized(keys, f), keys, f)
        if bits in (1, 2, 4):
            f = replace(f, boosted=dim // 4 + 1)
            assert_same_keys(quantized(keys, f), keys, f)


@pytest.mark.parametrize("bits", [1, 2])
def test_calibrated_channels_are_boosted(device, bits):
    f = key_format(bits, group=128, boosted=3, fixed_channels=True)
    channels = torch.tensor([[0, 31, 63], [5, 6, 40]])
    keys = random_tokens(2, f, device, torch.float16)
    found = quantized(keys, f, channels.to(device))
    assert_same_keys(found, keys, f, channels)


def test_ties_boost_the_lower_channel(device):
    f = key_format(2, heads=1, group=128, boosted=4)
    keys = torch.ones(1, 1, 128, 64, device=device)
    keys[..., 9] = 2
    assert quantized(keys, f).channels.flatten().tolist() == [0, 1, 2, 9]


VALUE_FORMATS = [
    value_format(2, heads=1),
    value_format(2, dim=128, group=128, clip_ratio=0.7, page=32),
    value_format(2, dim=80, group=16, page=32),
    value_format(1, dim=96, group=48, page=32),
    pytest.param(value_format(1, group=64, clip_ratio=0.5), marks=pytest.mark.full),
    pytest.param(value_format(4, group=16), marks=pytest.mark.full),
    value_format(8, dim=48, heads=3, group=16, page=32),
    pytest.param(value_format(8, group=16, page=32), marks=pytest.mark.full),
    value_format(3, group=64, clip_ratio=0.7, page=32),
    value_format(3, dim=48, heads=1, group=24, page=32),
    pytest.param(value_format(3, dim=80, group=16, page=32), marks=pytest.mark.full),
    value_format(1, group=64, clip_ratio=0.5, page=32, scale_bits=8),
    value_format(2, dim=128, group=128, clip_ratio=0.7, page=32, scale_bits=8),
    value_format(3, dim=48, heads=1, group=24, page=32, scale_bits=8),
    value_format(4, dim=80, group=16, page=32, scale_bits=8),
    value_format(16, dim=80),
]


def assert_same_values(found, values, f, static=None) -> None:
    expected = quantize_pages(values.cpu(), f, SideTensors(static=static))
    codes, wanted = page_codes(replace(found, codes=found.codes.cpu())), page_codes(expected)
    if not f.static:
        for mine, other in zip(found.group_scales, expected.group_scales, strict=True):
            assert torch.equal(mine.cpu(), other)
        grid = [part.repeat_interleave(f.group_size, 3) for part in expected.group_scales]
    else:
        grid = [part[None, :, None] for part in static]
    assert not ((codes != wanted) & ~near_a_border(values.cpu(), *grid)).any()


@pytest.mark.parametrize("f", VALUE_FORMATS, ids=str)
def test_values_are_stored_as_by_the_reference(device, f):
    values = random_tokens(1, f, device)
    found = quantized(values, f)
    if f.bits == 16:
        assert torch.equal(found.codes, values)
    else:
        assert_same_values(found, values, f)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [8, 48, 64, 80, 96, 128, 256])
def test_every_value_format(device, dim, bits, dtype):
    for group in {g for g in (8, 16, 32, 64, 128, dim // 2, dim) if dim % g == 0}:
        f = value_format(bits, dim=dim, group=group, clip_ratio=0.8)
        values = random_tokens(2, f, device, dtype)
        assert_same_values(quantized(values, f), values, f)


@pytest.mark.parametrize("bits", [1, *(pytest.param(bits, marks=pytest.mark.full) for bits in (2, 3, 8))])
def test_static_pages(device, bits):
    f, g = key_format(bits, group=128, static=True), value_format(bits, group=64, static=True)
    scale, offset = (
        torch.rand(2, 64, device=device).half() * 4 / 2**bits,
        -2 * torch.rand(2, 64, device=device).half(),
    )
    scale[0, 3] = 0
    static = ChannelScales(scale, offset)
    x = torch.randn(1, 2, 128, 64, device=device)
    assert_same_keys(quantized(x, f, static=static), x, f, static=cpu(static))
    assert_same_values(quantized(x, g, static=static), x, g, cpu(static))


HIDING = [
    key_format(2, group=128, boosted=5, token_norm="per_head"),
    key_format(3, dim=48, heads=1),
    key_format(4, dim=96, heads=1, group=128, by_token=True),
]


@pytest.mark.parametrize("f", HIDING, ids=str)
def test_hidden_keys_are_not_read(device, f):
    keys = random_tokens(2, f, device)
    keys[0, :, :37] = torch.inf
    found = quantized(keys, f, hidden=[37, 0])
    assert_same_keys(found, keys, f, hidden=37)


# Few channels and tokens: under the interpreter error feedback, which takes one channel after another, is slow.
@pytest.mark.parametrize("f", [key_format(2, dim=16, page=64, heads=1, token_norm="joint")], ids=str)
def test_error_feedback_does_not_read_hidden_keys(device, f):
    keys = random_tokens(2, f, device)
    keys[0, :, :37] = torch.inf
    matrix = torch.eye(f.head_dim).half() + torch.randn(f.heads, f.head_dim, f.head_dim).half().triu(1) / 50
    # The same kernel, given tokens in their places.
    given = [{"hidden": [37, 0]}, {}]
    tokens = [keys, shown_tokens(keys, 37)]
    both = [quantized(x, f, feedback=[matrix.to(device)], **more) for x, more in zip(tokens, given, strict=True)]
    assert torch.equal(both[0].codes, both[1].codes)


@pytest.mark.parametrize("f", [value_format(3, heads=1, dim=48, group=24, page=64), value_format(16, page=64)], ids=str)
def test_hidden_values_are_not_read(device, f):
    values = random_tokens(2, f, device)
    values[0, :, :37] = torch.inf
    found, shown = quantized(values, f, hidden=[37, 0]), shown_tokens(values, 37)
    if f.bits == 16:
        assert torch.equal(found.codes[1], values[1])
    else:
        assert_same_values(found, shown, f)


def test_pages_of_sequences_with_their_own_buffers(device):
    """One launch: pages out of buffers of different capacity into records in a pool, all in the given order."""
    f, g = key_format(2, dim=16, page=32, token_norm="joint"), value_format(2, dim=16, group=16, page=32)
    buffers = [torch.randn(2, n, 16, device=device, dtype=torch.bfloat16) for n in (80, 49, 32)]
    tokens = [buffers[b][:, start : start + n] for b, start, n in ((0, 2, 64), (1, 17, 32), (2, 0, 32))]
    slots = [4, 0, 2, 1]
    for layout in (f, g):
        pool = new_pages(5, layout, torch.bfloat16, device)
        poison(pool.buffer)
        before = pool.buffer.clone()
        store_pages(tokens, [pool.select(slice(slot, slot + 1)) for slot in slots])
        each = [page for part in tokens for page in part.split(32, 1)]
        for slot, page in zip(slots, each, strict=True):
            check = assert_same_keys if layout is f else assert_same_values
            check(pool.select(slice(slot, slot + 1)), page[None], layout)
        assert torch.equal(pool.buffer[3], before[3])


@pytest.mark.parametrize(
    ("poisoned", "norm"),
    [
        *((torch.nan, "none"), (3e38, "per_head")),
        pytest.param(torch.inf, "none", marks=pytest.mark.full),
        pytest.param(3e38, "none", marks=pytest.mark.full),
        pytest.param(torch.nan, "joint", marks=pytest.mark.full),
    ],
)
def test_bad_keys_are_named(device, poisoned, norm):
    f = key_format(2, dim=16, token_norm=norm)
    keys = torch.randn(2, 2, 128, 16, device=device)
    keys[1, 1, 7, 9] = keys[1, 1, 100, 1] = poisoned
    with pytest.raises(NumericError) as raised:
        quantized(keys, f)
    if norm == "none":
        assert isinstance(raised.value, GroupRangeError)
        assert raised.value.index == (1, 1)


@pytest.mark.parametrize("static", [False, True])
def test_bad_values_are_named_once(device, static):
    f = value_format(2, dim=16, group=16, page=32, static=static)
    scales = ChannelScales(*torch.ones(2, 2, 16, device=device, dtype=torch.float16)) if static else None
    values = torch.randn(3, 2, 32, 16, device=device)
    values[1, 1, 31, 15] = torch.nan
    flag, pages = new_flag(values.device), new_pages(3, f, values.dtype, values.device)
    writes, tensors = page_writes(list(values), [pages]), [SideTensors(static=scales)]
    quantize_at(writes, values[0], pages.buffer, f, flag, tensors)
    with pytest.raises(GroupRangeError) as raised:
        raise_if_flagged(flag, 2)
    assert raised.value.index == (1, 1)
    raise_if_flagged(flag, 2)


def test_what_the_kernels_do_not_take_has_a_reason(device):
    x = torch.zeros(1, 2, 128, 64, device=device)
    assert unsupported(x) is None
    assert "float64" in unsupported(x.double())
    assert "head sizes" in unsupported(x[..., :20])
    assert "pages" in unsupported(x, 96)
    assert "16 bytes" in unsupported(x[..., 2:58])
    assert "no kernels for meta" in unsupported(x.to("meta"))
