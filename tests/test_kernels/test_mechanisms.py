"""What each paper says happens, on tensors made so that it has to happen. Trained models only report; these assert."""

import pytest
import torch

from kvconvert.kernels.pages import PageFormat, SideTensors, dequantize_pages, quantize_pages
from kvconvert.kernels.quantizer import dequantize, quantize
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.kernels.spans import shift_extremes


def read_back(x: torch.Tensor, bits: int, group: int, dim: int, value_clip_ratio: float = 1.0) -> torch.Tensor:
    return dequantize(*quantize(x, bits, group, dim, value_clip_ratio), group, dim)


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Mean over tokens of |error|^2 / |token|^2: small tokens count as much as large ones."""
    return float(((got - exact).square().sum((1, 3)) / exact.square().sum((1, 3))).mean())


def keys(seed: int = 0, heads: int = 4, tokens: int = 512, dim: int = 64) -> torch.Tensor:
    return torch.randn(1, heads, tokens, dim, generator=torch.Generator().manual_seed(seed))


def outlier_channels() -> torch.Tensor:
    """Keys as KIVI finds them: a few channels are large in every token, with an offset of their own."""
    x = keys()
    x[..., 3], x[..., 40] = x[..., 3] + 20, x[..., 40] * 3 - 15
    return x


def norm_imbalance(x: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """Every eighth token is a tenth of the others' size, in all heads (OScaR's low-norm outlier tokens)."""
    small = torch.rand(x.shape[2], generator=torch.Generator().manual_seed(seed)) < 1 / 8
    return torch.where(small.view(1, 1, -1, 1), 0.1 * x, x)


def test_per_channel_keys_beat_per_token_keys_under_channel_outliers():
    """KIVI: scales that belong to a channel keep its offset out of everybody else's grid."""
    x = outlier_channels()
    assert relative_error(read_back(x, 2, 32, 2), x) < 0.2 * relative_error(read_back(x, 2, 64, 3), x)


def test_smaller_groups_of_tokens_beat_per_token_quantization_at_two_bits():
    """MiniKV's sub-channel groups, G = 16."""
    x = outlier_channels()
    errors = [relative_error(read_back(x, 2, group, 2), x) for group in (16, 32, 128)]
    assert errors == sorted(errors)
    assert errors[-1] < relative_error(read_back(x, 2, 64, 3), x)


def stages(x: torch.Tensor) -> dict[str, float]:
    """OScaR's stages through the page quantizer itself: errors in the original basis, relative to each token."""
    heads, dim = x.shape[1], x.shape[3]
    found = {}
    for name, rotate, norm in (
        ("plain", False, "none"),
        ("norm", False, "joint"),
        ("rotation", True, "none"),
        ("rotation + norm", True, "joint"),
    ):
        format = PageFormat.keys(heads, dim, 128, 2, 32, token_norm=norm)
        stored = hadamard_transform(x) if rotate else x
        pages = stored[0].unflatten(1, (-1, 128)).transpose(0, 1)
        read = dequantize_pages(quantize_pages(pages, format)).transpose(0, 1).flatten(1, 2)[None]
        found[name] = relative_error(hadamard_transform(read, inverse=True) if rotate else read, x)
    return found


def test_rotation_and_norm_beat_rotation_which_beats_neither_under_norm_imbalance_and_outliers():
    """OScaR, figure 5: where tokens differ in size and a channel has outliers, each component adds to the other.

    A channel that is large in one token in twenty stretches that channel's range for all tokens; rotation spreads it.
    """
    x = keys()
    spikes = torch.rand(512, generator=torch.Generator().manual_seed(2)) < 1 / 20
    x[..., 7] += torch.where(spikes, 25.0, 0.0)
    error = stages(norm_imbalance(x))
    assert error["rotation + norm"] < 0.5 * error["rotation"]
    assert error["rotation"] < error["plain"]


