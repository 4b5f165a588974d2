"""CalibQuant (arXiv 2502.14882), section 4.2: tau1 and tau2, which map a span's scores onto a smaller interval.

Keys quantized to 1 or 2 bits per channel exaggerate the extreme scores. The runtime maps the scores of a query with a
span linearly from [gamma, delta], their smallest and largest, onto [gamma - tau1, delta - tau2] (equation 7;
`kernels.spans.shift_extremes`). Both constants come from a grid, {0, 1, 2, 3} in the paper, by

    error(tau1, tau2) = mean over queries, query heads and visible tokens of (w - w_exact)^2,

w being the post-softmax weights over every token that a query attends to. The last tokens of each sample sequence are
the decoding queries, the tokens before them the span: queries attend to the sink tokens, the span, and each other up to
themselves, all but the span in full precision. Where a scheme compresses visual tokens only (as in the paper), the
span is the visual tokens before the decoding queries, and these are text; sequences without such a span are left out.

The clip ratios, which shrink the span's (min, max), can be searched too: that of values first, which does not depend on
tau, by the error of exact weights times values; then that of keys, the best one for each pair.
`choose_taus` takes the pair with the smallest sum of errors over layers; ties go to the smaller error of the attention
output, then to smaller tau1, then tau2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvconvert.calibration.attention_sample import AttentionSample, AttentionSampler, SampleReader
from kvconvert.calibration.protocol import (
    CalibrationPass,
    LayerJob,
    LayerWork,
    MeasuredLayer,
    PassResult,
    Resolution,
    significant,
)
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.calibration.scales import searched_sides
from kvconvert.kernels.spans import SpanFormat, quantize_span, shift_extremes, span_keys, span_values
from kvconvert.methods import KVCalibration

SPAN_CLIP_RATIO_GRID = tuple(round(1 - 0.1 * i, 1) for i in range(10))  # 1.0, 0.9 ... 0.1
DECODING_QUERIES = 128


@dataclass(frozen=True)
class TauTables:
    """Errors of one layer for every pair; n1 values of tau1 in rows, n2 of tau2 in columns.

    Attributes:
        error: mean squared error of the attention weights with each pair's best key clip ratio, float64 [n1, n2].
        output_error: error of the attention output with that clip ratio, relative to its mean square, float64 [n1, n2].
        key_clip_ratio: the key clip ratio with the smallest error, float64 [n1, n2].
        clip_ratio_error: error of the weights for every key clip ratio, float64 [clip ratios, n1, n2].
        value_clip_ratio: the values' clip ratio.
    """

    error: Tensor
    output_error: Tensor
    key_clip_ratio: Tensor
    clip_ratio_error: Tensor
    value_clip_ratio: float


@dataclass(frozen=True)
class _Decoding:
    """One sequence: a span, and queries that come after it.

    Attributes:
        sample: that the sequence is of.
        span: indices of its tokens, int64 [n].
        queries: [H, Hq / H, q, D].
        keys, values: [H, T, channels].
        scores, weights: in full precision, [H, Hq / H, q, T]; scores of masked tokens are -inf.
    """

    sample: AttentionSample
    span: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    scores: Tensor
    weights: Tensor

    @classmethod
    def of(cls, sample: AttentionSample, sequence: int, sink_tokens: int) -> _Decoding | None:
        """None where the sample says which tokens are visual and the sequence has none before its decoding queries."""
        prompt = span_of(sample.num_tokens, sink_tokens)
        tokens = torch.arange(sample.num_tokens, device=sample.keys.device)
        span, rows = tokens[prompt], tokens[prompt.stop :]
        if sample.visual is not None:
            visual = sample.visual[sequence]
            span, rows = span[visual[span]], rows[~visual[rows]]
            if not len(span) or not len(rows):
                return None
        queries, keys = sample.grouped_queries(sequence)[:, :, rows], sample.keys[sequence]
        scores = sample.scores(queries, keys).masked_fill(~sample.visible_in(sequence)[rows], float("-inf"))
        return cls(sample, span, queries, keys, sample.values[sequence], scores, sample.weights(scores))

    def read_back(self, f: SpanFormat, feedback: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the span's tokens as the runtime reads them, [H, n, channels]."""
        size = f.span_tokens or len(self.span)
        parts = zip(self.keys[:, self.span].split(size, 1), self.values[:, self.span].split(size, 1), strict=True)
        spans = [quantize_span(*part, f, feedback) for part in parts]
        return torch.cat([span_keys(s, f) for s in spans], 1), torch.cat([span_values(s, f) for s in spans], 1)

    def weights_with(self, span_scores: Tensor, tau1: float, tau2: float) -> Tensor:
        """Attention weights when the span's scores [H, Hq / H, q, n] are shifted."""
        scores = self.scores.clone()
        hidden = scores[..., self.span] == float("-inf")
        scores[..., self.span] = shift_extremes(span_scores, tau1, tau2).masked_fill_(hidden, float("-inf"))
        return self.sample.weights(scores)


