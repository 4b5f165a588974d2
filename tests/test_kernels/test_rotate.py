import pytest
import torch

from kvconvert.errors import UsageError
from kvconvert.kernels.rotate import (
    Rotations,
    hadamard_kind,
    hadamard_matrix,
    hadamard_reference,
    hadamard_transform,
    rotate_new_tokens,
)

KINDS = {
    1: "sylvester(1)",
    48: "paley(12) x sylvester(4)",
    64: "sylvester(64)",
    72: "block_diagonal(8) x 9",
    80: "paley(20) x sylvester(4)",
    96: "paley(12) x sylvester(8)",
    112: "paley(28) x sylvester(4)",
    128: "sylvester(128)",
    144: "block_diagonal(16) x 9",
    160: "paley(20) x sylvester(8)",
    192: "paley(12) x sylvester(16)",
    256: "sylvester(256)",
    320: "paley(20) x sylvester(16)",
    512: "sylvester(512)",
}


@pytest.mark.parametrize("d", [*KINDS, 2, 12, 20, 24, 28, 40, 56])
def test_the_matrix_is_orthonormal_with_exact_entries(d: int) -> None:
    matrix = hadamard_matrix(d)
    assert matrix.dtype == torch.float64
    signs = matrix.sign()
    # In integers, so that orthogonality is exact and not a matter of tolerance.
    order = int(signs[0].abs().sum())
    assert torch.equal((signs @ signs.T).long(), order * torch.eye(d, dtype=torch.int64))
    assert set(matrix.abs().unique().tolist()) <= {0.0, 1 / order**0.5}
    assert order == (d if "block" not in hadamard_kind(d) else d & -d)


@pytest.mark.parametrize("d", KINDS)
def test_the_kind_names_the_construction(d: int) -> None:
    assert hadamard_kind(d) == KINDS[d]


def test_sylvester_is_the_iterated_two_by_two_product() -> None:
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    product = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(6):
        product = torch.kron(two, product)
    assert torch.equal(hadamard_matrix(64), product / 8)


@pytest.mark.parametrize("d", [12, 20, 48, 80, 192])
def test_paley_matrices_are_not_symmetric_so_that_the_inverse_is_the_transpose(d: int) -> None:
    matrix = hadamard_matrix(d)
    assert not torch.equal(matrix, matrix.T)
    x = torch.randn(5, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rotated = hadamard_transform(x)
    torch.testing.assert_close(rotated, x @ matrix)
    torch.testing.assert_close(hadamard_transform(rotated, inverse=True), x)
    assert not torch.allclose(hadamard_transform(rotated), x)


@pytest.mark.parametrize("d", KINDS)
@pytest.mark.parametrize("inverse", [False, True])
def test_every_size_takes_a_path_that_equals_the_reference(d: int, inverse: bool) -> None:
    x = torch.randn(3, 0 if d == 1 else 7, d, dtype=torch.float64, generator=torch.Generator().manual_seed(d))
    torch.testing.assert_close(hadamard_transform(x, inverse), hadamard_reference(x, inverse), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2**-20), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("d", [48, 72, 128, 192])
def test_low_precision_inputs_are_rounded_only_at_the_end(dtype: torch.dtype, unit: float, d: int) -> None:
    # The unit is one rounding of a result near 1; for float32 some more, as sums of d terms round on the way.
    x = torch.randn(6, d, generator=torch.Generator().manual_seed(d)).to(dtype)
    rotated = hadamard_transform(x)
    assert rotated.dtype == dtype
    exact = x.double() @ hadamard_matrix(d)
    assert ((rotated.double() - exact).abs() <= unit * exact.abs().clamp(min=1.0)).all()


def test_strided_inputs_rotate_like_contiguous_ones() -> None:
    x = torch.randn(128, 3, 5).permute(1, 2, 0)
    torch.testing.assert_close(hadamard_transform(x), hadamard_transform(x.contiguous()))


def test_gradients_pass_even_if_the_matrix_was_first_needed_in_inference_mode() -> None:
    with torch.inference_mode():
        hadamard_transform(torch.ones(1, 224))
    x = torch.ones(2, 224, requires_grad=True)
    hadamard_transform(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_a_callers_copy_of_the_matrix_is_his_own() -> None:
    hadamard_matrix(16).zero_()
    assert hadamard_matrix(16).any()


def test_sizes_without_a_rotation_are_refused() -> None:
    for d in (0, -4, 7, 75):
        with pytest.raises(UsageError):
            hadamard_matrix(d)


@pytest.mark.parametrize("rotations", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize(
    ("heads", "length", "dims"), [((4, 2), 1, (64, 64)), ((3, 1), 1, (64, 64)), ((4, 2), 5, (64, 48))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_tokens_get_the_numbers_that_each_tensor_gets_alone(rotations, heads, length, dims, dtype) -> None:
    """Also where one product serves all, and a tensor of a single row, whose product alone rounds otherwise."""
    torch.manual_seed(0)
    (query_heads, key_heads), (key_dim, value_dim) = heads, dims
    shapes = (query_heads, key_dim), (key_heads, key_dim), (key_heads, value_dim)
    tensors = [torch.randn(1, count, length, dim, dtype=dtype) for count, dim in shapes]
    keys, values = rotations
    for found, x, rotated in zip(
        rotate_new_tokens(*tensors, Rotations(*rotations)), tensors, (keys, keys, values), strict=True
    ):
        assert torch.equal(found, hadamard_transform(x) if rotated else x)
    assert rotate_new_tokens(None, *tensors[1:], Rotations(*rotations))[0] is None
