"""Unquantized Linears of 16-bit models on a CPU: the same function as `nn.Linear`, summed in float32."""

import pytest
import torch
from tiny.weights import relative_error
from torch import nn

from kvconvert.kernels import device
from kvconvert.kernels.linear import DenseLinear
from kvconvert.kernels.linear.cpu import FEW_ROWS, tiled_dense_product


@pytest.fixture(params=[False, True], ids=["without instructions", "with instructions"])
def processor(request, monkeypatch):
    """Whether the processor multiplies bfloat16 by itself."""
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, FEW_ROWS, FEW_ROWS + 1, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_product_in_float64(processor, dtype, rows, bias):
    linear = nn.Linear(96, 130, bias).to(dtype).requires_grad_(False)
    x = torch.randn(rows, 96).to(dtype)
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    y = DenseLinear.of(linear)(x)
    assert y.dtype == dtype
    assert y.shape == exact.shape
    if rows:
        # The result's rounding; with a bias, torch's own product may round before it adds.
        assert relative_error(y, exact) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("tile_weights", [1, 96 * 7, 1 << 20])
def test_tiles_of_any_size_give_the_product(tile_weights):
    rows, weight, bias = torch.randn(5, 96).bfloat16(), torch.randn(45, 96).bfloat16(), torch.randn(45).bfloat16()
    exact = rows.double() @ weight.double().T + bias.double()
    assert relative_error(tiled_dense_product(rows, weight, bias, tile_weights), exact) < 4e-3


def test_many_rows_are_summed_in_float32_where_the_processor_has_no_instructions(monkeypatch):
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: False)
    called = []
    original = torch.nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *args: called.append(args[0].dtype) or original(*args))
    linear = DenseLinear.of(nn.Linear(64, 32).bfloat16().requires_grad_(False))
    linear(torch.randn(FEW_ROWS + 1, 64).bfloat16())
    assert called == []
    linear(torch.randn(FEW_ROWS, 64).bfloat16())
    linear.float()(torch.randn(9, 64))
    assert called == [torch.bfloat16, torch.float32]


def test_shares_its_parameters_and_gives_gradients():
    linear = nn.Linear(64, 32).bfloat16()
    dense = DenseLinear.of(linear)
    assert dense.weight is linear.weight
    assert sorted(dense.state_dict()) == sorted(linear.state_dict())
    x = torch.randn(2, 9, 64).bfloat16().requires_grad_()
    dense(x).sum().backward()
    assert x.grad.shape == x.shape
    assert linear.weight.grad is not None
