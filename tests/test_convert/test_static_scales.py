"""Static scales from calibration to generation."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert import export, load
from kvconvert.calibration.attention_sample import RECORDING_ATTENTION, attention_observed
from kvconvert.calibration.protocol import CalibrationPass
from kvconvert.calibration.scales import RunningBounds
from kvconvert.convert import layer_calibration, pipeline
from kvconvert.data.text import load_token_samples
from kvconvert.errors import BundleError
from kvconvert.kernels.rotate import hadamard_matrix

SAMPLES, LENGTH = 3, 300
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def calibrated(model, directory, text, fields, weights="none"):
    """A working directory of a recipe with these lines in its [kv] table."""
    directory.mkdir(exist_ok=True)
    recipe = directory / "recipe.toml"
    group = "" if weights == "none" else "group_size = 32\n"
    recipe.write_text(f'[weights]\nmethod = "{weights}"\n{group}[kv]\nstatic_scales = "calibrated"\n{fields}')
    settings = {"samples": SAMPLES, "seq_len": LENGTH, "progress": False}
    return pipeline.calibrate(str(model), directory / "work", recipe=recipe, data=text, **settings)


def calibration_ids(model, text):
    return load_token_samples(text, AutoTokenizer.from_pretrained(model), SAMPLES, LENGTH, 0).ids


def seen(model, text, index):
    """Keys and values [B, H, T, D] of a layer on the calibration data, from the whole source model."""
    source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=RECORDING_ATTENTION)
    found = []
    with (
        torch.no_grad(),
        attention_observed(source.model.layers[index].self_attn, lambda q, k, v: found.append((k, v))),
    ):
        source.eval()(calibration_ids(model, text), use_cache=False)
    return found[0]


def expected(x, bits, value_clip_ratio=1.0):
    """Scale and zero_point of each channel in float64."""
    low, high = x.double().amin((0, 2)), x.double().amax((0, 2))
    middle, half = (low + high) / 2, (high - low) / 2 * value_clip_ratio
    return 2 * half / (2**bits - 1), middle - half


def check(plan, index, side, found, bits, value_clip_ratio=1.0):
    for part, want in zip(("scale", "zero_point"), expected(found, bits, value_clip_ratio), strict=True):
        got = plan[f"layers.{index}.static_{side}_{part}"]
        assert got.dtype == torch.float16
        # float16 keeps 11 bits; float32 sums of another order move a bound a little
        torch.testing.assert_close(got.double(), want, rtol=2**-10, atol=1e-4)


def test_bounds_are_those_of_all_batches_without_sinks():
    batches = [torch.randn(2, 3, 9, 5), torch.randn(1, 3, 9, 5)]
    bounds = RunningBounds(sink_tokens=4)
    for batch in batches:
        bounds.update(batch)
    kept = torch.cat(batches)[:, :, 4:].transpose(1, 2).flatten(0, 1)
    assert torch.equal(bounds.bounds.low, kept.amin(0))
    assert torch.equal(bounds.bounds.high, kept.amax(0))
    short = RunningBounds(sink_tokens=20)
    short.update(batches[0])
    assert torch.equal(short.bounds.low, batches[0][:, :, -1].amin(0))


def test_the_plan_holds_the_smallest_and_largest_number_of_each_channel(place, model, text):
    fields = "key_bits = 8\nvalue_bits = 4\nkey_clip_ratio = 0.9\ncalibrate_clip_ratios = false\n"
    plan = calibrated(model, place / "plain", text, fields).layer_plan(1)
    keys, values = seen(model, text, 1)
    check(plan, 1, "key", keys, 8, 0.9)
    check(plan, 1, "value", values, 4)


def test_channels_are_measured_after_the_rotations(place, model, text):
    fields = 'rotate_keys = "hadamard"\nrotate_values = "folded"\n'
    fields += "key_bits = 8\nvalue_bits = 8\ncalibrate_clip_ratios = false\n"
    plan = calibrated(model, place / "rotated", text, fields).layer_plan(0)
    keys, values = (x @ hadamard_matrix(16).float() for x in seen(model, text, 0))
    check(plan, 0, "key", keys, 8)
    check(plan, 0, "value", values, 8)


class TripleValues(CalibrationPass):
    """Stands for a pass that changes weights once it has seen data."""

    name = "triple_values"

    def apply(self, work):
        work.layer.get_submodule(work.structure.value.linear).weight.mul_(3)


def test_channels_are_measured_on_the_finished_layer(place, model, text, monkeypatch):
    original = layer_calibration.make_passes
    monkeypatch.setattr(layer_calibration, "make_passes", lambda *args: [TripleValues(), *original(*args)])
    fields = "key_bits = 16\nvalue_bits = 8\ncalibrate_clip_ratios = false\n"
    plan = calibrated(model, place / "finished", text, fields).layer_plan(0)
    check(plan, 0, "value", seen(model, text, 0)[1] * 3, 8)
    assert "layers.0.static_key_scale" not in plan


@pytest.mark.quick("4-none")
@pytest.mark.parametrize(("bits", "weights"), [(8, "awq"), (4, "none")])
def test_a_bundle_with_static_scales_loads_and_generates(place, model, text, bits, weights):
    directory = place / f"bundle{bits}"
    work = calibrated(model, directory, text, f"key_bits = {bits}\nvalue_bits = {bits}\n", weights)
    scheme = work.layer_record(0).kv
    if weights == "none":
        check(work.layer_plan(0), 0, "key", seen(model, text, 0)[0], bits, scheme["key_clip_ratio"])
    export(work.path, directory / "bundle", progress=False)
    built, _ = load(directory / "bundle", dtype=torch.float32)
    ids = calibration_ids(model, text)[:1, :256]
    cache = built.new_kv_cache()
    with torch.no_grad():
        built(ids, past_key_values=cache)
        assert cache.stats().bits_per_value == bits
        after = built(ids[:, :1], past_key_values=cache).logits
        exact = built(torch.cat([ids, ids[:, :1]], 1), use_cache=False).logits[:, -1:]
    assert built.generate(ids[:, :140], max_new_tokens=5, **GREEDY).shape == (1, 145)
    error = (after - exact).norm() / exact.norm()
    assert error < {8: 0.02, 4: 0.15}[bits]  # measured 0.008 and 0.05


def test_a_bundle_that_lost_a_static_scale_is_refused(place, model, text):
    work = calibrated(model, place / "lost", text, "key_bits = 8\nvalue_bits = 8\ncalibrate_clip_ratios = false\n")
    plan = work.layer_plan(1)
    del plan["layers.1.static_value_scale"]
    work.commit_layer(1, work.layer_tensors(1), plan, work.layer_record(1))
    with pytest.raises(BundleError, match=r"layers\.1\.static_value_scale.*missing"):
        export(work.path, place / "lost" / "bundle", progress=False)
