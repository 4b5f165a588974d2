"""Which tokens of a prompt a layer keeps: heavy hitters by their attention mass and the newest (MiniKV), or those that
the prompt can be reconstructed from (KVzip, arXiv 2505.23416, section 3).

A token's attention mass is the sum of the attention weights that queries give it. The Triton kernels for it share their
tiles with the prompt's attention and lie with that, in `kernels/prompt/triton`.

For reconstruction the prompt is read a second time, right after itself, and the score of a stored token in a KV head is
the largest attention weight that any query of the repetition gives it there. The repetition is read in parts: a query
attends to the stored tokens of its own part, to the first tokens of the prompt, and to the repeated tokens of its part
up to itself, so that the work is linear in the prompt's length. (The paper's queries attend to the whole prompt, and
each part follows an instruction in words.) All heads of all layers share one budget: which of them retrieve differs
from model to model far more than tokens do. A `TokenScorer` predicts the scores without a second reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from kvconvert.kernels import device, prompt
from kvconvert.kernels.attention import Scoring, capped
from kvconvert.kernels.prompt import BLOCK_SCORES, is_fallback, prompt_attention, weight_blocks
from kvconvert.kernels.rotate import KERNEL_DTYPES, LARGEST_HEAD, hadamard_transform


def select_tokens(scores: torch.Tensor, heavy: int | list[int], recent: int, sink_tokens: int = 0) -> torch.Tensor:
    """The tokens that each KV head keeps: int64 [H, kept], ascending.

    The first `sink_tokens`, the newest `recent`, and of the others the `heavy` with the highest score [H, n], ties to
    the older token. Counts that exceed what there is keep everything. `heavy` may be one number for each head if
    `recent` is 0; the lines of heads that keep fewer tokens are then filled up with entries to ignore.
    """
    heads, n = scores.shape
    sink_tokens = min(sink_tokens, n)
    recent = min(recent, n - sink_tokens)
    counts = [min(count, n - sink_tokens - recent) for count in ([heavy] * heads if isinstance(heavy, int) else heavy)]
    middle = scores[:, sink_tokens : n - recent]
    order = torch.sort(middle, dim=-1, descending=True, stable=True).indices[:, : max(counts)] + sink_tokens
    every = torch.arange(n, device=scores.device).expand(heads, n)
    if min(counts) < max(counts):
        limits = device.upload([counts], scores.device)[0]
        order = order.masked_fill(every[:, : max(counts)] >= limits[:, None], n - 1)
    return torch.cat([every[:, :sink_tokens], order.sort(-1).values, every[:, n - recent :]], 1)


def blockwise_column_sums(
    queries: torch.Tensor,
    keys: torch.Tensor,
    visible: Callable[[slice, slice], torch.Tensor] | None,
    scoring: Scoring,
    block_scores: int = BLOCK_SCORES,
) -> torch.Tensor:
    """`column_sums` on every device, `block_scores` scores at a time."""
    sums = torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device)
    for _, seen, weights in weight_blocks(queries, keys, visible, scoring, block_scores):
        sums[:, seen] += weights.sum((1, 2))
    return sums


def column_sums(
    queries: torch.Tensor,
    keys: torch.Tensor,
    visible: Callable[[slice, slice], torch.Tensor] | None,
    scoring: Scoring,
    log_sum_exp: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention mass of each token (MiniKV, section 3.2), in float32.

    It is computed block of queries by block of queries, so that memory is linear in n; causal attention on a GPU takes
    Triton kernels.

    Args:
        queries: [Hq, T, D]; keys: [H, n, D], the T queries belonging to the last T keys.
        visible: gives bool [queries of the slice, keys of the slice]; None for causal attention.
        scoring: the layer's scoring; its window counts where `visible` is None.
        log_sum_exp: float32 [Hq, T], that of the same attention if it is known; it saves the kernels a pass.

    Returns:
        float32 [H, n].
    """
    reason = prompt.unsupported(queries, keys, None, scoring.scaling) if visible is None else None
    if visible is None and reason is None:
        from kvconvert.kernels.prompt import triton as launch

        if log_sum_exp is None:
            _, log_sum_exp = launch.attention(queries, keys, None, scoring)
        return launch.column_sums(queries, keys, log_sum_exp, scoring)
    if reason is not None and is_fallback(queries):
        device.fall_back("The attention mass of tokens", reason)
    return blockwise_column_sums(queries, keys, visible, scoring)


