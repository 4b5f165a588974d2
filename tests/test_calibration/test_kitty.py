"""Statistics of key channels and the choice of boosted ones, against loops over the definitions."""

import pytest
import torch
from sample_layers import layer_work, run_passes

from kvconvert.calibration.kitty import ChannelStatistics, KittyPass, choose_channels
from kvconvert.kernels.pages import LayerFormat, PageFormat, SideTensors, dequantize_pages, quantize_pages
from kvconvert.kernels.rotate import Rotations, hadamard_matrix
from kvconvert.methods.kitty import Kitty


def by_hand(queries, keys, page, sinks):
    """Lists over heads and channels of (mean |k|, mean range, mean |q|)."""
    batch, query_heads, _, dim = queries.shape
    heads = keys.shape[1]
    rows = []
    for h in range(heads):
        own = range(h * query_heads // heads, (h + 1) * query_heads // heads)
        for d in range(dim):
            ranges = []
            for b in range(batch):
                channel = keys[b, h, sinks:, d]
                size = min(page, len(channel))
                ranges += [channel[i : i + size] for i in range(0, len(channel) // size * size, size)]
            rows.append(
                (
                    keys[:, h, sinks:, d].abs().mean(),
                    torch.stack([r.max() - r.min() for r in ranges]).mean(),
                    torch.stack([queries[:, i, :, d].abs() for i in own]).mean(),
                )
            )
    return torch.tensor(rows).view(heads, dim, 3).unbind(-1)


@pytest.mark.parametrize(("length", "page", "sinks"), [(40, 16, 0), (40, 16, 5), (12, 16, 0), (7, 16, 7)], ids=str)
def test_statistics_follow_their_definitions(length, page, sinks):
    torch.manual_seed(0)
    queries, keys = torch.randn(3, 4, length, 6), torch.randn(3, 2, length, 6)
    statistics = ChannelStatistics(page, sinks)
    statistics.update(queries[:2], keys[:2])
    statistics.update(queries[2:], keys[2:])
    found = statistics.result()
    mean_abs, spread, query = by_hand(queries, keys, page, min(sinks, length - 1))
    torch.testing.assert_close(found["key_mean_abs"], mean_abs)
    torch.testing.assert_close(found["key_range"], spread)
    torch.testing.assert_close(found["query_mean_abs"], query)
    torch.testing.assert_close(found["key_sensitivity"], query * spread)


def test_ties_go_to_the_lower_channel_and_channels_ascend():
    score = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert choose_channels(score, 2).tolist() == [[1, 2], [0, 1]]
    assert choose_channels(score, 5).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert choose_channels(score, 0).shape == (2, 0)


def test_a_large_channel_that_no_query_reads_is_not_sensitive_and_boosting_by_sensitivity_pays():
    """Magnitude would boost channel 0; the scores only suffer from channel 1."""
    torch.manual_seed(1)
    keys, queries = torch.randn(1, 1, 128, 8), torch.randn(1, 1, 128, 8)
    keys[..., 0] *= 50
    queries[..., 0] *= 1e-4
    keys[..., 1] *= 10
    statistics = ChannelStatistics()
    statistics.update(queries, keys)
    found = statistics.result()
    assert int(found["key_mean_abs"].argmax()) == 0
    chosen = choose_channels(found["key_sensitivity"], 1)
    assert chosen.tolist() == [[1]]
    f = PageFormat.keys(1, 8, 128, 2, 128, boosted=1, fixed_channels=True)

    def score_error(channels):
        tensors = SideTensors(channels)
        read = dequantize_pages(quantize_pages(keys, f, tensors), tensors)
        return (queries @ (read - keys).transpose(2, 3)).square().mean()

    by_magnitude = choose_channels(found["key_mean_abs"], 1)
    assert score_error(chosen) < 0.5 * score_error(by_magnitude)


@pytest.mark.parametrize("select", ["dynamic", "calibrated"])
@pytest.mark.parametrize("norm", ["none", "joint", "per_head"])
def test_the_pass_measures_keys_as_the_quantizer_sees_them(select, norm):
    work, seen = layer_work(length=20)
    keys = PageFormat.keys(2, 8, 16, 2, 16, token_norm=norm, boosted=3)
    values = PageFormat.values(2, 8, 16, 2, 8)
    work.cache = LayerFormat(keys, values, rotations=Rotations(keys=True), sink_tokens=2)
    calibration = KittyPass(select)
    result = run_passes([calibration], work)
    queries, stored = (torch.cat(x) @ hadamard_matrix(8, torch.float32) for x in (seen["queries"], seen["keys"]))
    if norm != "none":
        dims = (1, 3) if norm == "joint" else 3
        stored = stored / stored.square().mean(dims, keepdim=True).sqrt()
    mean_abs, spread, query = by_hand(queries, stored, 16, 2)
    torch.testing.assert_close(result.plan["key_mean_abs"], mean_abs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.plan["key_sensitivity"], query * spread, rtol=1e-4, atol=1e-5)
    assert result.plan.keys() <= {*Kitty.plan_tensors}
    if select == "dynamic":
        assert "boosted_channels" not in result.plan
        assert work.cache.key_tensors.boosted is None
    else:
        chosen = result.plan["boosted_channels"]
        assert (chosen.dtype, chosen.shape) == (torch.int32, (2, 3))
        assert torch.equal(work.cache.key_tensors.boosted, chosen.long())
        assert work.cache.keys.fixed_channels
