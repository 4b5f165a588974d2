"""Keys without their constant part: kernels that take it away, add it, and add what it gives to scores."""

from dataclasses import replace

import pytest
import torch
from decode_cases import Case, compare, random_center
from test_gpu_decode import TOLERANCE

from kvconvert.kernels.pages import add_centers, page_centers

SMALL = {"heads": 1, "half_quantized_pages": (0, 0, 0), "residual": (3, 0, 5)}
HALF, BRAIN = torch.float16, torch.bfloat16
CASES = (
    Case(center=3.0),
    Case(center=3.0, dtype=HALF, heads=1, group=1, key_dim=64, value_dim=64, value_group=64, pages=(1, 5, 2)),
    Case(center=3.0, dtype=BRAIN, group=3, key_dim=80, value_dim=80, value_group=16, norm="joint"),
    Case(center=3.0, dtype=HALF, group=7, key_bits=4, value_bits=4, **SMALL),
    Case(center=3.0, dtype=HALF, key_bits=1, value_bits=1, key_dim=256, value_dim=256, value_group=256, **SMALL),
    Case(center=3.0, dtype=BRAIN, key_bits=3, norm="per_head", **SMALL),
    Case(center=3.0, dtype=HALF, boosted=16, softcap=5.0, sink_logits=True, **SMALL),
    Case(center=3.0, dtype=HALF, half_quantized=1, half_quantized_pages=(1, 0, 2), pages=(0, 2, 1), value_bits=16),
    Case(center=3.0, dtype=HALF, half_quantized=2, half_quantized_pages=(1, 0, 2)),
    Case(center=3.0, dtype=HALF, queries=3, masked=True, group=2),
    Case(center=3.0, queries=9, group=4, key_group=32, pages=(2, 0, 0), **{**SMALL, "residual": (3, 1, 1)}),
    Case(center=300.0, position=130_000, pages=(1, 3, 2), key_dim=64, value_dim=64, value_group=64),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decoding_equals_float64_attention_over_whole_keys(case, device):
    error, _ = compare(case, device)
    assert error < TOLERANCE[case.dtype]


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
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
    ("dim", "page_size", "dtype"), [(64, 128, BRAIN), (80, 128, torch.float32), (256, 32, HALF), (8, 128, HALF)]
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
