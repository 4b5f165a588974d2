"""Attention mass, loss curves and budget allocation against direct computation."""

from dataclasses import replace

import pytest
import torch
from sample_layers import layer_work, random_sample, run_passes

from kvconvert.calibration.attention_sample import AttentionSampler
from kvconvert.calibration.minikv import MiniKVPass, calibrated_ratios, eviction_loss, spend_by_marginal_loss
from kvconvert.kernels.attention import attention_reference
from kvconvert.kernels.select import select_tokens
from kvconvert.methods.minikv import MiniKV


def weights_of(sample, sequence, head):
    scores = sample.queries[sequence, head].double() @ sample.keys[sequence, head // 2].double().T * sample.scaling
    return scores.masked_fill(~sample.visible, float("-inf")).softmax(-1)


@pytest.mark.parametrize(("sinks", "recent_ratio"), [(0, 0.0), (0, 0.25), (3, 0.2), (30, 0.5), (0, 1.0)])
def test_curves_are_what_attention_masked_to_the_kept_tokens_loses(sinks, recent_ratio):
    sample = replace(random_sample(tokens=41, dim=8), output_weight=torch.randn(5, 32))
    points, prompt = 6, 20
    found = eviction_loss(sample, recent_ratio, sinks, points)
    lost, error, size = torch.zeros(3, points, dtype=torch.float64)
    for s in range(2):
        queries, keys = sample.queries[s, :, :prompt], sample.keys[s, :, :prompt]
        received = attention_reference(queries, keys, None, sample.visible[:prompt, :prompt], sample.scaling).mass
        for i in range(points):
            heavy, recent = round(i / (points - 1) * prompt), round(recent_ratio * prompt)
            kept = select_tokens(received, heavy, recent, min(sinks, prompt - recent))
            exact_heads, kept_heads = [], []
            for head in range(4):
                weights = weights_of(sample, s, head)[prompt:]
                seen = torch.ones(41, dtype=torch.bool)
                seen[:prompt] = False
                seen[kept[head // 2]] = True
                lost[i] += weights[:, ~seen].sum(1).mean() / 8
                part = weights * seen
                values = sample.values[s, head // 2].double()
                exact_heads.append(weights @ values)
                kept_heads.append(part / part.sum(1, keepdim=True) @ values)
            weight = sample.output_weight.double()
            exact, masked = (torch.cat(heads, 1) @ weight.T for heads in (exact_heads, kept_heads))
            error[i] += (masked - exact).square().sum()
            size[i] += exact.square().sum()
    torch.testing.assert_close(found.attention, lost, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found.output, error / size, rtol=1e-3, atol=1e-9)
    assert found.attention.diff().max() <= 1e-12
    assert found.attention[-1] == found.output[-1] == 0


def test_two_tokens_are_enough_to_measure():
    curves = eviction_loss(random_sample(tokens=2), 0.0)
    assert curves.attention[0] > 0
    assert curves.attention[-1] == 0


CURVES = {
    "steep": torch.tensor([1.0, 0.1, 0.05, 0.02, 0.0]),
    "flat": torch.tensor([0.1, 0.08, 0.06, 0.03, 0.0]),
    "done": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0]),
}


def total_loss(curves, shares):
    loss = 0.0
    for curve, share in zip(curves, shares, strict=True):
        at = share * (len(curve) - 1)
        low = min(int(at), len(curve) - 2)
        loss += float(curve[low] + (at - low) * (curve[low + 1] - curve[low]))
    return loss


@pytest.mark.parametrize("budget", [0.0, 0.3, 0.75, 1.2, 2.0, 3.0])
def test_calibrated_budgets_lose_least_of_all_that_spend_the_same(budget):
    """Convex curves: compared with every spread in steps of a twentieth."""
    curves = [torch.tensor([1.0, 0.4, 0.15, 0.05, 0.0]), torch.tensor([0.5, 0.3, 0.2, 0.1, 0.0]), CURVES["steep"]]
    shares = spend_by_marginal_loss(curves, budget, 1.0)
    assert sum(shares) == pytest.approx(budget)
    assert all(0 <= share <= 1 for share in shares)
    steps = [i / 20 for i in range(21)]
    best = min(
        total_loss(curves, (a, b, budget - a - b)) for a in steps for b in steps if -1e-9 <= budget - a - b <= 1 + 1e-9
    )
    assert total_loss(curves, shares) <= best + 1e-9


def test_a_curve_that_is_not_convex_is_spent_along_its_hull():
    """The first half saves nothing by itself, yet leads to the steepest fall: it is not passed over."""
    shares = spend_by_marginal_loss([torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.6, 0.3, 0.0])], 1.0, 1.0)
    assert shares == pytest.approx([1.0, 0.0])


def test_equal_layers_share_alike_and_a_limit_holds():
    assert spend_by_marginal_loss([CURVES["steep"]] * 3, 0.9, 1.0) == pytest.approx([0.3] * 3)
    assert spend_by_marginal_loss([CURVES["done"]] * 2, 0.5, 1.0) == pytest.approx([0.25] * 2)
    limited = spend_by_marginal_loss([CURVES["steep"], CURVES["flat"]], 0.8, 0.6)
    assert max(limited) <= 0.6
    assert sum(limited) == pytest.approx(0.8)
    assert spend_by_marginal_loss([CURVES["steep"]] * 2, 5.0, 0.6) == pytest.approx([0.6] * 2)
    assert spend_by_marginal_loss([CURVES["steep"]] * 2, 1.0, 0.0) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("heavy", "recent"), [(0.25, 0.25), (0.0, 0.25), (0.25, 0.0), (0.7, 0.25), (1.0, 0.0), (0.5, 1.0)]
)
def test_budgets_keep_their_mean_as_far_as_recent_windows_leave_room(heavy, recent):
    ratios = calibrated_ratios(heavy, recent, [*CURVES.values(), CURVES["flat"]])
    assert sum(ratios) / 4 == pytest.approx(min(heavy, 1 - recent))
    assert all(-1e-12 <= ratio <= 1 - recent + 1e-12 for ratio in ratios)


def test_the_pass_writes_its_measurements():
    work, _ = layer_work(samples=2, length=16)
    work.cache = replace(work.cache, sink_tokens=2)
    sampler = AttentionSampler(2)
    result = run_passes([sampler, MiniKVPass(sampler, 0.25)], work)
    curves = eviction_loss(sampler.sample, 0.25, 2)
    torch.testing.assert_close(result.plan["lost_attention"], curves.attention.float())
    torch.testing.assert_close(result.plan["lost_output"], curves.output.float())
    assert result.plan.keys() == {*MiniKV.plan_tensors}
