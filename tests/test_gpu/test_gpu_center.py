"""Keys without their constant part: kernels that take it away, add it, and add what it gives to scores."""

from dataclasses import replace

import pytest
import torch
from decode_cases import Case, compare, random_center
from test_gpu_decode import TOLERANCE
from tiny import prompt_chunks
from tiny.key_centers import center_plan
from transformers import LlamaConfig

from kvconvert import KVCache, KVScheme
from kvconvert.kernels import decode
from kvconvert.kernels import device as dispatch
from kvconvert.kernels.chunked_prefill import FEWEST_QUERIES
from kvconvert.kernels.pages import add_centers, page_centers
from kvconvert.kernels.pages.triton import launch as page_launch
from kvconvert.runtime.cache.attend import commit
from kvconvert.runtime.cache.compress import end_forward
from kvconvert.runtime.cache.forward_pass import PassTokens

SMALL = {"heads": 1, "half_quantized_pages": (0, 0, 0), "residual": (3, 0, 5)}
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, pytest.mark.full
CASES = (
    Case(center=3.0),
    Case(center=3.0, dtype=HALF, heads=1, group=1, key_dim=64, value_dim=64, value_group=64, pages=(1, 5, 2)),
    Case(center=3.0, dtype=HALF, boosted=16, softcap=5.0, sink_logits=True, **SMALL),
    Case(center=3.0, dtype=HALF, half_quantized=1, half_quantized_pages=(1, 0, 2), pages=(0, 2, 1), value_bits=16),
    # Programs that take tiles of several rows, one of them without pages.
    Case(center=3.0, heads=4, group=8, key_dim=32, value_dim=32, value_group=32, pages=(1, 0, 2)),
)
# Other constants of kernels whose bits, norms, and sizes tests/test_gpu/test_gpu_decode.py has without a center.
MORE_CASES = (
    Case(center=3.0, dtype=HALF, queries=3, masked=True, group=2),
    Case(center=3.0, dtype=BRAIN, group=3, key_dim=80, value_dim=80, value_group=16, norm="joint"),
    Case(center=3.0, dtype=HALF, group=7, key_bits=4, value_bits=4, **SMALL),
    Case(center=3.0, dtype=HALF, key_bits=1, value_bits=1, key_dim=256, value_dim=256, value_group=256, **SMALL),
    Case(center=3.0, dtype=BRAIN, key_bits=3, norm="per_head", **SMALL),
    Case(center=3.0, dtype=HALF, half_quantized=2, half_quantized_pages=(1, 0, 2)),
    Case(center=3.0, queries=9, group=4, key_group=32, pages=(2, 0, 0), **{**SMALL, "residual": (3, 1, 1)}),
    Case(center=300.0, position=130_000, pages=(1, 3, 2), key_dim=64, value_dim=64, value_group=64),
    # Programs that take half a row's tile.
    Case(center=3.0, dtype=HALF, heads=8, group=16, key_dim=48, value_dim=32, value_group=32, pages=(5, 1, 2)),
)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=FULL) for case in MORE_CASES)], ids=str)
def test_decoding_equals_float64_attention_over_whole_keys(case, device):
    error, _ = compare(case, device)
    assert error < TOLERANCE[case.dtype]


@pytest.mark.parametrize("dtype", [HALF, pytest.param(BRAIN, marks=FULL)])
def test_large_constant_parts_cost_no_more_than_rounding_keys_to_their_dtype(dtype, device):
    # Scores of some 30 times a normal number, of which fp16 keeps 11 bits.
    case = Case(center=300.0, position=130_000, pages=(1, 3, 2), key_dim=64, value_dim=64, value_group=64, dtype=dtype)
    error, _ = compare(case, device)
    assert error < 0.1


def test_queries_of_any_size_are_within_the_range_of_halves(device):
    case = Case(center=3.0, dtype=BRAIN, scaling=1e-4, **SMALL)
    stored = compare(case, device)[1]
    assert stored.isfinite().all()


@pytest.mark.parametrize(
    ("dim", "page_size", "dtype"),
    [(64, 128, BRAIN), (80, 128, torch.float32), pytest.param(256, 32, HALF, marks=FULL), (8, 128, HALF)],
)
def test_what_is_taken_away_is_what_is_added(dim, page_size, dtype, device):
    case = Case(heads=3, key_dim=dim, center=50.0)
    center = random_center(case, torch.Generator().manual_seed(0))
    position = 100_003
    starts = position + page_size * torch.arange(3)
    expected = page_centers(starts, page_size, center).transpose(0, 1).flatten(1, 2)
    buffer = torch.zeros(3, 5 * page_size + 8, dim, dtype=dtype, device=device)
    there = replace(center, matrix=center.matrix.to(device), frequencies=center.frequencies.to(device))
    add_centers(buffer[:, 8 : 8 + 3 * page_size], position, page_size, there)
    got = buffer[:, 8 : 8 + 3 * page_size].cpu()
    # Sums in another order, then rounded.
    bound = {torch.float32: 1e-5, HALF: 1e-3, BRAIN: 8e-3}[dtype]
    torch.testing.assert_close(got.float(), expected, rtol=bound, atol=50 * 1e-5)
    assert not buffer[:, :8].any()
    assert not buffer[:, 8 + 3 * page_size :].any()
    add_centers(buffer[:, 8 : 8 + 3 * page_size], position, page_size, there, sign=-1)
    assert buffer.float().abs().max() <= 50 * bound


