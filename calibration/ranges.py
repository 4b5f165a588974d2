"""Range calibration: how far to shrink each group's (min, max) before it is quantized.

The best uniform quantizer of b bits does not reach to the extremes. Of 128 near-Gaussian values, min and max are about
5.3 standard deviations apart, while the range that minimises the mean squared error spans about 3 at 2 bits and 1.6 at
1 bit: clamping a few values costs less than a coarse step costs all. A factor r shrinks (min, max) about their midpoint.
It is chosen per layer, for keys and for values, on a sample of the layer's attention,

    r* = argmin over the grid of  E || (o_r(t) - o(t)) W_O^T ||^2

o(t) being the heads' attention outputs of query t in full precision and o_r(t) the same where every complete page that
precedes t is quantized as the runtime would, with t's own page in full precision. First keys with exact values, then
values with the keys so chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvconvert.calibration.attention_sample import AttentionSample, AttentionSampler
from kvconvert.calibration.protocol import CacheFormat, CalibrationPass, LayerWork, PassResult
from kvconvert.errors import NumericError
from kvconvert.kernels.pages import dequantize_keys, dequantize_values, quantize_keys, quantize_values

RANGE_GRID = tuple(round(1 - 0.05 * i, 2) for i in range(17))  # 1.0, 0.95 ... 0.2
QUERY_BLOCK = 128  # queries whose attention is held at once


def pages_read(num_tokens: int, sinks: int, recent: int, page_size: int) -> int:
    """Quantized pages that the last of `num_tokens` tokens attends to.

    Page p holds tokens sinks + p page_size and following. It is quantized after the attention of the token that
    completes it and `recent` further ones, so that only later tokens read it quantized.
    """
    return max(0, (num_tokens - 1 - sinks - recent) // page_size)


def reads_quantized(queries: slice, keys: int, sinks: int, recent: int, page_size: int, device: torch.device) -> Tensor:
    """Bool [queries, keys]: which of the first `keys` tokens a query finds quantized."""
    token = torch.arange(keys, device=device)
    page = torch.div(token - sinks, page_size, rounding_mode="floor")
    available = sinks + (page + 1) * page_size + recent
    query = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    return (token >= sinks) & (query >= available)


def stored_keys(keys: Tensor, cache: CacheFormat, value_range: float) -> Tensor:
    """One sequence's keys [H, T, D] as read back from pages of this range; unchanged where no page is read."""
    f = replace(cache.pages.keys, range=value_range)
    count = pages_read(keys.shape[1], cache.sink_tokens, cache.key_recent_tokens, f.page_size)
    part = slice(cache.sink_tokens, cache.sink_tokens + count * f.page_size)
    if f.bits == 16 or not count:
        return keys
    pages = keys[:, part].unflatten(1, (count, f.page_size)).transpose(0, 1)
    read = dequantize_keys(quantize_keys(pages, f, cache.pages.boosted), f, cache.pages.boosted)
    result = keys.clone()
    result[:, part] = read.permute(1, 0, 3, 2).flatten(1, 2)
    return result


def stored_values(values: Tensor, cache: CacheFormat, value_range: float) -> Tensor:
    """The same for values [H, T, E]."""
    f = replace(cache.pages.values, range=value_range)
    count = pages_read(values.shape[1], cache.sink_tokens, cache.value_recent_tokens, f.page_size)
    part = slice(cache.sink_tokens, cache.sink_tokens + count * f.page_size)
    if f.bits == 16 or not count:
        return values
    pages = values[:, part].unflatten(1, (count, f.page_size)).transpose(0, 1)
    result = values.clone()
    result[:, part] = dequantize_values(quantize_values(pages, f), f).transpose(0, 1).flatten(1, 2)
    return result


