"""Attention over everything that a cache has stored: one softmax over pages, spans and full-precision tokens.

Prompts that have nothing quantized before them go to `kernels/prompt/__init__.py`.

The CPU's path, and the slower one of every other device, goes tile by tile in plain PyTorch. Every tile of pages and
every batch of residual windows contributes a partial (maximum, sum of exponentials, weighted values) per sequence, and
partials are merged, so that nothing larger than a tile is ever dequantized. Codes of pages are unpacked to float32 in
three passes over memory that is used again and again. Scales are multiplied into the queries and the weights where
these are few; where they are many, the codes themselves are dequantized, once for all.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import torch

from kvconvert.kernels import device
from kvconvert.kernels.attention import Scoring, StreamingSoftmax, capped
from kvconvert.kernels.code_bits import LANE_BITS, field_bits, fields_per_lane
from kvconvert.kernels.decode.plan import (
    MOST_ROWS,
    PageTables,
    PageTile,
    ResidualTokens,
    ResidualWindows,
    SpanTokens,
    StoredTokens,
    Visibility,
)
from kvconvert.kernels.device import runs_triton
from kvconvert.kernels.page_formats import PAGE_SIZE, ChannelScales, LayerFormat
from kvconvert.kernels.pages.center import projected_scores
from kvconvert.kernels.pages.records import PageTensors
from kvconvert.kernels.pages.reference import page_codes
from kvconvert.kernels.spans import shift_scores, span_scores, weighted_span_values

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_CHANNELS = 256
# Queries of one launch: bounds masks and partial results when a prompt follows stored tokens.
QUERIES_AT_ONCE = 256
# Room for what a key center adds to the scores of one launch, which may have fewer queries for it.
CENTER_BYTES = 64 << 20


def unsupported(queries: torch.Tensor, format: LayerFormat, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot serve queries [B, Hq, T, D] over a layer; None if they can.

    Args:
        queries: as for `decode_attention`.
        format: the format of the layer's pages, or with spans that of pages of these heads.
        dtype: the dtype of stored full-precision tokens.
    """
    reason = device.unsupported(queries.device)
    if reason is not None:
        return reason
    key, value, group = format.keys, format.values, queries.shape[1] // format.keys.heads
    for name, size in (("key", key.head_dim), ("value", value.head_dim)):
        if size % 8 or size > MOST_CHANNELS:
            return f"{name} heads of {size} channels are not a multiple of 8 up to {MOST_CHANNELS}"
    if group > MOST_ROWS:
        return f"{group} query heads per KV head are more than {MOST_ROWS}"
    if key.boosted and key.bits == 1:
        return "boosted channels of 1-bit keys have no kernel"
    if key.page_size != PAGE_SIZE:
        return f"pages of {key.page_size} tokens have no kernel"
    if dtype not in KERNEL_DTYPES:
        return f"there is no kernel for {dtype}"
    return None if queries.dtype == dtype else f"queries are {queries.dtype} and stored tokens {dtype}"


def decode_attention(
    queries: torch.Tensor,
    stored: StoredTokens,
    format: LayerFormat,
    dtype: torch.dtype,
    scoring: Scoring,
    *,
    clamped_rows: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    fall_back: Callable[[str, str], None] = device.fall_back,
) -> torch.Tensor:
    """Attention of a batch of ragged sequences, each query over its own sequence's stored tokens.

    Args:
        queries: [B, Hq, T, D], rotated if the keys are.
        stored: what they attend to.
        format: how the layer stores tokens.
        dtype: the dtype of stored full-precision tokens.
        scoring: the layer's scoring, without its window, which `stored` knows.
        clamped_rows: as in `SpanTokens`.
        output: [B, Hq, T, E] in the queries' dtype, channels side by side, where kernels put the result; made if not
            given.
        fall_back: called with operation and reason where a GPU's attention takes the slower path.

    Returns:
        [B, Hq, T, E] in the queries' dtype or float32; zeros where a query attends to nothing.
    """
    reason = unsupported(queries, format, dtype)
    if reason is not None:
        if queries.is_cuda or runs_triton(queries.device):
            fall_back("attention over the cache", reason)
        tiles = stored.page_tiles(queries.shape[1], queries.shape[2])
        residuals, spans = stored.residual_tokens(), stored.spans()
        return paged_attention(queries, tiles, residuals, format, scoring, spans)
    from kvconvert.kernels.decode.triton import launch

    windows, group = stored.residual_windows(), queries.shape[1] // format.keys.heads
    if output is None:
        output = queries.new_empty(*queries.shape[:3], format.values.head_dim)
    at_once = QUERIES_AT_ONCE
    if format.key_tensors.center is not None and queries.shape[2] > 1:
        entries = len(stored.page_tables(1).keys)
        room = launch.centered_queries(CENTER_BYTES, entries, format.keys.heads, group, queries)
        at_once = min(QUERIES_AT_ONCE, room)
    for start in range(0, queries.shape[2], at_once):
        part = queries[:, :, start : start + at_once]
        visibility = stored.visibility(slice(start, start + at_once))
        programs = launch.programs_for(queries.device, format, group, part.shape[2])
        launch.decode_attention(
            part,
            stored.page_tables(programs),
            windows,
            format,
            scoring,
            visibility=visibility,
            clamped_rows=clamped_rows,
            output=output[:, :, start : start + at_once],
        )
    return output


