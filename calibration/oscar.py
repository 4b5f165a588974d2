"""OScaR (Su et al., "The Occam's Razor for Extreme KV Cache Quantization"): value fold and token-norm imbalance.

Offline, OScaR changes two weights (algorithm 1, OScaR-Preprocess): W_V <- W_V H per KV head and W_O <- H^T W_O per
query head, with the head's orthonormal Hadamard matrix H, so that values come out rotated and the output projection
rotates them back. Everything else (rotating q and k, norms, quantizing) happens at run time.

The statistics say how much there is to gain. Within a group g of tokens that share a key channel's scale, the expected
error of b-bit quantization is, by equations 9 and 11 (appendix G),

    MSE_g = sum_j R_j^2 / (12 (2^b - 1)^2)  >=  (max_t |k_t| - min_t |k_t|)^2 / (12 (2^b - 1)^2),

R_j being the range of channel j over the group's tokens and |k_t| a token's L2 norm. Both numerators are reported for
each KV head, divided by the group's mean |k_t|^2, averaged over groups, at three stages: as the model computes keys,
after rotation, and after rotation and token-norm scaling:

    key_norm_imbalance  = (max_t |k_t| - min_t |k_t|)^2 / mean_t |k_t|^2     rotation cannot change it, scaling does
    key_channel_range   = sum_j R_j^2 / mean_t |k_t|^2                      12 (2^b - 1)^2 times the relative error

The second is the one to compare between stages: dividing by the mean square makes it independent of the scaling's size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from kvconvert.calibration.attention_sample import AttentionPass
from kvconvert.calibration.protocol import CalibrationPass, LayerJob, LayerWork, PassResult, require_finite
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.kernels.rotate import hadamard_matrix, hadamard_transform
from kvconvert.models.structure import LayerStructure

STAGES = ("original", "rotated", "rotated_scaled")


@torch.no_grad()
def fold_value_rotation(layer: nn.Module, structure: LayerStructure) -> None:
    """Let the layer compute values times H and undo it in the output projection, in place; outputs do not change.

    In the convention of nn.Linear (y = W x), each KV head's rows of W_V become H^T W_V and its biases b H; each query
    head's columns of W_O become W_O H. The same H serves all heads, so grouped queries need nothing further.

    Args:
        layer: a decoder layer in float32.
        structure: its names; `fold_unsupported_reason` has to be None.
    """
    value, output = layer.get_submodule(structure.value.linear), layer.get_submodule(structure.output)
    d = structure.head_dim
    h = hadamard_matrix(d, dtype=torch.float32, device=value.weight.device)
    rows = structure.value.rows(value.weight).unflatten(0, (-1, d))
    structure.value.write(value.weight, (h.T @ rows).flatten(0, 1))
    if value.bias is not None:
        bias = structure.value.rows(value.bias).unflatten(0, (-1, d))
        structure.value.write(value.bias, (bias @ h).flatten())
    output.weight.copy_((output.weight.unflatten(1, (-1, d)) @ h).flatten(1))


class KeyStatistics:
    """Running statistics of token-norm imbalance of one layer's keys; see the module's docstring for the definitions.

    Args:
        group_size: tokens that share a scale; sequences are cut into groups, a last incomplete group is left out
            (a sequence shorter than one group is one group).
        token_norm: "joint" scales a token by one norm over all KV heads (OScaR), "per_head" by one per head.
        measure: "l2" or "mean_abs".
    """

    def __init__(
        self,
        group_size: int,
        token_norm: Literal["joint", "per_head"] = "joint",
        measure: Literal["l2", "mean_abs"] = "l2",
    ) -> None:
        self.group_size, self.token_norm, self.measure = group_size, token_norm, measure
        self._sums: dict[str, list[Tensor]] = {}  # of each batch
        self._sequences = 0

    def update(self, keys: Tensor) -> None:
        """Add a batch of keys after RoPE, [B, KV heads, T, head_dim]."""
        keys = keys.float()
        rotated = hadamard_transform(keys)
        size = rotated.abs() if self.measure == "mean_abs" else rotated.square()
        size = size.mean((1, 3) if self.token_norm == "joint" else 3, keepdim=True)
        size = size if self.measure == "mean_abs" else size.sqrt()
        scaled = torch.where(size > 0, rotated / size, 0)
        batch = [self._measure(stage) for stage in (keys, rotated, scaled)]
        for name in batch[0]:
            total = torch.stack([stage[name] for stage in batch])  # [stages, KV heads], summed over sequences
            self._sums.setdefault(name, []).append(total)
        self._sequences += keys.shape[0]

    def _measure(self, keys: Tensor) -> dict[str, Tensor]:
        length = keys.shape[2]
        group = min(self.group_size, length)
        groups = keys[:, :, : length // group * group].unflatten(2, (-1, group))  # [B, heads, groups, tokens, d]
        norms = groups.norm(dim=-1)
        energy = norms.square().mean(-1).clamp(min=torch.finfo(torch.float32).tiny)
        low, high = torch.aminmax(groups, dim=3)
        spread = norms.amax(-1) - norms.amin(-1)
        all_norms = keys.norm(dim=-1)
        median = all_norms.median(-1).values.clamp(min=torch.finfo(torch.float32).tiny)
        measured = {
            "key_norm_imbalance": (spread.square() / energy).mean(-1),
            "key_channel_range": ((high - low).square().sum(-1) / energy).mean(-1),
            "key_norm_max_over_median": all_norms.amax(-1) / median,
            "key_norm_min_over_median": all_norms.amin(-1) / median,
        }
        return {name: values.double().sum(0).cpu() for name, values in measured.items()}

    def result(self, ranks: Ranks = ALONE) -> dict[str, Tensor]:
        """Each statistic as float32 [3, KV heads], rows in the order of `STAGES`; means over groups and sequences.

        `key_norm_max_over_median` and `..._min_over_median` compare token norms within a sequence, averaged over
        sequences.
        """
        sequences = int(ranks.sum_(torch.tensor(self._sequences)))
        return {name: (ranks.sum_in_order(sums) / sequences).float() for name, sums in self._sums.items()}


class OscarPass(AttentionPass):
    """Fold the rotation into W_V and W_O if `fold_values` is set, and measure token-norm imbalance.

    Args:
        fold_values: rotate values in the weights.
        group_size, token_norm, measure: see `KeyStatistics`.
    """

    name = "oscar"

    def __init__(
        self,
        fold_values: bool,
        group_size: int,
        token_norm: Literal["joint", "per_head"] = "joint",
        measure: Literal["l2", "mean_abs"] = "l2",
    ) -> None:
        self.fold_values = fold_values
        self._statistics = KeyStatistics(group_size, token_norm, measure)
        self._tensors: dict[str, Tensor] = {}

    @classmethod
    def of(cls, job: LayerJob, sampler: CalibrationPass) -> OscarPass | None:
        """The pass for a scheme that rotates or normalizes."""
        scheme = job.scheme
        if scheme is None or not (scheme.rotates or scheme.token_norm != "none"):
            return None
        norm = "per_head" if scheme.token_norm == "per_head" else "joint"
        return cls(scheme.folds_values, scheme.key_group_size, norm, scheme.token_norm_measure)

    def prepare(self, work: LayerWork) -> None:
        """Fold the value rotation."""
        if self.fold_values:
            fold_value_rotation(work.layer, work.structure)

    def see(self, work: LayerWork, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Count keys after RoPE."""
        self._statistics.update(key)

    def solve(self, work: LayerWork) -> None:
        """Average what was recorded."""
        self._tensors = self._statistics.result(work.ranks)
        require_finite(self._tensors, "keys", work)

    def result(self) -> PassResult:
        """The four statistics as plan tensors, and their means over heads as readable statistics."""
        return PassResult(
            plan=self._tensors,
            statistics={
                name: {stage: round(float(row.mean()), 6) for stage, row in zip(STAGES, values, strict=True)}
                for name, values in self._tensors.items()
            },
        )
