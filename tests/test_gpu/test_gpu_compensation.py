"""GPTQ's block of columns: the kernel against the reference."""

import pytest
import torch

from kvconvert.kernels.compensation import round_columns_, round_columns_reference_


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("columns", "outputs"), [(1, 1), (5, 33), (20, 70)])
def test_columns_are_rounded_as_by_the_reference(columns, outputs, bits, device):
    generator = torch.Generator().manual_seed(columns + bits)
    weight = torch.randn(columns, outputs, generator=generator)
    scale = torch.rand(columns, outputs, generator=generator) / 2**bits + 0.02
    zero = torch.randint(2**bits, (columns, outputs), generator=generator).float()
    # A part of a larger factor, whose lower triangle holds something else.
    whole = 0.1 * torch.randn(columns + 3, columns + 3, generator=generator) + torch.eye(columns + 3)
    factor = whole[3:, 3:]
    expected, found = weight.clone(), weight.clone().to(device)
    errors = round_columns_reference_(expected, scale, zero, factor, 2**bits - 1)
    on_device = whole.to(device)[3:, 3:]
    made = round_columns_(found, scale.to(device), zero.to(device), on_device, 2**bits - 1).cpu()
    # float32 sums in another order: what is halfway between two codes may fall to either side.
    same = (found.cpu() - expected).abs() < scale / 2
    assert same.float().mean() > 0.99
    torch.testing.assert_close(made[same], errors[same], rtol=1e-3, atol=1e-4)


def test_halves_are_rounded_to_even_and_codes_stay_within_their_levels(device):
    weight = torch.tensor([[0.5, 1.5, -0.5, 9.0, -9.0, 2.5]], device=device)
    scale, zero = torch.ones_like(weight), torch.full_like(weight, 2.0)
    errors = round_columns_(weight, scale, zero, torch.full((1, 1), 2.0, device=device), 3)
    assert weight[0].tolist() == [0, 1, 0, 1, -2, 1]
    assert errors[0].tolist() == [0.25, 0.25, -0.25, 4.0, -3.5, 0.75]
