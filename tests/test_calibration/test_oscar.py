"""The value fold, and statistics of token-norm imbalance, against direct computation."""

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from kvconvert.calibration.attention_sample import RECORDING_ATTENTION, attention_observed
from kvconvert.calibration.awq import simulate_value_cache
from kvconvert.calibration.oscar import STAGES, KeyStatistics, OscarPass, fold_value_rotation
from kvconvert.calibration.protocol import LayerWork
from kvconvert.errors import NumericError
from kvconvert.kernels.rotate import hadamard_matrix
from kvconvert.methods.oscar import Oscar
from kvconvert.models.structure import LayerStructure, Projection


def structure(heads, kv_heads, head_dim):
    parts = map(Projection, ("attn.q", "attn.k", "attn.v"))
    return LayerStructure("attn", *parts, "attn.o", (), (), heads, kv_heads, head_dim)


def attention(heads, kv_heads, head_dim, bias, hidden=40):
    torch.manual_seed(0)
    linears = {
        "q": nn.Linear(hidden, heads * head_dim, bias),
        "k": nn.Linear(hidden, kv_heads * head_dim, bias),
        "v": nn.Linear(hidden, kv_heads * head_dim, bias),
        "o": nn.Linear(heads * head_dim, hidden, bias),
    }
    return nn.ModuleDict({"attn": nn.ModuleDict(linears)}).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 48), (4, 2, 64), (4, 1, 80), (2, 2, 12)])
def test_folded_values_are_the_rotated_values_and_outputs_stay(heads, kv_heads, head_dim, bias):
    layer = attention(heads, kv_heads, head_dim, bias)
    x = torch.randn(7, 40)
    values = layer.attn.v(x).view(7, kv_heads, head_dim)
    # Any mixture of tokens may stand for attention; each query head mixes the values of its KV head.
    mixing = torch.rand(heads, 7, 7).softmax(-1)

    def output():
        v = layer.attn.v(x).view(7, kv_heads, head_dim).repeat_interleave(heads // kv_heads, 1)
        return layer.attn.o(torch.einsum("hts,shd->thd", mixing, v).flatten(1))

    expected = output()
    bias_of_output = layer.attn.o.bias.clone() if bias else None
    fold_value_rotation(layer, structure(heads, kv_heads, head_dim))
    h = hadamard_matrix(head_dim, dtype=torch.float32)
    torch.testing.assert_close(layer.attn.v(x).view(7, kv_heads, head_dim), values @ h, rtol=0, atol=1e-5)
    torch.testing.assert_close(output(), expected, rtol=0, atol=1e-5)
    if bias:
        assert torch.equal(layer.attn.o.bias, bias_of_output)


def test_statistics_follow_their_definitions():
    torch.manual_seed(1)
    keys = torch.randn(1, 2, 8, 16) * torch.tensor([1.0, 5.0, 1.0, 0.1, 1.0, 1.0, 2.0, 1.0]).view(1, 1, 8, 1)
    statistics = KeyStatistics(group_size=4)
    statistics.update(keys)
    found = statistics.result()
    rotated = keys @ hadamard_matrix(16, dtype=torch.float32)
    scaled = rotated / rotated.square().mean((1, 3), keepdim=True).sqrt()
    for stage, stage_keys in enumerate((keys, rotated, scaled)):
        for head in range(2):
            imbalance, channel_range = [], []
            for group in stage_keys[0, head].split(4):
                norms = group.norm(dim=-1)
                energy = norms.square().mean()
                imbalance.append((norms.max() - norms.min()) ** 2 / energy)
                channel_range.append((group.amax(0) - group.amin(0)).square().sum() / energy)
            norms = stage_keys[0, head].norm(dim=-1)
            expected = {
                "key_norm_imbalance": torch.stack(imbalance).mean(),
                "key_channel_range": torch.stack(channel_range).mean(),
                "key_norm_max_over_median": norms.max() / norms.median(),
                "key_norm_min_over_median": norms.min() / norms.median(),
            }
            for name, value in expected.items():
                torch.testing.assert_close(found[name][stage, head], value, rtol=1e-5, atol=1e-6)


def test_channel_range_is_what_the_quantizers_error_follows():
    """Equation (9): the error of 2-bit rounding is the channel range over 12 (2^b - 1)^2, for well spread values."""
    from kvconvert.kernels.quantizer import dequantize, quantize

    torch.manual_seed(2)
    keys = torch.randn(4, 1, 128, 64)
    statistics = KeyStatistics(group_size=32)
    statistics.update(keys)
    predicted = statistics.result()["key_channel_range"][0, 0] / (12 * 15**2)
    read = dequantize(*quantize(keys, 4, 32, dim=2), 32, dim=2)
    error = (read - keys).square().sum() / keys.square().sum()
    # The model assumes errors uniform over a step; at 4 bits only the exact extremes depart from it, 2 of 32 tokens.
    assert float(error) == pytest.approx(float(predicted), rel=0.1)


def test_rotation_leaves_imbalance_and_joint_scaling_removes_it():
    """A group of tokens that differ in size only: the paper's token-norm imbalance in its pure form."""
    torch.manual_seed(3)
    direction = torch.randn(1, 2, 1, 32)
    keys = direction * torch.logspace(-1, 1, 64).view(1, 1, 64, 1)
    statistics = KeyStatistics(group_size=32)
    statistics.update(keys)
    found = statistics.result()
    imbalance, channel_range = found["key_norm_imbalance"], found["key_channel_range"]
    torch.testing.assert_close(imbalance[0], imbalance[1], rtol=1e-4, atol=0)
    assert imbalance[0].min() > 0.5
    assert imbalance[2].max() < 1e-9
    assert channel_range[2].max() < 1e-9 < 0.5 < channel_range[1].min()


def test_a_token_of_zeros_is_no_division_by_zero():
    keys = torch.randn(1, 2, 8, 16)
    keys[:, :, 3] = 0
    statistics = KeyStatistics(group_size=4)
    statistics.update(keys)
    statistics.update(torch.zeros(1, 2, 8, 16))
    assert all(values.isfinite().all() for values in statistics.result().values())


@pytest.mark.parametrize("measure", ["l2", "mean_abs"])
def test_per_head_scaling_evens_out_every_head(measure):
    torch.manual_seed(4)
    sizes = torch.logspace(-1, 1, 8)
    keys = torch.randn(1, 2, 1, 16) * torch.stack([sizes, sizes.flip(0)]).view(1, 2, 8, 1)
    for scope, even in (("per_head", True), ("joint", False)):
        statistics = KeyStatistics(8, scope, measure)
        statistics.update(keys)
        assert bool((statistics.result()["key_norm_imbalance"][2] < 1e-9).all()) == even


def test_statistics_do_not_depend_on_the_batches():
    keys = torch.randn(4, 2, 16, 8, generator=torch.Generator().manual_seed(5))
    whole, parts = KeyStatistics(8), KeyStatistics(8)
    whole.update(keys)
    for part in keys.split([1, 3]):
        parts.update(part)
    for name, values in whole.result().items():
        torch.testing.assert_close(parts.result()[name], values)


def recording_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=50, attn_implementation=RECORDING_ATTENTION,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def test_recording_sees_keys_after_rope_and_changes_nothing():
    model = recording_model()
    ids = torch.randint(0, 50, (2, 12))
    seen = []
    with attention_observed(model.model.layers[0].self_attn, lambda q, k, v: seen.append((q, k, v))):
        recorded = model(ids, use_cache=False).logits
    cached = model(ids, use_cache=True)
    query, key, value = seen[0]
    assert query.shape == (2, 4, 12, 8)
    assert torch.equal(key, cached.past_key_values.layers[0].keys)
    assert torch.equal(value, cached.past_key_values.layers[0].values)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(ids).logits, recorded)
    model.set_attn_implementation(RECORDING_ATTENTION)
    model(ids)
    assert len(seen) == 1  # the observer is gone
    assert RECORDING_ATTENTION in AttentionInterface().valid_keys()


