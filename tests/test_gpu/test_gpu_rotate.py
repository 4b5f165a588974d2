"""The rotation kernels agree with the float64 product, write everything they should, and nothing else."""

import pytest
import torch

from kvconvert.kernels.rotate import Rotations, hadamard_matrix, hadamard_transform, unsupported, unsupported_append
from kvconvert.kernels.rotate import triton as gpu

# Half a unit in the last place of the result, and the rounding of float32 sums.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def rotated(x: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    matrix = hadamard_matrix(x.shape[-1], device=x.device)
    return x.double() @ (matrix.T if inverse else matrix)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.each_value
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dim", [8, 20, 48, 64, 72, 80, 96, 128, 256])
def test_rotation_is_the_product_with_the_matrix(device, dim, inverse):
    torch.manual_seed(dim)
    x = torch.randn(2, 3, 5, dim, device=device, dtype=torch.bfloat16)
    assert error(gpu.rotate(x, inverse), rotated(x, inverse)) < TOLERANCES[x.dtype]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(64,), (63, 64), (1, 2, 129, 64), (2, 1, 2, 3, 64), (0, 64)])
def test_rotation_keeps_shape_and_dtype(device, dtype, shape):
    x = torch.randn(shape, device=device).to(dtype)
    found = gpu.rotate(x)
    assert found.shape == x.shape
    assert found.dtype == dtype
    if x.numel():
        assert error(found, rotated(x)) < TOLERANCES[dtype]


def test_rotation_follows_strides(device):
    """As attention layers hand out heads: [B, T, H, D] transposed, and parts of a wider tensor."""
    whole = torch.randn(2, 7, 3, 3, 64, device=device, dtype=torch.float16)
    x = whole[:, :, 1].transpose(1, 2)
    assert error(gpu.rotate(x), rotated(x)) < TOLERANCES[x.dtype]


def test_rotation_and_its_inverse_cancel(device):
    x = torch.randn(3, 80, device=device)
    assert error(gpu.rotate(gpu.rotate(x), inverse=True), x.double()) < 2e-6


def test_dispatch_takes_the_kernel_where_it_can(device, monkeypatch):
    calls = []
    monkeypatch.setattr(gpu, "rotate", lambda x, inverse: calls.append(inverse) or x)
    hadamard_transform(torch.randn(2, 64, device=device))
    hadamard_transform(torch.randn(2, 64, device=device, dtype=torch.float64), inverse=True)
    assert calls == [False]


@pytest.mark.each_value
@pytest.mark.parametrize("rotate_values", [False, True])
@pytest.mark.parametrize("rotate_keys", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "query_heads", "dims"),
    [(1, 2, 8, (64, 64)), (3, 2, 2, (48, 80)), (5, 8, 16, (64, 128)), (66, 1, 2, (64, 48))],
)
def test_append_rotates_and_stores_in_one_launch(device, tokens, heads, query_heads, dims, rotate_keys, rotate_values):
    torch.manual_seed(0)
    batch, dtype = 3, torch.bfloat16
    queries = torch.randn(batch, tokens, query_heads, dims[0], device=device).to(dtype).transpose(1, 2)
    keys, values = (torch.randn(batch, heads, tokens, dim, device=device).to(dtype) for dim in dims)
    capacities, first = (tokens + 9, tokens + 20, tokens + 16), torch.tensor([0, -1, 5], device=device)
    poisoned = [
        [torch.full((heads, n, dim), torch.nan, device=device, dtype=dtype) for n in capacities] for dim in dims
    ]
    rows = [
        [number for buffer in pair for number in (offset(buffer, keys), buffer.stride(0))]
        for pair in zip(*poisoned, strict=True)
    ]
    table = torch.tensor(rows, device=device)
    found = gpu.rotate_and_append(queries, keys, values, keys, table, first, Rotations(rotate_keys, rotate_values))
    if rotate_keys:
        assert error(found, rotated(queries)) < TOLERANCES[dtype]
    else:
        assert found is queries
    for buffers, new, rotates in ((poisoned[0], keys, rotate_keys), (poisoned[1], values, rotate_values)):
        for row, start in enumerate(first.tolist()):
            buffer = buffers[row]
            if start < 0:
                assert buffer.isnan().all()
                continue
            stored = buffer[:, start : start + tokens]
            assert error(stored, rotated(new[row]) if rotates else new[row].double()) < TOLERANCES[dtype]
            assert int(buffer.isnan().sum()) == buffer.numel() - stored.numel()


def offset(buffer, base) -> int:
    return (buffer.data_ptr() - base.data_ptr()) // base.element_size()


def test_what_the_kernels_do_not_serve_has_a_reason(device):
    x = torch.zeros(1, 2, 3, 64, device=device, dtype=torch.float16)
    assert unsupported(x) is None
    assert "float64" in unsupported(x.double())
    assert "head sizes up to 256" in unsupported(torch.zeros(2, 512, device=device))
    assert "gradients" in unsupported(torch.zeros(2, 64, device=device, requires_grad=True))
    assert "no kernels for meta" in unsupported(x.to("meta"))
    none, wide = Rotations(), torch.zeros(1, 2, 3, 512, device=device).half()
    assert unsupported_append(torch.float16, x, x, x, none) is None
    assert "stored ones torch.bfloat16" in unsupported_append(torch.bfloat16, x, x, x, none)
    assert "up to 256" in unsupported_append(torch.float16, x, wide, x, Rotations(keys=True))
    assert unsupported_append(torch.float16, wide, wide, x, Rotations(values=True)) is None
    for askew in (x[..., 1:57], x.transpose(2, 3)[..., :3, :].transpose(2, 3), x[..., :60]):
        assert "16 bytes" in unsupported_append(torch.float16, x, x, askew, none)
