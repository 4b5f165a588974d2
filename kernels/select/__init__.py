"""Which prompt tokens a layer keeps (MiniKV): heavy hitters by attention received, and the newest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kvconvert.kernels.device import fall_back, runs_triton, why_not

# Scores held at once, in numbers: bounds memory whatever the prompt's length.
BLOCK_SCORES = 1 << 22


def column_sums_reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    visible: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention that each token receives, summed over queries and over the query heads of its KV head (MiniKV, sec. 4).

    Args:
        queries: [Hq, T, D]; keys: [H, n, D].
        visible: bool [T, n].
        scaling, softcap, sink_logits: as in attention.

    Returns:
        float64 [H, n].
    """
    heads = keys.shape[0]
    scores = queries.double() @ keys.double().repeat_interleave(queries.shape[0] // heads, 0).transpose(1, 2) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sink_logits is not None:
        scores = torch.cat([scores, sink_logits.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : keys.shape[1]]
    return weights.unflatten(0, (heads, -1)).sum((1, 2))


def column_sums(
    queries: torch.Tensor,
    keys: torch.Tensor,
    visible: Callable[[slice, slice], torch.Tensor] | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    window: int | None = None,
    log_sum_exp: torch.Tensor | None = None,
) -> torch.Tensor:
    """`column_sums_reference` in float32, block of queries by block of queries, so that memory is linear in n.

    On a GPU causal attention takes the kernels of `kernels/prompt/triton/launch.py`.

    Args:
        queries: [Hq, T, D]; keys: [H, n, D], the T queries belonging to the last T keys.
        visible: gives bool [queries of the slice, keys of the slice]; None for causal attention.
        scaling, softcap, sink_logits: as in attention.
        window: tokens that a query sees, its own included, where `visible` is None; None for all before it.
        log_sum_exp: float32 [Hq, T], that of the same attention if it is known; it saves the kernels a pass.

    Returns:
        float32 [H, n].
    """
    reason = no_kernel(queries, keys, None, scaling) if visible is None else ""
    if reason is None:
        from kvconvert.kernels.prompt.triton import launch as kernels

        if log_sum_exp is None:
            _, log_sum_exp = kernels.attention(queries, keys, None, scaling, softcap, sink_logits, window)
        return kernels.column_sums(queries, keys, log_sum_exp, scaling, softcap, window)
    if reason:
        fall_back("The attention that tokens receive", reason)
    sums = torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device)
    for _, seen, weights in weight_blocks(queries, keys, visible, scaling, softcap, sink_logits, window):
        sums[:, seen] += weights.sum((1, 2))
    return sums


def no_kernel(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, scaling: float) -> str | None:
    """Why no kernel of `kernels/prompt/triton/launch.py` serves these: None if one does, "" where none is to be expected."""
    device = queries.device
    if not queries.shape[1] or (device.type == "cpu" and not runs_triton(device)):
        return ""
    if not runs_triton(device):
        return why_not(device)
    from kvconvert.kernels.prompt.triton.launch import unsupported

    return unsupported(queries, keys, values, scaling)


def weight_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    visible: Callable[[slice, slice], torch.Tensor] | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    window: int | None = None,
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Attention weights of one block of queries after another, for paths without a kernel; arguments as above.

    Yields:
        which queries, over which keys, and float32 [H, Hq / H, queries, keys]; zeros where a query sees nothing.
    """
    heads, n, _ = keys.shape
    length = queries.shape[1]
    grouped = queries.float().unflatten(0, (heads, -1))
    keys = keys.float()
    step = max(1, BLOCK_SCORES // (queries.shape[0] * n))
    for start in range(0, length, step):
        block = slice(start, min(start + step, length))
        # Causal blocks need no keys beyond their last query's own, nor any before their first query's window.
        seen = (
            slice(0, n) if visible else slice(max(0, n - length + start + 1 - (window or n)), n - length + block.stop)
        )
        scores = grouped[:, :, block] @ keys[:, None, seen].transpose(2, 3) * scaling
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if visible is None:
            own = torch.arange(n - length + start, n - length + block.stop, device=keys.device).unsqueeze(1)
            columns = torch.arange(seen.start, seen.stop, device=keys.device)
            hidden = columns > own
            if window is not None:
                hidden |= columns <= own - window
        else:
            hidden = ~visible(block, seen)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sink_logits is None:
            weights = scores.softmax(-1).nan_to_num(0.0)
        else:
            logits = sink_logits.float().view(heads, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, logits], -1).softmax(-1)[..., :-1]
        yield block, seen, weights


def select_tokens(scores: torch.Tensor, heavy: int, recent: int, sink_tokens: int = 0) -> torch.Tensor:
    """The tokens that each KV head keeps: int64 [H, kept], ascending.

    The first `sink_tokens`, the newest `recent`, and of the others the `heavy` with the highest score [H, n], ties to the
    older token. Counts that exceed what there is keep everything.
    """
    heads, n = scores.shape
    sink_tokens = min(sink_tokens, n)
    recent = min(recent, n - sink_tokens)
    heavy = min(heavy, n - sink_tokens - recent)
    middle = scores[:, sink_tokens : n - recent]
    order = torch.sort(middle, dim=-1, descending=True, stable=True).indices[:, :heavy] + sink_tokens
    every = torch.arange(n, device=scores.device).expand(heads, n)
    return torch.cat([every[:, :sink_tokens], order.sort(-1).values, every[:, n - recent :]], 1)
