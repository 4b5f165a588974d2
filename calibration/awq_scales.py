"""AWQ's scales per input channel (Lin et al., arXiv 2306.00978), found by search.

Scaling (section 3.2, equations 4 and 5). Multiplying input channel c of a Linear by s_c, and dividing what
produces that channel by s_c, leaves the function as it is but makes salient channels lose less to rounding. With the
activation statistic a_c = mean |x_c|, the candidates are

    s = clamp(a^r, 1e-4) / sqrt(max(.) min(.)),   r = 0, 1/20, ..., 1,

and the one with the least squared error of the inspected module's output, || f(x; Q(W s) / s) - f(x; W) ||^2, is kept.
r = 0 is the identity, so the result is never worse than plain rounding on the inspected outputs. Producers and readers:

    norm -> every Linear that reads the norm     (inspected: attention, MLP)
    value -> output projection                   (inspected: output; one scale per channel of a KV head)
    up -> down projection                        (inspected: down)

A pair is skipped, with the reason, where a scale cannot pass: no norm precedes, or what lies between is not linear.

Cost. Statistics use all tokens. The scale search evaluates its 21 candidates on at most `LOSS_TOKENS` tokens: evenly
spaced whole sequences for attention, which mixes tokens, and tokens at a constant stride otherwise. All candidates see
a part of these, and the others only those whose error on it is close to the least: `_Losses`.

Where rounding is compensated afterwards (GPTQ), candidates are compared by what compensation leaves of each Linear's
error, sum over outputs o and inputs i of D_oi^2 r_i with r of `ActivationStatistics.remaining`, relative to that at
r = 0 and added over the readers: no activations, and no forward pass.

Rounding of norms. A scaled norm is stored in the model's dtype, at most 8 bits of precision in bfloat16. So every
candidate s is first replaced by weight / round(weight / s): the norm's rounding is absorbed exactly by the readers'
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvconvert.calibration.activations import ActivationStatistics, point_of
from kvconvert.calibration.awq_scaling import ScaledReader, Scaling, Widths, rounded, scaling_label, width_of
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.kernels.linear.awq_format import fake_quantize_weight
from kvconvert.kernels.quantizer import GroupRangeError
from kvconvert.models.structure import LayerStructure, NormGroup, ScalingPair

RATIO_STEPS = 20
_CHUNK_TOKENS = 1024  # of a search's forward pass: bounds its memory
_CHUNK_WEIGHTS = 2**22  # rounded at once where no forward pass is needed
# What every candidate is tried on first: every n-th sampled token, or every n-th group of about so many tokens of whole
# sequences; fewer tokens than `_LEAST_SPLIT` are not split. On layers 0, 3, 9, 15 and 21 of SmolLM2 the best candidate
# lost on any such part at most 1.031 (tokens) and 1.167 (sequences) times what the part's own best one did.
_LEAST_SPLIT = 1024
_FIRST_TOKENS, _CLOSE_ON_TOKENS = 8, 1.1
_FIRST_SEQUENCES, _SEQUENCE_TOKENS, _CLOSE_ON_SEQUENCES = 4, 512, 1.25


def candidate_scale(statistic: Tensor, ratio: float) -> Tensor:
    """The scale that exponent `ratio` gives for a statistic [in]: float32, geometric middle of its extremes at 1."""
    scale = statistic.float().pow(ratio).clamp(min=1e-4)
    return scale / (scale.max() * scale.min()).sqrt()


def representable_scale(norm: nn.Module, scale: Tensor, unit_offset: bool, dtype: torch.dtype) -> Tensor:
    """The scale nearest to `scale` for which the scaled norm weight is exact in `dtype`; 1 where the norm is 0."""
    offset = 1.0 if unit_offset else 0.0
    weight = norm.weight.float() + offset
    rounded = (weight / scale - offset).to(dtype).float() + offset
    exact = weight / rounded
    return torch.where((weight != 0) & (rounded != 0) & exact.isfinite(), exact, 1.0)


@torch.no_grad()
def search_scales(
    layer: nn.Module,
    structure: LayerStructure,
    statistics: ActivationStatistics,
    bits: Widths,
    group_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    quantize_values: Callable[[Tensor], Tensor] | None = None,
    ranks: Ranks = ALONE,
) -> tuple[list[Scaling], dict[str, str]]:
    """Search the scale of every pair of a layer. The layer is unchanged afterwards.

    Args:
        layer: decoder layer in float32.
        structure: its names.
        statistics: the statistics of its activations. Only `mean_abs` decides on the candidates, so statistics from
            elsewhere, or shuffled ones, may be given. Those with `remaining` are for weights that will be compensated.
        bits: the width of the weights, 2 to 8 bits, one for all Linears or one for each by name.
        group_size: the group size of the weights.
        dtype: in which norms will be stored.
        quantize_values: gives values [tokens, KV heads, head_dim] as read back from the KV cache. With it, candidates
            for value -> output that raise the mean squared error of the values are skipped.
        ranks: each evaluates some of the candidates.

    Returns:
        the scalings, and for each pair that was skipped (by label) the reason.
    """
    search = _Search(layer, structure, statistics, bits, group_size, dtype, quantize_values, ranks)
    scalings: list[Scaling] = []
    skipped: dict[str, str] = {}
    for group in structure.norm_groups:
        if group.unsupported_reason is None:
            scalings.append(search.norm_group(group))
        else:
            skipped[scaling_label(group.norm, group.readers)] = group.unsupported_reason
    if structure.value is not None and structure.value_scaling_unsupported_reason is None:
        scaling, reason = search.value_output()
        scalings.append(scaling)
        if reason:
            skipped[scaling.label] = reason
    elif structure.value_scaling_unsupported_reason is not None:
        skipped[scaling_label(structure.value or structure.attention, (structure.output,))] = (
            structure.value_scaling_unsupported_reason
        )
    for pair in structure.pairs:
        if pair.unsupported_reason is None:
            scalings.append(search.pair(pair))
        else:
            skipped[scaling_label(pair.up, (pair.down,))] = pair.unsupported_reason
    return scalings, skipped


@dataclass(frozen=True)
class _Losses:
    """A candidate's loss as a sum over parts of the data.

    Attributes:
        parts: one or two functions of a scale.
        close: the second part is evaluated for ratio 0 and for candidates whose first part is at most this many times
            the least one's.
    """

    parts: Sequence[Callable[[Tensor], float]]
    close: float = 1.0


def _best_ratio(
    scale_of: Callable[[float], Tensor],
    losses: _Losses,
    ranks: Ranks,
    admissible: Callable[[Tensor], bool] = lambda scale: True,
) -> tuple[Tensor, float, float, float]:
    """Scale, ratio, loss at ratio 0, loss at the chosen ratio. Ties go to the smaller ratio; 0 always competes."""

    def part_at(part: Callable[[Tensor], float], ratio: float) -> float | None:
        try:
            return part(scale_of(ratio))
        except GroupRangeError:
            if not ratio:
                raise
            return None  # this candidate, unlike ratio 0, leaves the range of fp16

    first, *others = losses.parts
    ratios = [step / RATIO_STEPS for step in range(RATIO_STEPS + 1)]
    shared = ranks.share(lambda ratio: part_at(first, ratio), ratios)
    found = {ratio: loss for ratio, loss in zip(ratios, shared, strict=True) if loss is not None}
    for part in others:
        bound = losses.close * min(found.values())
        found = {ratio: loss for ratio, loss in found.items() if not ratio or loss <= bound}
        rest = ranks.share(lambda ratio, part=part: part_at(part, ratio), list(found))
        found = {ratio: loss + more for (ratio, loss), more in zip(found.items(), rest, strict=True)}
    before = found.pop(0.0)
    best_scale, best_ratio, best = scale_of(0.0), 0.0, before
    for ratio, loss in found.items():
        if not loss < best:
            continue
        scale = scale_of(ratio)
        try:
            better = admissible(scale)
        except GroupRangeError:
            continue
        if better:
            best_scale, best_ratio, best = scale, ratio, loss
    return best_scale, best_ratio, before, best


@dataclass(frozen=True)
class _Search:
    """The search in one layer; attributes are the arguments of `search_scales`."""

    layer: nn.Module
    structure: LayerStructure
    statistics: ActivationStatistics
    bits: Widths
    group_size: int
    dtype: torch.dtype
    quantize_values: Callable[[Tensor], Tensor] | None
    ranks: Ranks

    def norm_group(self, group: NormGroup) -> Scaling:
        """The scale of a norm's readers."""
        point, norm = group.readers[0], self.layer.get_submodule(group.norm)
        quantized = [reader for reader in group.readers if reader not in self.structure.unquantized]

        def scale_of(ratio: float) -> Tensor:
            scale = candidate_scale(self.statistics.mean_abs[point], ratio)
            return representable_scale(norm, scale, group.unit_offset, self.dtype) if ratio else scale

        if self.statistics.remaining:
            losses = _Losses([self.remaining_loss(quantized)])
        else:
            losses = self.inspected_losses(group, quantized)
        scale, ratio, before, after = _best_ratio(scale_of, losses, self.ranks)
        return Scaling(group.norm, group.readers, scale, scale, ratio, before, after)

    def inspected_losses(self, group: NormGroup, quantized: list[str]) -> _Losses:
        """Mean squared error of the output of the modules that read a norm, its quantized readers rounded."""
        inspected = [self.layer.get_submodule(name) for name in group.inspected]
        if self.structure.attention in group.inspected:
            chunks = list(self.statistics.sequence_chunks(_SEQUENCE_TOKENS))
            splits = len(chunks) > 1 and self.statistics.sequences.shape[:2].numel() >= _LEAST_SPLIT
            split = _first_and_others(chunks, _FIRST_SEQUENCES) if splits else (chunks,)
            close = _CLOSE_ON_SEQUENCES
        else:
            tokens, close = _token_parts(self.statistics.tokens[group.readers[0]]), _CLOSE_ON_TOKENS
            split = [[(chunk.unsqueeze(0), {}) for chunk in part.split(_CHUNK_TOKENS)] for part in tokens]
        routed = self.structure.experts.owner if self.structure.experts is not None else lambda reader: None
        readers = [
            ScaledReader(self.layer.get_submodule(reader), width_of(self.bits, reader), routed(reader) is not None)
            for reader in quantized
        ]

        def forward(chunk: Tensor, **kwargs: Any) -> Tensor:
            total = None
            for name, module in zip(group.inspected, inspected, strict=True):
                output = module(chunk, **kwargs) if name == self.structure.attention else module(chunk)
                output = output[0] if isinstance(output, tuple) else output
                total = output if total is None else total + output
            return total

        parts = [[(chunk, kwargs, forward(chunk, **kwargs)) for chunk, kwargs in chunks] for chunks in split]
        count = sum(reference.numel() for part in parts for _, _, reference in part)

        def loss(part: list[tuple[Tensor, dict[str, Any], Tensor]], scale: Tensor) -> float:
            with rounded(readers, scale, self.group_size):
                errors = [
                    (forward(chunk, **kwargs) - reference).square_().sum(dtype=torch.float64)
                    for chunk, kwargs, reference in part
                ]
            return float(torch.stack(errors).sum()) / count

        return _Losses([partial(loss, part) for part in parts], close)

    def value_output(self) -> tuple[Scaling, str]:
        """The scale of values, and why it is 1 where better ones were passed over."""
        kv_heads, d = self.structure.num_key_value_heads, self.structure.head_dim

        def per_query_head(scale: Tensor) -> Tensor:
            repeats = self.structure.num_attention_heads // kv_heads
            return scale.view(kv_heads, 1, d).expand(kv_heads, repeats, d).flatten()

        statistic = self.statistics.mean_abs[self.structure.output].view(kv_heads, -1, d).mean(1).flatten()
        output, width = self.structure.output, width_of(self.bits, self.structure.output)
        # In one part: which candidates the cache allows shows only later.
        if self.statistics.remaining:
            loss = self.remaining_loss([output])
        else:
            loss = _linear_loss(
                self.layer.get_submodule(output), self.statistics.tokens[output], width, self.group_size
            )
        losses = _Losses([lambda scale: loss(per_query_head(scale))])
        passed_over: list[float] = []
        admissible: Callable[[Tensor], bool] = lambda scale: True  # noqa: E731
        if self.quantize_values is not None:
            value, name = self.structure.value, self.structure.value.linear
            outputs = self.layer.get_submodule(name)(self.statistics.tokens[point_of(self.structure, name)])
            values = value.rows(outputs, dim=-1).unflatten(-1, (kv_heads, d))

            def value_error(scale: Tensor) -> float:
                scale = scale.view(kv_heads, d)
                return float((self.quantize_values(values / scale) * scale - values).square().mean(dtype=torch.float64))

            unscaled_error = value_error(torch.ones_like(statistic))

            def admissible(scale: Tensor) -> bool:
                error = value_error(scale)
                if error > unscaled_error:
                    passed_over.append(error)
                return error <= unscaled_error

        scale, ratio, before, after = _best_ratio(
            lambda r: candidate_scale(statistic, r), losses, self.ranks, admissible
        )
        reason = ""
        if ratio == 0 and passed_over:
            raised = f"from {unscaled_error:.4g} to {min(passed_over):.4g} or more"
            reason = f"each better scale raises the error of the quantized values ({raised})"
        return Scaling(
            self.structure.value, (self.structure.output,), scale, per_query_head(scale), ratio, before, after
        ), reason

    def pair(self, pair: ScalingPair) -> Scaling:
        """The scale between an up and a down projection."""
        statistic = self.statistics.mean_abs[pair.down]
        if self.statistics.remaining:
            losses = [self.remaining_loss([pair.down])]
        else:
            width = width_of(self.bits, pair.down)
            linear, tokens = self.layer.get_submodule(pair.down), self.statistics.tokens[pair.down]
            # With fewer inputs than tokens no candidate needs the tokens, see `_linear_loss`.
            parts = [tokens] if tokens.shape[1] < tokens.shape[0] else _token_parts(tokens)
            losses = [_linear_loss(linear, part, width, self.group_size, tokens.shape[0]) for part in parts]
        scale, ratio, before, after = _best_ratio(
            lambda r: candidate_scale(statistic, r), _Losses(losses, _CLOSE_ON_TOKENS), self.ranks
        )
        return Scaling(pair.up, (pair.down,), scale, scale, ratio, before, after)

    def remaining_loss(self, readers: Sequence[str]) -> Callable[[Tensor], float]:
        """The sum over readers of what compensation leaves of a Linear's error with a scale, relative to no scale.

        Experts that had too few tokens, and are not compensated, do not count.
        """
        costs = {reader: self.statistics.remaining.get(point_of(self.structure, reader)) for reader in readers}

        def left(reader: str, scale: Tensor | None) -> float:
            weight, total = self.layer.get_submodule(reader).weight, 0.0
            for rows in weight.split(max(1, _CHUNK_WEIGHTS // weight.shape[1])):
                scaled = rows if scale is None else rows * scale
                delta = fake_quantize_weight(scaled, width_of(self.bits, reader), self.group_size)
                delta = (delta if scale is None else delta.div_(scale)).sub_(rows)
                total += float(delta.square_().mul_(costs[reader]).sum(dtype=torch.float64))
            return total

        unscaled = {reader: left(reader, None) for reader, cost in costs.items() if cost is not None}

        def loss(scale: Tensor) -> float:
            return sum(left(reader, scale) / before if before else 0.0 for reader, before in unscaled.items())

        return loss


def _first_and_others(items: Sequence[Any], every: int) -> tuple[list[Any], list[Any]]:
    """Every n-th item, and those between."""
    return list(items[::every]), [item for index, item in enumerate(items) if index % every]


def _token_parts(tokens: Tensor) -> list[Tensor]:
    """Tokens [n, in] that all candidates are tried on, and the others; all of them where they are few."""
    if len(tokens) < _LEAST_SPLIT:
        return [tokens]
    first = torch.arange(len(tokens), device=tokens.device) % _FIRST_TOKENS == 0
    return [tokens[first], tokens[~first]]


def _linear_loss(
    linear: nn.Module, tokens: Tensor, bits: int, group_size: int, count: int | None = None
) -> Callable[[Tensor], float]:
    """Mean squared error of a Linear's output, ||X D^T||^2 / (count * out) for the weights' error D of a scale.

    `count` is the number of tokens unless X is a part of them.
    With fewer inputs than tokens it is tr(D G D^T) with G = X^T X, which is less work for each scale.
    """
    gram = tokens.T @ tokens if tokens.shape[1] < tokens.shape[0] else None
    count = tokens.shape[0] if count is None else count

    def loss(scale: Tensor) -> float:
        delta = fake_quantize_weight(linear.weight * scale, bits, group_size).div_(scale).sub_(linear.weight)
        squares = (tokens @ delta.T).square_() if gram is None else (delta @ gram).mul_(delta)
        return float(squares.sum(dtype=torch.float64)) / (count * delta.shape[0])

    return loss
