"""Attention over a paged cache: one softmax over quantized pages and full-precision tokens of ragged sequences.

`attention_reference` is the oracle. `paged_attention` streams: every tile of pages and every dense run contributes a
partial (maximum, sum of exponentials, weighted values) per sequence, and partials are merged, so that nothing larger
than a tile is ever dequantized. `prompt_attention` serves prompts that have nothing behind them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvconvert.kernels.packing import unpack_codes
from kvconvert.kernels.pages import PageFormat, Pages, page_keys, page_values

# Bytes of scores and gathered queries that one tile may take; measured: larger tiles leave the last-level cache.
TILE_BYTES = 8 << 20


@dataclass(frozen=True)
class PageTile:
    """Some pages of some sequences.

    Attributes:
        pages: N pages.
        rows: int64 [N], the batch row that each page belongs to.
        visible: bool [N, T, P], which tokens each of the T queries may see; None when all may see all.
    """

    pages: Pages
    rows: torch.Tensor
    visible: torch.Tensor | None = None


@dataclass(frozen=True)
class DenseRun:
    """Full-precision tokens of one sequence.

    Attributes:
        row: the batch row.
        keys: [H, n, D]; values: [H, n, E].
        visible: bool [T, n]; None when all queries may see all tokens.
    """

    row: int
    keys: torch.Tensor
    values: torch.Tensor
    visible: torch.Tensor | None = None


def attention_reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one sequence in float64.

    Args:
        queries: [Hq, T, D]; query head h reads KV head h // (Hq / H).
        keys: [H, n, D]; values: [H, n, E].
        visible: bool [T, n] or None for all.
        scaling: factor of the dot products, usually 1 / sqrt(D).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
        sinks: [Hq] logits of a virtual token with no value (gpt-oss).

    Returns:
        float64 [Hq, T, E]; zeros where a query sees nothing.
    """
    repeat = queries.shape[0] // keys.shape[0]
    keys, values = (x.double().repeat_interleave(repeat, 0) for x in (keys, values))
    scores = queries.double() @ keys.transpose(1, 2) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights[..., : keys.shape[1]] @ values


