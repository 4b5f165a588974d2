"""Each pass declares exactly the plan tensors that it can make: readers of a bundle rely on the list."""

from dataclasses import replace

import pytest
from sample_layers import cache_format, layer_work, run_layer, run_passes

from kvconvert.calibration.attention_sample import AttentionSampler
from kvconvert.calibration.awq import AwqPass
from kvconvert.calibration.calibquant import CalibQuantPass
from kvconvert.calibration.clip_ratios import ClipRatioPass
from kvconvert.calibration.kitty import KittyPass
from kvconvert.calibration.minikv import MiniKVPass
from kvconvert.calibration.oscar import OscarPass
from kvconvert.calibration.protocol import CalibrationPass
from kvconvert.calibration.static_scales import StaticScalesPass
from kvconvert.kernels.decode.reference import LayerFormat
from kvconvert.kernels.pages import KeyFormat, ValueFormat
from kvconvert.kernels.spans import SpanFormat

BOOSTED = LayerFormat(KeyFormat(2, 8, 128, 2, 32, boosted=2), ValueFormat(2, 8, 128, 2, 8))
STATIC = LayerFormat(KeyFormat(2, 8, 128, 8, 128, static=True), ValueFormat(2, 8, 128, 8, 8, static=True))


def sampled(make):
    """A pass that reads a sample, after its sampler."""
    sampler = AttentionSampler(1)
    return [sampler, make(sampler)]


# The passes with every option on, and the format of the layer's cache.
CASES = {
    AwqPass: (lambda: [AwqPass(4, 32)], {}),
    CalibQuantPass: (lambda: sampled(lambda s: CalibQuantPass(s, (0.0, 1.0))), {"span": SpanFormat(2, 2)}),
    ClipRatioPass: (lambda: sampled(ClipRatioPass), {}),
    KittyPass: (lambda: [KittyPass("calibrated")], {"pages": BOOSTED}),
    MiniKVPass: (lambda: sampled(lambda s: MiniKVPass(s, 0.25)), {}),
    OscarPass: (lambda: [OscarPass(True, 32)], {}),
    StaticScalesPass: (lambda: [StaticScalesPass()], {"pages": STATIC}),
}


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.name)
def test_a_pass_makes_the_plan_tensors_that_it_declares(kind):
    make, changes = CASES[kind]
    work, _ = layer_work(samples=2, length=136)
    work.cache = replace(cache_format(), **changes)
    work.replay = lambda: run_layer(work)
    assert run_passes(make(), work).plan.keys() == {*kind.plan_tensors}


def test_every_pass_is_tested():
    assert {kind for kind in CalibrationPass.__subclasses__() if kind.__module__.startswith("kvconvert.")} == {
        AttentionSampler,
        *CASES,
    }
    assert AttentionSampler.plan_tensors == ()
