"""Each pass makes exactly the plan tensors that its method declares: readers of a bundle rely on the list."""

from dataclasses import replace

import pytest
import torch
from sample_layers import cache_format, layer_work, run_layer, run_passes

from kvconvert.calibration.attention_sample import AttentionSampler
from kvconvert.calibration.awq import AwqPass
from kvconvert.calibration.calibquant import CalibQuantPass
from kvconvert.calibration.gptq import GptqPass
from kvconvert.calibration.keys import ErrorFeedbackPass, KeyTreatmentPass
from kvconvert.calibration.kitty import KittyPass
from kvconvert.calibration.kvzip import FittedScorer, KVzipPass
from kvconvert.calibration.minikv import MiniKVPass
from kvconvert.calibration.oscar import OscarPass
from kvconvert.calibration.protocol import LayerJob
from kvconvert.calibration.scales import ClipRatioPass, StaticScalesPass
from kvconvert.convert.passes import PASSES
from kvconvert.errors import NumericError
from kvconvert.kernels.pages import LayerFormat, PageFormat
from kvconvert.kernels.select import TokenScorer
from kvconvert.kernels.spans import SpanFormat
from kvconvert.methods import KVCalibration, KVScheme
from kvconvert.methods.calibquant import CalibQuant
from kvconvert.methods.keys import ErrorFeedback, KeyCenter
from kvconvert.methods.kitty import Kitty
from kvconvert.methods.kvzip import KVzip, scorer_shapes
from kvconvert.methods.minikv import MiniKV
from kvconvert.methods.oscar import Oscar
from kvconvert.methods.scales import ClipRatio, StaticScales

BOOSTED = LayerFormat(PageFormat.keys(2, 8, 128, 2, 32, boosted=2), PageFormat.values(2, 8, 128, 2, 8))
STATIC = LayerFormat(PageFormat.keys(2, 8, 128, 8, 128, static=True), PageFormat.values(2, 8, 128, 8, 8, static=True))


def sampled(make):
    """A pass that reads a sample, after its sampler."""
    sampler = AttentionSampler(1)
    return [sampler, make(sampler)]


def centering(sampler):
    """A pass that keeps the constant part of keys."""
    return KeyTreatmentPass(sampler, KVScheme(key_center="calibrated"), KVCalibration())


def predicting():
    """The pass of a layer whose network was fitted."""
    scheme = KVScheme(heavy_ratio=0.3, recent_ratio=0.1, selection="predicted")
    *parts, quantiles = map(torch.zeros, scorer_shapes(2, 8, 8).values())
    sizes = {"heads": 2, "key_dim": 8, "value_dim": 8}
    fit = FittedScorer(TokenScorer(*parts), 0.0, quantiles)
    return KVzipPass(LayerJob(0, "", None, scheme, None, None, **sizes, scorer=fit))


# The method of each pass, if it leaves tensors; the pass with every option on; and the format of the layer's cache.
CASES = {
    AwqPass: (None, lambda: [AwqPass(4, 32)], {}),
    CalibQuantPass: (CalibQuant, lambda: sampled(lambda s: CalibQuantPass(s, (0.0, 1.0))), {"span": SpanFormat(2, 2)}),
    ClipRatioPass: (ClipRatio, lambda: sampled(ClipRatioPass), {}),
    ErrorFeedbackPass: (ErrorFeedback, lambda: [ErrorFeedbackPass()], {}),
    GptqPass: (None, lambda: [GptqPass(4, 32)], {}),
    KeyTreatmentPass: (KeyCenter, lambda: sampled(centering), {}),
    KVzipPass: (KVzip, lambda: [predicting()], {}),
    KittyPass: (Kitty, lambda: [KittyPass("calibrated")], {"keys": BOOSTED.keys, "values": BOOSTED.values}),
    MiniKVPass: (MiniKV, lambda: sampled(lambda s: MiniKVPass(s, 0.25)), {}),
    OscarPass: (Oscar, lambda: [OscarPass(True, 32)], {}),
    StaticScalesPass: (StaticScales, lambda: [StaticScalesPass()], {"keys": STATIC.keys, "values": STATIC.values}),
}


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.name)
def test_a_pass_makes_the_plan_tensors_that_its_method_declares(kind):
    method, make, changes = CASES[kind]
    work, _ = layer_work(samples=2, length=136)
    work.cache = replace(cache_format(), **changes)
    work.replay = lambda: run_layer(work)
    assert run_passes(make(), work).plan.keys() == {*(method.plan_tensors if method else ())}


# But for what reads the whole model's data before layers are calibrated.
@pytest.mark.parametrize("kind", [kind for kind in CASES if kind is not KVzipPass], ids=lambda kind: kind.name)
def test_nan_in_the_data_is_named_with_its_layer(kind):
    _, make, changes = CASES[kind]
    work, _ = layer_work(samples=2, length=136)
    work.cache = replace(cache_format(), **changes)
    work.layer.seen["hidden"][:, 3] = float("nan")
    work.replay = lambda: run_layer(work)
    with pytest.raises(NumericError, match=r"model\.layers\.0"):
        run_passes(make(), work)


def test_every_pass_is_tested():
    assert {*PASSES} == {*CASES}
