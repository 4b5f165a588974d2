"""Calibration of error feedback: which part of a key channel's rounding error later channels can make up for.

With H = E[q^T q] over the calibration queries of a KV head (all its query heads, after RoPE and the cache's rotation:
in the coordinates of stored keys, which a token norm leaves as they are),

    H + 0.1 mean(diag H) I,      its inverse = U^T U, U upper triangular (Cholesky, float64),      F_ij = U_ij / U_ii

What is left of the expected error when every channel has the same step is

    sum_i U_ii^-2 / trace H

with the damped H: 1 where channels of queries are uncorrelated. Rounding itself is in `kernels/pages/reference.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvconvert.calibration.attention_sample import AttentionPass, as_cached
from kvconvert.calibration.protocol import CalibrationPass, LayerJob, LayerWork, PassResult, require_finite
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.kernels.device import float32_products

DAMPING = 0.1  # of the mean diagonal; 0.01 to 0.3 made no difference on held-out text


class QueryMoments:
    """Running E[q^T q] of the queries of each KV head."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def update(self, queries: Tensor, num_key_value_heads: int) -> None:
        """Add queries [B, Hq, T, D]."""
        grouped = queries.float().unflatten(1, (num_key_value_heads, -1))
        for sequence in grouped:
            rows = sequence.flatten(1, 2)
            with float32_products(rows.device):
                total = (rows.transpose(1, 2) @ rows).double()
            self._sum = total if self._sum is None else self._sum + total
            self._count += rows.shape[1]

    def result(self, ranks: Ranks = ALONE) -> Tensor:
        """Float64 [H, D, D]."""
        return ranks.sum_(self._sum) / int(ranks.sum_(torch.tensor(self._count)))


def feedback_matrices(moments: Tensor) -> tuple[Tensor, Tensor]:
    """F and what it leaves of the expected error; see the module's docstring.

    Args:
        moments: H, [heads, D, D], finite. All zeros (nothing asks) gives the identity.

    Returns:
        float64 [heads, D, D], upper triangular with a diagonal of ones, and float64 [heads], 0 to 1.
    """
    dim = moments.shape[-1]
    moments = moments.double()
    mean = moments.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    # Scaled to a mean diagonal of 1, which leaves F as it is and keeps small queries clear of the smallest numbers.
    scaled = moments / torch.where(mean > 0, mean, 1.0)
    damped = scaled + DAMPING * torch.eye(dim, dtype=scaled.dtype, device=scaled.device)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    diagonal = upper.diagonal(dim1=1, dim2=2)
    left = diagonal.pow(-2).sum(1) / damped.diagonal(dim1=1, dim2=2).sum(1)
    return (upper / diagonal.unsqueeze(2)).triu(), left


class ErrorFeedbackPass(AttentionPass):
    """Measure the layer's queries and round its keys with feedback from there on.

    Stands before the passes that choose clip ratios, which then see keys as they will be rounded. The queries are those
    of the source's weights.
    """

    name = "error_feedback"

    def __init__(self) -> None:
        self._moments = QueryMoments()
        self._feedback: Tensor | None = None
        self._left: Tensor | None = None

    @classmethod
    def of(cls, job: LayerJob, sampler: CalibrationPass) -> ErrorFeedbackPass | None:
        """The pass for a scheme that asks for error feedback, or leaves the rounding of narrow keys to calibration."""
        scheme = job.scheme
        if scheme is None:
            return None
        wanted = scheme.feeds_errors_back or job.search.chooses_error_feedback(scheme)
        return cls() if wanted else None

    def see(self, work: LayerWork, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Sum up queries as they come, not rotated yet."""
        self._moments.update(query, key.shape[1])

    def solve(self, work: LayerWork) -> None:
        """Bring the moments into the coordinates of stored keys, and factorize them."""
        moments = self._moments.result(work.ranks)
        require_finite({"their second moments": moments}, "queries", work)
        for _ in range(2):  # H becomes R^T H R: rotated as rows of queries are, then its transpose likewise
            moments = _rotated(moments, work).transpose(1, 2)
        self._feedback, self._left = feedback_matrices(moments)

    def apply(self, work: LayerWork) -> None:
        """Put the matrices into the format of the layer's cache."""
        feedback = self._feedback.half().to(next(work.layer.parameters()).device)
        work.cache = replace(work.cache, key_tensors=work.cache.key_tensors._replace(feedback=feedback))

    def result(self) -> PassResult:
        """The matrices, and what they leave of the error."""
        return PassResult(
            plan={"key_feedback": self._feedback.half().cpu()},
            statistics={"expected_error_left": [round(float(value), 6) for value in self._left]},
            scheme={"key_rounding": "error_feedback"},
        )


def _rotated(rows: Tensor, work: LayerWork) -> Tensor:
    """Rows [..., D] rotated as the cache rotates queries."""
    return as_cached(rows, rows, rows, work.cache)[0].double()