@dataclass(frozen=True)
class _Block:
    """Some queries of one sequence, everything they attend to in full precision.

    Attributes:
        rows: of the queries in their sequence; `keys` is the number of tokens up to the last of them.
        queries: [H, Hq / H, q, D].
        scores, weights: [H, Hq / H, q, keys]; output: [H, Hq / H, q, E].
        visible, keys_stored, values_stored: bool [q, keys].
    """

    sequence: int
    rows: slice
    keys: int
    queries: Tensor
    scores: Tensor
    output: Tensor
    visible: Tensor
    keys_stored: Tensor
    values_stored: Tensor


def _blocks(sample: AttentionSample, cache: CacheFormat) -> Iterator[_Block]:
    """The queries that read at least one quantized page."""
    page = cache.pages.keys.page_size
    sinks, recents = cache.sink_tokens, (cache.key_recent_tokens, cache.value_recent_tokens)
    for sequence in range(len(sample.queries)):
        keys, values = sample.keys[sequence].unsqueeze(1), sample.values[sequence].unsqueeze(1)
        for start in range(sinks + page + min(recents), sample.num_tokens, QUERY_BLOCK):
            rows = slice(start, min(start + QUERY_BLOCK, sample.num_tokens))
            reach = rows.stop
            queries = sample.grouped_queries(sequence)[:, :, rows]
            scores = queries @ keys[:, :, :reach].transpose(2, 3) * sample.scaling
            visible = sample.visible[rows, :reach]
            stored = (reads_quantized(rows, reach, sinks, recent, page, scores.device) for recent in recents)
            output = _weights(scores, visible) @ values[:, :, :reach]
            yield _Block(sequence, rows, reach, queries, scores, output, visible, *stored)


