"""AWQ's mechanism on constructed layers: salient channels, grouped queries, norms, clips, and the search's limits."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from kvconvert.calibration.activations import LOSS_TOKENS, ActivationRecorder
from kvconvert.calibration.awq import AwqPass, simulate_value_cache
from kvconvert.calibration.awq_scales import (
    _best_ratio,
    _linear_loss,
    _Losses,
    _token_parts,
    candidate_scale,
    representable_scale,
    search_scales,
)
from kvconvert.calibration.awq_scaling import apply_clips, apply_scales, search_clips
from kvconvert.calibration.protocol import LayerWork
from kvconvert.calibration.ranks import ALONE
from kvconvert.errors import NumericError
from kvconvert.kernels.linear.awq_format import fake_quantize_weight
from kvconvert.models.structure import LayerStructure, NormGroup, Projection, ScalingPair

GROUP = 16
SAMPLES, LENGTH = 4, 32
STRUCTURE = LayerStructure(
    attention="self_attn",
    query=Projection("self_attn.q_proj"),
    key=Projection("self_attn.k_proj"),
    value=Projection("self_attn.v_proj"),
    output="self_attn.o_proj",
    norm_groups=(
        NormGroup("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn",)),
        NormGroup("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), ("mlp",)),
    ),
    pairs=(ScalingPair(Projection("mlp.up_proj"), "mlp.down_proj"),),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


class Setting:
    """A decoder layer with salient channels before every Linear, inputs for it, and what a recorder saw."""

    def __init__(self, seed=0, bias=True):
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            attention_bias=bias, mlp_bias=bias, attn_implementation="sdpa",
        )  # fmt: skip
        self.layer = LlamaDecoderLayer(config, 0).eval().requires_grad_(False)
        for name, parameter in self.layer.named_parameters():
            parameter.normal_(1, 0.1) if "norm" in name else parameter.normal_(0, 0.15)
        for norm in (self.layer.input_layernorm, self.layer.post_attention_layernorm):
            norm.weight[[3, 20, 41]] *= 20
        self.layer.self_attn.v_proj.weight[[2, 9, 25]] *= 15
        self.layer.mlp.up_proj.weight[[5, 50, 77]] *= 15
        self.hidden = torch.randn(SAMPLES, LENGTH, 64)
        positions = torch.arange(LENGTH)[None]
        self.kwargs = {"position_embeddings": LlamaRotaryEmbedding(config)(self.hidden, positions)}
        self.observed = self.observe(self.layer)

    def run(self, layer):
        with torch.no_grad():
            return layer(self.hidden, **self.kwargs)

    def observe(self, layer, batches=(SAMPLES,)):
        recorder = ActivationRecorder(STRUCTURE, SAMPLES, LENGTH, GROUP)
        with torch.no_grad(), recorder.attached(layer):
            for batch in self.hidden.split(list(batches)):
                layer(batch, **self.kwargs)
        return recorder.result()


@pytest.fixture(scope="module")
def setting():
    return Setting()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_scaling_lowers_the_inspected_loss_where_channels_are_salient(setting, bits):
    scalings, skipped = search_scales(setting.layer, STRUCTURE, setting.observed, bits, GROUP)
    assert [scaling.label for scaling in scalings] == [
        "input_layernorm -> self_attn.q_proj, self_attn.k_proj, self_attn.v_proj",
        "post_attention_layernorm -> mlp.gate_proj, mlp.up_proj",
        "self_attn.v_proj -> self_attn.o_proj",
        "mlp.up_proj -> mlp.down_proj",
    ]
    assert skipped == {}
    for scaling in scalings:
        assert scaling.ratio > 0
        assert scaling.loss_after < 0.9 * scaling.loss_before


def test_shuffled_statistics_lose_to_true_ones(setting):
    generator = torch.Generator().manual_seed(0)
    shuffled = {n: v[torch.randperm(v.numel(), generator=generator)] for n, v in setting.observed.mean_abs.items()}
    true, _ = search_scales(setting.layer, STRUCTURE, setting.observed, 3, GROUP)
    wrong, _ = search_scales(setting.layer, STRUCTURE, replace(setting.observed, mean_abs=shuffled), 3, GROUP)
    assert all(t.loss_after < w.loss_after for t, w in zip(true, wrong, strict=True))
    # Ratio 0 is always a candidate, so even nonsense never does worse than rounding.
    assert all(w.loss_after <= w.loss_before for w in wrong)


def test_the_recorded_loss_is_that_of_the_quantized_module(setting):
    scalings, _ = search_scales(setting.layer, STRUCTURE, setting.observed, 4, GROUP)
    mlp = copy.deepcopy(setting.layer.mlp)
    scaling = scalings[1]
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight = nn.Parameter(
            fake_quantize_weight(linear.weight * scaling.reader_scale, 4, GROUP) / scaling.reader_scale, False
        )
    x = setting.observed.tokens["mlp.gate_proj"]
    expected = (mlp(x) - setting.layer.mlp(x)).square().mean()
    assert scaling.loss_after == pytest.approx(float(expected), rel=1e-4)


def test_searching_leaves_the_layer_and_its_hooks_as_they_were():
    setting = Setting(seed=1)
    before = copy.deepcopy(setting.layer.state_dict())
    search_scales(setting.layer, STRUCTURE, setting.observed, 4, GROUP)
    assert all(torch.equal(value, before[name]) for name, value in setting.layer.state_dict().items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in setting.layer.modules())


@pytest.mark.parametrize("bias", [False, True])
def test_scaled_layer_computes_the_same(bias):
    setting = Setting(seed=2, bias=bias)
    expected = setting.run(setting.layer)
    scalings, _ = search_scales(setting.layer, STRUCTURE, setting.observed, 3, GROUP)
    apply_scales(setting.layer, STRUCTURE, scalings, torch.float32)
    torch.testing.assert_close(setting.run(setting.layer), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_value_scale_is_shared_by_the_query_heads_of_a_kv_head(setting):
    scaling = search_scales(setting.layer, STRUCTURE, setting.observed, 3, GROUP)[0][2]
    assert scaling.producer_scale.shape == (32,)
    per_head = scaling.reader_scale.view(2, 2, 16)  # KV head, query head within it, channel
    assert torch.equal(per_head[:, 0], per_head[:, 1])
    assert torch.equal(per_head[:, 0].flatten(), scaling.producer_scale)


def test_value_scaling_is_taken_only_if_the_cache_loses_nothing(setting):
    """Values divided by s share their cache's step; multiplied back, large channels carry s times that step."""

    def quantize_values(values):
        return simulate_value_cache(values, 2, 16, 1.0, rotate=False)

    values = setting.layer.self_attn.v_proj(setting.observed.tokens["self_attn.q_proj"]).unflatten(-1, (2, 16))

    def error(scale):
        return (quantize_values(values / scale) * scale - values).square().mean()

    free = search_scales(setting.layer, STRUCTURE, setting.observed, 3, GROUP)[0][2]
    bound, skipped = search_scales(
        setting.layer, STRUCTURE, setting.observed, 3, GROUP, quantize_values=quantize_values
    )
    unscaled = error(torch.ones(2, 16))
    assert error(bound[2].producer_scale.view(2, 16)) <= unscaled
    assert free.ratio > 0
    if error(free.producer_scale.view(2, 16)) > unscaled:
        assert bound[2].ratio != free.ratio
    if bound[2].ratio == 0:
        assert "raises the error of the quantized values" in skipped["self_attn.v_proj -> self_attn.o_proj"]


