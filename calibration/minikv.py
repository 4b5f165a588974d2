"""MiniKV (arXiv 2411.18077), section 3.1.3: how many heavy hitters each layer keeps.

Loss curves say how much eviction costs a layer. Of each sequence the first half is the prompt; each KV head keeps its
sink tokens, its newest tokens and, of the others, a share f of the prompt, the heavy hitters, which have the largest
attention mass within it (the column sums of causal attention over the query heads of the KV head), as the runtime does;
then, for the queries q after the prompt, o_f(q) being the heads' outputs over the kept tokens,

    lost_attention(f) = mean over q of the attention weight on tokens that are not kept
    lost_output(f)    = mean over q of || (o_f(q) - o(q)) W_O^T ||^2, relative to that of || o(q) W_O^T ||^2

The allocation `calibrated` minimizes the sum of lost_output(f_l) over layers l at the nominal mean of f_l: budgets grow
in the order of the loss that the next token saves, along each curve's convex hull, until the total is spent. Lost
attention itself is not the objective: a layer that spreads its attention thinly loses most of it and little of its
output. On the reference model, budgets by lost attention go to layer 0 and are worse on held-out text than uniform
ones, those by lost output far better. No layer gets more than its recent window leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvconvert.calibration.attention_sample import (
    AttentionSample,
    AttentionSampler,
    SampleReader,
    squared_output,
)
from kvconvert.calibration.protocol import (
    CalibrationPass,
    LayerJob,
    LayerWork,
    MeasuredLayer,
    PassResult,
    Resolution,
)
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.select import column_sums
from kvconvert.methods import KVCalibration, clamp_ratios
from kvconvert.methods.minikv import FORMULAS, spread_ratios

CURVE_POINTS = 33  # ratios of heavy hitters 0, 1/32 ... 1


@dataclass(frozen=True)
class EvictionLoss:
    """The loss of a layer whose prompts keep a share i / (points - 1) of heavy hitters, i = 0 ... points - 1.

    Attributes:
        attention: mean attention weight of later queries on tokens that were evicted, float64 [points].
        output: squared error of the layer's attention output at later queries, relative to its square, float64
            [points].
    """

    attention: Tensor
    output: Tensor


def eviction_loss(
    sample: AttentionSample,
    recent_ratio: float,
    sink_tokens: int = 0,
    points: int = CURVE_POINTS,
    ranks: Ranks = ALONE,
) -> EvictionLoss:
    """Both curves; see the module's docstring. They end at 0: a whole prompt is no loss.

    Args:
        sample: attention of the layer; at least two tokens.
        recent_ratio: share of the prompt kept as its newest tokens.
        sink_tokens: first tokens kept by themselves.
        points: the points of the curves.
        ranks: each evaluates some of the points.
    """
    prompt = sample.num_tokens // 2
    recent = min(round(recent_ratio * prompt), prompt)
    middle = slice(min(sink_tokens, prompt - recent), prompt - recent)
    kept = [min(round(i / (points - 1) * prompt), middle.stop - middle.start) for i in range(points)]
    attention, output = torch.zeros(points, dtype=torch.float64), torch.zeros(points, dtype=torch.float64)
    size = 0.0
    for sequence in range(len(sample.queries)):
        mass = _attention_mass(sample, sequence, prompt)[:, middle]
        rank = torch.sort(mass, dim=-1, descending=True, stable=True).indices.argsort(-1)  # [H, middle]
        values = sample.values[sequence].unsqueeze(1)
        scores = sample.scores(sample.grouped_queries(sequence)[:, :, prompt:], sample.keys[sequence])
        scores = scores.masked_fill(~sample.visible_in(sequence)[prompt:], float("-inf"))
        exact = sample.weights(scores)
        size += float(squared_output(exact @ values, sample.output_weight))
        for i in ranks.mine(range(points)):
            if kept[i] == rank.shape[1]:
                break  # nothing is evicted from here on
            evicted = torch.zeros(len(rank), sample.num_tokens, dtype=torch.bool, device=rank.device)
            evicted[:, middle] = rank >= kept[i]
            evicted = evicted[:, None, None]
            weights = sample.weights(scores.masked_fill(evicted, float("-inf")))
            attention[i] += float((exact * evicted).sum(-1).mean(dtype=torch.float64))
            output[i] += float(squared_output((weights - exact) @ values, sample.output_weight))
    attention, output = ranks.sum_(attention), ranks.sum_(output)
    return EvictionLoss(attention / len(sample.queries), output / size if size else output)


def _attention_mass(sample: AttentionSample, sequence: int, tokens: int) -> Tensor:
    """Attention mass (column sums) of the first `tokens` tokens among themselves, [H, tokens]."""
    queries, keys = sample.queries[sequence][:, :tokens], sample.keys[sequence][:, :tokens]
    visible = sample.visible_in(sequence)
    scoring = Scoring(sample.scaling, sample.softcap, sample.sink_logits)
    return column_sums(queries, keys, lambda rows, columns: visible[rows, columns], scoring)


def calibrated_ratios(heavy_ratio: float, recent_ratio: float, curves: Sequence[Tensor]) -> list[float]:
    """Ratio of heavy hitters of each layer, with mean `heavy_ratio` as far as recent windows leave room for it.

    Args:
        heavy_ratio, recent_ratio: nominal shares of the prompt.
        curves: `EvictionLoss.output` of each layer.
    """
    ratios = spend_by_marginal_loss(curves, heavy_ratio * len(curves), max(0.0, 1 - recent_ratio))
    return clamp_ratios(ratios, recent_ratio)


def spend_by_marginal_loss(curves: Sequence[Tensor], budget: float, limit: float) -> list[float]:
    """Shares, at most `limit` each and `budget` together, that minimize the sum of the curves' convex hulls.

    Args:
        curves: per layer, falling values over equally spaced shares from 0 to 1.
        budget: sum of shares to spend.
        limit: the upper limit of each share.
    """
    segments: dict[float, list[tuple[int, float]]] = {}
    for layer, curve in enumerate(curves):
        for slope, length in _hull(curve.double().tolist(), limit):
            segments.setdefault(slope, []).append((layer, length))
    shares = [0.0] * len(curves)
    for slope in sorted(segments):
        # Layers that would gain alike share what is left alike.
        wanted = sum(length for _, length in segments[slope])
        part = min(1.0, budget / wanted) if wanted > 0 else 0.0
        for layer, length in segments[slope]:
            shares[layer] += part * length
        budget = max(0.0, budget - wanted)
    return shares


def _hull(values: list[float], limit: float) -> list[tuple[float, float]]:
    """Lower convex hull up to `limit` of a curve over [0, 1]: (slope, length) of its segments, steepest fall first."""
    step = 1 / (len(values) - 1)
    points = [(i * step, value) for i, value in enumerate(values) if i * step < limit]
    last = min(int(limit / step), len(values) - 2)
    share = limit / step - last
    points.append((limit, values[last] * (1 - share) + values[last + 1] * share))
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-1][0]) >= (y - hull[-1][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return [((y1 - y0) / (x1 - x0), x1 - x0) for (x0, y0), (x1, y1) in pairwise(hull)]


class MiniKVPass(SampleReader):
    """Measure what eviction costs the layer; its budget is decided when every layer is measured.

    Args:
        sampler: takes the sample, earlier in the list of passes.
        recent_ratio: share of the prompt kept as its newest tokens.
    """

    name = "minikv"

    def __init__(self, sampler: AttentionSampler, recent_ratio: float) -> None:
        super().__init__(sampler)
        self.recent_ratio = recent_ratio
        self._plan: dict[str, Tensor] = {}

    @classmethod
    def of(cls, job: LayerJob, sampler: CalibrationPass) -> MiniKVPass | None:
        """The pass for a scheme that evicts."""
        scheme = job.scheme
        evicts = scheme is not None and scheme.evicts and not scheme.heads_apart
        return cls(sampler, scheme.recent_ratio) if evicts else None

    @classmethod
    def resolve(cls, layers: Mapping[int, MeasuredLayer], search: KVCalibration) -> dict[int, Resolution]:
        """Spread the budget over the layers that share it; a recipe has one at most."""
        spread = {i: layer for i, layer in layers.items() if layer.nominal.allocation != "uniform"}
        if not spread:
            return {}
        nominal = next(iter(spread.values())).nominal
        if nominal.allocation in FORMULAS:
            ratios = [scheme.heavy_ratio for scheme in spread_ratios([layer.nominal for layer in spread.values()])]
        else:
            curves = [layer.plan["lost_output"] for layer in spread.values()]
            ratios = calibrated_ratios(nominal.heavy_ratio, nominal.recent_ratio, curves)
        return {
            index: Resolution(
                {"heavy_ratio": min(1.0, ratio), "allocation": "uniform"}, {"allocation": nominal.allocation}
            )
            for index, ratio in zip(spread, ratios, strict=True)
        }

    def solve(self, work: LayerWork) -> None:
        """Measure the curves."""
        sample = self.sampler.sample
        loss = eviction_loss(sample, self.recent_ratio, work.cache.sink_tokens, ranks=work.ranks)
        self._plan = {
            "lost_attention": loss.attention.float(),
            "lost_output": loss.output.float(),
        }

    def result(self) -> PassResult:
        """The measurements."""
        return PassResult(plan=self._plan)
