"""Weights corrected towards the source model's outputs: moments and corrections against the definition."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from test_awq import GROUP, LENGTH, SAMPLES, STRUCTURE, Setting

from kvconvert.calibration import gptq
from kvconvert.calibration.awq import AwqPass
from kvconvert.calibration.gptq import GptqPass, Mismatch, correction, rounding_order
from kvconvert.calibration.hessians import factorize
from kvconvert.calibration.protocol import LayerWork
from kvconvert.calibration.ranks import ALONE

STRUCTURE = copy.copy(STRUCTURE)
object.__setattr__(STRUCTURE, "adds_to_stream", True)


@dataclass
class Tokens:
    """Inputs of a Linear in two models, and the difference of the streams that it writes to."""

    x: torch.Tensor
    y: torch.Tensor
    r: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def random(cls, outputs=7, inputs=24, tokens=300, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        x = normal(tokens, inputs) @ (torch.eye(inputs) + 0.3 * normal(inputs, inputs))
        y = x + 0.3 * x @ normal(inputs, inputs) / inputs**0.5 + 0.1 * normal(tokens, inputs)
        return cls(x, y, 0.2 * y @ normal(inputs, outputs) + 0.1 * normal(tokens, outputs), normal(outputs, inputs))

    def moments(self, writes, batches=(100, 200)):
        found = Mismatch(len(self.weight) if writes else self.x.shape[1], self.x.shape[1], self.x.device)
        for x, y, r in zip(*(t.split(batches) for t in (self.x, self.y, self.r)), strict=True):
            found.add(r + (x - y) @ self.weight.T if writes else x - y, y)
        found.reduce(ALONE)
        return found


def moments_and_target(tokens, writes):
    hessian, cross = tokens.moments(writes).moments()
    return hessian, cross if writes else tokens.weight @ cross


def by_definition(tokens, writes, damping):
    """The weight with the least error, by least squares in which the damping is further tokens."""
    x, y, r, weight = (t.double() for t in (tokens.x, tokens.y, tokens.r, tokens.weight))
    wanted = x @ weight.T + (r if writes else 0)
    ridge = (damping * y.square().sum(0)).sqrt().diag()
    return torch.linalg.lstsq(torch.cat([y, ridge]), torch.cat([wanted, ridge @ weight.T])).solution.T


@pytest.mark.parametrize("damping", [0.3, 1.0])
@pytest.mark.parametrize("writes", [False, True], ids=["reads a norm", "writes to the stream"])
def test_the_corrected_weight_is_that_of_least_squares(writes, damping):
    tokens = Tokens.random()
    hessian, target = moments_and_target(tokens, writes)
    factor = factorize(hessian, rounding_order(hessian), damping, block=16)
    moved = correction(target, factor, block=16)
    expected = by_definition(tokens, writes, damping)
    torch.testing.assert_close((tokens.weight + moved).double(), expected, rtol=1e-4, atol=1e-4)
    assert moved.norm() > 0.05 * tokens.weight.norm()


def test_equal_inputs_correct_nothing():
    tokens = Tokens.random()
    tokens.y, tokens.r = tokens.x, torch.zeros_like(tokens.r)
    for writes in (False, True):
        assert not moments_and_target(tokens, writes)[1].any()


def test_moments_add_up_in_blocks_of_rows(monkeypatch):
    tokens = Tokens.random(outputs=30)
    whole = [moments_and_target(tokens, writes)[1] for writes in (False, True)]
    monkeypatch.setattr(gptq, "block_rows", lambda width: [(0, 13), (13, width - 13)])
    for expected, writes in zip(whole, (False, True), strict=True):
        torch.testing.assert_close(moments_and_target(tokens, writes)[1], expected)


@dataclass
class Paired:
    """`PairedInputs` of a layer whose quantized model has another input."""

    setting: Setting
    quantized: torch.Tensor
    kept: dict = field(default_factory=dict)

    def recording(self, layer, names):
        self.kept = self.inputs(layer, filter(None, names), self.setting.hidden)
        with torch.no_grad():
            self.kept[""] = layer(self.setting.hidden, **self.setting.kwargs)
        return torch.no_grad()

    def of(self, layer, kept, names):
        found = self.inputs(layer, names, self.quantized)
        for i in range(SAMPLES):
            yield self.kept[kept][i : i + 1], {name: found[name][i : i + 1] for name in names}

    def inputs(self, layer, names, hidden):
        found = {}

        def record(name):
            return lambda module, args: found.__setitem__(name, args[0].clone())

        hooks = [layer.get_submodule(name).register_forward_pre_hook(record(name)) for name in names]
        with torch.no_grad():
            layer(hidden, **self.setting.kwargs)
        for hook in hooks:
            hook.remove()
        return found


def converted(setting, quantized, bits, awq, paired):
    """The layer after one pass, and its work."""
    layer = copy.deepcopy(setting.layer)
    work = LayerWork("model.layers.0", layer, STRUCTURE, SAMPLES, LENGTH, torch.float32)
    work.paired = Paired(setting, quantized) if paired else None
    made = GptqPass(bits, GROUP, AwqPass(bits, GROUP, compensated=True) if awq else None)
    with made.observe(work), torch.no_grad():
        layer(setting.hidden, **setting.kwargs)
    made.solve(work)
    made.apply(work)
    return work


@pytest.mark.each_value
@pytest.mark.parametrize("awq", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_corrected_layer_undoes_some_of_the_error_that_it_is_given(bits, awq):
    """Other tokens, off by what is a function of them, come out nearer to the source model's than they went in."""
    setting = Setting(bias=False)
    generator = torch.Generator().manual_seed(3)
    drift = torch.eye(64) + 0.15 * torch.randn(64, 64, generator=generator) / 8
    errors = {}
    for paired in (False, True):
        work = converted(setting, setting.hidden @ drift, bits, awq, paired)
        for name, grid in work.grids.items():
            weight = work.layer.get_submodule(name).weight
            assert torch.equal(grid.round(weight), weight)
        assert set(work.grids) == set(STRUCTURE.linears)
        with torch.no_grad():
            found = work.layer(setting.hidden @ drift, **setting.kwargs)
            expected = setting.layer(setting.hidden, **setting.kwargs)
        errors[paired] = float((found - expected).square().mean())
    assert errors[True] < 0.8 * errors[False]