def prompt_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention of one sequence over itself: [Hq, n, D], [H, n, D], [H, n, E] to [Hq, n, E] in the queries'
    dtype.
    """
    return torch.nn.functional.scaled_dot_product_attention(
        queries[None],
        keys[None],
        values[None],
        is_causal=True,
        scale=scaling,
        enable_gqa=queries.shape[0] != keys.shape[0],
    )[0]


def pages_per_tile(num_query_heads: int, num_queries: int, format: PageFormat) -> int:
    """How many pages one tile should hold, so that its scores and dequantized codes stay within `TILE_BYTES`."""
    scores = num_query_heads * num_queries * (format.page_size + format.key_head_dim)
    codes = format.num_key_value_heads * format.page_size * max(format.key_head_dim, format.value_head_dim)
    return max(1, TILE_BYTES // (4 * (scores + codes)))


def paged_attention(
    queries: torch.Tensor,
    tiles: Iterable[PageTile],
    dense: Iterable[DenseRun],
    format: PageFormat,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a batch of ragged sequences, each query over its own sequence's pages and dense tokens.

    Args:
        queries: [B, Hq, T, D], rotated if the keys are.
        tiles: the pages, in any order and grouping.
        dense: the full-precision tokens, at most one softmax block per run.
        format: the layer's page format.
        scaling, softcap, sinks: as in `attention_reference`.

    Returns:
        float32 [B, Hq, T, E]; zeros where a query sees nothing.
    """
    batch, query_heads, length, _ = queries.shape
    heads = format.num_key_value_heads
    # All queries that read one KV head are rows of one matrix, so a code is unpacked once for the whole group.
    grouped = queries.float().reshape(batch, heads, query_heads // heads * length, -1)
    state = _Softmax(grouped, format.value_head_dim)
    for tile in tiles:
        scores = _page_scores(grouped[tile.rows], tile.pages, format)
        weights, maximum = _exponentials(scores, scaling, softcap, tile.visible, length)
        state.add(tile.rows, maximum, weights.sum(-1), _weighted_page_values(weights, tile.pages, format))
    for run in dense:
        scores = grouped[run.row] @ run.keys.float().transpose(1, 2)
        visible = None if run.visible is None else run.visible[None]
        weights, maximum = _exponentials(scores[None], scaling, softcap, visible, length)
        row = torch.tensor([run.row], device=queries.device)
        state.add(row, maximum, weights.sum(-1), weights @ run.values.float())
    return state.finish(sinks, length).reshape(batch, query_heads, length, -1)


def _exponentials(
    scores: torch.Tensor, scaling: float, softcap: float | None, visible: torch.Tensor | None, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(score - row maximum) and that maximum, for raw dot products [N, H, R, n] with R = query heads per KV head *
    T.
    """
    scores.mul_(scaling)
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    if visible is not None:
        n, heads, rows, tokens = scores.shape
        scores.view(n, heads, rows // length, length, tokens).masked_fill_(~visible[:, None, None], float("-inf"))
    maximum = scores.amax(-1)
    # A query that sees nothing here has maximum -inf; subtracting 0 instead keeps its exponentials at 0, not NaN.
    return scores.sub_(maximum.nan_to_num(neginf=0.0).unsqueeze(-1)).exp_(), maximum


class _Softmax:
    """The running softmax of every query of the batch: maximum, sum of exponentials and weighted values so far."""

    def __init__(self, grouped: torch.Tensor, value_dim: int):
        shape = grouped.shape[:3]
        self.maximum = grouped.new_full(shape, float("-inf"))
        self.total = grouped.new_zeros(shape)
        self.output = grouped.new_zeros(*shape, value_dim)

    def add(self, rows: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor, output: torch.Tensor) -> None:
        """Merge N partials: `rows` [N], `maximum` and `total` [N, H, R], `output` [N, H, R, E]."""
        index = rows.view(-1, 1, 1).expand_as(maximum)
        merged = self.maximum.scatter_reduce(0, index, maximum, "amax")
        finite = merged.nan_to_num(neginf=0.0)
        self._rescale((self.maximum - finite).exp())
        self.maximum = merged
        weight = (maximum - finite[rows]).exp()
        self.total.index_add_(0, rows, total * weight)
        self.output.index_add_(0, rows, output * weight.unsqueeze(-1))

    def _rescale(self, factor: torch.Tensor) -> None:
        self.total.mul_(factor)
        self.output.mul_(factor.unsqueeze(-1))

    def finish(self, sinks: torch.Tensor | None, length: int) -> torch.Tensor:
        """[B, H, R, E]."""
        if sinks is not None:
            logits = sinks.float().view(1, self.maximum.shape[1], -1, 1)
            logits = logits.expand(-1, -1, -1, length).reshape(1, self.maximum.shape[1], -1)
            merged = torch.maximum(self.maximum, logits)
            self._rescale((self.maximum - merged).exp())
            self.total += (logits - merged).exp()
        return self.output / self.total.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)


def _page_scores(queries: torch.Tensor, pages: Pages, format: PageFormat) -> torch.Tensor:
    """Dot products of queries [N, H, R, D] with page keys: [N, H, R, P].

    With few queries the scales are folded into the query, which leaves the codes as they are; with many, one
    dequantized page serves them all.
    """
    f = format
    groups = f.page_size // f.key_group_size
    if f.key_bits == 16 or queries.shape[2] * groups > f.page_size:
        return queries @ page_keys(pages, f)
    codes = unpack_codes(pages.key_codes, f.key_bits, 3, f.page_size).float()
    scale, offset = pages.key_scale.float(), queries @ pages.key_minimum.float()
    scores = torch.empty(*queries.shape[:3], f.page_size, device=queries.device)
    for g in range(groups):
        tokens = slice(g * f.key_group_size, (g + 1) * f.key_group_size)
        scores[..., tokens] = (queries * scale[..., g].unsqueeze(2)) @ codes[..., tokens]
        scores[..., tokens] += offset[..., g : g + 1]
    return scores if pages.key_norm is None else scores.mul_(pages.key_norm.float().unsqueeze(2))


def _weighted_page_values(weights: torch.Tensor, pages: Pages, format: PageFormat) -> torch.Tensor:
    """Sum of page values by weights [N, H, R, P]: [N, H, R, E]; few weights take the scales into themselves."""
    f = format
    groups = f.value_head_dim // f.value_group_size
    if f.value_bits == 16 or weights.shape[2] * groups > f.value_head_dim:
        return weights @ page_values(pages, f)
    codes = unpack_codes(pages.value_codes, f.value_bits, 3, f.value_head_dim).float()
    scale, offset = pages.value_scale.float(), weights @ pages.value_minimum.float()
    output = torch.empty(*weights.shape[:3], f.value_head_dim, device=weights.device)
    for g in range(groups):
        channels = slice(g * f.value_group_size, (g + 1) * f.value_group_size)
        output[..., channels] = (weights * scale[..., g].unsqueeze(2)) @ codes[..., channels]
        output[..., channels] += offset[..., g : g + 1]
    return output
