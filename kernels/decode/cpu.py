"""Decode attention tile by tile in plain PyTorch: the CPU's path, and the slower one of every other device.

Every tile of pages and every batch of residual windows contributes a partial (maximum, sum of exponentials, weighted
values) per sequence, and partials are merged, so that nothing larger than a tile is ever dequantized.

Codes of pages are unpacked to float32 in three passes over memory that is used again and again. Scales are multiplied
into the queries and the weights where these are few; where they are many, the codes themselves are dequantized, once
for all.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from functools import lru_cache

import torch

from kvconvert.kernels.decode.stored import PageTile, ResidualTokens, SpanTokens
from kvconvert.kernels.packing import LANE_BITS, field_bits, fields_per_lane
from kvconvert.kernels.pages.center import projected_scores
from kvconvert.kernels.pages.formats import LayerFormat
from kvconvert.kernels.pages.records import KeyPages, ValuePages
from kvconvert.kernels.pages.reference import key_codes, key_scales
from kvconvert.kernels.spans.reference import shift_scores, span_scores, weighted_span_values

# Bytes of scores and gathered queries that one tile may take; measured: larger tiles leave the last-level cache.
TILE_BYTES = 3 << 20


def pages_per_tile(num_query_heads: int, num_queries: int, format: LayerFormat) -> int:
    """How many pages one tile should hold, so that its scores and dequantized codes stay within `TILE_BYTES`."""
    keys, values = format.keys, format.values
    scores = num_query_heads * num_queries * (keys.page_size + keys.head_dim)
    codes = keys.heads * keys.page_size * max(keys.head_dim, values.head_dim)
    return max(1, TILE_BYTES // (4 * (scores + codes)))


def paged_attention(
    queries: torch.Tensor,
    tiles: Iterable[PageTile],
    residuals: Iterable[ResidualTokens],
    format: LayerFormat,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    spans: Iterable[SpanTokens] = (),
) -> torch.Tensor:
    """Attention of a batch of ragged sequences, each query over its own sequence's stored tokens.

    Args:
        queries: [B, Hq, T, D], rotated if the keys are.
        tiles: the pages, in any order and grouping.
        residuals: the full-precision tokens, one softmax block each.
        format: of the layer's pages.
        scaling, softcap, sink_logits: as in `attention_reference`.
        spans: at most one entry per row.

    Returns:
        float32 [B, Hq, T, E]; zeros where a query sees nothing.
    """
    batch, query_heads, length, _ = queries.shape
    heads = format.keys.heads
    # All queries that read one KV head are rows of one matrix, so a code is unpacked once for the whole group.
    grouped = queries.float().reshape(batch, heads, query_heads // heads * length, -1)
    # Soft caps need the scores themselves.
    scaled = grouped if softcap else grouped * scaling
    center = format.key_center
    projected = None if center is None else scaled @ center.matrix.float()
    state = _Softmax(grouped, format.values.head_dim)

    def weights_of(rows: torch.Tensor, scores: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        if softcap:
            scores = scores.mul_(scaling / softcap).tanh_().mul_(softcap)
        return state.weights(rows, _hide(scores, visible, length))

    for tile in tiles:
        asking = scaled if batch == 1 else scaled[tile.rows]
        scores = page_scores(asking, tile.keys, format)
        if projected is not None and not isinstance(tile.keys, torch.Tensor):
            here = projected if batch == 1 else projected[tile.rows]
            scores += projected_scores(here, tile.positions, format.keys.page_size, center)
        for page, count in tile.hidden:
            scores[page, ..., :count] = float("-inf")
        weights = weights_of(tile.rows, scores, tile.visible)
        state.add(tile.rows, weighted_page_values(weights, tile.values, format))
    for part in residuals:
        asking = scaled if batch == 1 else scaled[part.rows]
        scores = asking @ part.keys.float().transpose(2, 3)
        state.add(part.rows, weights_of(part.rows, scores, part.visible) @ part.values.float())
    for part in spans:
        row = torch.tensor([part.row], device=queries.device)
        scores = torch.cat([span_scores(grouped[part.row], span, part.format) for span in part.spans], -1).mul_(scaling)
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = shift_scores(scores, part.format, part.clamped_rows)[None]
        weights = state.weights(row, _hide(scores, None if part.visible is None else part.visible[None], length))
        parts = weights[0].split([span.tokens for span in part.spans], -1)
        output = sum(weighted_span_values(w, span, part.format) for w, span in zip(parts, part.spans, strict=True))
        state.add(row, output[None])
    return state.finish(sink_logits, length).reshape(batch, query_heads, length, -1)


def _hide(scores: torch.Tensor, visible: torch.Tensor | None, length: int) -> torch.Tensor:
    """Scores [N, H, R, n], R = query heads per KV head * T, with -inf where `visible` [N, H or 1, T, n] is false."""
    if visible is None:
        return scores
    n, heads, rows, tokens = scores.shape
    by_query = scores.view(n, heads, rows // length, length, tokens)
    return by_query.masked_fill_(~visible.unsqueeze(2), float("-inf")).view(n, heads, rows, tokens)


class _Softmax:
    """The running softmax of every query of the batch: maximum, sum of exponentials and weighted values so far.

    Maxima begin at the lowest finite number: -inf minus it is -inf, whose exponential is 0 and not NaN.
    """

    def __init__(self, grouped: torch.Tensor, value_dim: int):
        shape = grouped.shape[:3]
        self.maximum = grouped.new_full(shape, torch.finfo(torch.float32).min)
        self.total = grouped.new_zeros(shape)
        self.output = grouped.new_zeros(*shape, value_dim)

    def weights(self, rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Count N blocks of scores [N, H, R, n] of batch rows [N], which they replace by exp(score - maximum so far).

        What was counted before is brought to the new maximum; `add` has to follow.
        """
        own = scores.amax(-1)
        if len(self.maximum) == 1:
            merged = torch.maximum(self.maximum, own.amax(0))
            of_rows = merged
        else:
            merged = self.maximum.scatter_reduce(0, rows.view(-1, 1, 1).expand_as(own), own, "amax")
            of_rows = merged[rows]
        self._rescale((self.maximum - merged).exp_())
        self.maximum = merged
        weights = scores.sub_(of_rows.unsqueeze(-1)).exp_()
        self._add(self.total, rows, weights.sum(-1))
        return weights

    def add(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """Add the values [N, H, R, E] that the last `weights` gave."""
        self._add(self.output, rows, output)

    @staticmethod
    def _add(target: torch.Tensor, rows: torch.Tensor, parts: torch.Tensor) -> None:
        if len(target) == 1:
            target.add_(parts.sum(0))
        else:
            target.index_add_(0, rows, parts)

    def _rescale(self, factor: torch.Tensor) -> None:
        self.total.mul_(factor)
        self.output.mul_(factor.unsqueeze(-1))

    def finish(self, sink_logits: torch.Tensor | None, length: int) -> torch.Tensor:
        """[B, H, R, E]."""
        if sink_logits is not None:
            logits = sink_logits.float().view(1, self.maximum.shape[1], -1, 1)
            logits = logits.expand(-1, -1, -1, length).reshape(1, self.maximum.shape[1], -1)
            merged = torch.maximum(self.maximum, logits)
            self._rescale((self.maximum - merged).exp())
            self.total += (logits - merged).exp()
        return self.output.div_(self.total.clamp_(min=torch.finfo(torch.float32).tiny).unsqueeze(-1))


def page_scores(queries: torch.Tensor, pages: KeyPages | torch.Tensor, format: LayerFormat) -> torch.Tensor:
    """Dot products of queries float32 [N or 1, H, R, D] with N pages of keys, or full-precision keys [N, H, P, D].

    Returns:
        float32 [N, H, R, P].
    """
    if isinstance(pages, torch.Tensor):
        return queries @ pages.float().transpose(2, 3)
    f = format.keys
    if f.bits == 16:
        return queries @ pages.codes.float().transpose(2, 3)
    codes = key_codes(pages, f, format.boosted).transpose(2, 3).float() if f.boosted else _unpacked(pages.codes, f.bits)
    # A row [N, H, groups, 1, D] for each group of tokens.
    scale, zero_point = (part.float().transpose(2, 3).unsqueeze(3) for part in key_scales(pages, format.static_keys))
    groups = f.page_size // f.group_size
    codes = codes.unflatten(2, (groups, f.group_size))
    if queries.shape[2] * groups > f.page_size:
        scores = queries @ codes.mul_(scale).add_(zero_point).flatten(2, 3).transpose(2, 3)
    else:
        scores = _grouped_product(queries, scale, zero_point, codes)
    return scores if pages.norm is None else scores.mul_(pages.norm.float().unsqueeze(2))


def weighted_page_values(weights: torch.Tensor, pages: ValuePages | torch.Tensor, format: LayerFormat) -> torch.Tensor:
    """Sums of N pages of values, or of full-precision values [N, H, P, E], by weights float32 [N, H, R, P].

    Returns:
        float32 [N, H, R, E].
    """
    if isinstance(pages, torch.Tensor):
        return weights @ pages.float()
    f, static = format.values, format.static_values
    if f.bits == 16:
        return weights @ pages.codes.float()
    codes = _unpacked(pages.codes, f.bits)
    if f.static:
        # Tokens share the scales, which therefore leave the product.
        offset = weights.sum(-1, keepdim=True) * static.zero_point.float().unsqueeze(1)
        return (weights @ codes.transpose(2, 3)).mul_(static.scale.float().unsqueeze(1)).add_(offset)
    # A row [N, H, groups, 1, P] for each group of channels.
    scale, zero_point = (part.float().transpose(2, 3).unsqueeze(3) for part in pages.group_scales)
    groups = f.head_dim // f.group_size
    codes = codes.unflatten(2, (groups, f.group_size))
    if weights.shape[2] * groups > f.head_dim:
        return weights @ codes.mul_(scale).add_(zero_point).flatten(2, 3).transpose(2, 3)
    return _grouped_product(weights, scale, zero_point, codes)


def _grouped_product(
    left: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, codes: torch.Tensor
) -> torch.Tensor:
    """left (codes scale + zero_point)^T with the scales multiplied into `left`.

    Args:
        left: [N or 1, H, R, k].
        scale, zero_point: [N or 1, H, G, 1, k].
        codes: [N, H, G, n, k].

    Returns:
        [N, H, R, G n].
    """
    count, heads, groups, n, inner = codes.shape
    by_group = left.unsqueeze(2)
    scaled = (by_group * scale).expand(count, -1, -1, -1, -1).reshape(-1, left.shape[2], inner)
    product = torch.bmm(scaled, codes.view(-1, n, inner).transpose(1, 2)).view(count, heads, groups, -1, n)
    product.add_((by_group * zero_point).sum(-1, keepdim=True))
    return product.transpose(2, 3).flatten(3)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of words int16 [N, H, lanes, rows], packed along tokens of keys or channels of values, as float32.

    Returns:
        [N, H, packed axis, other axis], valid until the next call on the same thread.
    """
    if bits == 3:
        rows = words.shape[3] * 2 // 3
        upper, lowest = words.split([rows, words.shape[3] - rows], 3)
        codes = _unpacked(upper, 2)
        return codes.mul_(2).add_(_fields(lowest, 1)[..., : codes.shape[3]])
    fields = _fields(words, bits)
    return _workspace(torch.float32, words.device, fields.shape).copy_(fields)


def _fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """`_unpacked` as int16, of codes that lie in one plane."""
    n, heads, lanes, rows = words.shape
    planes, parts = fields_per_lane(bits), field_bits(bits) // bits
    shape = (n, heads, planes, lanes, parts, rows)
    fields = _workspace(torch.int16, words.device, shape)
    # The shift is arithmetic; the mask removes the sign that it drags in.
    torch.bitwise_right_shift(words[:, :, None, :, None], _places(bits, words.device), out=fields)
    return fields.bitwise_and_(2**bits - 1).view(n, heads, planes * lanes, parts * rows)


@lru_cache(maxsize=32)
def _places(bits: int, device: torch.device) -> torch.Tensor:
    """Where the fields of a word begin, in bits: int16 [planes, 1, parts, 1]; see `kernels/packing.py` for 1 bit."""
    with torch.inference_mode(False):
        places = torch.arange(0, LANE_BITS, bits, dtype=torch.int16, device=device)
        return places.view(fields_per_lane(bits), 1, -1, 1)


_workspaces = threading.local()


def _workspace(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> torch.Tensor:
    """Uninitialised memory that one thread's calls share, for what is used up before the next call.

    Fresh memory of this size would come from the operating system page by page, for every layer and step. On a CPU
    alone; elsewhere torch keeps memory by itself.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape)
    buffers = _workspaces.__dict__
    if dtype not in buffers or buffers[dtype].numel() < size:
        with torch.inference_mode(False):
            buffers[dtype] = torch.empty(size, dtype=dtype)
    return buffers[dtype][:size].view(shape)
