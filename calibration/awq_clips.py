"""AWQ's clipping: each group of weights is clamped where rounding loses least.

Each group of each output channel of every Linear but the query and key projections is clamped to +- max |w| (1 - i/20),
i = 0..9, taking the i with the least squared error of that group's share of the output. The error needs no activations,
only the group's second moment E[x x^T], so all calibration tokens count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from kvconvert.calibration.activations import ActivationStatistics, point_of
from kvconvert.calibration.awq_scaling import Scaling, reader_scales, scaled_parameters
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.kernels.linear.awq_format import fake_quantize_weight
from kvconvert.models.structure import LayerStructure, Projection

CLIP_STEPS = 10
# Bits of all Linears' weights, or of each one's by name.
Widths = int | Mapping[str, int]
_CHUNK_WEIGHTS = 2**22  # bounds the search's memory


def width_of(bits: Widths, name: str) -> int:
    """Bits of one Linear's weights."""
    return bits if isinstance(bits, int) else bits[name]


@torch.no_grad()
def search_clips(
    layer: nn.Module,
    structure: LayerStructure,
    statistics: ActivationStatistics,
    scalings: Sequence[Scaling],
    bits: Widths,
    group_size: int,
    ranks: Ranks = ALONE,
) -> dict[str, tuple[Tensor, float, float]]:
    """Search how far to clamp each group of each Linear but query and key. The layer is unchanged afterwards.

    Args:
        statistics: of the activations. Linears whose input has no second moment are not clipped.
        scalings: by which the layer is going to be scaled.
        bits: of the weights, of all Linears or of each by name.
        ranks: each searches some of the Linears.

    Returns:
        by Linear: the bound [out, in / group_size] for |w|, and the mean squared error of the output, summed over
        groups as if they were independent, without and with it. Where query or key are part of a fused Linear, their
        rows keep their largest weight and do not count.
    """

    scales = reader_scales(scalings)

    def search(name: str) -> tuple[Tensor, float, float] | None:
        part, point, width = _clipped_part(structure, name), point_of(structure, name), width_of(bits, name)
        moment = statistics.second_moment.get(point)
        if part is None or moment is None:
            return None
        scale = scales.get(name)
        if scale is not None:
            scale = scale.unflatten(0, (-1, group_size))
            moment = moment / (scale.unsqueeze(2) * scale.unsqueeze(1))
        weight = scaled_parameters(layer, structure, name, scalings, torch.float32)["weight"]
        bound, before, after = _search_clip(part.rows(weight), moment, width, group_size)
        if not part.is_whole:
            everything = weight.unflatten(-1, (-1, group_size)).abs().amax(-1)
            part.write(everything, bound)
            bound = everything
        return bound, before, after

    clips = zip(structure.linears, ranks.share(search, structure.linears), strict=True)
    return {name: clip for name, clip in clips if clip is not None}


@torch.no_grad()
def apply_clips(layer: nn.Module, clips: dict[str, tuple[Tensor, float, float]], group_size: int) -> None:
    """Clamp the layer's weights to the bounds that `search_clips` found, in place."""
    for name, (bound, _, _) in clips.items():
        groups = layer.get_submodule(name).weight.unflatten(-1, (-1, group_size))
        groups.copy_(groups.clamp(min=-bound.unsqueeze(-1), max=bound.unsqueeze(-1)))


def _clipped_part(structure: LayerStructure, name: str) -> Projection | None:
    """What of a Linear to clip: all of it, all but its query and key, or nothing."""
    inside = [part for part in (structure.query, structure.key) if part is not None and part.linear == name]
    if not inside:
        return Projection(name)
    value = structure.value
    return value if value is not None and value.linear == name and not value.is_whole else None


def _search_clip(weight: Tensor, moment: Tensor, bits: int, group_size: int) -> tuple[Tensor, float, float]:
    bounds, before, after = [], 0.0, 0.0
    for rows in weight.split(max(1, _CHUNK_WEIGHTS // weight.shape[1])):
        largest = rows.unflatten(-1, (-1, group_size)).abs().amax(-1)
        best_error, best_bound = None, largest
        for step in range(CLIP_STEPS):
            bound = largest * (1 - step / (2 * CLIP_STEPS))
            delta = fake_quantize_weight(rows, bits, group_size, bound) - rows
            delta = delta.unflatten(-1, (-1, group_size))  # [rows, groups, group_size]
            by_group = delta.transpose(0, 1)
            error = ((by_group @ moment) * by_group).sum(-1).T
            if best_error is None:
                best_error = error
                before += float(error.double().sum())
            else:
                better = error < best_error
                best_error = torch.where(better, error, best_error)
                best_bound = torch.where(better, bound, best_bound)
        bounds.append(best_bound)
        after += float(best_error.double().sum())
    return torch.cat(bounds), before / weight.shape[0], after / weight.shape[0]
