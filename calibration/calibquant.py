"""CalibQuant (arXiv 2502.14882), section 4.3: tau1 and tau2, which map a span's scores onto a smaller interval.

Keys quantized to 1 or 2 bits per channel exaggerate the extreme scores. The runtime maps the scores of a query with a
span linearly from [gamma, delta], their smallest and largest, onto [gamma - tau1, delta - tau2] (equation 7;
`kernels.spans.shift_extremes`). Both constants come from a grid, {0, 1, 2, 3} in the paper, by

    error(tau1, tau2) = mean over queries, query heads and visible tokens of (w - w_exact)^2,

w being the post-softmax weights over everything a query sees. The first half of each sample sequence is the span, the
tokens after it are the decoding queries: they see the sinks, the span, and each other up to themselves, all but the
span in full precision. Ties are broken by the attention output's squared error, then in favour of smaller tau2, tau1.

The factors that shrink the span's (min, max) are searched with it: the range of values first, because it does not
depend on tau, by the error of exact weights times values; then, for each pair, the range of keys that suits it best.
One pair for all layers minimises the sum of the layers' errors (`choose_taus`), each layer at its best range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvconvert.calibration.attention_sample import AttentionSample, AttentionSampler
from kvconvert.calibration.protocol import CacheFormat, CalibrationPass, LayerWork, PassResult
from kvconvert.errors import NumericError
from kvconvert.kernels.spans import SpanFormat, quantize_span, shift_extremes, span_keys, span_values

TAU_GRID = (0.0, 1.0, 2.0, 3.0)
SPAN_RANGE_GRID = tuple(round(1 - 0.1 * i, 1) for i in range(10))  # 1.0, 0.9 ... 0.1
QUERY_BLOCK = 128  # queries whose attention is held at once


@dataclass(frozen=True)
class TauTables:
    """Errors of one layer for every pair; rows are tau1, columns tau2, in the order of the grid.

    Attributes:
        error: mean squared error of the attention weights, float64 [ranges, n, n].
        output_error: mean squared error of the attention output, relative to its mean square, float64 [ranges, n, n].
        ranges: factors of the keys' (min, max) that were tried.
        value_range: factor of the values' (min, max).
    """

    error: Tensor
    output_error: Tensor
    ranges: tuple[float, ...]
    value_range: float


@dataclass(frozen=True)
class _Queries:
    """Decoding queries of one sequence: scores [H, G, q, T] and weights in full precision, and which are visible."""

    queries: Tensor
    scores: Tensor
    weights: Tensor
    visible: Tensor
    sequence: int


def span_of(num_tokens: int, sinks: int) -> slice:
    """The tokens of a sample sequence that form its span: the first half after the sinks, at least one token."""
    stop = max(1, num_tokens // 2)
    return slice(min(sinks, stop - 1), stop)


def search_taus(
    sample: AttentionSample,
    cache: CacheFormat,
    grid: tuple[float, ...] = TAU_GRID,
    key_ranges: tuple[float, ...] = (1.0,),
    value_ranges: tuple[float, ...] = (1.0,),
) -> TauTables:
    """Measure every pair (tau1, tau2) with every range; see the module's docstring.

    Args:
        sample: attention of the layer.
        cache: its format, with a span.
        grid: values of tau1 and of tau2.
        key_ranges, value_ranges: factors to try; one each means that nothing is searched.
    """
    span = span_of(sample.num_tokens, cache.sink_tokens)
    value_range = _best_value_range(sample, cache.span, span, value_ranges)
    shape = (len(key_ranges), len(grid), len(grid))
    error, output_error = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    weights_seen = output_size = 0.0
    stored_keys: list[Tensor] = []
    current = -1
    for block in _decoding_queries(sample, span):
        keys, values = sample.keys[block.sequence], sample.values[block.sequence]
        if block.sequence != current:
            current = block.sequence
            spans = [_read_back(keys, values, span, replace(cache.span, key_range=r)) for r in key_ranges]
            stored_keys = [k for k, _ in spans]
            read = _read_back(keys, values, span, replace(cache.span, value_range=value_range))[1]
            stored_values = torch.cat([values[:, : span.start], read, values[:, span.stop :]], 1).unsqueeze(1)
        output = block.weights @ values.unsqueeze(1)
        output_size += float(output.square().sum(dtype=torch.float64))
        weights_seen += float(block.visible.sum()) * block.scores.shape[0] * block.scores.shape[1]
        for r, stored in enumerate(stored_keys):
            scores = block.queries @ stored.unsqueeze(1).transpose(2, 3) * sample.scaling
            for i, tau1 in enumerate(grid):
                for j, tau2 in enumerate(grid):
                    shifted = block.scores.clone()
                    shifted[..., span] = shift_extremes(scores, tau1, tau2)
                    weights = _weights(shifted, block.visible)
                    error[r, i, j] += float((weights - block.weights).square().sum(dtype=torch.float64))
                    difference = weights @ stored_values - output
                    output_error[r, i, j] += float(difference.square().sum(dtype=torch.float64))
    tiny = torch.finfo(torch.float64).tiny
    return TauTables(error / max(weights_seen, 1.0), output_error / max(output_size, tiny), key_ranges, value_range)


def _decoding_queries(sample: AttentionSample, span: slice) -> Iterator[_Queries]:
    for sequence in range(len(sample.queries)):
        keys = sample.keys[sequence].unsqueeze(1)
        for start in range(span.stop, sample.num_tokens, QUERY_BLOCK):
            rows = slice(start, min(start + QUERY_BLOCK, sample.num_tokens))
            queries = sample.grouped_queries(sequence)[:, :, rows]
            scores = queries @ keys.transpose(2, 3) * sample.scaling
            visible = sample.visible[rows]
            yield _Queries(queries, scores, _weights(scores, visible), visible, sequence)


def _weights(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(~visible, float("-inf")).softmax(-1)


def _read_back(keys: Tensor, values: Tensor, span: slice, f: SpanFormat) -> tuple[Tensor, Tensor]:
    """Keys and values of the span's tokens as the runtime reads them, [H, n, D] and [H, n, E]."""
    quantized = quantize_span(keys[:, span], values[:, span], f)
    return span_keys(quantized, f), span_values(quantized, f)