def test_the_pass_declares_what_it_returns_and_names_a_layer_with_nan():
    model = recording_model()
    parts = map(Projection, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
    names = LayerStructure("self_attn", *parts, "self_attn.o_proj", (), (), 4, 2, 8)
    work = LayerWork("model.layers.0", model.model.layers[0], names, 2, 12, torch.float32)
    ids = torch.randint(0, 50, (2, 12))
    oscar = OscarPass(fold_values=True, group_size=32)
    expected = model(ids).logits
    oscar.prepare(work)
    with oscar.observe(work):
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
    oscar.solve(work)
    oscar.apply(work)
    result = oscar.result()
    assert set(result.plan) == set(Oscar.plan_tensors)
    assert all(values.shape == (len(STAGES), 2) for values in result.plan.values())
    work.layer.self_attn.k_proj.weight[0, 0] = float("nan")
    oscar = OscarPass(fold_values=False, group_size=32)
    with oscar.observe(work):
        model(ids)
    with pytest.raises(NumericError, match=r"model\.layers\.0\.self_attn"):
        oscar.solve(work)


def test_simulated_value_cache_rotates_and_comes_back():
    values = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(6))
    assert torch.equal(simulate_value_cache(values, 16, 16, 1.0, rotate=True), values)
    # 8 bits over a range of about 4: errors of at most half a step, spread by the rotation.
    torch.testing.assert_close(simulate_value_cache(values, 8, 16, 1.0, rotate=True), values, rtol=0, atol=0.06)
    plain = simulate_value_cache(values, 2, 16, 1.0, rotate=False)
    rotated = simulate_value_cache(values, 2, 16, 1.0, rotate=True)
    assert not torch.allclose(plain, rotated)
