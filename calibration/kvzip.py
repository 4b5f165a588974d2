"""KVzip's scores (arXiv 2505.23416), predicted by a network of two layers for each layer of the model.

KVzap (arXiv 2601.07891) reads hidden states. Here a token's own keys and values are read
(`kernels.select.token_features`), which a cache holds when the prompt is complete: that finds as much
(benchmarks/RESULTS.md) and leaves the model alone. The network minimizes the squared error of the scores' logarithms,
which span orders of magnitude, over tokens of texts that were read twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvconvert.calibration.protocol import CalibrationPass, LayerJob, LayerWork, PassResult, significant
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.kernels.select import TokenScorer
from kvconvert.methods.kvzip import SCORE_QUANTILES, SCORER_CHANNELS, scorer_shapes

SMALLEST = 1e-5  # scores below it count as this
STEPS = 1200
BATCH, GPU_BATCH = 1024, 4096
LEARNING_RATE, LAST_RATE, WEIGHT_DECAY = 2e-3, 0.02, 0.01


@dataclass(frozen=True)
class FittedScorer:
    """A layer's network.

    Attributes:
        scorer: for values that are not rotated.
        explained: share of the variance of held-out tokens' logarithms of scores that it explains.
        quantiles: float32 [H, SCORE_QUANTILES], of the logarithms of the scores that it predicts.
    """

    scorer: TokenScorer
    explained: float
    quantiles: Tensor


def fit_scorer(features: Tensor, scores: Tensor, held_out: int, seed: int = 0) -> FittedScorer:
    """Fit one layer's network by AdamW.

    Args:
        features: [n, F] of tokens, `token_features`, in any float dtype.
        scores: float32 [n, H], the scores that a second reading gave them.
        held_out: tokens at the end that it is judged by and not fitted to; fewer than n.
        seed: seed for initializing the weights and drawing batches of tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    device, heads, count = features.device, scores.shape[1], len(features) - held_out
    batch = min(count, GPU_BATCH if device.type == "cuda" else BATCH)
    logarithms = (scores.float() + SMALLEST).log()
    mean = features[:count].float().mean(0)
    spread = features[:count].float().std(0) + 1e-3
    offset = logarithms[:count].mean(0)
    size = features.shape[1]
    first = [
        torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for shape in ((SCORER_CHANNELS, size), (heads, SCORER_CHANNELS))
    ]
    weights = [first[0], torch.zeros(SCORER_CHANNELS), 0.1 * first[1], torch.zeros(heads)]
    weights = [weight.to(device).requires_grad_() for weight in weights]

    def predicted(part: Tensor) -> Tensor:
        hidden = functional.gelu(functional.linear((part.float() - mean) / spread, weights[0], weights[1]))
        return functional.linear(hidden, weights[2], weights[3]) + offset

    optimizer = torch.optim.AdamW(weights, LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, LAST_RATE, STEPS)
    with torch.enable_grad():
        for _ in range(STEPS):
            chosen = torch.randint(count, (batch,), generator=generator).to(device)
            loss = (predicted(features[chosen]) - logarithms[chosen]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        judged = slice(count, None) if held_out else slice(None)
        truth = logarithms[judged]
        error = (torch.cat([predicted(part) for part in features[judged].split(batch)]) - truth).square().mean()
        explained = 1 - float(error / (truth - truth.mean(0)).square().mean())
        # Without means and spreads of features.
        hidden_weight = weights[0] / spread
        scorer = TokenScorer(hidden_weight, weights[1] - hidden_weight @ mean, weights[2].detach(), weights[3] + offset)
        ordered = torch.cat([predicted(part) for part in features.split(batch)]).sort(0, descending=True).values
        places = torch.linspace(0, len(ordered) - 1, SCORE_QUANTILES).round().long()
    return FittedScorer(scorer, explained, ordered[places.to(device)].T)


class KVzipPass(CalibrationPass):
    """Record the network that was fitted to the layer's scores, for values as the cache will hold them."""

    name = "kvzip"

    def __init__(self, job: LayerJob) -> None:
        self.job = job

    @classmethod
    def of(cls, job: LayerJob, sampler: CalibrationPass) -> KVzipPass | None:
        """The pass for a scheme that predicts."""
        return cls(job) if job.scorer is not None else None

    def sequences_read(self, samples: int, length: int) -> int:
        """None."""
        return 0

    def solve(self, work: LayerWork) -> None:
        """Nothing: the whole model was needed for it."""

    def result(self) -> PassResult:
        """The network's tensors, and how well it predicts."""
        job, (hidden_weight, *others) = self.job, self.job.scorer.scorer
        others.append(job.scorer.quantiles)
        if job.scheme.rotate_values != "none":
            values = hidden_weight[:, : job.heads * job.value_dim].unflatten(1, (job.heads, -1))
            rotated = hadamard_transform(values.contiguous()).flatten(1)
            hidden_weight = torch.cat([rotated, hidden_weight[:, rotated.shape[1] :]], 1)
        names = scorer_shapes(job.heads, job.key_dim, job.value_dim)
        tensors = (tensor.cpu().contiguous() for tensor in (hidden_weight, *others))
        return PassResult(
            plan=dict(zip(names, tensors, strict=True)), statistics={"explained": significant(job.scorer.explained)}
        )
