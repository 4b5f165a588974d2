"""Whether tensors are finite, however large and of whatever dtype."""

import pytest
import torch

from kvconvert.kernels.quantizer import all_finite

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_number_is_found_wherever_it_is(dtype, value):
    for size in (1, 7, 4099):
        for place in {0, size // 2, size - 1}:
            tensor = torch.randn(size, dtype=torch.float64).to(dtype)
            assert all_finite(tensor)
            tensor[place] = value
            assert not all_finite(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_numbers_and_none_are_finite(dtype):
    limits = torch.finfo(dtype)
    assert all_finite(torch.tensor([[limits.min, limits.max, limits.tiny, -0.0]], dtype=dtype))
    assert all_finite(torch.zeros(3, 0, dtype=dtype))


def test_a_view_with_strides_is_read_as_it_is():
    tensor = torch.zeros(6, 8)
    tensor[3, 5] = float("nan")
    assert all_finite(tensor[::2])
    assert not all_finite(tensor.T[1::2])
