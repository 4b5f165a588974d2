"""Calibration of scales: how far to shrink each group's (min, max) before it is quantized, and grids for all tokens.

The best uniform quantizer of b bits does not reach to the extremes. Of 128 near-Gaussian values, min and max are about
5.3 standard deviations apart, while the range that minimizes the mean squared error spans about 3 at 2 bits and 1.6 at
1 bit: clamping a few values costs less than a coarse step costs all. The clip ratio r shrinks (min, max) about
their midpoint. It is chosen per layer, for keys and for values, on a sample of the layer's attention,

    r* = argmin over the grid of  E || (o_r(t) - o(t)) W_O^T ||^2

o(t) being the heads' attention outputs of query t in full precision and o_r(t) the same where every complete page that
precedes t is quantized as the runtime would, with t's own page in full precision. Keys are searched with exact values,
values with exact attention weights: searched with the quantized keys, values make up for the keys' error on the sample,
which did not carry over to held-out text. Without W_O, or by the error of the attention weights alone, the
chosen clip ratios were worse on held-out text.

Static scales are one grid per channel of a layer for all tokens, fixed by calibration.
With m_c and M_c the smallest and largest value of channel c over all calibration tokens, as the cache stores them
(after RoPE and rotation, weights folded, scaled and clipped), each KV head's keys and values get

    scale_c = r (M_c - m_c) / (2^b - 1)      offset_c = m_c + (1 - r) (M_c - m_c) / 2

in float16, r being `key_clip_ratio` or `value_clip_ratio`, given or calibrated (`clip_ratios`). Pages then hold codes
alone. Sink tokens never reach a page and are left out. The scales of keys hold for the positions of the calibration
data: RoPE takes slow channels beyond their bounds at later positions, so calibrate at the length to be served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvconvert.cache import Side
from kvconvert.calibration.attention_sample import (
    AttentionSample,
    AttentionSampler,
    SampleReader,
    as_cached,
    attention_observed,
    squared_output,
)
from kvconvert.calibration.protocol import CalibrationPass, LayerJob, LayerWork, PassResult, significant
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.errors import NumericError
from kvconvert.kernels.page_formats import ChannelBounds, LayerFormat
from kvconvert.kernels.pages import dequantize_pages, page_centers, quantize_pages
from kvconvert.methods import KVCalibration, KVScheme
from kvconvert.methods.scales import SCALE_NAMES

CLIP_RATIO_GRID = tuple(round(1 - 0.05 * i, 2) for i in range(17))  # 1.0, 0.95 ... 0.2
QUERIES = 512  # of a sequence, evenly spaced, whose errors are measured, or all of a shorter one
QUERY_BLOCK = 128  # queries of a sequence whose attention is held at once
# Attention scores, and numbers read back from pages, that are held at once, each in several copies: a GPU is kept busy
# by many, the caches of a CPU by few.
SCORES, GPU_SCORES = 2**20, 2**26
STORED_NUMBERS, GPU_STORED_NUMBERS = 2**20, 2**26


def pages_read(num_tokens: int, recent: int, page_size: int) -> int:
    """Quantized pages that the last of `num_tokens` tokens attends to.

    Page p holds tokens p page_size and following. It is quantized after the attention of the token that completes it
    and of `recent` further ones, so that only later tokens read it quantized.
    """
    return max(0, (num_tokens - 1 - recent) // page_size)


def reads_quantized(
    queries: slice, keys: int, sink_tokens: int, recent: int, page_size: int, device: torch.device
) -> Tensor:
    """Bool [queries, keys]: which of the first `keys` tokens the queries of a slice find quantized."""
    token = torch.arange(keys, device=device)
    available = (token // page_size + 1) * page_size + recent
    query = torch.arange(queries.start, queries.stop, queries.step or 1, device=device).unsqueeze(1)
    return (token >= sink_tokens) & (query >= available)


def stored_tokens(tokens: Tensor, cache: LayerFormat, side: Side, clip_ratios: Sequence[float]) -> Tensor:
    """Keys or values of n sequences as read back from pages with each of some clip ratios.

    Args:
        tokens: [n, H, T, channels], of sequences that begin at position 0.
        cache: how they are stored, but for the clip ratio.
        side: which of them.
        clip_ratios: m of them.

    Returns:
        [m, n, H, T, channels]; unchanged where no page is read.
    """
    f, tensors = cache.side(side == "key")
    count = pages_read(tokens.shape[2], cache.window(f.is_key), f.page_size)
    result = tokens.expand(len(clip_ratios), *tokens.shape)
    if f.bits == 16 or not count:
        return result
    result, sinks, size = result.clone(), cache.sink_tokens, count * f.page_size
    pages = tokens[:, :, :size].unflatten(2, (count, f.page_size)).transpose(1, 2)
    constant: Tensor | float = 0.0
    if tensors.center is not None:
        starts = f.page_size * torch.arange(count, device=tokens.device)
        constant = page_centers(starts, f.page_size, tensors.center)
        pages = pages - constant
    # Static scales belong to the layer, and are others with each clip ratio.
    limit = GPU_STORED_NUMBERS if tokens.is_cuda else STORED_NUMBERS
    together = 1 if f.static else max(1, limit // pages.numel())
    for first in range(0, len(clip_ratios), together):
        some = slice(first, first + together)
        read = _read_back(pages, cache, side, clip_ratios[some]) + constant
        result[some, :, :, :size] = read.transpose(2, 3).flatten(3, 4)
    result[:, :, :, :sinks] = tokens[:, :, :sinks]
    return result


def _read_back(pages: Tensor, cache: LayerFormat, side: Side, clip_ratios: Sequence[float]) -> Tensor:
    """Pages [n, count, H, P, channels] of n sequences with each of m clip ratios, [m, n, count, H, P, channels]."""
    (f, tensors), shape = cache.side(side == "key"), (len(clip_ratios), *pages.shape)
    tensors = tensors._replace(static=cache.static_scales(f.is_key, clip_ratios[0]))
    ratios = torch.tensor(clip_ratios, dtype=torch.float64).repeat_interleave(shape[1] * shape[2]).to(pages.device)
    every = pages.expand(shape).flatten(0, 2)
    of_all = {"hidden": cache.sink_tokens, "firsts": slice(0, None, shape[2]), "clip_ratios": ratios}
    return dequantize_pages(quantize_pages(every, f, tensors, **of_all), tensors).view(shape)


@dataclass(frozen=True)
class _Block:
    """Some queries of n sequences, with what they attend to in full precision.

    Attributes:
        sequences: which; rows: the queries in each; keys: tokens up to the last of them.
        queries: [n, H, Hq / H, q, D].
        scores, weights: [n, H, Hq / H, q, keys]; output: [n, H, Hq / H, q, E].
        visible: bool [q, keys] or [n, 1, 1, q, keys].
    """

    sequences: slice
    rows: slice
    keys: int
    queries: Tensor
    scores: Tensor
    weights: Tensor
    output: Tensor
    visible: Tensor


def _blocks(sample: AttentionSample, first: int, sequences: slice) -> Iterator[_Block]:
    """Evenly spaced queries from token `first` on."""
    keys, values = sample.keys[sequences], sample.values[sequences].unsqueeze(2)
    queries = sample.queries[sequences].unflatten(1, (keys.shape[1], -1))
    own = sample.visible if sample.visible.dim() == 2 else sample.visible[sequences, None, None]
    step = max(1, sample.num_tokens // QUERIES)
    for start in range(first, sample.num_tokens, QUERY_BLOCK * step):
        rows = slice(start, min(start + QUERY_BLOCK * step, sample.num_tokens), step)
        reach = rows.stop
        some = queries[:, :, :, rows]
        scores, visible = sample.scores(some, keys[:, :, :reach]), own[..., rows, :reach]
        weights = _weights(sample, scores, visible)
        output = weights @ values[:, :, :, :reach]
        yield _Block(sequences, rows, reach, some, scores, weights, output, visible)


def _weights(sample: AttentionSample, scores: Tensor, visible: Tensor) -> Tensor:
    return sample.weights(scores.masked_fill(~visible, float("-inf")))


def key_clip_ratio_errors(
    sample: AttentionSample, cache: LayerFormat, grid: tuple[float, ...], ranks: Ranks = ALONE
) -> Tensor:
    """Error of the attention output with quantized keys and exact values, relative to its mean square.

    Returns:
        float64 [grid], over the queries that read at least one quantized page; zeros where there are none.
    """
    recent, page = cache.key_window, cache.keys.page_size

    def output(block: _Block, stored: Tensor) -> Tensor:
        quantized = reads_quantized(block.rows, block.keys, cache.sink_tokens, recent, page, stored.device)
        scores = sample.scores(block.queries, stored)
        weights = _weights(sample, torch.where(quantized, scores, block.scores), block.visible)
        return weights @ sample.values[block.sequences, :, None, : block.keys] - block.output

    return _errors(sample, cache, "key", grid, output, ranks)


def value_clip_ratio_errors(
    sample: AttentionSample, cache: LayerFormat, grid: tuple[float, ...], ranks: Ranks = ALONE
) -> Tensor:
    """The same with quantized values and exact attention weights."""
    recent, page = cache.value_window, cache.values.page_size

    def output(block: _Block, stored: Tensor) -> Tensor:
        quantized = reads_quantized(block.rows, block.keys, cache.sink_tokens, recent, page, stored.device)
        difference = stored - sample.values[block.sequences, :, : block.keys]
        return (block.weights * quantized) @ difference.unsqueeze(-3)

    return _errors(sample, cache, "value", grid, output, ranks)


def _errors(
    sample: AttentionSample,
    cache: LayerFormat,
    side: Side,
    grid: tuple[float, ...],
    error: Callable[[_Block, Tensor], Tensor],
    ranks: Ranks,
) -> Tensor:
    """Squared output error with each clip ratio, over evenly spaced queries that may read a quantized page.

    Args:
        sample: attention of the layer.
        cache: how `side` is stored, but for the clip ratio.
        side: keys or values.
        grid: clip ratios.
        error: the error of the heads' outputs of a block, [m, n, H, Hq / H, q, E], given what was read back with m clip
            ratios: [m, n, H, keys, channels].
        ranks: each evaluates some of the clip ratios.
    """
    exact = sample.keys if side == "key" else sample.values
    f = cache.side(side == "key")[0]
    first, mine = f.page_size + cache.window(f.is_key), ranks.mine(range(len(grid)))
    # What is computed at once: some of the sequences, and of these with some of the clip ratios.
    room = GPU_SCORES if exact.is_cuda else SCORES
    scores = sample.queries.shape[1] * QUERY_BLOCK * sample.num_tokens
    sequences = min(max(1, room // (scores * max(1, len(mine)))), len(exact))
    together = max(1, room // (scores * sequences))
    sums, size = exact.new_zeros(len(grid), dtype=torch.float64), exact.new_zeros((), dtype=torch.float64)
    for start in range(0, len(exact), sequences):
        some = slice(start, start + sequences)
        stored = stored_tokens(exact[some], cache, side, [grid[i] for i in mine])
        for block in _blocks(sample, first, some):
            size += squared_output(block.output, sample.output_weight).sum()
            for i in range(0, len(mine), together):
                tokens = stored[i : i + together, :, :, : block.keys]
                found = squared_output(error(block, tokens), sample.output_weight).sum(1)
                sums[list(mine[i : i + together])] += found
    sums, size = ranks.sum_(sums.cpu()), float(size)
    return sums / size if size else sums


def searched_sides(scheme: KVScheme, search: KVCalibration) -> tuple[bool, bool]:
    """Whether keys, and whether values, are quantized with a clip ratio that is to be chosen."""
    keys, values = (side.quantized and search.searches_clip_ratio(side.name) for side in scheme.sides)
    return keys, values


class ClipRatioPass(SampleReader):
    """Choose `key_clip_ratio` and `value_clip_ratio` of the layer's pages.

    Args:
        sampler: takes the sample, earlier in the list of passes.
        search_keys, search_values: what to search; the other side keeps the scheme's clip ratio.
    """

    name = "clip_ratios"

    def __init__(self, sampler: AttentionSampler, search_keys: bool = True, search_values: bool = True) -> None:
        super().__init__(sampler)
        self.search_keys, self.search_values = search_keys, search_values
        self._errors: dict[str, Tensor] = {}
        self._note = ""

    @classmethod
    def of(cls, job: LayerJob, sampler: CalibrationPass) -> ClipRatioPass | None:
        """The pass for a page scheme, for the quantized sides whose ratio the recipe leaves open."""
        scheme = job.scheme
        if scheme is None or scheme.is_span:
            return None
        keys, values = searched_sides(scheme, job.search)
        return cls(sampler, keys, values) if keys or values else None

    def solve(self, work: LayerWork) -> None:
        """Search each side whose pages the calibration sequences are long enough to fill and read."""
        cache, page, missing = work.cache, work.cache.keys.page_size, []
        search = {"key": self.search_keys, "value": self.search_values}
        for side, recent in (("key", cache.key_window), ("value", cache.value_window)):
            if search[side] and not pages_read(work.seq_len, recent, page):
                search[side] = False
                missing.append(f"{side}_clip_ratio ({page + recent + 1:,} tokens are needed)")
        if missing:
            self._note = f"sequences of {work.seq_len:,} tokens are too short to calibrate {' and '.join(missing)}"
        for side, measure in (("key", key_clip_ratio_errors), ("value", value_clip_ratio_errors)):
            if not search[side]:
                continue
            self._errors[side] = measure(self.sampler.sample, cache, CLIP_RATIO_GRID, work.ranks)

    def apply(self, work: LayerWork) -> None:
        """Put the chosen clip ratios into the format of the layer's pages."""
        chosen, cache = self._chosen(), work.cache
        keys = replace(cache.keys, clip_ratio=chosen.get("key", cache.keys.clip_ratio))
        values = replace(cache.values, clip_ratio=chosen.get("value", cache.values.clip_ratio))
        work.cache = replace(cache, keys=keys, values=values)

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


