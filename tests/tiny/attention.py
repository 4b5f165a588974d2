"""What kernels of attention are compared with where the one reference needs a mask of their own."""

from __future__ import annotations

import torch

from kvconvert.kernels.attention import attention_reference


def repeated_by_reference(queries, repeated, stored, start, part, sink_tokens, scoring):
    """`repeated_attention` by its definition: a query attends to its own part, sink tokens, and what came before it of
    its part's repetition.
    """
    length, count = queries.shape[2], stored[0].shape[1]
    keys, values = (torch.cat(both, 1) for both in zip(stored, repeated, strict=True))
    query = torch.arange(length, device=queries.device)[:, None]
    token = torch.arange(count, device=queries.device)[None, :] - start
    same_part = (token >= 0) & (token < length) & (token // part == query // part)
    again = (query.T // part == query // part) & (query >= query.T)
    visible = torch.cat([same_part | (token < sink_tokens - start), again], 1)
    found = attention_reference(queries.flatten(0, 1), keys, values, visible, scoring.scaling, scoring.softcap)
    weights = found.weights.unflatten(0, queries.shape[:2])[..., :count] * same_part
    return found.output.unflatten(0, queries.shape[:2]), weights.amax((1, 2))[:, start : start + length]
