"""Keys rounded with error feedback in a rotation of choice: the Hadamard matrix, or one calibrated before it.

The calibrated rotation is R = V T, with the eigenvectors V of H = E[q^T q] (one H for each KV head, over its queries)
and the Hadamard matrix T: V brings the queries' covariance into diagonal form and T spreads it evenly, so that every
stored channel matters as much as any other. Error feedback uses R^T H R, clip ratios are those with the smallest
expected error of scores, (k - k_hat) H (k - k_hat)^T, on calibration keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvconvert.calibration.error_feedback import feedback_matrices
from kvconvert.kernels.pages.feedback import round_with_feedback
from kvconvert.kernels.quantizer import dequantize, quantize
from kvconvert.kernels.rotate import hadamard_matrix

PAGE = 128
CLIP_RATIOS = {1: (0.3, 0.4, 0.5, 0.6), 2: (0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0)}
DEFAULT_CLIP_RATIOS = (0.85, 0.9, 0.95, 1.0)


@dataclass
class Known:
    """What calibration text says of one layer.

    Attributes:
        sensitivity: of key channels, [H, D]; see `sensitivities`.
        moments: E[q^T q], float64 [H, D, D].
        keys: of whole pages, [H, n, D].
        clip_ratios: found so far, by the arguments of `rounded_keys`.
    """

    sensitivity: Tensor
    moments: Tensor
    keys: Tensor
    clip_ratios: dict[tuple, float] = field(default_factory=dict)


def rotation(known: Known, calibrated: bool) -> Tensor:
    """Orthonormal [H, D, D]; rows of keys are multiplied by it from the right."""
    heads, dim, _ = known.moments.shape
    spread = hadamard_matrix(dim, dtype=torch.float64, device=known.moments.device).expand(heads, dim, dim)
    return (torch.linalg.eigh(known.moments)[1] @ spread if calibrated else spread).float()


def rounded_keys(x: Tensor, known: Known, bits: int, calibrated: bool, feedback: bool) -> Tensor:
    """Keys [H, n, D], n a multiple of 128, as pages with groups of 128 tokens and a norm per token would give them."""
    key = (bits, calibrated, feedback)
    if key not in known.clip_ratios:
        errors = {}
        for ratio in CLIP_RATIOS.get(bits, DEFAULT_CLIP_RATIOS):
            off = (known.keys - _rounded(known.keys, known, *key, ratio)).double()
            errors[ratio] = float(((off @ known.moments) * off).sum())
        known.clip_ratios[key] = min(errors, key=errors.__getitem__)
    return _rounded(x, known, *key, known.clip_ratios[key])


def _rounded(x: Tensor, known: Known, bits: int, calibrated: bool, feedback: bool, clip_ratio: float) -> Tensor:
    turn = rotation(known, calibrated)
    norm = x.square().mean((0, 2), keepdim=True).sqrt().half().float().clamp(min=1e-8)
    # [pages, H, D, tokens]
    pages = ((x @ turn) / norm).unflatten(1, (-1, PAGE)).permute(1, 0, 3, 2).contiguous()
    found = quantize(pages, bits, PAGE, 3, clip_ratio)
    codes = found.codes
    if feedback:
        matrices = feedback_matrices(turn.mT.double() @ known.moments @ turn.double())[0].half()
        codes = round_with_feedback(pages, found.scale, found.zero_point, 2**bits - 1, matrices)
    read = dequantize(codes, found.scale, found.zero_point, PAGE, 3)
    return (read.permute(1, 0, 3, 2).flatten(1, 2) * norm) @ turn.mT
