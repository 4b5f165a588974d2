"""A mixture's experts, each computed for the tokens routed to it, with dequantized weights: the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from kvconvert.kernels.elementwise.reference import Gate, gated_reference


def experts_reference(
    x: Tensor,
    chosen: Tensor,
    scores: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    kind: Gate,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The sum over each token's experts of score times output: [tokens, hidden].

    Args:
        x: [tokens, hidden].
        chosen: experts of each token, [tokens, k]; an index outside of 0..experts - 1 stands for none.
        scores: weights of their outputs, [tokens, k]; None for 1.
        gate_up: [experts, 2 intermediate, hidden], all gates first.
        down: [experts, hidden, intermediate].
        kind: how gate and up are joined.
        gate_up_bias, down_bias: [experts, 2 intermediate] and [experts, hidden], if any.
    """
    y = torch.zeros(*chosen.shape, down.shape[1], dtype=x.dtype, device=x.device)
    for expert in range(len(down)):
        token, position = (chosen == expert).nonzero(as_tuple=True)
        joined = x[token] @ gate_up[expert].T
        if gate_up_bias is not None:
            joined = joined + gate_up_bias[expert]
        output = gated_reference(*joined.chunk(2, -1), kind) @ down[expert].T
        if down_bias is not None:
            output = output + down_bias[expert]
        y[token, position] = output if scores is None else output * scores[token, position, None]
    return y.sum(1)
