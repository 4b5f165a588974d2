"""GPTQ: the blocked form against the definition, grids against the format's own rounding, and the pass on layers."""

import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from test_awq import GROUP, LENGTH, SAMPLES, STRUCTURE, Setting

from kvconvert.calibration import gptq, hessians, weight_grid
from kvconvert.calibration.activations import point_of
from kvconvert.calibration.awq import AwqPass
from kvconvert.calibration.awq_scales import search_scales
from kvconvert.calibration.gptq import DAMPING, GptqPass, compensate, rounding_order
from kvconvert.calibration.hessians import HessianRecorder, SquareSum, damped_diagonal, factorize
from kvconvert.calibration.protocol import LayerWork
from kvconvert.calibration.weight_grid import WeightGrid
from kvconvert.errors import NumericError
from kvconvert.kernels.linear.awq_format import fake_quantize_weight
from kvconvert.kernels.quantizer import GroupRangeError


def problem(outputs, inputs, seed=0, tokens=400):
    """A weight, and the Hessian of correlated inputs of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    mixing = torch.eye(inputs) + 0.2 * torch.randn(inputs, inputs, generator=generator)
    x = torch.randn(tokens, inputs, generator=generator) @ mixing * (0.3 + torch.rand(inputs, generator=generator))
    return weight, x.T @ x / tokens


def compensated(weight, hessian, grid, order=None, damping=DAMPING):
    """A weight by the factor of a Hessian, and the damping that the factor took."""
    order = torch.arange(weight.shape[1]) if order is None else order
    factor = factorize(hessian.clone(), order, damping)
    return compensate(weight, factor, grid), factor.damping


def compensated_by_definition(weight, hessian, grid, order=None):
    """Column by column, with an inverse for each."""
    order = torch.arange(weight.shape[1]) if order is None else order
    free, hessian = weight.double().clone(), hessian.double().clone()
    hessian.diagonal().copy_(damped_diagonal(hessian.diagonal(), DAMPING))
    result = torch.empty_like(weight)
    for position, column in enumerate(order):
        (scale,), (zero,) = grid.of_columns(column[None])
        result[:, column] = grid.nearest(free[:, column].float(), scale, zero)
        rest = order[position:]
        inverse = torch.linalg.inv(hessian[rest][:, rest])
        error = (free[:, column] - result[:, column].double()) / inverse[0, 0]
        free[:, rest] -= error[:, None] * inverse[0]
    return result


def output_error(weight, rounded, hessian):
    """Trace of D H D^T for D = rounded - weight: mean squared error of the outputs, summed over them."""
    delta = rounded - weight
    return float(((delta @ hessian) * delta).sum(dtype=torch.float64))


@pytest.mark.each_value
@pytest.mark.parametrize("ordered", [False, True], ids=["left to right", "by diagonal"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(5, 48, 16), (3, 144, 48)])  # 144 is more than one block
def test_the_blocked_form_is_the_definition(outputs, inputs, group, bits, ordered):
    weight, hessian = problem(outputs, inputs)
    grid = WeightGrid.of(weight, bits, group)
    order = rounding_order(hessian) if ordered else None
    expected = compensated_by_definition(weight, hessian, grid, order)
    found = compensated(weight, hessian, grid, order)[0]
    # float32 against float64: a code may fall on the other side of a tie, which moves all after it.
    assert (found != expected).float().mean() <= 0.02
    assert output_error(weight, found, hessian) == pytest.approx(output_error(weight, expected, hessian), rel=0.02)
    assert output_error(weight, found, hessian) < 0.8 * output_error(weight, grid.round(weight), hessian)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_grid_rounds_as_the_format_does(bits):
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    weight[2, 16:32] = 0
    weight[3, :16] = weight[3, :16].abs() + 1  # zero is outside the group's own range
    grid = WeightGrid.of(weight, bits, GROUP)
    rounded = grid.round(weight)
    assert torch.equal(rounded, fake_quantize_weight(weight, bits, GROUP))
    codes = grid.codes(rounded).float().unflatten(1, (-1, GROUP))
    assert codes.max() <= 2**bits - 1
    assert torch.equal(((codes - grid.zero[..., None]) * grid.scale[..., None]).flatten(1), rounded)


@pytest.mark.parametrize("size", [5, 32, 75])  # blocks of 16: a part of one, whole ones, and both
def test_the_factor_is_the_inverse_s_and_keeps_the_hessian(size):
    _, hessian = problem(1, size)
    order = rounding_order(hessian)
    found = factorize(hessian.clone(), order, 0.01, block=16)
    upper, permuted = found.matrix.triu().double(), hessian[order][:, order].double()
    damped = permuted + 0.01 * permuted.diagonal().diag()
    torch.testing.assert_close(upper.T @ upper @ damped, torch.eye(size, dtype=torch.float64), rtol=0, atol=2e-4)
    assert torch.equal(found.matrix.tril(-1), hessian[order][:, order].tril(-1))
    weight, rounded = torch.randn(7, size), torch.randn(7, size)
    assert found.output_error(weight, rounded) == pytest.approx(output_error(weight, rounded, hessian), rel=1e-4)


def test_more_damping_begins_from_the_hessian_again():
    _, hessian = problem(1, 40)
    hessian -= 0.02 * hessian.diagonal().mean() * torch.eye(40)  # fails in a late block, after others were replaced
    once, again = (factorize(hessian.clone(), torch.arange(40), damping, block=16) for damping in (0.1, 1e-5))
    assert again.damping == pytest.approx(0.1)
    torch.testing.assert_close(once.matrix, again.matrix, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("numbers", [10**4, 500])
def test_a_sum_of_squares_is_symmetric_and_stored_once(numbers, monkeypatch):
    monkeypatch.setattr(hessians, "BLOCK_NUMBERS", numbers)
    total, x = SquareSum(48, torch.device("cpu")), torch.randn(70, 48)
    for batch in x.split(30):
        total.add(batch)
    expected = x.T @ x / 70
    torch.testing.assert_close(total.mean(70), expected)
    assert sum(block.numel() for block in total.blocks.values()) == (
        48 * 48 if numbers > 48 * 48 else 11 * 48 + 14 * 37 + 22 * 23 + 1
    )
    assert torch.equal(total.mean(70), total.mean(70, release=True))
    assert not total.blocks


def test_what_remains_of_an_error_is_what_no_later_input_makes_up_for():
    _, hessian = problem(4, 40)
    hessian[7], hessian[:, 7] = 0, 0
    order = rounding_order(hessian)
    remaining = factorize(hessian.clone(), order, 0.3, block=16).remaining()
    damped = hessian.double()
    damped.diagonal().copy_(damped_diagonal(damped.diagonal(), 0.3))
    for position, column in enumerate(order.tolist()):
        rest = order[position:]
        expected = 1 / torch.linalg.inv(damped[rest][:, rest])[0, 0] if column != 7 else torch.tensor(0.0)
        assert float(remaining[column]) == pytest.approx(float(expected), rel=1e-3)


def test_a_scaled_factor_is_that_of_the_scaled_inputs():
    _, hessian = problem(4, 40)
    order, scale = rounding_order(hessian), torch.rand(40) + 0.5
    found = factorize(hessian.clone(), order, 0.3, block=16).scaled_(scale, block=16)
    expected = factorize(hessian / scale / scale[:, None], order, 0.3, block=16)
    torch.testing.assert_close(found.matrix, expected.matrix, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.diagonal, expected.diagonal)


def test_searches_weigh_errors_by_what_remains_of_them():
    setting = Setting(seed=1)
    remaining = {point: torch.rand(moment.shape[0] * GROUP) for point, moment in setting.observed.second_moment.items()}
    observed = replace(setting.observed, remaining=remaining)
    scalings, _ = search_scales(setting.layer, STRUCTURE, observed, 3, GROUP)
    for scaling in scalings:
        left = []
        for scale in (torch.ones_like(scaling.reader_scale), scaling.reader_scale):
            errors = []
            for reader in scaling.readers:
                weight = setting.layer.get_submodule(reader).weight
                delta = fake_quantize_weight(weight * scale, 3, GROUP) / scale - weight
                errors.append((delta.square() * remaining[point_of(STRUCTURE, reader)]).sum())
            left.append(torch.stack(errors))
        assert scaling.loss_before == pytest.approx(len(scaling.readers))
        assert scaling.loss_after == pytest.approx(float((left[1] / left[0]).sum()), rel=1e-4)
        assert scaling.loss_after <= scaling.loss_before
    assert any(scaling.ratio for scaling in scalings)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_searched_grid_costs_least_of_those_in_the_middle_of_a_group(bits, monkeypatch):
    monkeypatch.setitem(weight_grid._SEARCHED_WEIGHTS, "cpu", 3 * 32)  # rows in parts
    weight, _ = problem(7, 32)
    weight[2] = weight[2].abs() + 1
    weight[3, :GROUP] = 0
    costs = torch.rand(32)
    found, top = WeightGrid.searched(weight, bits, GROUP, costs), 2**bits - 1

    def error(row, group, scale, zero):
        part = slice(group * GROUP, (group + 1) * GROUP)
        values = ((weight[row, part] / scale).round() + zero).clamp(0, top) - zero
        return float(((values * scale - weight[row, part]).square() * costs[part]).sum())

    whole = WeightGrid.of(weight, bits, GROUP)
    for row, group in product(range(7), range(32 // GROUP)):
        part = weight[row, group * GROUP : (group + 1) * GROUP]
        low, high = min(float(part.min()), 0.0), max(float(part.max()), 0.0)
        errors = [error(row, group, whole.scale[row, group], whole.zero[row, group])]
        for share in weight_grid.RANGES if high > low else ():
            scale = torch.tensor((high - low) / top * share).half().float()
            middle = math.floor(top / 2 - (low + high) / (2 * float(scale)))
            errors += [error(row, group, scale, min(max(zero, 0), top)) for zero in (middle, middle + 1)]
        assert error(row, group, found.scale[row, group], found.zero[row, group]) == pytest.approx(
            min(errors), rel=1e-4
        )
    improved = [
        error(row, group, found.scale[row, group], found.zero[row, group])
        < 0.95 * error(row, group, whole.scale[row, group], whole.zero[row, group])
        for row, group in product((0, 1, 4, 5, 6), range(32 // GROUP))
    ]
    assert sum(improved) > len(improved) / 2 or bits == 4
    nothing = WeightGrid.searched(weight, bits, GROUP, torch.zeros(32))
    assert torch.equal(nothing.scale, whole.scale)
    assert torch.equal(nothing.zero, whole.zero)


def test_independent_inputs_are_rounded_to_nearest():
    weight, _ = problem(4, 32)
    grid = WeightGrid.of(weight, 3, GROUP)
    assert torch.equal(compensated(weight, torch.diag(torch.rand(32) + 0.1), grid)[0], grid.round(weight))


def test_an_input_that_never_occurs_is_rounded_to_nearest():
    weight, hessian = problem(4, 32)
    hessian[7], hessian[:, 7] = 0, 0
    grid = WeightGrid.of(weight, 3, GROUP)
    found = compensated(weight, hessian, grid, rounding_order(hessian))[0]
    assert torch.equal(found[:, 7], grid.round(weight)[:, 7])
    assert not torch.equal(found, grid.round(weight))


def test_more_damping_is_taken_and_told_where_float32_needs_it():
    weight, _ = problem(4, 32)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))  # three tokens, 32 inputs
    grid = WeightGrid.of(weight, 4, GROUP)
    assert compensated(weight, x.T @ x, grid, damping=1e-9)[1] > 1e-9
    with pytest.raises(NumericError, match="not positive definite"):
        compensated(weight, torch.diag(-torch.ones(32)), grid)
    with pytest.raises(NumericError, match="NaN or infinity"):
        compensated(weight, torch.full((32, 32), float("nan")), grid)


def test_weights_beyond_fp16_scales_are_refused():
    with pytest.raises(GroupRangeError, match=r"\(1, 2\)"):
        WeightGrid.of(torch.zeros(2, 48).index_put((torch.tensor(1), torch.tensor(40)), torch.tensor(torch.inf)), 4, 16)


def test_hessians_are_the_inputs_second_moments_in_any_batches():
    setting = Setting()
    recorder = HessianRecorder(STRUCTURE)
    with torch.no_grad(), recorder.attached(setting.layer):
        for batch in setting.hidden.split([1, SAMPLES - 1]):
            setting.layer(batch, **setting.kwargs)
    for point, expected in setting.observed.second_moment.items():
        rows = recorder.of(point).split(GROUP)
        blocks = torch.stack([some[:, i * GROUP : (i + 1) * GROUP] for i, some in enumerate(rows)])
        torch.testing.assert_close(blocks, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    scale = torch.rand(64) + 0.5
    name = "mlp.gate_proj"
    torch.testing.assert_close(recorder.of(name, scale), recorder.of(name) / scale / scale[:, None])
    assert not any(module._forward_pre_hooks for module in setting.layer.modules())


def converted(setting, calibration_pass):
    """The layer's work after one pass."""
    work = LayerWork("model.layers.0", setting.layer, STRUCTURE, SAMPLES, LENGTH, torch.float32)
    with calibration_pass.observe(work):
        setting.run(setting.layer)
    calibration_pass.solve(work)
    calibration_pass.apply(work)
    return work