def _best_value_range(
    sample: AttentionSample, f: SpanFormat, span: slice, value_ranges: tuple[float, ...]
) -> float:
    """The factor whose values, weighted exactly, give the smallest squared error; ties to the larger factor."""
    if len(value_ranges) == 1:
        return value_ranges[0]
    errors = torch.zeros(len(value_ranges), dtype=torch.float64)
    current, differences = -1, []
    for block in _decoding_queries(sample, span):
        if block.sequence != current:
            current = block.sequence
            keys, values = sample.keys[current], sample.values[current]
            formats = [replace(f, value_range=r) for r in value_ranges]
            differences = [_read_back(keys, values, span, v)[1] - values[:, span] for v in formats]
        for r, difference in enumerate(differences):
            error = block.weights[..., span] @ difference.unsqueeze(1)
            errors[r] += float(error.square().sum(dtype=torch.float64))
    return value_ranges[int(errors.argmin())]


def best_ranges(error: Tensor, output_error: Tensor) -> Tensor:
    """Index of the best range for every pair: int64 [n, n] from tables [ranges, n, n]; ties by output error."""
    tied = error == error.amin(0)
    return torch.where(tied, output_error, float("inf")).argmin(0)


def choose_taus(errors: list[Tensor], output_errors: list[Tensor]) -> tuple[int, int]:
    """Indices into the grid of the pair that serves all layers best.

    Args:
        errors, output_errors: per layer [ranges, n, n], as in `TauTables`.
    """
    total = torch.zeros(errors[0].shape[1:], dtype=torch.float64)
    total_output = torch.zeros_like(total)
    for error, output_error in zip(errors, output_errors, strict=True):
        index = best_ranges(error, output_error).unsqueeze(0)
        total += error.double().gather(0, index)[0]
        total_output += output_error.double().gather(0, index)[0]
    # Rows are tau1, columns tau2: flat order puts smaller tau1 first, and a pair is reached by tau2 second.
    tied = total == total.min()
    flat = int(torch.where(tied, total_output, float("inf")).argmin())
    return flat // total.shape[1], flat % total.shape[1]


class CalibQuantPass(CalibrationPass):
    """Measure the whole table of pairs for one layer; which pair wins is decided when every layer is measured.

    Args:
        sampler: takes the sample, earlier in the list of passes.
        grid: values of tau1 and tau2; None keeps the pair that the scheme gives, and only ranges are searched.
        taus: the scheme's own pair.
        search_keys, search_values: search the ranges of keys and values.
    """

    name = "calibquant"
    plan_tensors = ("tau_grid", "tau_error", "tau_output_error", "tau_key_range", "tau_range_grid", "tau_range_error")

    def __init__(
        self, sampler: AttentionSampler, grid: tuple[float, ...], search_keys: bool = True, search_values: bool = True
    ) -> None:
        self.sampler, self.grid = sampler, grid
        self.search_keys, self.search_values = search_keys, search_values
        self._tables: TauTables | None = None

    def solve(self, work: LayerWork) -> None:
        """Measure the table."""
        f = work.cache.span
        self._tables = search_taus(
            self.sampler.sample,
            work.cache,
            self.grid,
            SPAN_RANGE_GRID if self.search_keys else (f.key_range,),
            SPAN_RANGE_GRID if self.search_values else (f.value_range,),
        )
        if not (self._tables.error.isfinite().all() and self._tables.output_error.isfinite().all()):
            raise NumericError(
                f"The attention of {work.name} holds NaN or infinity on the calibration data; check the source model's "
                "weights."
            )
