"""Linears with a common input: one product for all, the right output for each, in any order and after any change."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor

from kvconvert.errors import UsageError
from kvconvert.kernels import linear as dispatch
from kvconvert.kernels.linear import QuantizedLinear, share_input, w4a16_reference
from kvconvert.kernels.linear.awq_format import AwqWeight, quantize_weight
from kvconvert.kernels.linear.shared_input import MOST_WASTED, SharedStorage

TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 9e-3}
OUTPUTS = (64, 32, 40)


def linears(
    device: torch.device, outputs: tuple[int, ...] = OUTPUTS, inputs: int = 192, group_size: int = 64, biases: str = ""
) -> list[QuantizedLinear]:
    """`biases` names by position which have one: "02" the first and the third."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for position, out in enumerate(outputs):
        weight = quantize_weight(torch.randn(out, inputs, generator=generator), 4, group_size)
        bias = 5 * torch.randn(out, generator=generator).to(device, torch.bfloat16)
        weight = AwqWeight(*(tensor.to(device) for tensor in weight))
        made.append(QuantizedLinear.from_weight(weight, bias if str(position) in biases else None))
    return made


def rows(count: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, inputs: int = 192) -> Tensor:
    return torch.randn(1, count, inputs, generator=torch.Generator().manual_seed(count)).to(device, dtype)


def assert_right(linear: QuantizedLinear, x: Tensor, y: Tensor) -> None:
    exact = w4a16_reference(x.double(), linear.awq_weight(), linear.bias)
    assert y.shape == exact.shape
    assert y.dtype == x.dtype
    assert float((y.double() - exact).norm() / exact.norm()) < TOLERANCE[x.dtype]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Outputs of each product of a kernel, as they come."""
    seen: list[int] = []
    product = dispatch.packed_product

    def counted(x: Tensor, weight, bias=None) -> Tensor:
        seen.append(weight.outputs)
        return product(x, weight, bias)

    monkeypatch.setattr(dispatch, "packed_product", counted)
    return seen


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("count", [1, 5, 70])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("biases", ["", "012", "02"])
def test_one_product_gives_every_output(device, products, dtype, count, order, biases):
    parts, x = linears(device, biases=biases), rows(count, device, dtype)
    assert share_input(parts) is None
    for linear in (parts[position] for position in order):
        assert_right(linear, x, linear(x))
    assert products == [sum(OUTPUTS)]


@pytest.mark.parametrize(("outputs", "inputs", "group_size"), [((32, 8), 64, 32), ((96, 96), 512, 256)])
def test_other_shapes_and_groups_share(device, products, outputs, inputs, group_size):
    parts, x = linears(device, outputs, inputs, group_size), rows(3, device, inputs=inputs)
    assert share_input(parts) is None
    for linear in parts:
        assert_right(linear, x, linear(x))
    assert products == [sum(outputs)]


def test_a_changed_input_another_one_and_a_second_call_are_computed_anew(device, products):
    q, k, v = linears(device)
    share_input([q, k, v])
    x = rows(2, device)
    first = q(x)
    assert_right(q, x, first)
    x.mul_(2)
    assert_right(k, x, k(x))
    assert_right(v, x, v(x))
    other = x.clone()
    assert_right(q, other, q(other))
    assert torch.equal(q(x), first * 2)
    assert len(products) == 4


def test_views_and_equal_tensors_are_not_mistaken_for_the_input(device):
    q, k = linears(device, (32, 32))
    share_input([q, k])
    x = rows(4, device)
    q(x)
    for view in (x[:, ::2], x[:, 1:], x.flip(1)):
        assert_right(k, view, k(view))


def test_in_inference_mode_each_linear_sees_changes_too(device, products):
    q, k = linears(device, (32, 32))
    share_input([q, k])
    with torch.inference_mode():
        x = rows(2, device).clone()
        assert_right(q, x, q(x))
        x.add_(1)
        assert_right(k, x, k(x))
    assert products == [32, 32]


def test_linears_that_never_share_stop_computing_for_each_other(device, products):
    q, k = linears(device, (32, 32))
    share_input([q, k])
    for number in range(MOST_WASTED + 2):
        x = rows(1, device) * (number + 1)
        assert_right(q, x, q(x))
    assert products == [64] * MOST_WASTED + [32] * 2
    assert q.shared_input is k.shared_input is q.storage is None
    assert_right(k, x, k(x))


def test_nothing_keeps_inputs_or_outputs_alive(device):
    q, k = linears(device, (32, 32))
    share_input([q, k])
    x = rows(2, device)
    input_gone, waiting = weakref.ref(x), q.shared_input
    q(x)
    assert waiting._waiting.outputs
    del x
    gc.collect()
    assert input_gone() is None
    assert not waiting._waiting.outputs


def test_each_linear_still_answers_for_itself(device):
    parts = linears(device, biases="0")
    before = [{name: tensor.clone() for name, tensor in linear.state_dict().items()} for linear in parts]
    share_input(parts)
    x = rows(3, device)
    outputs = [linear(x) for linear in parts]
    packed, _ = parts[0].storage.packed()
    for linear in parts:
        assert linear.qweight is None
        assert linear.gpu_lanes.untyped_storage().data_ptr() == packed.lanes.untyped_storage().data_ptr()
    for linear, state, y in zip(parts, before, outputs, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in linear.state_dict().items())
        alone = copy.deepcopy(linear)
        assert alone.shared_input is alone.storage is None
        assert_right(alone, x, alone(x))
        assert_right(linear, x, y)


@pytest.mark.parametrize("leave", ["cast", "move", "load"])
def test_a_linear_that_leaves_the_buffer_comes_back(device, products, leave):
    parts, x = linears(device, biases="1"), rows(3, device)
    share_input(parts)
    for linear in parts:
        linear(x)
    if leave == "cast":
        parts[1].to(torch.float16)
        parts[1].to(torch.bfloat16)
    elif leave == "move":
        parts[1].cpu().to(device)
    else:
        loaded = QuantizedLinear.from_weight(linears(device, (48, 32), biases="01")[1].awq_weight(), parts[1].bias * 3)
        parts[1].load_state_dict(loaded.state_dict())
    products.clear()
    other = x.clone()
    assert_right(parts[1], other, parts[1](other))
    products.clear()
    for linear in parts:
        assert_right(linear, x, linear(x))
    assert products == [sum(OUTPUTS)]


def test_gradients_and_dtypes_without_a_kernel_take_each_linears_own_path(device, products):
    q, k = linears(device, (32, 32))
    share_input([q, k])
    x = rows(2, device).requires_grad_()
    (q(x).sum() + k(x).sum()).backward()
    assert x.grad.abs().sum() > 0
    wide = rows(2, device, torch.float32)
    torch.testing.assert_close(k(wide), w4a16_reference(wide, k.awq_weight()))
    assert products == [32, 32]
    assert q(x.detach()[:, :0]).shape == (1, 0, 32)


def test_what_cannot_share_is_named(device):
    assert "only one" in share_input(linears(device, (32,)))
    assert "multiple of 32" in share_input(linears(device, (40, 32)))
    assert "numbers of inputs" in share_input([*linears(device, (32,)), *linears(device, (32,), 256)])
    assert "groups of 96" in share_input(linears(device, (32, 32), 192, 96))
    mixed = linears(device, (32, 32), biases="01")
    mixed[0].bias = mixed[0].bias.float()
    assert "dtypes of biases" in share_input(mixed)
    parts = linears(device)
    assert share_input(parts[:2]) is None
    assert "already" in share_input(parts)
    with pytest.raises(UsageError, match="already"):
        SharedStorage(parts)
