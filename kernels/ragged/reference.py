"""What the kernels of a pass over several sequences compute, with tensors instead of addresses and in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvconvert.kernels.decode.reference import attention_reference


def ragged_reference(
    queries: torch.Tensor,
    stored: Sequence[tuple[torch.Tensor, torch.Tensor]],
    lengths: Sequence[int],
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of several sequences' newest tokens, one sequence's after the other's.

    Args:
        queries: [Hq, N, D].
        stored: of each sequence keys [H, n, D] and values [H, n, E], the new ones last.
        lengths: new tokens of each sequence, together N.
        scaling, softcap, sink_logits, window: as for `attend`.

    Returns:
        float64 [N, Hq, E].
    """
    outputs = []
    for own, (keys, values) in zip(queries.split(list(lengths), 1), stored, strict=True):
        tokens, length = keys.shape[1], own.shape[1]
        column = torch.arange(tokens, device=keys.device)
        query = column[tokens - length :].unsqueeze(1)
        visible = (column <= query) & (column > query - (window or tokens))
        outputs.append(attention_reference(own, keys, values, visible, scaling, softcap, sink_logits).transpose(0, 1))
    return torch.cat(outputs)
