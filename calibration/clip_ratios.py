"""Calibration of clip ratios: how far to shrink each group's (min, max) before it is quantized.

The best uniform quantizer of b bits does not reach to the extremes. Of 128 near-Gaussian values, min and max are about
5.3 standard deviations apart, while the range that minimises the mean squared error spans about 3 at 2 bits and 1.6 at
1 bit: clamping a few values costs less than a coarse step costs all. The clip ratio r shrinks (min, max) about
their midpoint. It is chosen per layer, for keys and for values, on a sample of the layer's attention,

    r* = argmin over the grid of  E || (o_r(t) - o(t)) W_O^T ||^2

o(t) being the heads' attention outputs of query t in full precision and o_r(t) the same where every complete page that
precedes t is quantized as the runtime would, with t's own page in full precision. Keys are searched with exact values,
values with exact attention weights: searched with the quantized keys, values make up for the keys' error on the sample,
which did not carry over to held-out text. Without W_O, or by the error of the attention weights alone, the
chosen clip ratios were worse on held-out text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvconvert.cache.format import CacheFormat, Side
from kvconvert.calibration.attention_sample import AttentionSample, AttentionSampler, squared_output
from kvconvert.calibration.protocol import (
    CalibrationPass,
    LayerJob,
    LayerWork,
    PassResult,
    require_finite,
    significant,
)
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.kernels.pages import dequantize_keys, dequantize_values, page_centers, quantize_keys, quantize_values
from kvconvert.methods import KVCalibration, KVScheme

CLIP_RATIO_GRID = tuple(round(1 - 0.05 * i, 2) for i in range(17))  # 1.0, 0.95 ... 0.2
QUERY_BLOCK = 128  # queries whose attention is held at once


def pages_read(num_tokens: int, recent: int, page_size: int) -> int:
    """Quantized pages that the last of `num_tokens` tokens attends to.

    Page p holds tokens p page_size and following. It is quantized after the attention of the token that completes it
    and of `recent` further ones, so that only later tokens read it quantized.
    """
    return max(0, (num_tokens - 1 - recent) // page_size)


def reads_quantized(
    queries: slice, keys: int, sink_tokens: int, recent: int, page_size: int, device: torch.device
) -> Tensor:
    """Bool [queries, keys]: which of the first `keys` tokens a query finds quantized."""
    token = torch.arange(keys, device=device)
    available = (token // page_size + 1) * page_size + recent
    query = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    return (token >= sink_tokens) & (query >= available)


def stored_tokens(tokens: Tensor, cache: CacheFormat, side: Side, clip_ratio: float) -> Tensor:
    """One sequence's keys or values [H, T, channels] as read back from pages with this clip ratio.

    Unchanged where no page is read.
    """
    f, own = cache.side(side)
    f = replace(f, clip_ratio=clip_ratio)
    count, sinks = pages_read(tokens.shape[1], own.recent_tokens, f.page_size), cache.sink_tokens
    part = slice(0, count * f.page_size)
    if f.bits == 16 or not count:
        return tokens
    pages = tokens[:, part].unflatten(1, (count, f.page_size)).transpose(0, 1)
    static = cache.static_scales(side, clip_ratio)
    if side == "value":
        read = dequantize_values(quantize_values(pages, f, static, sinks), f, static)
    else:
        fixed = cache.pages.boosted, static
        constant: Tensor | float = 0.0
        if cache.pages.key_center is not None:
            starts = f.page_size * torch.arange(count, device=tokens.device)
            constant = page_centers(starts, f.page_size, cache.pages.key_center)
        quantized = quantize_keys(pages - constant, f, *fixed, cache.pages.key_feedback, sinks)
        read = dequantize_keys(quantized, f, *fixed).transpose(2, 3) + constant
    result = tokens.clone()
    result[:, part] = read.transpose(0, 1).flatten(1, 2)
    result[:, :sinks] = tokens[:, :sinks]
    return result


@dataclass(frozen=True)
class _Block:
    """Some queries of one sequence, with what they attend to in full precision.

    Attributes:
        sequence: number of the sequence; rows: the queries in it; keys: tokens up to the last of them.
        queries: [H, Hq / H, q, D].
        scores, weights: [H, Hq / H, q, keys]; output: [H, Hq / H, q, E].
        visible: bool [q, keys].
    """

    sequence: int
    rows: slice
    keys: int
    queries: Tensor
    scores: Tensor
    weights: Tensor
    output: Tensor
    visible: Tensor


def _blocks(sample: AttentionSample, first: int) -> Iterator[_Block]:
    """The queries from token `first` on."""
    for sequence in range(len(sample.queries)):
        keys, values = sample.keys[sequence], sample.values[sequence].unsqueeze(1)
        for start in range(first, sample.num_tokens, QUERY_BLOCK):
            rows = slice(start, min(start + QUERY_BLOCK, sample.num_tokens))
            reach = rows.stop
            queries = sample.grouped_queries(sequence)[:, :, rows]
            scores = sample.scores(queries, keys[:, :reach])
            visible = sample.visible_in(sequence)[rows, :reach]
            weights = _weights(sample, scores, visible)
            yield _Block(sequence, rows, reach, queries, scores, weights, weights @ values[:, :, :reach], visible)


def _weights(sample: AttentionSample, scores: Tensor, visible: Tensor) -> Tensor:
    return sample.weights(scores.masked_fill(~visible, float("-inf")))


def key_clip_ratio_errors(
    sample: AttentionSample, cache: CacheFormat, grid: tuple[float, ...], ranks: Ranks = ALONE
) -> Tensor:
    """Error of the attention output with quantized keys and exact values, relative to its mean square.

    Returns:
        float64 [grid], over the queries that read at least one quantized page; zeros where there are none.
    """
    recent, page = cache.keys.recent_tokens, cache.pages.keys.page_size

    def output(block: _Block, stored: Tensor) -> Tensor:
        device = stored.device
        quantized = reads_quantized(block.rows, block.keys, cache.sink_tokens, recent, page, device)
        scores = sample.scores(block.queries, stored[:, : block.keys])
        weights = _weights(sample, torch.where(quantized, scores, block.scores), block.visible)
        return weights @ sample.values[block.sequence][:, None, : block.keys] - block.output

    candidates = [partial(stored_tokens, cache=cache, side="key", clip_ratio=r) for r in grid]
    return _errors(sample, sample.keys, page + recent, candidates, output, ranks)


def value_clip_ratio_errors(
    sample: AttentionSample, cache: CacheFormat, grid: tuple[float, ...], ranks: Ranks = ALONE
) -> Tensor:
    """The same with quantized values and exact attention weights."""
    recent, page = cache.values.recent_tokens, cache.pages.values.page_size

    def output(block: _Block, stored: Tensor) -> Tensor:
        quantized = reads_quantized(block.rows, block.keys, cache.sink_tokens, recent, page, stored.device)
        difference = stored[:, : block.keys] - sample.values[block.sequence][:, : block.keys]
        return (block.weights * quantized) @ difference.unsqueeze(1)

    candidates = [partial(stored_tokens, cache=cache, side="value", clip_ratio=r) for r in grid]
    return _errors(sample, sample.values, page + recent, candidates, output, ranks)


def _errors(
    sample: AttentionSample,
    exact: Tensor,
    first: int,
    candidates: list[Callable[[Tensor], Tensor]],
    error: Callable[[_Block, Tensor], Tensor],
    ranks: Ranks,
) -> Tensor:
    """Each candidate's squared output error over the queries from `first` on.

    Args:
        sample: attention of the layer.
        exact: the keys or values that candidates store, [n, H, T, channels].
        first: the first query that may read a quantized page.
        candidates: what the runtime reads back of one sequence.
        error: of the heads' outputs of a block, given what was read back.
        ranks: each evaluates some of the candidates.
    """
    errors, size = torch.zeros(len(candidates), dtype=torch.float64), 0.0
    current, stored, mine = -1, [], ranks.mine(range(len(candidates)))
    for block in _blocks(sample, first):
        if block.sequence != current:
            current = block.sequence
            stored = [candidates[i](exact[current]) for i in mine]
        size += squared_output(block.output, sample.output_weight)
        for i, tokens in zip(mine, stored, strict=True):
            errors[i] += squared_output(error(block, tokens), sample.output_weight)
    errors = ranks.sum_(errors)
    return errors / size if size else errors


def searched_sides(scheme: KVScheme, search: KVCalibration) -> tuple[bool, bool]:
    """Whether keys, and whether values, are quantized with a clip ratio that is to be chosen."""
    keys, values = (side.quantized and search.searches_clip_ratio(side.name) for side in scheme.sides)
    return keys, values


class ClipRatioPass(CalibrationPass):
    """Choose `key_clip_ratio` and `value_clip_ratio` of the layer's pages.

    Args:
        sampler: takes the sample, earlier in the list of passes.
        search_keys, search_values: what to search; the other side keeps the scheme's clip ratio.
    """

    name = "clip_ratios"
    reads_sample = True

    def __init__(self, sampler: AttentionSampler, search_keys: bool = True, search_values: bool = True) -> None:
        self.sampler, self.search_keys, self.search_values = sampler, search_keys, search_values
        self._errors: dict[str, Tensor] = {}
        self._note = ""

    @classmethod
    def of(cls, job: LayerJob, sampler: CalibrationPass) -> ClipRatioPass | None:
        """Of a page scheme, for the quantized sides whose ratio the recipe leaves open."""
        scheme = job.scheme
        if scheme is None or scheme.is_span:
            return None
        keys, values = searched_sides(scheme, job.search)
        return cls(sampler, keys, values) if keys or values else None

    def solve(self, work: LayerWork) -> None:
        """Search each side whose pages the calibration sequences are long enough to fill and read."""
        cache, page, missing = work.cache, work.cache.pages.keys.page_size, []
        search = {"key": self.search_keys, "value": self.search_values}
        for side, recent in (("key", cache.keys.recent_tokens), ("value", cache.values.recent_tokens)):
            if search[side] and not pages_read(work.seq_len, recent, page):
                search[side] = False
                missing.append(f"{side}_clip_ratio ({page + recent + 1} tokens are needed)")
        if missing:
            self._note = f"sequences of {work.seq_len} tokens are too short to calibrate {' and '.join(missing)}"
        for side, measure in (("key", key_clip_ratio_errors), ("value", value_clip_ratio_errors)):
            if not search[side]:
                continue
            errors = measure(self.sampler.sample, cache, CLIP_RATIO_GRID, work.ranks)
            require_finite({f"{side}_clip_ratio_error": errors}, "attention weights", work)
            self._errors[side] = errors

    def apply(self, work: LayerWork) -> None:
        """Put the chosen clip ratios into the format of the layer's pages."""
        chosen, pages = self._chosen(), work.cache.pages
        keys = replace(pages.keys, clip_ratio=chosen.get("key", pages.keys.clip_ratio))
        values = replace(pages.values, clip_ratio=chosen.get("value", pages.values.clip_ratio))
        work.cache = replace(work.cache, pages=replace(pages, keys=keys, values=values))

    def _chosen(self) -> dict[str, float]:
        """The best clip ratio of each searched side; ties go to the larger one."""
        return {side: CLIP_RATIO_GRID[int(errors.argmin())] for side, errors in self._errors.items()}

    def result(self) -> PassResult:
        """The chosen clip ratios, their error curves, and the error with r = 1 beside that of the choice."""
        plan = {f"{side}_clip_ratio_error": errors.float() for side, errors in self._errors.items()}
        if plan:
            plan["clip_ratio_grid"] = torch.tensor(CLIP_RATIO_GRID)
        statistics = {
            f"{side}_output_error": {"full_range": significant(errors[0]), "chosen": significant(errors.min())}
            for side, errors in self._errors.items()
        }
        return PassResult(
            plan=plan,
            statistics=statistics,
            scheme={f"{side}_clip_ratio": factor for side, factor in self._chosen().items()},
            notes=(self._note,) if self._note else (),
        )
