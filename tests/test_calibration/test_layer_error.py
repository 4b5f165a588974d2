"""A layer never keeps more of AWQ than gives its whole output the least error."""

import copy

import pytest
import torch
from test_awq import GROUP, LENGTH, SAMPLES, STRUCTURE, Setting

from kvconvert.calibration.awq import AwqPass, LayerSampler
from kvconvert.calibration.protocol import LayerWork
from kvconvert.calibration.ranks import Ranks
from kvconvert.kernels.linear.awq_format import fake_quantize_weight

BITS = 3


def work_on(setting, dtype=torch.bfloat16):
    return LayerWork("model.layers.0", copy.deepcopy(setting.layer), STRUCTURE, SAMPLES, LENGTH, dtype)


def quantized(setting, work):
    """What AWQ records of the layer, which it leaves ready for rounding."""
    awq = AwqPass(BITS, GROUP)
    with awq.observe(work):
        setting.run(work.layer)
    awq.solve(work)
    awq.apply(work)
    return awq.result().statistics


def error_when_rounded(setting, layer):
    """The relative error of the output behind the first norm, every Linear rounded to nearest."""
    layer, expected = copy.deepcopy(layer), setting.run(setting.layer)
    for name in STRUCTURE.linears:
        weight = layer.get_submodule(name).weight
        weight.copy_(fake_quantize_weight(weight, BITS, GROUP))
    norm = setting.layer.input_layernorm
    return float((norm(setting.run(layer)) - norm(expected)).square().sum() / norm(expected).square().sum())


def with_a_sink(setting):
    """The first token of each sequence fills one input in each group of the down projection with a huge value.

    So it decides on the scales of that projection, and every other token pays.
    """
    layer, hidden = setting.layer, setting.hidden
    hidden[:, :, 7], hidden[:, 0] = 0, 0
    hidden[:, 0, 7] = 30.0
    for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
        linear.weight[:, 7], linear.weight[5::GROUP, 7] = 0, 60.0
    return setting


def test_scales_are_kept_where_channels_are_salient_and_the_recorded_errors_are_those_of_the_stored_layer():
    setting = Setting()
    for norm in (setting.layer.input_layernorm, setting.layer.post_attention_layernorm):
        norm.weight.copy_(norm.weight.bfloat16())
    work = work_on(setting)
    found = quantized(setting, work)
    errors = found["layer_error"]
    assert found["kept"] == "scales and clips"
    assert list(errors) == ["rounding", "clips", "scales and clips"]
    assert errors["scales and clips"] < 0.9 * min(errors["rounding"], errors["clips"])
    assert errors["rounding"] == pytest.approx(error_when_rounded(setting, setting.layer), rel=1e-3)
    # The stored values of v_proj's bias are rounded to bfloat16 in the record alone.
    assert errors["scales and clips"] == pytest.approx(error_when_rounded(setting, work.layer), rel=1e-2)


def test_scales_that_serve_one_token_and_harm_the_others_are_left_out():
    setting = with_a_sink(Setting(seed=3))
    work = work_on(setting)
    found = quantized(setting, work)
    errors = found["layer_error"]
    down = found["scales"]["mlp.up_proj -> mlp.down_proj"]
    assert down["ratio"] > 0.5
    assert down["loss_after"] < down["loss_before"]
    assert errors["scales and clips"] > 2 * errors["rounding"]
    assert errors["clips"] > errors["rounding"]
    assert found["kept"] == "rounding"
    assert all(torch.equal(value, work.layer.state_dict()[name]) for name, value in setting.layer.state_dict().items())


def test_of_equal_errors_plain_rounding_wins():
    setting = Setting()
    for name in STRUCTURE.linears:
        setting.layer.get_submodule(name).weight.zero_()
    work = work_on(setting, torch.float32)
    found = quantized(setting, work)
    assert set(found["layer_error"].values()) == {0.0}
    assert found["kept"] == "rounding"
    assert found["clips"] == {}
    assert all(torch.equal(value, work.layer.state_dict()[name]) for name, value in setting.layer.state_dict().items())


def test_solving_leaves_the_layer_and_its_hooks_as_they_were():
    setting = Setting()
    work, awq = work_on(setting), AwqPass(BITS, GROUP)
    with awq.observe(work):
        setting.run(work.layer)
    awq.solve(work)
    assert all(torch.equal(value, work.layer.state_dict()[name]) for name, value in setting.layer.state_dict().items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in work.layer.modules())


@pytest.mark.parametrize(("samples", "length", "wanted"), [(64, 512, {8, 40}), (3, 8, {0, 1, 2}), (8, 9000, {2})])
def test_sequences_of_the_sample_lie_between_those_of_the_search(samples, length, wanted):
    work = LayerWork("model.layers.0", Setting().layer, STRUCTURE, samples, length, torch.float32)
    assert LayerSampler(work)._wanted == wanted


class OneOfTwo(Ranks):
    """A rank that saw half of the sequences; the other's arrive in its place."""

    size = 2

    def __init__(self, rank, sent):
        self.rank, self.sent = rank, sent

    def gather_list(self, items):
        others = self.sent[1 - self.rank].pop(0)
        return [*items, *others] if self.rank == 0 else [*others, *items]


def test_every_rank_has_the_sample_of_one_process():
    setting = Setting()

    def sampled(ranks, first, hidden):
        work = work_on(setting)
        work.ranks, work.first_sample = ranks, first
        sampler = LayerSampler(work)
        with torch.no_grad(), sampler.attached(work.layer):
            for batch in hidden.split(1):
                work.layer(batch, **setting.kwargs)
        return sampler.result()

    whole, halves = sampled(Ranks(), 0, setting.hidden), []
    for first in (0, SAMPLES // 2):
        halves.append(sampled(Ranks(), first, setting.hidden[first : first + SAMPLES // 2]))
    sent = [[[half.inputs], [half.outputs], half.arguments] for half in halves]
    for rank in (0, 1):
        first = rank * SAMPLES // 2
        found = sampled(OneOfTwo(rank, copy.deepcopy(sent)), first, setting.hidden[first : first + SAMPLES // 2])
        assert torch.equal(found.inputs, whole.inputs)
        assert torch.equal(found.outputs, whole.outputs)
        assert found.error(setting.layer) == whole.error(setting.layer)