@pytest.mark.quick("3")
@pytest.mark.parametrize("bits", [3, 4])
def test_compensation_lowers_the_error_of_the_layer(bits):
    """On the calibration data itself, in the geometric mean of several layers: AWQ's scales below it again."""
    errors = {name: [] for name in ("rtn", "awq", "gptq", "awq+gptq")}
    for seed, name in product(range(4), errors):
        setting = Setting(seed=seed)
        expected = setting.run(setting.layer)
        awq = AwqPass(bits, GROUP, compensated=name != "awq") if "awq" in name else None
        found = {"rtn": None, "awq": awq}.get(name, GptqPass(bits, GROUP, awq))
        grids = {} if found is None else converted(setting, found).grids
        assert set(grids) == (set(STRUCTURE.linears) if "gptq" in name else set())
        for linear in STRUCTURE.linears:
            weight = setting.layer.get_submodule(linear).weight
            if linear in grids:
                assert torch.equal(grids[linear].round(weight), weight)
            else:
                weight.copy_(fake_quantize_weight(weight, bits, GROUP))
        errors[name].append(float((setting.run(setting.layer) - expected).square().mean()))
    means = {name: math.prod(found) for name, found in errors.items()}
    assert means["gptq"] < means["rtn"]
    assert means["awq+gptq"] < min(means["awq"], means["gptq"])