def test_a_cache_that_suffers_from_every_scale_vetoes_them_all_with_the_reason(setting, monkeypatch):
    work = LayerWork("model.layers.7", copy.deepcopy(setting.layer), STRUCTURE, SAMPLES, LENGTH, torch.float32)
    reference = setting.layer.self_attn.v_proj(setting.observed.tokens["self_attn.q_proj"]).unflatten(-1, (2, 16))

    def stubborn_cache(values):
        same = values.shape == reference.shape and torch.allclose(values, reference)
        return values if same else values + 1

    monkeypatch.setattr("kvconvert.calibration.awq.value_rounding", lambda cache: stubborn_cache)
    awq = AwqPass(3, GROUP)
    with awq.observe(work):
        setting.run(work.layer)
    awq.solve(work)
    awq.apply(work)
    result = awq.result()
    assert result.statistics["scales"]["self_attn.v_proj -> self_attn.o_proj"]["ratio"] == 0
    assert "raises the error" in result.reasons["self_attn.v_proj"]
    assert "raises the error" in result.reasons["self_attn.o_proj"]
    assert "mlp.up_proj" not in result.reasons


def test_clips_never_raise_the_error_and_lower_it_where_a_weight_sticks_out(setting):
    layer = copy.deepcopy(setting.layer)
    layer.mlp.down_proj.weight[0, 0] = 12 * layer.mlp.down_proj.weight.std()
    observed = setting.observe(layer)
    observed.second_moment["mlp.down_proj"][0, 0, :] = 0  # the input of the outlying weight is silent
    observed.second_moment["mlp.down_proj"][0, :, 0] = 0
    clips = search_clips(layer, STRUCTURE, observed, [], 3, GROUP)
    assert set(clips) == set(STRUCTURE.linears) - {"self_attn.q_proj", "self_attn.k_proj"}
    assert all(after <= before for _, before, after in clips.values())
    bound = clips["mlp.down_proj"][0]
    assert bound.shape == (64, 96 // GROUP)
    largest = layer.mlp.down_proj.weight.unflatten(-1, (-1, GROUP)).abs().amax(-1)
    # The search goes down to 1 - 9/20 of the largest weight, which a useless outlier makes it do.
    assert bound[0, 0] == pytest.approx(0.55 * float(largest[0, 0]), rel=1e-5)
    assert (bound <= largest).all()
    apply_clips(layer, clips, GROUP)
    assert layer.mlp.down_proj.weight[0, 0] == pytest.approx(float(bound[0, 0]))


def test_the_clip_error_is_the_error_of_the_group_outputs(setting):
    """Second moments replace activations: for one group, they give the exact squared error over all tokens."""
    observed = setting.observed
    clips = search_clips(setting.layer, STRUCTURE, observed, [], 3, GROUP)
    weight = setting.layer.mlp.down_proj.weight
    x = observed.tokens["mlp.down_proj"]  # 128 tokens, all of them
    assert x.shape[0] == SAMPLES * LENGTH
    delta = (fake_quantize_weight(weight, 3, GROUP) - weight).unflatten(-1, (-1, GROUP))
    partial = torch.einsum("tgi,ogi->tog", x.unflatten(-1, (-1, GROUP)), delta)
    expected = partial.square().mean(0).sum() / weight.shape[0]
    assert clips["mlp.down_proj"][1] == pytest.approx(float(expected), rel=1e-3)


def test_observations_do_not_depend_on_the_batches(setting):
    other = setting.observe(setting.layer, batches=(1, 2, 1))
    for name, values in setting.observed.mean_abs.items():
        torch.testing.assert_close(other.mean_abs[name], values)
        torch.testing.assert_close(other.second_moment[name], setting.observed.second_moment[name])
        torch.testing.assert_close(other.tokens[name], setting.observed.tokens[name])
    torch.testing.assert_close(other.sequences, setting.observed.sequences)


def test_the_sample_for_losses_is_bounded_and_meets_every_position():
    samples, length = 48, 256
    recorder = ActivationRecorder(STRUCTURE, samples, length, GROUP)
    layer = nn.ModuleDict({"self_attn": nn.ModuleDict(), "mlp": nn.ModuleDict()})
    for name in STRUCTURE.linears:
        parent, child = name.split(".")
        layer[parent][child] = nn.Linear(96 if child == "down_proj" else 64, 16)
    position = torch.arange(length).view(1, length, 1)
    with recorder.attached(layer):
        for _ in range(samples):
            for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
                linear = layer.get_submodule(name)
                linear(position.expand(1, length, linear.in_features).float())
    tokens = torch.cat(recorder._tokens["mlp.gate_proj"])
    assert tokens.shape[0] == LOSS_TOKENS
    counts = tokens[:, 0].long().bincount(minlength=length)
    assert counts.min() == counts.max() == LOSS_TOKENS // length


def test_candidates_far_from_the_best_on_some_data_are_not_tried_on_the_rest():
    tried = []

    def rest(ratio):
        tried.append(round(float(ratio), 2))
        return {0.4: 5.0, 0.45: 3.0, 0.5: 4.0}.get(tried[-1], 0.0)

    # On the first data 0.4 is best, 0.35 to 0.5 are close, and 0 is not.
    losses = _Losses([lambda ratio: 10 + 10 * abs(float(ratio) - 0.4), rest], close=1.1)
    scale, ratio, before, after = _best_ratio(lambda r: torch.tensor(r), losses, ALONE)
    assert tried == [0.0, 0.3, 0.35, 0.4, 0.45, 0.5]
    assert (before, ratio, after) == pytest.approx((14.0, 0.35, 10.5))
    assert float(scale) == pytest.approx(0.35)


@pytest.mark.parametrize("channels", [32, 2048])
def test_losses_of_parts_of_the_tokens_add_up_to_that_of_all(channels):
    torch.manual_seed(0)
    linear, tokens = nn.Linear(channels, 8), torch.randn(1100, channels)
    first, others = _token_parts(tokens)
    assert (len(first), len(others)) == (138, 962)
    scale = torch.rand(channels) + 0.5
    with torch.no_grad():
        whole = _linear_loss(linear, tokens, 3, GROUP)(scale)
        parts = sum(_linear_loss(linear, part, 3, GROUP, 1100)(scale) for part in (first, others))
    assert parts == pytest.approx(whole, rel=1e-5)
    assert len(_token_parts(tokens[:1000])) == 1


def test_candidates_run_from_identity_to_the_statistic():
    statistic = torch.tensor([0.01, 1.0, 4.0])
    assert torch.equal(candidate_scale(statistic, 0.0), torch.ones(3))
    full = candidate_scale(statistic, 1.0)
    torch.testing.assert_close(full / full[1], statistic)
    assert float(full.max() * full.min()) == pytest.approx(1)
    assert candidate_scale(torch.tensor([0.0, 1.0]), 1.0).isfinite().all()


@pytest.mark.parametrize("unit_offset", [False, True])
def test_representable_scales_leave_the_norm_exact_in_the_stored_dtype(unit_offset):
    torch.manual_seed(0)
    norm = nn.LayerNorm(64)
    norm.weight.data = (torch.randn(64) - float(unit_offset)).bfloat16().float()
    norm.weight.data[5] = -1.0 if unit_offset else 0.0
    scale = torch.rand(64) * 3 + 0.2
    exact = representable_scale(norm, scale, unit_offset, torch.bfloat16)
    offset = float(unit_offset)
    scaled = (norm.weight + offset) / exact - offset
    torch.testing.assert_close(scaled, scaled.bfloat16().float(), rtol=1e-6, atol=1e-6)
    assert exact[5] == 1
    others = torch.arange(64) != 5
    assert ((exact / scale)[others] - 1).abs().median() < 2**-8  # it stays near what was asked for


class UnitOffsetNorm(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight, False), nn.Parameter(bias, False)

    def forward(self, x):
        return nn.functional.layer_norm(x, x.shape[-1:]) * (1 + self.weight) + self.bias


@pytest.mark.parametrize("unit_offset", [False, True])
def test_norms_with_bias_or_unit_offset_are_scaled_as_they_compute(unit_offset):
    setting = Setting(seed=3)
    groups = tuple(replace(group, unit_offset=unit_offset) for group in STRUCTURE.norm_groups)
    structure = replace(STRUCTURE, norm_groups=groups)
    layer = setting.layer
    for group in groups:
        weight, bias = layer.get_submodule(group.norm).weight.data, torch.randn(64)
        if unit_offset:
            norm = UnitOffsetNorm(weight - 1, bias)
        else:
            norm = nn.LayerNorm(64)
            norm.weight.data, norm.bias.data = weight, bias
        setattr(layer, group.norm, norm.requires_grad_(False))
    expected = setting.run(layer)
    scalings, _ = search_scales(layer, structure, setting.observe(layer), 3, GROUP)
    apply_scales(layer, structure, scalings, torch.float32)
    assert all(scaling.ratio > 0 for scaling in scalings[:2])
    torch.testing.assert_close(setting.run(layer), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_an_activation_that_is_not_finite_is_named_with_layer_and_linear(setting):
    work = LayerWork("model.layers.7", copy.deepcopy(setting.layer), STRUCTURE, SAMPLES, LENGTH, torch.float32)
    work.layer.mlp.up_proj.weight[0, 0] = float("inf")
    awq = AwqPass(4, GROUP)
    with awq.observe(work):
        setting.run(work.layer)
    with pytest.raises(NumericError, match=r"model\.layers\.7.*mlp\.down_proj"):
        awq.solve(work)