# Bytes of scores and gathered queries that one tile may take; measured: larger tiles leave the last-level cache.
TILE_BYTES = 3 << 20
# Shapes of shared memory that are remembered.
MOST_VIEWS = 256


def divided_pages(counts: Iterable[tuple[int, int, int]], step: int) -> list[list[tuple[int, int]]]:
    """All pages of some rows as (row, page), those that attention on a CPU takes at once side by side.

    Args:
        counts: for each row, its number and its numbers of key pages and value pages.
        step: how many of the pages that are quantized on both sides, which come first; the others come one by one.
    """
    both: list[tuple[int, int]] = []
    half: list[list[tuple[int, int]]] = []
    for row, keys, values in counts:
        both += [(row, page) for page in range(min(keys, values))]
        half += [[(row, page)] for page in range(min(keys, values), max(keys, values))]
    return [both[i : i + step] for i in range(0, len(both), step)] + half


def pages_per_tile(num_query_heads: int, num_queries: int, format: LayerFormat) -> int:
    """How many pages one tile should hold, so that its scores and dequantized codes stay within `TILE_BYTES`."""
    keys, values = format.keys, format.values
    scores = num_query_heads * num_queries * (keys.page_size + keys.head_dim)
    codes = keys.heads * keys.page_size * max(keys.head_dim, values.head_dim)
    return max(1, TILE_BYTES // (4 * (scores + codes)))


def pages_at_once(num_query_heads: int, num_queries: int, format: LayerFormat) -> int:
    """How many pages should be attended to at once, so that what is computed of each stays within `TILE_BYTES`, beside
    the codes of `pages_per_tile` pages.
    """
    row_bytes = 4 * max(format.keys.page_size, format.keys.head_dim, format.values.head_dim)
    least = pages_per_tile(num_query_heads, num_queries, format)
    return max(least, TILE_BYTES // (num_query_heads * num_queries * row_bytes))


def paged_attention(
    queries: torch.Tensor,
    tiles: Iterable[PageTile],
    residuals: Iterable[ResidualTokens],
    format: LayerFormat,
    scoring: Scoring,
    spans: Iterable[SpanTokens] = (),
) -> torch.Tensor:
    """Attention of a batch of ragged sequences, each query over its own sequence's stored tokens.

    Args:
        queries: [B, Hq, T, D], rotated if the keys are.
        tiles: the pages, in any order and grouping.
        residuals: the full-precision tokens, one softmax block each.
        format: the format of the layer's pages.
        scoring: as in `decode_attention`.
        spans: at most one entry per row.

    Returns:
        float32 [B, Hq, T, E]; zeros where a query attends to nothing.
    """
    batch, query_heads, length, _ = queries.shape
    heads, (scaling, softcap, sink_logits, _) = format.keys.heads, scoring
    # All queries that read one KV head are rows of one matrix, so a code is unpacked once for the whole group.
    grouped = queries.float().reshape(batch, heads, query_heads // heads * length, -1)
    # Soft caps need the scores themselves.
    scaled = grouped if softcap else grouped * scaling
    center = format.key_tensors.center
    projected = None if center is None else scaled @ center.matrix.float()
    softmax = StreamingSoftmax(batch)

    def weights_of(
        scores: torch.Tensor,
        rows: torch.Tensor | None,
        visible: torch.Tensor | None,
        hidden: Sequence[tuple[int, int]] = (),
    ) -> torch.Tensor:
        if softcap:
            scores = capped(scores, scaling, softcap)
        # After the cap, which makes every score finite.
        for page, count in hidden:
            scores[page, ..., :count] = float("-inf")
        return softmax.weights(scores if visible is None else _hide(scores, visible, length), rows)

    for tile in tiles:
        rows = None if batch == 1 else tile.rows
        scores = page_scores(_of_rows(scaled, rows), tile.keys, format)
        if projected is not None and not isinstance(tile.keys, torch.Tensor):
            scores += projected_scores(_of_rows(projected, rows), tile.positions, format.keys.page_size, center)
        weights = weights_of(scores, rows, tile.visible, tile.hidden)
        softmax.add(weighted_page_values(weights, tile.values, format), rows)
    for part in residuals:
        rows = None if batch == 1 else part.rows
        scores = _of_rows(scaled, rows) @ part.keys.float().transpose(2, 3)
        softmax.add(weights_of(scores, rows, part.visible) @ part.values.float(), rows)
    for part in spans:
        rows = None if batch == 1 else torch.tensor([part.row], device=queries.device)
        scores = torch.cat([span_scores(grouped[part.row], span, part.format) for span in part.spans], -1)
        scores = shift_scores(capped(scores, scaling, softcap), part.format, part.clamped_rows)[None]
        visible = None if part.visible is None else part.visible[None]
        weights = softmax.weights(scores if visible is None else _hide(scores, visible, length), rows)
        parts = weights[0].split([span.tokens for span in part.spans], -1)
        output = sum(weighted_span_values(w, span, part.format) for w, span in zip(parts, part.spans, strict=True))
        softmax.add(output[None], rows)
    if sink_logits is not None:
        sink_logits = sink_logits.float().view(1, heads, -1, 1).expand(-1, -1, -1, length).reshape(1, heads, -1)
    output = softmax.finish(sink_logits)
    if output is None:
        return queries.new_zeros(batch, query_heads, length, format.values.head_dim, dtype=torch.float32)
    return output.view(batch, query_heads, length, -1)


def _of_rows(queries: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """The queries [B, ...] of each block; those of the only row, or of every row in order, where `rows` is None."""
    return queries if rows is None else queries[rows]


def _hide(scores: torch.Tensor, visible: torch.Tensor, length: int) -> torch.Tensor:
    """Scores [N, H, R, n], R = query heads per KV head * T, with -inf where `visible` [N, H or 1, T, n] is false."""
    n, heads, rows, tokens = scores.shape
    by_query = scores.view(n, heads, rows // length, length, tokens)
    return by_query.masked_fill_(~visible.unsqueeze(2), float("-inf")).view(n, heads, rows, tokens)


Pages = Sequence[PageTensors] | PageTensors | torch.Tensor


def page_scores(queries: torch.Tensor, pages: Pages, format: LayerFormat) -> torch.Tensor:
    """Dot products of queries float32 [N or 1, H, R, D] with N pages of keys, or full-precision keys [N, H, P, D].

    Returns:
        float32 [N, H, R, P].
    """
    if isinstance(pages, torch.Tensor):
        return queries @ pages.float().transpose(2, 3)
    parts = [pages] if isinstance(pages, PageTensors) else pages
    if format.keys.bits == 16:
        return queries @ _joined([part.codes for part in parts]).float().transpose(2, 3)
    scores = _product(queries, parts, format, *_scales(parts, format.key_tensors.static))
    if parts[0].norm is None:
        return scores
    return scores.mul_(_joined([part.norm for part in parts]).float().unsqueeze(2))


def weighted_page_values(weights: torch.Tensor, pages: Pages, format: LayerFormat) -> torch.Tensor:
    """Sums of N pages of values, or of full-precision values [N, H, P, E], by weights float32 [N, H, R, P].

    Returns:
        float32 [N, H, R, E].
    """
    if isinstance(pages, torch.Tensor):
        return weights @ pages.float()
    parts, static = [pages] if isinstance(pages, PageTensors) else pages, format.value_tensors.static
    if format.values.bits == 16:
        return weights @ _joined([part.codes for part in parts]).float()
    if static is None:
        return _product(weights, parts, format, *_scales(parts, None))
    # Tokens share the scales, which therefore leave the product.
    scale, offset = (part.float().unsqueeze(1) for part in static)
    one = weights.new_ones(1, 1, 1, 1, 1)
    return _product(weights, parts, format, one, 0 * one).mul_(scale).add_(weights.sum(-1, keepdim=True) * offset)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scales(parts: Sequence[PageTensors], static: ChannelScales | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and offset of the pages' groups, or the layer's: float32 [N or 1, H, groups, 1, k]."""
    if static is not None:
        return tuple(part.float()[None, :, None, None] for part in static)
    if parts[0].scales is None:
        grids = zip(*(part.group_scales for part in parts), strict=True)
        return tuple(_joined(list(grid)).float().transpose(2, 3).unsqueeze(3) for grid in grids)
    return _joined([part.scales for part in parts]).float().unsqueeze(4).unbind(2)


def _product(
    left: torch.Tensor, parts: Sequence[PageTensors], format: LayerFormat, scale: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """left (codes scale + offset)^T, with codes unpacked a few pages at a time.

    Args:
        left: [N or 1, H, R, k].
        parts: N pages in all, whose codes [N, H, G n, k] are in G groups.
        format: the layer's format.
        scale, offset: [N or 1, H, G, 1, k].

    Returns:
        [N, H, R, G n].
    """
    f = parts[0].format
    packed_axis = f.page_size if f.is_key else f.head_dim
    count, heads, (rows, k), groups = sum(map(len, parts)), f.heads, left.shape[2:], scale.shape[2]
    few, most = rows * groups <= packed_axis, pages_per_tile(heads * rows, 1, format)
    if few:
        # Measured on an AVX2 processor: with four rows the product takes four fifths of the time of three, which pays
        # for the copy where there are many pages.
        padded = torch.cat([left, left[:, :, :1]], 2) if rows % 4 == 3 and count > most else left
        factors = (padded.unsqueeze(2) * scale).expand(count, heads, groups, -1, k)
    products, begin = [], 0
    for part, some in ((pages, slice(i, i + most)) for pages in parts for i in range(0, len(pages), most)):
        if f.boosted:
            codes, powers = page_codes(part.select(some), format.key_tensors.boosted).transpose(2, 3).float(), None
        else:
            codes, powers = _unpacked(part.codes[some], f.bits, in_place=few)
        here = slice(begin, begin + len(codes))
        begin = here.stop
        if few:
            codes = codes.reshape(-1, packed_axis // groups, k)
            products.append(torch.bmm(factors[here].reshape(len(codes), -1, k), codes.transpose(1, 2)))
        else:
            steps, zeros = (grid.expand(count, -1, -1, -1, -1)[here] for grid in (scale, offset))
            codes = codes.unflatten(2, (groups, -1)).mul_(steps).add_(zeros).flatten(2, 3)
            products.append(left.expand(count, -1, -1, -1)[here] @ codes.transpose(2, 3))
    product = _joined(products)
    if not few:
        return product
    product = product.view(*factors.shape[:4], -1)[..., :rows, :]
    offset = (left.unsqueeze(2) * offset).sum(-1, keepdim=True)
    product = product.add_(offset) if powers is None else torch.addcmul(offset, product, powers.view(groups, 1, -1))
    return product.squeeze(2) if groups == 1 else product.transpose(2, 3).flatten(3)


def _unpacked(words: torch.Tensor, bits: int, in_place: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes of words int16 [N, H, lanes, rows], packed along tokens of keys or channels of values, as float32.

    Args:
        words: the words of some pages.
        bits: width of a code.
        in_place: leave every code where it is in its word, which saves a pass over memory: what comes back is then the
            code times a power of two that its place along the packed axis has.

    Returns:
        [N, H, packed axis, other axis], valid until the next call on the same thread; and the reciprocals of these
        powers, [packed axis], or None where codes are themselves.
    """
    if bits == 3:
        rows = words.shape[3] * 2 // 3
        upper, lowest = words.split([rows, words.shape[3] - rows], 3)
        codes, _ = _unpacked(upper, 2, in_place=False)
        return codes.mul_(2).add_(_fields(lowest, 1)[..., : codes.shape[3]]), None
    if in_place and bits > 1 and words.device.type == "cpu":
        planes, lanes = fields_per_lane(bits), words.shape[2]
        masks, places = _places_in_word(bits, lanes, words.device)
        fields = _workspace(torch.int16, words.device, (*words.shape[:2], planes, lanes, words.shape[3]))
        # The highest field has the sign's bit: as a number without one it is its code times the power, too.
        fields = torch.bitwise_and(words.unsqueeze(2), masks, out=fields).view(torch.uint16).flatten(2, 3)
        return _workspace(torch.float32, words.device, fields.shape).copy_(fields), places
    fields = _fields(words, bits)
    return _workspace(torch.float32, words.device, fields.shape).copy_(fields), None


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


@lru_cache(maxsize=64)
def _places_in_word(bits: int, lanes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of a word's fields, int16 [planes, 1, 1], and what makes codes of them, float32 [planes lanes]."""
    with torch.inference_mode(False):
        begins = torch.arange(0, LANE_BITS, bits, device=device)
        masks = ((2**bits - 1) << begins).to(torch.int16)
        return masks.view(-1, 1, 1), (0.5**begins).float().repeat_interleave(lanes)


_workspaces = threading.local()


def _workspace(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> torch.Tensor:
    """Uninitialised memory that one thread's calls share, for what is used up before the next call.

    Fresh memory of this size would come from the operating system page by page, for every layer and step. On a CPU
    alone; elsewhere torch keeps memory by itself.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    views = _workspaces.__dict__.setdefault(dtype, {})
    if shape not in views:
        size = math.prod(shape)
        whole = views.get(())
        if whole is None or whole.numel() < size or len(views) > MOST_VIEWS:
            with torch.inference_mode(False):
                whole = torch.empty(size if whole is None else max(size, whole.numel()), dtype=dtype)
            views.clear()
            views[()] = whole
        views[shape] = whole[:size].view(shape)
    return views[shape]
