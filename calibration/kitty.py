"""Kitty (MLSys 2026): which key channels get twice the bits.

A key channel d with step Delta_d puts at most |q_d| Delta_d / 2 of error into a score, and Delta_d = R_d / (2^b - 1)
with the channel's range R_d over a page (equations 4 and 5). The paper's released code ranks each page's channels by
mean |K| alone, when the page is written, because future queries are unknown. Calibration data has queries, so that
fixed channels per layer and head can be chosen by the bound itself:

    key_sensitivity_d = E|q_d| E[R_d]

with E|q_d| averaged over tokens and over the query heads of a KV head, and R_d = max_t k_td - min_t k_td averaged over
pages. Keys are taken as the quantizer gets them: after RoPE, the scheme's rotation and its token norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from kvconvert.calibration.attention_sample import AttentionPass, as_cached
from kvconvert.calibration.protocol import CalibrationPass, LayerJob, LayerWork, PassResult, require_finite
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.kernels.pages import PAGE_SIZE, normalised_keys


class ChannelStatistics:
    """Running statistics of key channels over calibration sequences.

    Args:
        page_size: tokens over which a range is taken; a last incomplete page is left out, and a sequence shorter than
            one page is one page.
        sink_tokens: first tokens of a sequence, which stay in full precision and are left out.
    """

    def __init__(self, page_size: int = PAGE_SIZE, sink_tokens: int = 0) -> None:
        self.page_size, self.sink_tokens = page_size, sink_tokens
        self._sums: dict[str, list[Tensor]] = {}  # of each batch
        self._counts: dict[str, int] = {}

    def update(self, queries: Tensor, keys: Tensor) -> None:
        """Add queries [B, Hq, T, D] and keys [B, H, T, D]."""
        sink_tokens = min(self.sink_tokens, keys.shape[2] - 1)
        stored = keys[:, :, sink_tokens:].float()
        length = stored.shape[2]
        page = min(self.page_size, length)
        pages = stored[:, :, : length // page * page].unflatten(2, (-1, page))
        grouped = queries.float().unflatten(1, (keys.shape[1], -1))
        self._add("key_mean_abs", stored.abs(), (0, 2))
        self._add("key_range", pages.amax(3) - pages.amin(3), (0, 2))
        self._add("query_mean_abs", grouped.abs(), (0, 2, 3))

    def _add(self, name: str, values: Tensor, dims: tuple[int, ...]) -> None:
        total = values.sum(dims, dtype=torch.float64)
        self._sums.setdefault(name, []).append(total)
        self._counts[name] = self._counts.get(name, 0) + values.numel() // total.numel()

    def result(self, ranks: Ranks = ALONE) -> dict[str, Tensor]:
        """`key_mean_abs`, `key_range`, `query_mean_abs` and `key_sensitivity`, each float32 [H, D]."""
        counts = ranks.sum_(torch.tensor(list(self._counts.values()))).tolist()
        sums = {name: ranks.sum_in_order(partial) for name, partial in self._sums.items()}
        means = {name: total / count for (name, total), count in zip(sums.items(), counts, strict=True)}
        means["key_sensitivity"] = means["query_mean_abs"] * means["key_range"]
        return {name: mean.float().cpu() for name, mean in means.items()}


def choose_channels(score: Tensor, count: int) -> Tensor:
    """The `count` channels of highest score of each head: from [H, D], int64 [H, count], ascending.

    Ties go to the lower index, as in the runtime's own ranking.
    """
    order = torch.sort(score, dim=-1, descending=True, stable=True).indices
    return order[:, :count].sort(-1).values


class KittyPass(AttentionPass):
    """Statistics of the layer's key channels and, if `select` says so, the fixed channels to boost.

    Args:
        select: "calibrated" fixes the channels, "dynamic" leaves them to each page.
    """

    name = "kitty"

    def __init__(self, select: Literal["dynamic", "calibrated"]) -> None:
        self.select = select
        self._statistics: ChannelStatistics | None = None
        self._tensors: dict[str, Tensor] = {}

    @classmethod
    def of(cls, job: LayerJob, sampler: CalibrationPass) -> KittyPass | None:
        """The pass for a scheme that boosts any channel of the layer's heads."""
        scheme = job.scheme
        if scheme is None or not scheme.boosted_for(job.key_dim):
            return None
        return cls(scheme.boost_select)

    def see(self, work: LayerWork, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Count queries and keys as the page quantizer gets them."""
        cache, f = work.cache, work.cache.keys
        if self._statistics is None:
            self._statistics = ChannelStatistics(f.page_size, cache.sink_tokens)
        queries, keys, _ = as_cached(query, key, value, cache)
        self._statistics.update(queries, normalised_keys(keys, f))

    def solve(self, work: LayerWork) -> None:
        """Average what was recorded and choose channels by sensitivity."""
        self._tensors = self._statistics.result(work.ranks)
        require_finite(self._tensors, "queries or keys", work)
        if self.select == "calibrated":
            chosen = choose_channels(self._tensors["key_sensitivity"], work.cache.keys.boosted)
            self._tensors["boosted_channels"] = chosen.int()

    def apply(self, work: LayerWork) -> None:
        """Fix the channels in the format of the layer's pages."""
        if self.select == "calibrated":
            cache = work.cache
            chosen = self._tensors["boosted_channels"].long().to(next(work.layer.parameters()).device)
            keys, tensors = replace(cache.keys, fixed_channels=True), cache.key_tensors._replace(boosted=chosen)
            work.cache = replace(cache, keys=keys, key_tensors=tensors)

    def result(self) -> PassResult:
        """The statistics as plan tensors, and what share of all sensitivity the most sensitive channels have."""
        sensitivity = self._tensors["key_sensitivity"].sort(-1, descending=True).values
        top = max(1, sensitivity.shape[1] // 8)
        share = sensitivity[:, :top].sum(-1) / sensitivity.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
        return PassResult(
            plan=self._tensors,
            statistics={"sensitivity_share_of_top_eighth": [round(float(value), 6) for value in share]},
        )