class RunningBounds:
    """Running smallest and largest value of each channel.

    Args:
        sink_tokens: first tokens of each sequence to leave out; a sequence no longer than that counts with its last.
    """

    def __init__(self, sink_tokens: int = 0) -> None:
        self.sink_tokens = sink_tokens
        self.bounds: ChannelBounds | None = None

    def update(self, x: Tensor) -> None:
        """Add keys or values [B, H, T, channels]."""
        stored = x[:, :, min(self.sink_tokens, x.shape[2] - 1) :].float()
        self._widen(stored.amin((0, 2)), stored.amax((0, 2)))

    def combine(self, ranks: Ranks) -> None:
        """Take in what other ranks found."""
        found = ranks.gather(torch.stack(self.bounds).unsqueeze(0))
        self.bounds = None
        for low, high in found:
            self._widen(low, high)

    def _widen(self, low: Tensor, high: Tensor) -> None:
        if self.bounds is not None:
            low, high = torch.minimum(low, self.bounds.low), torch.maximum(high, self.bounds.high)
        self.bounds = ChannelBounds(low, high)


class StaticScalesPass(CalibrationPass):
    """Measure the channels of the finished layer, which costs one more run of the calibration data through it.

    Stands after passes that change weights and before those that choose clip ratios: these shrink the measured bounds.
    """

    name = "static_scales"

    def __init__(self) -> None:
        self._work: LayerWork | None = None
        self._bounds: dict[str, RunningBounds] = {}

    @classmethod
    def of(cls, job: LayerJob, sampler: CalibrationPass) -> StaticScalesPass | None:
        """The pass for a scheme with static scales."""
        return cls() if job.scheme is not None and job.scheme.is_static else None

    def solve(self, work: LayerWork) -> None:
        """Find the bounds of all calibration tokens."""
        cache = work.cache
        self._work = work
        self._bounds = {side: RunningBounds(cache.sink_tokens) for side in ("key", "value")}

        def record(query: Tensor, key: Tensor, value: Tensor) -> None:
            _, keys, values = as_cached(query, key, value, cache)
            self._bounds["key"].update(keys)
            self._bounds["value"].update(values)

        with attention_observed(work.layer.get_submodule(work.structure.attention), record):
            work.replay()
        for bounds in self._bounds.values():
            bounds.combine(work.ranks)

    def apply(self, work: LayerWork) -> None:
        """Put the bounds of the sides with static pages into the format of the layer's cache.

        Raises:
            NumericError: a channel that float16 scales cannot describe.
        """
        for side, found in self._bounds.items():
            f, own = work.cache.side(side == "key")
            tensors = own._replace(bounds=found.bounds if f.static else None)
            work.cache = replace(work.cache, **{f"{side}_tensors": tensors})
            scales = work.cache.static_scales(f.is_key, 1.0)
            unfit = None if scales is None else ~(scales.scale.isfinite() & scales.offset.isfinite())
            if unfit is not None and unfit.any():
                head, channel = unfit.nonzero()[0].tolist()
                raise NumericError(
                    f"Channel {channel} of {side} head {head} of {work.name}.{work.structure.attention} takes values "
                    "on the calibration data that no float16 scale and offset can describe; keep this layer's "
                    f"{side}s in 16 bits."
                )

    def result(self) -> PassResult:
        """The scales with the clip ratios that later passes chose."""
        cache = self._work.cache
        formats = {"key": cache.keys, "value": cache.values}
        sides = {side: cache.static_scales(f.is_key, f.clip_ratio) for side, f in formats.items()}
        return PassResult(
            plan={
                f"static_{side}_{part}": tensor.cpu()
                for side, scales in sides.items()
                if scales is not None
                for part, tensor in zip(SCALE_NAMES, scales, strict=True)
            }
        )