def _cases(sample: AttentionSample, sink_tokens: int) -> Iterator[_Decoding]:
    """Each sequence of the sample that has a span."""
    for sequence in range(len(sample.queries)):
        case = _Decoding.of(sample, sequence, sink_tokens)
        if case is not None:
            yield case


def has_spans(sample: AttentionSample, sink_tokens: int) -> bool:
    """Whether some sequence has a span and a query that decodes after it."""
    return next(_cases(sample, sink_tokens), None) is not None


def span_of(num_tokens: int, sink_tokens: int) -> slice:
    """The span of a sample sequence: the tokens between the sink tokens and the last `DECODING_QUERIES` tokens.

    At least the first half of the sequence precedes the queries, and at least one token is the span.
    """
    stop = max(num_tokens // 2, num_tokens - DECODING_QUERIES, 1)
    return slice(min(sink_tokens, stop - 1), stop)


def search_taus(
    sample: AttentionSample,
    span: SpanFormat,
    tau1s: Sequence[float],
    tau2s: Sequence[float],
    key_clip_ratios: Sequence[float],
    value_clip_ratios: Sequence[float],
    sink_tokens: int = 0,
    feedback: Tensor | None = None,
    ranks: Ranks = ALONE,
) -> TauTables:
    """Measure every pair (tau1, tau2) with every clip ratio; see the module's docstring.

    Args:
        sample: attention of the layer; at least two tokens. With `visual`, spans are visual tokens, and
            `has_spans` has to hold.
        span: format of the layer's spans, but for its clip ratios.
        tau1s, tau2s: values to try.
        key_clip_ratios, value_clip_ratios: values to try, descending; ties go to the larger one. A single value
            means no search.
        sink_tokens: first tokens of a sequence that stay in full precision.
        feedback: with which keys are rounded, see `quantize_span`.
        ranks: each evaluates some of the clip ratios, then some of the pairs.
    """
    pairs = [(i, j) for i in range(len(tau1s)) for j in range(len(tau2s))]
    value_clip_ratio = _best_value_clip_ratio(sample, span, value_clip_ratios, sink_tokens, ranks)
    span = replace(span, value_clip_ratio=value_clip_ratio)
    clip_ratio_error = torch.zeros(len(key_clip_ratios), len(tau1s), len(tau2s), dtype=torch.float64)
    visible = 0.0
    for case in _cases(sample, sink_tokens):
        visible += float((case.scores > float("-inf")).sum())
        for r in ranks.mine(range(len(key_clip_ratios))):
            keys, _ = case.read_back(replace(span, key_clip_ratio=key_clip_ratios[r]), feedback)
            scores = sample.scores(case.queries, keys)
            for i, j in pairs:
                weights = case.weights_with(scores, tau1s[i], tau2s[j])
                clip_ratio_error[r, i, j] += float((weights - case.weights).square().sum(dtype=torch.float64))
    clip_ratio_error = ranks.sum_(clip_ratio_error) / max(visible, 1.0)
    best = clip_ratio_error.argmin(0)
    output_error, size = torch.zeros(best.shape, dtype=torch.float64), 0.0
    for case in _cases(sample, sink_tokens):
        exact = case.weights @ case.values.unsqueeze(1)
        size += float(exact.square().sum(dtype=torch.float64))
        for i, j in ranks.mine(pairs):
            keys, values = case.read_back(replace(span, key_clip_ratio=key_clip_ratios[int(best[i, j])]), feedback)
            scores = sample.scores(case.queries, keys)
            weights = case.weights_with(scores, tau1s[i], tau2s[j])
            difference = weights @ case.values.unsqueeze(1) - exact
            difference += weights[..., case.span] @ (values - case.values[:, case.span]).unsqueeze(1)
            output_error[i, j] += float(difference.square().sum(dtype=torch.float64))
    output_error = ranks.sum_(output_error)
    return TauTables(
        error=clip_ratio_error.amin(0),
        output_error=output_error / size if size else output_error,
        key_clip_ratio=torch.tensor(list(key_clip_ratios), dtype=torch.float64)[best],
        clip_ratio_error=clip_ratio_error,
        value_clip_ratio=value_clip_ratio,
    )


def _best_value_clip_ratio(
    sample: AttentionSample, span: SpanFormat, value_clip_ratios: Sequence[float], sink_tokens: int, ranks: Ranks
) -> float:
    """The clip ratio whose values, weighted exactly, give the smallest squared error."""
    if len(value_clip_ratios) == 1:
        return value_clip_ratios[0]
    errors = torch.zeros(len(value_clip_ratios), dtype=torch.float64)
    for case in _cases(sample, sink_tokens):
        for r in ranks.mine(range(len(value_clip_ratios))):
            stored = case.read_back(replace(span, value_clip_ratio=value_clip_ratios[r]))[1]
            difference = stored - case.values[:, case.span]
            error = case.weights[..., case.span] @ difference.unsqueeze(1)
            errors[r] += float(error.square().sum(dtype=torch.float64))
    return value_clip_ratios[int(ranks.sum_(errors).argmin())]


def choose_taus(errors: Sequence[Tensor], output_errors: Sequence[Tensor]) -> tuple[int, int]:
    """Row and column of the pair that serves all layers best.

    Args:
        errors, output_errors: per layer [n1, n2], as in `TauTables`.
    """
    total = torch.stack([error.double() for error in errors]).sum(0)
    output = torch.stack([error.double() for error in output_errors]).sum(0)
    best = int(torch.where(total == total.min(), output, float("inf")).argmin())
    return best // total.shape[1], best % total.shape[1]


class CalibQuantPass(SampleReader):
    """Measure the whole table of pairs for one layer; which pair wins is decided when every layer is measured.

    Args:
        sampler: takes the sample, earlier in the list of passes.
        grid: values of tau1 and of tau2, or None where `taus` is given and only clip ratios are searched.
        taus: the scheme's own pair.
        search_keys, search_values: search the clip ratio of keys, of values; otherwise the scheme's is kept.
    """

    name = "calibquant"

    def __init__(
        self,
        sampler: AttentionSampler,
        grid: Sequence[float] | None,
        taus: tuple[float, float] = (0.0, 0.0),
        search_keys: bool = True,
        search_values: bool = True,
    ) -> None:
        super().__init__(sampler)
        self.grid, self.taus = grid, taus
        self.search_keys, self.search_values = search_keys, search_values
        self._tables: TauTables | None = None
        self._note = ""

    @classmethod
    def of(cls, job: LayerJob, sampler: CalibrationPass) -> CalibQuantPass | None:
        """The pass for a scheme with spans, for what the recipe leaves open."""
        scheme, search = job.scheme, job.search
        if scheme is None or not scheme.is_span:
            return None
        keys, values = searched_sides(scheme, search)
        if not (search.searches_tau or keys or values):
            return None
        grid = search.tau_grid if search.searches_tau else None
        return cls(sampler, grid, (scheme.tau1, scheme.tau2), keys, values)

    @classmethod
    def resolve(cls, layers: Mapping[int, MeasuredLayer], search: KVCalibration) -> dict[int, Resolution]:
        """One pair (tau1, tau2) for all layers, or one for each, with the best key clip ratio of each layer."""
        measured = {i: layer.plan for i, layer in layers.items() if layer.scheme.is_span and "tau_grid" in layer.plan}
        groups = [[index] for index in measured] if search.tau_per_layer else [[*measured]] if measured else []
        resolved = {}
        for group in groups:
            row, column = choose_taus(
                [measured[i]["tau_error"] for i in group], [measured[i]["tau_output_error"] for i in group]
            )
            for index in group:
                found = measured[index]
                grid, errors = found["tau_grid"], found["tau_error"]
                chosen = {"tau1": round(float(grid[row]), 6), "tau2": round(float(grid[column]), 6)}
                if "tau_clip_ratio_grid" in found:
                    chosen["key_clip_ratio"] = round(float(found["tau_key_clip_ratio"][row, column]), 6)
                unshifted = [i for i, tau in enumerate(grid.tolist()) if tau == 0]
                statistics = {"weights_error": significant(errors[row, column])}
                if unshifted:
                    statistics["weights_error_without_tau"] = significant(errors[unshifted[0], unshifted[0]])
                resolved[index] = Resolution(chosen, statistics)
        return resolved

    def solve(self, work: LayerWork) -> None:
        """Measure the table, unless the data holds nothing of what the scheme compresses."""
        if work.seq_len < 2:
            self._note = (
                "sequences of one token hold no query after a span, so that tau and clip ratios are not calibrated"
            )
            return
        f, cache, sample = work.cache.span, work.cache, self.sampler.sample
        if f.modality == "all":
            sample = replace(sample, visual=None)
        elif f.modality != "visual" or sample.visual is None or not has_spans(sample, cache.sink_tokens):
            self._note = (
                f"the calibration data has no {f.modality} tokens with text to decode after them, so that tau and "
                "clip ratios are the scheme's own"
            )
            return
        self._tables = search_taus(
            sample,
            f,
            self.grid or self.taus[:1],
            self.grid or self.taus[1:],
            SPAN_CLIP_RATIO_GRID if self.search_keys else (f.key_clip_ratio,),
            SPAN_CLIP_RATIO_GRID if self.search_values else (f.value_clip_ratio,),
            cache.sink_tokens,
            cache.key_tensors.feedback,
            work.ranks,
        )

    def result(self) -> PassResult:
        """The table; the value clip ratio; and the key clip ratio where no pair is left to choose."""
        tables = self._tables
        if tables is None:
            return PassResult(notes=(self._note,))
        plan, scheme = {}, {}
        if self.search_values:
            scheme["value_clip_ratio"] = tables.value_clip_ratio
        if self.search_keys:
            plan["tau_clip_ratio_grid"] = torch.tensor(SPAN_CLIP_RATIO_GRID)
            plan["tau_clip_ratio_error"] = tables.clip_ratio_error.float()
        if self.grid is not None:
            plan["tau_grid"] = torch.tensor(list(self.grid), dtype=torch.float32)
            plan["tau_error"] = tables.error.float()
            plan["tau_output_error"] = tables.output_error.float()
            plan["tau_key_clip_ratio"] = tables.key_clip_ratio.float()
        elif self.search_keys:
            scheme["key_clip_ratio"] = float(tables.key_clip_ratio[0, 0])
        return PassResult(plan=plan, scheme=scheme)
