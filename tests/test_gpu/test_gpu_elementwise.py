"""Norms, gates and rotary positions in one launch equal the separate steps, rounded as these are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvconvert.kernels.elementwise import (
    Gate,
    Norm,
    add_rms_norm,
    gated,
    gated_reference,
    gated_rms_norm,
    gated_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
    rotary,
    rotary_reference,
    unsupported,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
GATES = [
    Gate("silu"),
    Gate("gelu_tanh"),
    Gate("gelu"),
    Gate("relu"),
    Gate("silu", 1.702, 7.0, 1.0),
    Gate("silu", 1.0, 0.5),
]


def random(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 3).to(device, dtype)


def assert_rounded_alike(y: Tensor, expected: Tensor, same: bool = True, least: float = 0.02) -> None:
    """Equal to a unit in the last place, and mostly the same bits: float32 results may lie between two of the dtype's.

    The interpreter rounds to bfloat16 by truncation, at each of up to four steps.

    Args:
        y, expected: what is compared.
        same: whether roundings happen at the same steps, so that bits are mostly equal.
        least: size, relative to the mean, below which values have the error of values of this size.
    """
    assert y.dtype == expected.dtype
    assert y.shape == expected.shape
    truncated = y.dtype == torch.bfloat16 and y.device.type == "cpu"
    size = expected.double().abs()
    error = (y.double() - expected.double()).abs() / size.clamp_min(float(size.mean()) * least)
    assert float(error.max()) <= (8 if y.dtype == torch.float32 else 5 if truncated else 2) * torch.finfo(y.dtype).eps
    if same and y.dtype != torch.float32 and not truncated:
        assert float((y != expected).float().mean()) < 0.03


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (5, 1100)])
def test_gates(device, dtype, kind, rows, columns):
    both = random(rows, 2 * columns, device=device, dtype=dtype)
    gate, up = both.chunk(2, -1)
    assert unsupported(gate, up) is None
    # Tails of GELU are differences of numbers near 1, and torch computes alpha and offset in separate steps.
    simple = kind.activation in ("silu", "relu") and kind.alpha == 1
    expected = gated_reference(gate, up, kind)
    assert_rounded_alike(gated(gate, up, kind), expected, same=simple, least=0.02 if simple else 1.0)
    whole = gate.contiguous().view(1, rows, columns)
    assert torch.equal(gated(whole, up[None], kind), gated(gate, up, kind)[None])


def test_gates_stay_finite_and_let_nan_through(device):
    gate = torch.tensor([[-3e4, -100.0, 0.0, 100.0, 3e4, float("nan")]], device=device, dtype=torch.float16)
    for kind in GATES:
        found, expected = gated(gate, torch.ones_like(gate), kind), gated_reference(gate, torch.ones_like(gate), kind)
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=2e-3, atol=1e-3)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Norm(1e-6), Norm(1e-5, 0.0, False), Norm(1e-6, 1.0, False)])
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 5, 1100), (2, 3, 4, 24), (7, 128)])
@pytest.mark.parametrize("weighted", [True, False])
def test_norms(device, dtype, kind, shape, weighted):
    x = random(*shape, device=device, dtype=dtype)
    weight = random(shape[-1], device=device, dtype=dtype, seed=1) if weighted else None
    expected = rms_norm_reference(x, weight, kind)
    assert_rounded_alike(rms_norm(x, weight, kind), expected)
    wide = random(*shape[:-1], 2 * shape[-1], device=device, dtype=dtype)
    for view in (wide[..., : shape[-1]], x.transpose(0, -2), x[-1:]):
        assert_rounded_alike(rms_norm(view, weight, kind), rms_norm_reference(view, weight, kind))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_before(device, dtype):
    x, residual = (random(3, 2, 200, device=device, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = random(200, device=device, dtype=dtype, seed=2)
    y, total = add_rms_norm(x, residual, weight, Norm(1e-6))
    assert_rounded_alike(total, residual + x)
    assert_rounded_alike(y, rms_norm_reference(total, weight, Norm(1e-6)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 1100), (70, 128)])
def test_a_norm_with_a_gate(device, dtype, shape):
    x, wide = random(*shape, device=device, dtype=dtype), random(*shape[:-1], 2 * shape[-1], device=device, dtype=dtype)
    weight, gate = random(shape[-1], device=device, dtype=dtype, seed=2), wide[..., shape[-1] :]
    assert_rounded_alike(
        gated_rms_norm(x, gate, weight, Norm(1e-6)), gated_rms_norm_reference(x, gate, weight, Norm(1e-6))
    )


def test_eps_counts_and_rows_of_zeros_stay_zero(device):
    x = torch.full((2, 64), 1e-3, device=device)
    x[1] = 0
    expected = torch.full((64,), 1e-3 / (1e-6 + 1e-2) ** 0.5, device=device)
    torch.testing.assert_close(rms_norm(x, None, Norm(1e-2))[0], expected)
    assert not rms_norm(x, None, Norm(1e-2))[1].any()


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "heads", "keys", "tokens", "size", "rotated"),
    [(1, 4, 1, 1, 16, 16), (2, 9, 3, 3, 24, 24), (2, 3, 3, 5, 32, 8), (1, 8, 8, 2, 80, 32)],
)
def test_rotary_positions(device, dtype, batch, heads, keys, tokens, size, rotated):
    q, k = (random(batch, tokens, n, size, device=device, dtype=dtype, seed=n).transpose(1, 2) for n in (heads, keys))
    angles = random(batch, tokens, rotated, device=device, dtype=torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for tables in ((cos, sin), (cos[:1], sin[:1])):
        for found, expected in zip(rotary(q, k, *tables), rotary_reference(q, k, *tables), strict=True):
            # Sums of two products may cancel.
            assert_rounded_alike(found, expected, least=4.0)
    whole = rotary(q.contiguous(), k.contiguous(), cos, sin)
    assert all(torch.equal(a, b) for a, b in zip(whole, rotary(q, k, cos, sin), strict=True))


def test_what_the_kernels_do_not_take_is_named(device):
    x = torch.zeros(4, 8, device=device)
    assert "float64" in unsupported(x.double())
    assert "one dtype" in unsupported(x, x.half())
    assert "side by side" in unsupported(x.T)
    assert "gradients" in unsupported(x.requires_grad_())
    y = rms_norm(x, None, Norm(1e-6))
    assert y.requires_grad