SCHEMES = {
    "rotated": KVScheme(key_center="calibrated", rotate_keys="hadamard", token_norm="joint", sink_tokens=3),
    "values stay longer": KVScheme(key_center="calibrated", value_recent_tokens=128, key_bits=4),
}


def attended(scheme: KVScheme, where: torch.device, lengths: tuple[int, ...], sliding_window: int | None):
    """A layer's outputs, chunk by chunk, of two rows of which one is padded, and the layer.

    The interpreter has no part in the first chunk, which would take it long.
    """
    layer = KVCache(prompt_chunks.CONFIG, scheme, plan=center_plan(1, 2, 32)).layers[0]
    layer.store.group.sliding_window = sliding_window
    mask_function = None if sliding_window is None else prompt_chunks.window
    with dispatch.interpreted(False):
        found = prompt_chunks.outputs(layer, lengths[:1], where, HALF, mask_function, rows=2)
    return found + prompt_chunks.outputs(layer, lengths[1:], where, HALF, mask_function, rows=2), layer


@pytest.mark.parametrize(
    ("name", "lengths", "window"),
    [
        ("rotated", (290, 1, 40), None),
        pytest.param("values stay longer", (390, 1, 3), None, marks=FULL),
        pytest.param("rotated", (420, 1, 5), prompt_chunks.WINDOW, marks=FULL),
    ],
)
def test_a_cache_with_kernels_gives_what_it_gives_without(name, lengths, window, device, monkeypatch):
    with dispatch.interpreted(False):
        expected, _ = attended(SCHEMES[name], torch.device("cpu"), lengths, window)
    monkeypatch.setitem(FEWEST_QUERIES, "cuda", 32)
    monkeypatch.setattr(decode, "CENTER_BYTES", 1 << 12)
    rows = prompt_chunks.counted(monkeypatch)
    got, layer = attended(SCHEMES[name], device, lengths, window)
    assert layer.store.fallbacks == 0
    assert layer.store.sequences[0].keys.pages
    if window is None:  # a first prompt beyond its window is counted, too, where a GPU attends to it
        assert rows[-2:] == ([0, 1] if lengths[-1] == 40 else [])
    for one, other in zip(got, expected, strict=True):
        # Halves, of which a number halfway between two codes may be rounded the other way.
        assert prompt_chunks.error(one.cpu(), other) < 1e-2


def test_one_flush_takes_each_layers_own_constant_part_away(device):
    config = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    scheme = KVScheme(key_center="calibrated", sink_tokens=2, key_bits=8)
    schemes = [scheme, replace(scheme, key_center="none"), scheme]
    caches, launched = [], []
    launch = page_launch.launch_centers
    page_launch.launch_centers = lambda *given, **named: launched.append(len(given[2])) or launch(*given, **named)
    try:
        for where in (device, torch.device("cpu")):
            cache, generator = KVCache(config, schemes, plan=center_plan(3, 1, 32)), torch.Generator().manual_seed(0)
            with dispatch.interpreted(where is device and device.type == "cpu"):
                for start, n in ((0, 130), (130, 125), (255, 1)):
                    for layer in cache.layers:
                        new = [torch.randn(2, 1, n, 32, generator=generator).half().to(where) for _ in range(2)]
                        layer.update(*new)
                        real = torch.ones(2, start + n, dtype=torch.bool, device=where)
                        real[1, :9] = False
                        commit(layer.store, PassTokens(torch.arange(start, start + n, device=where), real))
                        end_forward(layer.store)
            caches.append(cache)
    finally:
        page_launch.launch_centers = launch
    # A page of the first row, of the second, and of the first again, each in both layers that have a center.
    assert launched == [2, 2, 2]
    for mine, theirs in zip(*(cache.layers for cache in caches), strict=True):
        assert mine.store.sequences == theirs.store.sequences
        for sequence in mine.store.sequences:
            pages, expected = (layer.store.key_pages.read(sequence.keys.pages) for layer in (mine, theirs))
            codes = pages.codes.cpu().view(torch.uint8).int() - expected.codes.view(torch.uint8).int()
            assert codes.abs().max() <= 1
            assert (codes != 0).float().mean() < 1e-3
