"""What a cache has stored, in the forms that the two paths of decode attention read.

The kernels follow tables of addresses; the tiled path is given tensors, a few pages at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvconvert.kernels.decode.plan import WorkPlan
from kvconvert.kernels.page_formats import Span, SpanFormat
from kvconvert.kernels.pages.center import KeyCenter
from kvconvert.kernels.pages.records import PageTensors


class StoredTokens(Protocol):
    """One layer's stored tokens of a batch; each form is built when a path asks for it."""

    def page_tables(self, programs: int) -> PageTables:
        """Where pages and spans lie, with work for about `programs` programs."""

    def residual_windows(self) -> ResidualWindows:
        """Where full-precision tokens lie."""

    def visibility(self, queries: slice) -> Visibility | None:
        """Which tokens some of the queries see; None for all."""

    def page_tiles(self, num_query_heads: int, num_queries: int) -> Iterator[PageTile]:
        """All pages, in tiles for this number of query heads and queries."""

    def residual_tokens(self) -> Iterator[ResidualTokens]:
        """The full-precision tokens of all rows that have any, many rows at a time."""

    def spans(self) -> Iterator[SpanTokens]:
        """The spans of each row that has any."""


@dataclass(frozen=True)
class PageTables:
    """Where the pages of a batch lie, for the kernels; see `kernels/decode/plan.py` for `plan`.

    Attributes:
        key_base, value_base: any tensors of 2-byte elements, 16-byte aligned, from which offsets count.
        keys, values: int64 [n + 1] offsets of pages or span blocks in units of 16 bytes. Entry i of both is of the same
            tokens; where only one side of a half-quantized page is quantized, the other's entry is any valid one, as is
            the last entry, which is loaded in advance and never followed.
        plan: the work items.
        shared: int64 [S, 4] offsets, in the same units, of key scale and offset [H, D] relative to `key_base`, and
            of value scale and offset [H, E] relative to `value_base`; None where pages have scales of their own.
        boosted: integers [H, n], the channels with more bits where these are fixed for the layer, else None.
        center: what key pages leave out; None for whole keys.
        key_rows: int64 [B, 3], of each sequence's key pages the first entry, their number, and the position of the
            first one's first token; None without a center.
    """

    key_base: torch.Tensor
    value_base: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    plan: WorkPlan
    shared: torch.Tensor | None = None
    boosted: torch.Tensor | None = None
    center: KeyCenter | None = None
    key_rows: torch.Tensor | None = None


@dataclass(frozen=True)
class ResidualWindows:
    """The full-precision tokens of a batch, for the kernels.

    Attributes:
        base: any tensor of the keys' dtype, 16-byte aligned, from which offsets count.
        rows: int64 [B, 8] for each sequence: offset of its key buffer [H, capacity, D] from `base` and the stride of
            its heads, the same two of values, all in units of 8 elements; sink tokens; how much further on than in the
            residual window its other tokens lie in the key and in the value buffer, because of half-quantized pages
            between; tokens of the residual window. Sink tokens are fewer than a page's.
        places: int64 [B, capacity], how far from there each token of a buffer lies, in units of 16 bytes, where they do
            not lie side by side; None where they do.
    """

    base: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor | None = None


@dataclass(frozen=True)
class Visibility:
    """Which tokens queries see: uint8, addressed as base + sequence * row + head * head_stride + query * query_stride
    + token, tokens numbered [pages | half-quantized pages | residual window | spans] as `SequencePlan` says.
    """

    mask: torch.Tensor
    row: int
    head: int
    query: int


@dataclass(frozen=True)
class PageTile:
    """Some pages of some sequences.

    Keys and values of the same tokens; either may still be in full precision where their windows differ.

    Attributes:
        keys: N key pages, or full-precision keys [N, H, P, D].
        values: N value pages, or full-precision values [N, H, P, E].
        rows: int64 [N], the batch row that each page belongs to; may be None where there is one.
        visible: bool [N, H or 1, T, P], which tokens each of the T queries may see; None when all may see all.
        positions: int64 [N], of each page's first token, where key pages lack a constant part; else None.
        hidden: (number of a page, how many of its first tokens) that no query attends to here.
    """

    keys: PageTensors | torch.Tensor
    values: PageTensors | torch.Tensor
    rows: torch.Tensor | None
    visible: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    hidden: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class ResidualTokens:
    """Full-precision tokens of some sequences.

    Attributes:
        rows: int64 [N], their batch rows; None where these are all rows in order.
        keys: [N, H, n, D]; values: [N, H, n, E]; n is the longest, and shorter sequences end in anything finite.
        visible: bool [N, H or 1, T, n], false where a sequence has no token; None when every query may see all n.
    """

    rows: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    visible: torch.Tensor | None = None


@dataclass(frozen=True)
class SpanTokens:
    """All spans of one sequence, whose scores are shifted together (CalibQuant).

    Attributes:
        row: the batch row.
        spans: in order; format: of all of them.
        visible: bool [1, T, n] over the tokens of all spans; None when all queries may see all.
        clamped_rows: int64 scalar, to which the number of rows is added whose different scores the shift made equal.
    """

    row: int
    spans: list[Span]
    format: SpanFormat
    visible: torch.Tensor | None = None
    clamped_rows: torch.Tensor | None = None