def test_norm_alone_hurts_with_outlier_channels():
    """The scaling-induced artifact (section 4.2): small even tokens, scaled up to tokens that one channel dominates."""
    x = 0.1 * keys()
    small = torch.rand(512, generator=torch.Generator().manual_seed(3)) < 1 / 8
    x[..., 5] = torch.where(small, 0.1, 10.0)
    x[:, :, small] = 0.1
    # The damage is in the channels that are not outliers: their range grows with the small tokens' scaled-up entries.
    format = {norm: PageFormat.keys(4, 64, 128, 2, 32, token_norm=norm) for norm in ("none", "joint")}
    pages = x[0].unflatten(1, (-1, 128)).transpose(0, 1)
    others = [c for c in range(64) if c != 5]
    error = {}
    for norm, f in format.items():
        read = dequantize_pages(quantize_pages(pages, f))
        error[norm] = float((read - pages)[:, :, :, others].square().mean())
    assert error["joint"] > 1.5 * error["none"]


def test_boosting_by_magnitude_beats_random_channels():
    """Kitty: the channels with the largest mean |K| carry most of the logits' error."""
    x = keys() * torch.logspace(-1, 1, 64)[torch.randperm(64, generator=torch.Generator().manual_seed(4))]
    pages = x[0].unflatten(1, (-1, 128)).transpose(0, 1)
    queries = torch.randn(4, 4, 16, 64, generator=torch.Generator().manual_seed(5))
    exact = queries @ pages.transpose(2, 3)

    def error(select: str, channels: torch.Tensor | None = None) -> float:
        f = PageFormat.keys(4, 64, 128, 2, 128, boosted=8, fixed_channels=select == "calibrated")
        tensors = SideTensors(channels)
        return float(
            (queries @ dequantize_pages(quantize_pages(pages, f, tensors), tensors).mT - exact).square().mean()
        )

    generator = torch.Generator().manual_seed(6)
    for _ in range(5):
        chosen = torch.stack([torch.randperm(64, generator=generator)[:8].sort().values for _ in range(4)])
        assert error("dynamic") < 0.6 * error("calibrated", chosen)


def test_shifting_extreme_scores_lowers_the_softmax_error_at_one_bit():
    """CalibQuant, section 4.2: one-bit keys overstate the largest scores, and the softmax amplifies that."""
    x = keys(tokens=256, dim=64)[0]
    queries = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(7))
    exact = (queries @ x.transpose(1, 2) / 8).softmax(-1)
    scores = queries @ read_back(x, 1, 256, 1).transpose(1, 2) / 8
    plain = (scores.softmax(-1) - exact).square().mean()
    shifted = {tau: (shift_extremes(scores, 0.0, tau).softmax(-1) - exact).square().mean() for tau in (1.0, 2.0, 3.0)}
    assert min(shifted.values()) < 0.7 * plain


def test_values_per_channel_beat_one_global_range():
    """CalibQuant's ablation: channels of values differ in size and offset."""
    x = outlier_channels()[0]
    per_channel = read_back(x, 2, 512, 1)
    everything = read_back(x.reshape(1, -1), 2, x.numel(), 1).view_as(x)
    assert relative_error(per_channel[None], x[None]) < 0.3 * relative_error(everything[None], x[None])


@pytest.mark.parametrize(("bits", "low", "high"), [(1, 0.25, 0.45), (2, 0.5, 0.75), (4, 0.8, 1.0)])
def test_the_best_range_is_where_theory_puts_it(bits, low, high):
    """Gaussian groups of 128 span about 5.3 sigma; the best uniform grids span 1.6 (1 bit), 3.0 and 5.2 sigma.

    The mean-square optimal uniform quantizers have steps of 1.596, 0.996 and 0.335 sigma (Max, 1960), and a grid of
    2^b levels spans 2^b - 1 steps.
    """
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(8))
    candidates = [r / 20 for r in range(4, 21)]
    errors = [float((read_back(x, bits, 128, 1, r) - x).square().mean()) for r in candidates]
    best = candidates[errors.index(min(errors))]
    assert low <= best <= high
    step = {1: 1.596, 2: 0.996, 4: 0.335}[bits]
    span = float((x.amax(1) - x.amin(1)).mean())
    assert best == pytest.approx(min(1.0, (2**bits - 1) * step / span), abs=0.08)