def _weights(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(~visible, float("-inf")).softmax(-1)


def output_error(difference: Tensor, output_weight: Tensor | None) -> float:
    """Sum over queries of the squared error in the layer's output, from heads' output differences [H, Hq / H, q, E]."""
    if output_weight is None:
        return float(difference.square().sum(dtype=torch.float64))
    rows = difference.flatten(0, 1).transpose(0, 1).flatten(1)
    return float((rows @ output_weight.T).square().sum(dtype=torch.float64))


@dataclass(frozen=True)
class RangeChoice:
    """What a range search found.

    Attributes:
        key_range, value_range: the chosen factors.
        key_error, value_error: relative error of the attention output for every factor of the grid, float64 [grid]:
            keys quantized and values exact; both quantized, keys with `key_range`. None where nothing was searched.
    """

    key_range: float
    value_range: float
    key_error: Tensor | None
    value_error: Tensor | None


def search_ranges(
    sample: AttentionSample,
    cache: CacheFormat,
    search_keys: bool = True,
    search_values: bool = True,
    grid: tuple[float, ...] = RANGE_GRID,
) -> RangeChoice:
    """Choose the ranges of a layer's pages; see the module's docstring.

    Args:
        sample: attention of the layer.
        cache: its format; a side that is not searched keeps the range that this gives.
        search_keys, search_values: what to search. Sixteen-bit sides are never searched.
        grid: factors to try, descending; ties go to the larger factor.
    """
    f = cache.pages
    key_range, value_range = f.keys.range, f.values.range
    key_error = value_error = None
    if search_keys and f.keys.bits < 16:
        key_error = _errors(sample, cache, grid, lambda r: (r, None))
        key_range = grid[int(key_error.argmin())]
    if search_values and f.values.bits < 16:
        value_error = _errors(sample, cache, grid, lambda r: (key_range, r))
        value_range = grid[int(value_error.argmin())]
    return RangeChoice(key_range, value_range, key_error, value_error)


def _errors(
    sample: AttentionSample,
    cache: CacheFormat,
    grid: tuple[float, ...],
    ranges: Callable[[float], tuple[float, float | None]],
) -> Tensor:
    """Error of each candidate's (key, value) ranges, None standing for exact values; relative to the output's size."""
    errors, size = torch.zeros(len(grid), dtype=torch.float64), 0.0
    stored: list[tuple[Tensor, Tensor | None]] = []
    current = -1
    for block in _blocks(sample, cache):
        if block.sequence != current:
            current = block.sequence
            keys, values = sample.keys[current], sample.values[current]
            stored = []
            for r in grid:
                key_range, value_range = ranges(r)
                # Values searched with one key range: quantize the keys once.
                repeated = bool(stored) and ranges(grid[0])[0] == key_range
                stored_k = stored[0][0] if repeated else stored_keys(keys, cache, key_range)
                stored.append((stored_k, None if value_range is None else stored_values(values, cache, value_range)))
        size += output_error(block.output, sample.output_weight)
        exact = sample.values[current][:, None, : block.keys]
        weights = None
        for i, (k, v) in enumerate(stored):
            if weights is None or k is not stored[i - 1][0]:
                scores = block.queries @ k[:, None, : block.keys].transpose(2, 3) * sample.scaling
                weights = _weights(torch.where(block.keys_stored, scores, block.scores), block.visible)
            output = weights @ exact
            if v is not None:
                output += (weights * block.values_stored) @ (v[:, None, : block.keys] - exact)
            errors[i] += output_error(output - block.output, sample.output_weight)
    return errors / size if size else errors


class RangePass(CalibrationPass):
    """Choose `key_range` and `value_range` of the layer's pages.

    Args:
        sampler: takes the sample, earlier in the list of passes.
        search_keys, search_values: what to search; the other keeps the scheme's range.
    """

    name = "ranges"
    plan_tensors = ("range_grid", "key_range_error", "value_range_error")

    def __init__(self, sampler: AttentionSampler, search_keys: bool = True, search_values: bool = True) -> None:
        self.sampler, self.search_keys, self.search_values = sampler, search_keys, search_values
        self._choice: RangeChoice | None = None
        self._note = ""

    def solve(self, work: LayerWork) -> None:
        """Search each side whose pages the calibration sequences are long enough to fill and read."""
        cache, page, missing = work.cache, work.cache.pages.keys.page_size, []
        search = {"key": self.search_keys, "value": self.search_values}
        for side, recent in (("key", cache.key_recent_tokens), ("value", cache.value_recent_tokens)):
            if search[side] and not pages_read(work.seq_len, cache.sink_tokens, recent, page):
                search[side] = False
                missing.append(f"{side}_range ({cache.sink_tokens + page + recent + 1} tokens are needed)")
        if missing:
            self._note = f"sequences of {work.seq_len} tokens are too short to calibrate {' and '.join(missing)}"
        self._choice = search_ranges(self.sampler.sample, cache, search["key"], search["value"])
        for errors in (self._choice.key_error, self._choice.value_error):
            if errors is not None and not errors.isfinite().all():
                raise NumericError(
                    f"The attention of {work.name} holds NaN or infinity on the calibration data; check the source "
                    "model's weights."
                )

    def apply(self, work: LayerWork) -> None:
        """Put the chosen ranges into the format of the layer's pages."""
        pages = work.cache.pages
        keys = replace(pages.keys, range=self._choice.key_range)
        values = replace(pages.values, range=self._choice.value_range)
        work.cache = replace(work.cache, pages=replace(pages, keys=keys, values=values))

    def result(self) -> PassResult:
        """The chosen ranges, their error curves, and the error with r = 1 beside that of the choice."""
        plan, statistics, scheme = {}, {}, {}
        for side in ("key", "value"):
            errors, chosen = getattr(self._choice, f"{side}_error"), getattr(self._choice, f"{side}_range")
            if errors is not None:
                scheme[f"{side}_range"] = chosen
                plan["range_grid"] = torch.tensor(RANGE_GRID)
                plan[f"{side}_range_error"] = errors.float()
                statistics[f"{side}_output_error"] = {
                    "full_range": round(float(errors[0]), 8),
                    "chosen": round(float(errors.min()), 8),
                }
        return PassResult(plan=plan, statistics=statistics, scheme=scheme, notes=(self._note,) if self._note else ())