def test_the_pass_says_what_it_gained():
    setting = Setting()
    passed = GptqPass(3, GROUP)
    converted(setting, passed)
    losses = passed.result().statistics["compensation"]
    assert set(losses) == set(STRUCTURE.linears)
    assert all(loss["loss_after"] < loss["loss_before"] for loss in losses.values())
    assert passed.result().reasons == {}


def test_outputs_compensated_in_parts_are_those_compensated_together(monkeypatch):
    whole, parts = Setting(), Setting()
    passes = GptqPass(3, GROUP), GptqPass(3, GROUP)
    converted(whole, passes[0])
    monkeypatch.setattr(gptq, "outputs_at_once", lambda outputs, inputs, device: 5)
    converted(parts, passes[1])
    for name in STRUCTURE.linears:
        weight, other = whole.layer.get_submodule(name).weight, parts.layer.get_submodule(name).weight
        assert len(weight) > 5
        assert torch.equal(weight, other)
        loss, of_parts = (made.result().statistics["compensation"][name] for made in passes)
        assert of_parts == pytest.approx(loss, rel=1e-5)


def test_outputs_at_once_bound_their_weights():
    assert gptq.outputs_at_once(4096, 14336, "cpu") * 14336 <= 2**24
    assert gptq.outputs_at_once(40, 14336, "cpu") == 40
    assert gptq.outputs_at_once(4096, 14336, "cuda") == 4096


@pytest.mark.parametrize(("method", "scales"), [("awq", None), ("rtn", None), ("gptq", False), ("awq+gptq", True)])
def test_recipes_ask_for_it(method, scales):
    from kvconvert.methods.awq import WeightsRecipe

    made = GptqPass.of(SimpleNamespace(weights=WeightsRecipe(method=method, group_size=32)), None)
    assert (made is None) == (scales is None)
    assert made is None or (made.awq is not None) == scales