def selective_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`prompt_attention`, and the attention mass of each token (MiniKV, section 3.2).

    Arguments as there.

    Returns:
        the output [Hq, T, E], and float32 [H, n], summed over the T queries and the query heads of each KV head.
    """
    output, log_sum_exp = prompt_attention(queries, keys, values, scoring)
    return output, column_sums(queries, keys, None, scoring, log_sum_exp)


# At a time: what fits a processor's cache; few launches of a GPU.
_BLOCK_SCORES = {"cpu": 1 << 21, "cuda": 1 << 27}


def repeated_attention(
    queries: torch.Tensor,
    repeated: tuple[torch.Tensor, torch.Tensor],
    stored: tuple[torch.Tensor, torch.Tensor],
    start: int,
    part: int,
    sink_tokens: int,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of repeated tokens of one sequence, and the scores of the stored tokens that they repeat.

    The Triton kernels for prompts take all parts at a time, products of matrices with a softmax in float32 several.

    Args:
        queries: [H, G, T, D], G query heads for each KV head.
        repeated: keys [H, T, D] and values [H, T, E] of the repetition.
        stored: keys [H, n, D] and values [H, n, E] of the prompt.
        start: the token of the prompt that the first query repeats, no sink token; a part begins there.
        part: tokens of a part, of which the last may have fewer.
        sink_tokens: first tokens of the prompt that all queries attend to.
        scoring: the layer's scoring, without sink logits and window.

    Returns:
        [H, G, T, E] in the queries' dtype, and float32 [H, T]: the largest weight that each of the tokens start ...
        start + T - 1 receives from the queries of its part.
    """
    heads, group, length, dim = queries.shape
    reason = prompt.unsupported(queries[0], stored[0], stored[1], scoring.scaling)
    if reason and prompt.is_fallback(queries[0]):
        device.fall_back("Attention of a repeated prompt", reason)
    is_cpu = queries.device.type == "cpu"
    dtype = torch.float32 if reason and is_cpu else queries.dtype  # processors are slow at others
    output = queries.new_empty(heads, group, length, stored[1].shape[2])
    found = torch.empty(heads, length, dtype=torch.float32, device=queries.device)
    step = max(1, _BLOCK_SCORES["cpu" if is_cpu else "cuda"] // (heads * group * part * (sink_tokens + 2 * part)))
    begin = 0
    while begin < length:
        size = min(part, length - begin)
        parts = (length - begin) // size
        parts = min(step, parts) if reason else parts
        own, of_prompt = (slice(at, at + parts * size) for at in (begin, start + begin))
        # What queries of a part attend to, in an order in which their attention is causal.
        keys, values = (
            torch.cat(
                [
                    side[:, None, :sink_tokens].expand(-1, parts, -1, -1),
                    side[:, of_prompt].unflatten(1, (parts, size)),
                    again[:, own].unflatten(1, (parts, size)),
                ],
                2,
            )
            .flatten(0, 1)
            .to(dtype)
            for side, again in zip(stored, repeated, strict=True)
        )
        asked = queries[:, :, own].unflatten(2, (parts, size)).transpose(1, 2).reshape(-1, group * size, dim).to(dtype)
        by_part = _in_kernels if reason is None else _by_products
        attended, largest = by_part(asked, keys, values, size, scoring)
        found[:, own] = largest[:, sink_tokens : sink_tokens + size].reshape(heads, -1)
        attended = attended.view(heads, parts, group, size, -1)
        output[:, :, own] = attended.transpose(1, 2).flatten(2, 3).to(output.dtype)
        begin = own.stop
    return output, found


def _in_kernels(
    asked: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, size: int, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of [P, G * size, D] queries, `size` of each head, to [P, n, D] keys, of which the last `size` are their
    own, and the largest weight of each key, float32 [P, n]."""
    from kvconvert.kernels.prompt import triton as launch

    asked = asked.view(-1, size, asked.shape[2])
    attended, log_sum_exp = launch.attention(asked, keys, values, scoring)
    return attended, launch.column_sums(asked, keys, log_sum_exp, scoring, maxima=True)


def _by_products(
    asked: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, size: int, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_in_kernels` on every device."""
    mask = torch.zeros(size, keys.shape[1], dtype=asked.dtype, device=asked.device)
    mask[:, -size:] = torch.full_like(mask[:, -size:], float("-inf")).triu(1)
    mask = mask.repeat(asked.shape[1] // size, 1)
    if scoring.softcap:
        scores = mask + capped(torch.bmm(asked, keys.transpose(1, 2)), scoring.scaling, scoring.softcap)
    else:
        scores = torch.baddbmm(mask, asked, keys.transpose(1, 2), alpha=scoring.scaling)
    weights = torch.softmax(scores, -1, dtype=torch.float32)
    return torch.bmm(weights.to(asked.dtype), values), weights.amax(1)


_LARGEST_LOGARITHM = 80.0  # of a score: sums of those of a page are finite, unlike the scores of what has to be kept


class TokenScorer(NamedTuple):
    """A network of two layers that predicts how much a repetition of the prompt would attend to a token, from the
    token's keys and values (after KVzap, arXiv 2601.07891, which predicts it from hidden states).

    Attributes:
        hidden_weight: float32 [C, H (E + D / 2)]; hidden_bias: float32 [C].
        weight: float32 [H, C]; bias: float32 [H].
    """

    hidden_weight: torch.Tensor
    hidden_bias: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor

    def scores(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Predicted scores of tokens, float32 [H, n].

        Args:
            keys: [H, n, D] after RoPE, not rotated otherwise.
            values: [H, n, E] as they are stored.
        """
        hidden = functional.gelu(functional.linear(token_features(keys, values), self.hidden_weight, self.hidden_bias))
        return functional.linear(hidden, self.weight, self.bias).clamp(max=_LARGEST_LOGARITHM).exp().T


def token_features(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What a `TokenScorer` reads: float32 [n, H (E + D / 2)], the values of all heads, then norms of pairs of channels
    of the keys, which do not depend on a token's position where RoPE turns channels i and i + D / 2 together.

    Args:
        keys: [H, n, D]; values: [H, n, E].
    """
    norms = keys.float().unflatten(2, (2, -1)).norm(dim=2)
    return torch.cat([part.transpose(0, 1).flatten(1) for part in (values.float(), norms)], 1)


def predicted_scores(
    scorer: TokenScorer,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    rotated: bool,
    sink_tokens: int,
    newest: int,
) -> torch.Tensor:
    """The scores of a prompt's tokens as the cache holds them, infinite for those that have to be kept.

    Args:
        scorer: the layer's.
        keys, values: [n, D] and [n, E] of each KV head.
        rotated: whether keys are rotated.
        sink_tokens, newest: how many of the first and of the last tokens have to be kept.

    Returns:
        float32 [H, n]; NaN where the network computes NaN.
    """
    if device.runs_triton(keys[0].device):
        reason = _unsupported(keys[0], values[0])
        if reason is None:
            from kvconvert.kernels.select import triton as launch

            return launch.scores(scorer, keys, values, rotated, sink_tokens, newest, _LARGEST_LOGARITHM)
        device.fall_back("The prediction of scores", reason)
    stacked = torch.stack([*keys])
    stacked = hadamard_transform(stacked, inverse=True) if rotated else stacked
    scores = scorer.scores(stacked, torch.stack([*values])).contiguous()
    for part in (scores[:, :sink_tokens], scores[:, scores.shape[1] - newest :]):
        part[~part.isnan()] = math.inf
    return scores


def keep_tokens(
    sources: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    targets: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    index: torch.Tensor,
) -> None:
    """Copy chosen tokens of each KV head.

    Args:
        sources: keys [n, D] of each head, then values [n, E].
        targets: where they go, for each head [kept, D] and [kept, E]; heads may keep different numbers.
        index: int64 [H, most kept], the tokens; entries beyond what a head keeps are ignored.
    """
    if device.runs_triton(index.device) and _unsupported(sources[0][0], sources[1][0]) is None:
        from kvconvert.kernels.select import triton as launch

        launch.keep(sources, targets, index)
        return
    for source, target in zip(sources, targets, strict=True):
        for tokens, kept, chosen in zip(source, target, index, strict=True):
            torch.index_select(tokens, 0, chosen[: len(kept)], out=kept)


def _unsupported(keys: torch.Tensor, values: torch.Tensor) -> str | None:
    """Why the kernels cannot take tokens like these; None if they can."""
    if keys.dtype not in KERNEL_DTYPES:
        return f"the kernels do not take {keys.dtype}"
    if keys.shape[1] % 2 or max(keys.shape[1], values.shape[1]) > LARGEST_HEAD:
        return f"the kernels take even head sizes up to {LARGEST_HEAD}, not {keys.shape[1]} and {values.shape[1]}"
    return None


def share_pages(scores: torch.Tensor, pages: int, page_size: int) -> list[int]:
    """How many pages each head keeps, so that together they keep the best tokens that fit `pages` pages.

    A head's pages hold its tokens in descending order of their scores; of all heads' pages those with the largest mean
    are kept, ties going to the earlier head. No head keeps all of its tokens.

    Args:
        scores: float [heads of all layers, n]; infinity for tokens that have to be kept.
        pages: how many there are, at most those that the heads have whole.
        page_size: tokens of a page.
    """
    whole = (scores.shape[1] - 1) // page_size
    ordered = scores.sort(-1, descending=True).values[:, : whole * page_size]
    means = ordered.unflatten(1, (whole, page_size)).mean(2)
    best = means.flatten().sort(descending=True, stable=True).indices[:pages] // whole
    return torch.bincount(best, minlength=len(scores)).tolist()


_PER_PAGE = 8  # scores that stand for those of a page


def expected_pages(quantiles: np.ndarray, pages: int, tokens: int, kept: int, page_size: int) -> list[int]:
    """`share_pages` for scores that are distributed as those of the calibration text: known before a prompt is read.

    Args:
        quantiles: float32 [heads of all layers, n], of logarithms, evenly spaced from the highest to the lowest.
        pages, page_size: as there.
        tokens: the number of tokens of the prompt.
        kept: how many of them have to be kept.
    """
    whole = (tokens - 1) // page_size
    places = (np.arange(whole * _PER_PAGE) + 0.5) * (page_size / _PER_PAGE)  # in descending order of scores
    levels = ((places - kept) / max(1, tokens - kept)).clip(0, 1) * (quantiles.shape[1] - 1)
    below = np.minimum(levels.astype(np.int64), quantiles.shape[1] - 2)
    between = levels - below
    scores = np.exp(quantiles[:, below] * (1 - between) + quantiles[:, below + 1] * between)
    scores[:, places < kept] = np.inf
    means = scores.reshape(len(quantiles), whole, _PER_PAGE).mean(2)
    best = np.argsort(-means, axis=None, kind="stable")[:pages] // whole
    return np.bincount(best, minlength=len(quantiles)).tolist()
